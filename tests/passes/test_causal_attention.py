"""causal_attention: a causal mask goes, with its backward; every other mask stays, and is told why."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from workbench.passes import causal_attention
from workbench.passes.causal_attention import fewer_masks
from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.torch_api.ops import short_name

S = 8
LOWEST = torch.finfo(torch.float32).min


def causal():
    return torch.arange(S) <= torch.arange(S)[:, None]


def joint_of(mask, *, columns=S, kv_heads=4, dtype=torch.float32, attend=scaled_dot_product_attention, **options):
    """Attention and its backward; the mask is a function of one integer input, as of padding."""
    options = options if kv_heads == 4 else options | {"enable_gqa": True}

    def step(query, key, value, gradient, lengths):
        attention = attend(query, key, value, attn_mask=mask(lengths), **options)
        return attention, *torch.autograd.grad(attention, (query, key, value), gradient)

    with new_fake_mode():
        query, gradient = (torch.empty(2, 4, S, 16, dtype=dtype) for _ in range(2))
        key, value = (torch.empty(2, kv_heads, columns, 16, dtype=dtype) for _ in range(2))
        for tensor in (query, key, value):
            tensor.requires_grad_()
        return make_fx(step)(query, key, value, gradient, torch.empty(2, dtype=torch.int64))


def values_of(gm):
    torch.manual_seed(0)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    made = [torch.randn(x.shape, dtype=x.dtype) for x in inputs[:-1]]
    gm.recompile()
    return gm(*made, torch.full((2,), S))


def through(gm):
    """The effect of the pass, and the largest difference that it makes to a result."""
    before = torch.fx.GraphModule(gm, torch.fx.Graph())
    before.graph.output(before.graph.graph_copy(gm.graph, {}))
    was = values_of(gm)
    causal_attention.causal_attention(gm, [], options=None)
    gm.graph.lint()
    now = values_of(gm)
    assert [x.stride() for x in was] == [x.stride() for x in now]
    effect = fewer_masks((before,), (gm,), None)
    return effect, max(float((a - b).abs().max()) for a, b in zip(was, now, strict=True))


CAUSAL = {
    "bool": lambda _: causal(),
    "tril": lambda _: torch.ones(S, S, dtype=torch.bool).tril(),
    "triu of -inf": lambda _: torch.full((S, S), -torch.inf).triu(1),
    "cuDNN's": lambda _: torch.where(causal(), 0.0, -65504.0),
    "masked_fill": lambda _: torch.zeros(S, S).masked_fill(~causal(), LOWEST),
    "expanded": lambda _: causal()[None, None].expand(2, 1, S, S),
    "vmap": lambda _: torch.vmap(lambda row: torch.vmap(row.__ge__)(torch.arange(S)))(torch.arange(S)),
    "only a shape is read": lambda lengths: lengths.new_ones(S, S).tril().bool(),
}


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize("whole", [1 << 22, 20])
def test_a_causal_mask_goes_whole_or_in_blocks_of_rows(mask, whole, monkeypatch):
    monkeypatch.setattr(causal_attention, "WHOLE", whole)
    gm = joint_of(mask)
    effect, far = through(gm)
    assert effect.happened and not effect.reason and far < 1e-5
    assert effect.evidence["masked"] == [1, 0] and effect.evidence["mask_bytes"][1] == 0
    assert effect.evidence["flop"][0] == 2 * effect.evidence["flop"][1] == 7 * 2 * 2 * 4 * S * S * 16


def almost(row, column):
    """Causal but for one element."""
    return causal() ^ ((torch.arange(S)[:, None] == row) & (torch.arange(S) == column))


STAYS = {
    "padding": (lambda lengths: (causal() & (torch.arange(S) < lengths[:, None, None]))[:, None],
                "the mask is computed from lengths_1, which is no constant"),
    "ALiBi": (lambda _: torch.where(causal(), (torch.arange(S) - torch.arange(S)[:, None]) / 2, -torch.inf),
              "the mask adds -0.5 in row 1, column 0"),
    "low, and not the lowest": (lambda _: torch.where(causal(), 0.0, -1e4), "the mask adds -1e+04 in row 0, column 1"),
    "one element of the past": (lambda _: almost(7, 0), "the mask adds -inf in row 7, column 0"),
    "one element of the future": (lambda _: almost(6, 7), "the mask adds 0 in row 6, column 7"),
    "drawn": (lambda _: torch.rand(S, S) > 0.5, "the mask is computed from rand, which is no constant"),
    "one row for all": (lambda _: torch.ones(1, S, dtype=torch.bool), "there are 8 queries, 8 keys and a mask [1, 8]"),
    "none": (lambda _: None, "there is no mask"),
}


@pytest.mark.parametrize(("mask", "reason"), STAYS.values(), ids=STAYS)
def test_another_mask_stays_and_is_told_why(mask, reason, monkeypatch):
    monkeypatch.setattr(causal_attention, "WHOLE", 20)
    gm = joint_of(mask)
    before = str(gm.graph)
    effect, _ = through(gm)
    assert not effect.happened and effect.reason == f"1 of 1 attentions: {reason}" and str(gm.graph) == before


def test_other_calls_stay_and_are_told_why():
    longer = joint_of(lambda _: torch.ones(S, S + 2, dtype=torch.bool).tril(), columns=S + 2)
    assert "there are 8 queries, 10 keys and a mask [8, 10]" in through(longer)[0].reason
    assert "is_causal is set" in through(joint_of(lambda _: None, is_causal=True))[0].reason
    parts = joint_of(lambda _: causal(), dropout_p=0.5)  # a CPU has no fused attention with dropout
    assert through(parts)[0].reason == "the graph has no fused attention"


@pytest.mark.parametrize("options", [{"kv_heads": 2}, {"scale": 0.5}, {"dtype": torch.bfloat16}], ids=str)
def test_grouped_heads_a_scale_and_a_dtype_are_kept(options):
    effect, far = through(joint_of(lambda _: causal(), **options))
    assert effect.happened and far < (0.05 if "dtype" in options else 1e-5)


def test_a_row_operator_that_is_unknown_is_told_where_the_mask_is_large(monkeypatch):
    mask = lambda _: causal().flip(0).flip(0)  # noqa: E731
    assert through(joint_of(mask))[0].happened
    monkeypatch.setattr(causal_attention, "WHOLE", 20)
    assert "computed by flip, which is not evaluated in blocks of rows" in through(joint_of(mask))[0].reason


def on_a_gpu(query, key, value, *, attn_mask, **options):
    """The kernel that a GPU takes for a mask, by its operator: fake tensors have it on any device."""
    bias = torch.where(attn_mask, 0.0, -torch.inf).expand(2, 4, S, S)
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, **options)[0]


def test_a_gpu_takes_another_kernel_forward_and_backward(monkeypatch):
    gm = joint_of(lambda _: causal(), attend=on_a_gpu, scale=0.5)
    strides = [node.meta["val"].stride() for node in gm.graph.output_node().all_input_nodes]

    def chosen(query, key, value, *, is_causal, scale, enable_gqa):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, is_causal, scale=scale)[0]

    monkeypatch.setattr(causal_attention, "scaled_dot_product_attention", chosen)
    causal_attention.causal_attention(gm, [], options=None)
    gm.graph.lint()
    attention = [short_name(node) for node in gm.graph.nodes if "scaled_dot" in str(node.target)]
    name = "_scaled_dot_product_flash_attention"
    assert attention == [name, f"{name}_backward"]
    assert [node.meta["val"].stride() for node in gm.graph.output_node().all_input_nodes] == strides


def test_without_a_gradient_the_forward_alone_is_replaced():
    with new_fake_mode():
        query = torch.empty(2, 4, S, 16)
        gm = make_fx(lambda x, _: (scaled_dot_product_attention(x, x, x, attn_mask=causal()),))(
            query, torch.empty(2, dtype=torch.int64))
    effect, far = through(gm)
    assert effect.happened and far < 1e-5 and effect.evidence["flop"][0] == 2 * 2 * 2 * 4 * S * S * 16
