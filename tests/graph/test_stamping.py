"""Stamping: the graph that a full capture gives, what trains from it, and blocks that are not alike."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from on_ranks import FSDP_TP, gradients, small
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from workbench.authoring.author import author, author_module
from workbench.authoring.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from workbench.authoring.models.layers import FeedForward
from workbench.authoring.models.llama3 import Block, Llama3, Llama3Config
from workbench.authoring.plans import LLAMA3_PLAN
from workbench.errors import NotAlike
from workbench.graph.capture import capture
from workbench.graph.stamping import find_run
from workbench.graph.stamping.order import Turns, longer, turns_of
from workbench.world.fake import fake_world

# names that Dynamo gave to nodes of its own graph; and operators, of which each node holds a copy
NOT_COMPARED = {"from_node", "source_fn_stack", "fwd_source_fn_stack", "original_aten", "val", "eager_input_vals"}
EXPERTS = {"model.family": "deepseek_v3", "model.n_heads": 4, "model.dispatch": "capacity"}


def recipe_of(family: str, **more: Any) -> Any:
    """Six layers of llama3, or seven of deepseek_v3, of which the first is dense."""
    if family == "llama3":
        return small(FSDP_TP, layers=6, **more)
    return small(FSDP_TP, layers=7, **more).override(EXPERTS)


def face(value: Any) -> Any:
    return [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad)
            if isinstance(x, torch.Tensor) else getattr(x, "real_obj", x) for x in tree_leaves(value)]


def storages(graph: Any) -> list[int]:
    """For each tensor of the graph, the number of the first node with its storage."""
    first: dict[int, int] = {}
    return [first.setdefault(x.untyped_storage()._cdata, i) for i, n in enumerate(graph.nodes)
            for x in tree_leaves(n.meta.get("val")) if isinstance(x, torch.Tensor)]


def each_node(graph: Any) -> list[dict[str, Any]]:
    """All that two captures of one module have in common, node by node."""
    place = {n: f"node {i}" for i, n in enumerate(graph.nodes)}
    start = next(n.meta["seq_nr"] for n in graph.nodes if n.op == "call_function")
    rows = []
    for n in graph.nodes:
        row = {k: v for k, v in n.meta.items() if k not in NOT_COMPARED}
        row["seq_nr"] = n.meta["seq_nr"] - start if n.op == "call_function" else None
        row |= {"name": n.name, "op": n.op, "target": n.target, "type": n.type, "keys": list(n.meta),
                "args": map_arg((n.args, n.kwargs), place.__getitem__),
                "val": face(n.meta.get("val")), "inputs": face(n.meta.get("eager_input_vals")),
                "stacks": [list((n.meta.get(k) or {}).items()) for k in ("nn_module_stack", "fwd_nn_module_stack")]}
        rows.append(row)
    return rows


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_node_for_node_what_a_full_capture_gives(family):
    with fake_world(4) as world:
        authored = author(recipe_of(family), world)
        few, every = capture(authored), capture(authored, stamped=False)
    assert (few.stamped, every.stamped) == (2, "the whole module was asked for")
    assert (few.parameters, few.buffers) == (every.parameters, every.buffers)
    ours, theirs = each_node(few.graph.graph), each_node(every.graph.graph)
    assert len(ours) == len(theirs) > 2000
    for a, b in zip(ours, theirs, strict=True):
        assert a == b
    assert storages(few.graph.graph) == storages(every.graph.graph)
    ours, theirs = few.graph.graph._codegen.pytree_info, every.graph.graph._codegen.pytree_info
    assert (ours.in_spec, ours.out_spec) == (theirs.in_spec, theirs.out_spec)


def both_ways(recipe: Any) -> dict[str, Any]:
    """Three AdamW steps from a stamped and from a full capture: what differs of losses, gradients and buffers."""
    from workbench.pipeline import build, route
    from workbench.pipeline.train import Batches, deterministic
    from workbench.world.mesh import current_world

    whole, seen, stamped = route.capture, [], []

    def as_before(*args: Any, which: bool, **keywords: Any) -> Any:
        found = whole(*args, stamped=which, **keywords)
        stamped.append(found.stamped)
        return found

    try:
        for which in (True, False):
            route.capture = functools.partial(as_before, which=which)
            one = build.build(recipe, current_world())
            optimizer = torch.optim.AdamW(one.authored.module.parameters(), lr=1e-3, foreach=False)
            batches, steps = Batches(one.authored), []
            with deterministic(True):
                for i in range(3):
                    loss = one.step(*batches.at(i))
                    loss.backward()
                    buffers = {n: b.clone() for n, b in one.authored.module.named_buffers()}
                    steps.append({"loss": loss.detach().clone()} | buffers
                                 | {n: g.clone() for n, g in gradients(one.authored).items()})
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            seen.append(steps)
            records = {r.name: str(r.outcome) for r in one.records}
    finally:
        route.capture = whole
    differing = {n for a, b in zip(*seen, strict=True) for n in a.keys() | b.keys() if not torch.equal(a[n], b[n])}
    return {"stamped": stamped, "differing": sorted(differing), "tensors": len(seen[0][0]),
            "losses": [float(s["loss"]) for s in seen[0]], "outcomes": records}


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "passes"), [
    ("llama3", ()), ("llama3", ("transformer_block_bucketing",)), ("deepseek_v3", ("transformer_block_bucketing",)),
], ids=str)
def test_trains_bitwise_as_the_full_capture(pool4, family, passes):
    for found in pool4.run(both_ways, recipe_of(family, passes=passes)):
        assert found["stamped"] == [2, "the whole module was asked for"]
        assert found["differing"] == [] and found["tensors"] > 50
        assert len(set(found["losses"])) == 3
        assert all(outcome == "PASS" for outcome in found["outcomes"].values())


def model(layers: int = 8) -> Llama3:
    with torch.device("meta"):
        return Llama3(Llama3Config(dim=32, n_layers=layers, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=32))


def wider(made: Llama3) -> None:
    made.layers[3].feed_forward = FeedForward(32, 96)


class Squared(FeedForward):
    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)) ** 2 * self.w3(x))


def other_activation(made: Llama3) -> None:
    made.layers[3].feed_forward = Squared(32, 64)


def other_epsilon(made: Llama3) -> None:
    made.layers[4].ffn_norm.eps = 1e-3


def tied(made: Llama3) -> None:
    made.layers[5].feed_forward.w1.weight = made.layers[2].feed_forward.w1.weight


def tied_outside(made: Llama3) -> None:
    made.layers[5].ffn_norm.weight = made.norm.weight


def shared_module(made: Llama3) -> None:
    made.layers[5].attention_norm = made.layers[2].attention_norm


def hooked(made: Llama3) -> None:
    made.layers[3].register_forward_hook(lambda module, inputs, output: output * 2)


def hooked_otherwise(made: Llama3) -> None:
    for i, layer in enumerate(made.layers):
        layer.register_forward_hook(lambda module, inputs, output, factor=1 + (i == 3): output * factor)


def patched(made: Llama3) -> None:
    made.layers[3].forward = functools.partial(Block.forward, made.layers[3])


def frozen(made: Llama3) -> None:
    made.layers[3].attention.wq.weight.requires_grad_(False)


def numbered(made: Llama3) -> None:
    for i, layer in enumerate(made.layers):
        layer.number = i


def reordered(made: Llama3) -> None:
    for i, layer in enumerate(made.layers):
        names = ("b", "a") if i == 3 else ("a", "b")
        layer.parts = torch.nn.ModuleDict({name: torch.nn.Identity() for name in names})


class Unclear:
    """As an array of NumPy: whether two are equal is not one answer."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


