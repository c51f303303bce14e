"""regional_inductor: what enters a region, what never does, and what is refused before anything is compiled."""

import pytest
import torch
from on_ranks import FSDP_TP, small
from torch import nn

from workbench import World, author, author_module, capture, partition, region, run_partitioned
from workbench.authoring.plans import ParallelPlan
from workbench.checks.verdicts import Outcome
from workbench.errors import WorkbenchError
from workbench.graph.callables import kernels_of
from workbench.graph.read.memory import parameter_moves
from workbench.graph.read.nodes import kind_of
from workbench.passes.regional_inductor import parts_to_compile
from workbench.recipe.recipe import RecipeError, load_recipe
from workbench.recipe.sections import PassSpec
from workbench.torch_api.ops import COMPILED_REGION

pytestmark = pytest.mark.integration

NAME, BLOCKS = "regional_inductor", "transformer_block_bucketing"


def spec(**options):
    return PassSpec(name=NAME, options=options)


@pytest.fixture(scope="module")
def pair(fake4):
    """Makes the forward and backward of a small llama3 on a fake mesh, with passes run on it."""

    joint = capture(author(small(FSDP_TP), fake4))

    def make(*specs):
        made = partition(joint.fork())
        return made, run_partitioned(made, specs)[0]

    return make


@pytest.fixture
def uncompiled(monkeypatch):
    """Regions are cut out and not compiled: seconds, not minutes."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, inputs, **_: graph)


def calls(graph):
    return [n for n in graph.graph.nodes if COMPILED_REGION in n.meta]


def test_a_region_s_product_still_hides_the_collectives_around_it(fake4, uncompiled):
    """Attention's region has copies behind it that nobody needs soon: its call must not take their place."""
    recipe = load_recipe("llama3_flex_autobucketing_regional").override({
        "mesh.dp_shard": 4, "mesh.tp": 1, "model.n_layers": 2})
    pair = partition(capture(author(recipe, fake4)))
    records, _ = run_partitioned(pair, recipe.passes)
    chosen, kept = (record.verdict("order") for record in records)
    assert chosen.outcome is kept.outcome is Outcome.PASS and kept.evidence["lost"] == 0
    assert kept.evidence["hidden"] > 20
    for graph in pair.graphs:  # and the graphs of its masks travel with it
        assert calls(graph) and not [n for n in graph.graph.nodes if "higher_order" in str(n.target)]


def test_regions_are_calls_of_functions_and_the_rest_stays(pair):
    # options of its own: code that a run of an older package left in Inductor's cache has no kernels to see
    made, records = pair(BLOCKS, spec(regions=("feed_forward",), config={"cpp.simdlen": 1, "cpp.threads": 1}))
    found = records[-1].verdict("effect")
    assert records[-1].outcome is Outcome.PASS and found.evidence["names"] == ["feed_forward"]
    assert all(found.evidence["regions"]) and found.evidence["nodes_inside"] > 8
    for graph in made.graphs:
        assert not {n.op for n in graph.graph.nodes} - {"placeholder", "get_attr", "call_function", "output"}
        assert not list(graph.named_children())  # what get_attr reads are the captured constants
    assert "region_feed_forward_layers_0" in made.forward.code
    kernels = kernels_of(records[-1].before, records[-1].after)
    assert [k.graph for k in kernels] == [
        f"{part} {i}, {call.target.__name__}" for part, graph in made.by_part.items()
        for i, call in enumerate(calls(graph))]
    assert all(k.missing == () and k.launches for k in kernels)
    assert all(bool(call.source) == (call.kind == "cpp") for k in kernels for call in k.kernels)
    assert any("silu" in call.name for k in kernels for call in k.kernels)


