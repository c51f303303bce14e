"""FlexAttention: its masks against masks written out by hand, and the model that uses it against the one without."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from workbench.authoring.models.attention import ATTENTION
from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.errors import WorkbenchError
from workbench.pipeline.build import check_buildable
from workbench.recipe.recipe import RecipeError, load_recipe
from workbench.torch_api.flex import block_mask

END = 7


def texts(seq: int) -> torch.Tensor:
    """A long document, many short ones, and one of `END` alone; (3, seq)."""
    out = torch.randint(8, 99, (3, seq), generator=torch.Generator().manual_seed(1))
    out[0, seq // 2] = END
    out[1, ::5] = END
    out[2] = END
    return out


def visible(text: torch.Tensor, documents: bool) -> torch.Tensor:
    """Who sees whom, position by position: (batch, 1, seq, seq) bool."""
    seq = text.shape[1]
    out = torch.zeros(len(text), 1, seq, seq, dtype=torch.bool)
    for b, row in enumerate(text.tolist()):
        for q in range(seq):
            for kv in range(q, -1, -1):
                if documents and kv < q and row[kv] == END:
                    break
                out[b, 0, q, kv] = True
    return out


@pytest.mark.parametrize(("kind", "seq"), [("causal", 16), ("document", 300)])
def test_masks_against_masks_by_hand(kind, seq):
    text = texts(seq)
    q, k, v = (torch.randn(3, heads, seq, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    dense = visible(text, kind == "document")
    expected = scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    got = ATTENTION["flex"](q, k, v, block_mask(text, END if kind == "document" else None))
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, expected)),
                            strict=True):
        torch.testing.assert_close(mine, theirs)


def test_blocks_are_those_that_hold_something_visible():
    """Kernels leave a block out, or do without its mask, as these lists say; eager ignores them."""
    text = texts(512)
    text[0, 128:] = 8  # three blocks within one document
    mask = block_mask(text, END)
    tiles = visible(text, True).unflatten(3, (4, 128)).unflatten(2, (4, 128)).transpose(3, 4).flatten(4)
    some, whole = tiles.any(-1)[:, 0], tiles.all(-1)[:, 0]
    assert whole.any() and (~some).any()

    def listed(counts, indices):
        out = torch.zeros(*counts.shape, indices.shape[-1], dtype=torch.bool)
        for at in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            out[(*at, indices[tuple(at)][: counts[tuple(at)]].long())] = True
        return out[:, 0].expand(3, -1, -1)

    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), whole)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), some & ~whole)
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices), (some & ~whole).transpose(1, 2))


def test_the_model_with_flex_is_the_model_without():
    torch.manual_seed(0)
    config = Llama3Config(
        dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=17, ffn_dim=48, max_seq_len=8
    )
    batch = torch.randint(17, (2, 2, 8))
    plain, flex = (Llama3(replace(config, attention=kind)).double() for kind in ("sdpa", "flex"))
    flex.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(*batch), flex(*batch), rtol=1e-12, atol=0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="flex attention needs a block mask: see block_mask"):
        ATTENTION["flex"](*(torch.randn(1, 2, 8, 4) for _ in range(3)))
    with pytest.raises(RecipeError, match="mask document needs attention flex: set attention, or leave mask out"):
        load_recipe("llama3").override({"model.mask": "document"})
    with pytest.raises(WorkbenchError, match="needs CUDA .*FlexAttention on a CPU.*, and world fake has none here"):
        check_buildable(load_recipe("llama3_flex_block_bucketing_regional"), "fake")