def unclear(made: Llama3) -> None:
    for layer in made.layers:
        layer.table = Unclear()


FAULTS = {
    wider: "layers.3.feed_forward.w1.weight is ",
    other_activation: "layers.3.feed_forward is a Squared, and a FeedForward in the layer before",
    other_epsilon: "layers.4.ffn_norm.eps is 0.001, and 1e-05 in the layer before",
    tied: "layers.5.feed_forward.w1.weight is layers.2.feed_forward.w1.weight too",
    tied_outside: "layers.5.ffn_norm.weight is norm.weight too|norm.weight is layers.5.ffn_norm.weight too",
    shared_module: "layers.5.attention_norm.weight is layers.2.attention_norm.weight too",
    hooked: "layers.3._forward_hooks has 0, and the layer before no more",
    hooked_otherwise: "layers.3._forward_hooks.0.defaults.0 is 2, and 1 in the layer before",
    patched: "layers.3 has forward, and the layer before no more",
    frozen: "layers.3.attention.wq.weight is ",
    numbered: "layers.1.number is 1, and 0 in the layer before",
    reordered: "layers.3.parts has b where the layer before has a: another order",
    unclear: "layers.1.table is <",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_blocks_that_differ_are_found_with_the_reason(fault):
    made = model()
    assert find_run(made).extra == 4
    fault(made)
    with pytest.raises(NotAlike) as caught:
        find_run(made)
    assert re.search(FAULTS[fault], str(caught.value)), str(caught.value)


def scaled(factor: float) -> Any:
    return lambda module, inputs, output: output * factor


@pytest.mark.parametrize("where", ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1",
                                   "feed_forward.w2", "feed_forward.w3"])