def test_fallback_operators_stay_outside_and_a_region_that_is_left_out_is_no_effect(pair, uncompiled):
    products = [sum(n.target is torch.ops.aten.mm.default for graph in made.graphs for n in graph.graph.nodes)
                for made, _ in (pair(spec(fallback=("mm",))), pair(spec()))]
    assert products[0] > products[1]
    _, records = pair(spec(regions=("feed_forward", "norm"), fallback=(
        "rms_norm", "_fused_rms_norm", "mul", "pow", "mean", "add", "rsqrt", "_fused_rms_norm_backward", "sum", "div",
        "expand", "neg", "_to_copy", "sub", "view")))
    found = records[-1].verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT and "nothing of region 'norm' was compiled" in found.message


@pytest.mark.parametrize("bucketing", [(), ("autobucketing_reordering",)], ids=str)
def test_collectives_and_gather_chains_never_enter(pair, bucketing):
    for graph in pair(*bucketing)[0].graphs:
        inside = {node for _, nodes in parts_to_compile(graph) for node in nodes}
        assert inside and not {kind_of(n) for n in inside} & {"collective", "wait"}
        assert inside.isdisjoint(parameter_moves(graph))


REFUSED = [
    ({"regions": ("ffn",)}, "no region 'ffn' in the model: it has 'feed_forward', 'norm'"),
    ({"config": {"max_autotun": True}}, "Inductor has no option 'max_autotun': did you mean 'max_autotune'?"),
    ({"config": {"max_autotune": "no"}}, "Inductor's option 'max_autotune' is true or false, and not 'no'"),
    ({"fallback": ("mm", "silu_bakward")}, "fallback: no operator 'silu_bakward': did you mean 'silu_backward'?"),
]


def test_refused_before_anything_is_compiled(pair, monkeypatch):
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: pytest.fail("compiled"))
    made, _ = pair()
    for options, message in REFUSED:
        with pytest.raises(WorkbenchError) as error:
            run_partitioned(made, [spec(**options)])
        assert str(error.value) == f"pass 'regional_inductor': {message}"


def test_not_together_with_full_inductor_and_not_before_bucketing():
    with pytest.raises(RecipeError, match="passes 'regional_inductor' and 'full_inductor_compilation' conflict"):
        small(FSDP_TP, ("inductor_decomposition",), (NAME, "full_inductor_compilation"))
    with pytest.raises(RecipeError, match=f"pass '{BLOCKS}' must come before '{NAME}': swap them"):
        small(FSDP_TP, (), (NAME, BLOCKS))


class Interleaved(nn.Module):
    """Two regions that need each other's values in turn: a -> b -> a, with b's second part free of a's."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x, y):
        with region("a"):
            first, free = x @ self.w, y * 2
        with region("b"):
            second, other = first.sin(), free.cos()
        with region("a"):
            third = second @ self.w + other
        return (third * third).mean()


def built(model):
    torch.manual_seed(0)
    world = World("gloo", 1, 0, torch.device("cpu"))
    batch = torch.randn(3, 4), torch.randn(3, 4)
    return partition(capture(author_module(model, world, None, ParallelPlan(), batch=lambda: batch)))


def test_regions_that_need_each_other_make_no_cycle(uncompiled):
    made = built(Interleaved())
    (record,), _ = run_partitioned(made, [NAME])
    assert record.outcome is Outcome.PASS, record.verdicts
    assert [n.meta[COMPILED_REGION]["name"] for n in calls(made.forward)] == ["a", "b", "a"]


class Twice(nn.Module):
    """Two equal products, and one of them has a name: the partitioner keeps the first of each direction."""

    def __init__(self, named_first):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.names = ("b", "other") if named_first else ("other", "b")

    def forward(self, x, y):
        with region(self.names[0]):
            first = x @ self.w
        with region(self.names[1]):
            second = x @ self.w
        return (first * second).mean()


def test_a_name_that_the_partition_lost_is_said(uncompiled):
    for named_first, which in ((False, "forward"), (True, "backward")):
        (record,), _ = run_partitioned(built(Twice(named_first)), [spec(regions=("b",))])
        found = record.verdict("effect")
        assert found.outcome is Outcome.NO_EFFECT and found.evidence["lost"] == [f"b in the {which}"]
        assert found.message.startswith(f"the partition left no node of region 'b' in the {which}")