def test_one_hook_of_many_that_differs_is_found(where):
    made = model()
    for i, layer in enumerate(made.layers):
        for name, part in layer.named_modules():
            if isinstance(part, torch.nn.Linear):
                part.register_forward_hook(scaled(20.0 if (i, name) == (3, where) else 1.0))
    with pytest.raises(NotAlike, match=f"layers.3.{where}._forward_hooks.0.closure.0 is 20.0, and 1.0 in the layer"):
        find_run(made)


def test_the_longest_row_is_stamped_and_the_rest_captured():
    made = model(16)
    other_epsilon(made)  # in layer 4
    run = find_run(made)
    assert (run.kept, run.lower, run.extra) == ((0, 1, 2, 3, 4, 5, 6, 7, 15), 6, 7)
    run = find_run(model(6))
    assert (run.kept, run.lower, run.extra) == ((0, 1, 2, 5), 1, 2)


def test_few_layers_are_not_worth_it():
    with pytest.raises(NotAlike, match="5 of 5 layers in a row are alike, which saves fewer than 2"):
        find_run(model(5))


@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
def test_experts_of_static_capacity_alone_are_stamped(dispatch):
    with torch.device("meta"):
        made = DeepSeekV3(DeepSeekV3Config(dim=32, n_layers=8, dispatch=dispatch))
    if dispatch == "capacity":
        run = find_run(made)
        assert (run.kept, run.lower, run.extra) == ((0, 1, 2, 3, 7), 2, 3)
    else:
        with pytest.raises(NotAlike, match=r"layers\.2\.moe is dropless: it reads sizes from the device"):
            find_run(made)


class OwnLoop(Llama3):
    def forward(self, tokens, targets):
        return super().forward(tokens, targets)


def test_a_model_with_a_loop_of_its_own_is_captured_whole():
    with torch.device("meta"):
        made = OwnLoop(model().config)
    with pytest.raises(NotAlike, match="OwnLoop has a forward of its own"):
        find_run(made)


class Moody(Block):
    """Alike to look at, and not in what it does."""

    other: Any = None

    def forward(self, x, cos, sin, mask=None):
        x = super().forward(x, cos, sin, mask)
        return x.sin() if self is Moody.other else x


@pytest.mark.integration
def test_blocks_that_only_the_graph_tells_apart_are_captured_whole():
    with fake_world(2) as world:
        made = model(6)
        with torch.device("meta"):
            made.layers = torch.nn.ModuleList(Moody(made.config) for _ in range(6))
        with world.fake_mode:
            batch = tuple(torch.empty((2, 8), dtype=torch.int64) for _ in range(2))
        authored = author_module(made, world, None, LLAMA3_PLAN, batch=lambda: batch)
        Moody.other = made.layers[2]
        joint = capture(authored)
    assert re.match(r"layers\.1 and layers\.2 differ at |layers\.\d: its \w+ nodes are not one stretch", joint.stamped)
    assert len(joint.parameters) == 6 * 9 + 3
    assert sum(n.name == "sin" or "sin_" in n.name for n in joint.graph.graph.nodes) >= 1


def test_the_order_of_the_longer_list():
    keys = [("head", None), *(("up", b) for b in (0, 0, 1, 1, 2, 2, 3)), ("mid", None),
            *(("down", b) for b in (3, 2, None, 1, None, 0))]
    turns = turns_of(keys, 1)
    assert turns == [Turns(3, 5, 2), Turns(12, 10, 2)]
    order = longer(len(keys), turns, 2)
    assert order[3:12] == [(3, 0), (4, 0), (3, 1), (4, 1), (3, 2), (4, 2), (5, None), (6, None), (7, None)]
    assert order[-10:] == [(9, None), (10, None), (11, None), (12, 2), (13, 2), (12, 1), (13, 1), (12, 0), (13, 0),
                           (14, None)]
    for wrong in ([("up", b) for b in (0, 1, 1, 2, 3)], [("up", b) for b in (0, 1, 2, 1, 2)],
                  [("up", 1), ("down", 2)], [("up", b) for b in (1, 0, 2, 3)]):
        with pytest.raises(NotAlike):
            turns_of(wrong, 1)
