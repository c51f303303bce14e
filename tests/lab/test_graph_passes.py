"""A pass as a plain function of a graph, in torchtitan's own pass lists and without it."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Block
from on_ranks import FSDP_TP, calls, small, user_pass
from torch import nn

from workbench import Outcome, WorkbenchError, author, capture, fake_world, partition, ranks
from workbench.checks.record import TAGS
from workbench.graph.facts import GraphFacts, set_facts
from workbench.lab.graph_passes.graph_pass import as_graph_pass
from workbench.torch_api.ops import collective_kind

ROOT = Path(__file__).parents[2]
BLOCKS = ["layers.0", "layers.1"]

GRAPH_TRAINER = Path(sys.prefix) / "graph_trainer"  # torchtitan 0.3.0, which cannot be imported beside 0.2.2
TRAINER = pytest.mark.skipif(
    not GRAPH_TRAINER.is_dir() and not os.environ.get("CI"),
    reason="needs torchtitan 0.3.0: pip install --no-deps --target .venv/graph_trainer torchtitan==0.3.0 "
           "spmd_types==0.2.3")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in BLOCKS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def clamp_for_relu(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    for node in calls(gm, "aten.relu"):
        node.target, node.args = torch.ops.aten.clamp_min.default, (node.args[0], 0)
    return gm


def lose_a_gather(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The second block reads the first one's weight."""
    waits = calls(gm, "_c10d_functional.wait_tensor")
    (gather,) = waits[4].all_input_nodes
    waits[4].replace_all_uses_with(waits[0])
    gm.graph.erase_node(waits[4])
    gm.graph.erase_node(gather)
    return gm


def through_graph_trainer(specs: list[Any], root: str, titan: str) -> dict[str, Any]:
    """One step of the small module through graph_trainer's tracer and its list of passes, and the same eagerly.

    Before our passes runs one of its own, and after them another.
    """
    sys.path[:0] = [titan, root]
    from benchmarks.reference import fill_in

    fill_in()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.experiments.graph_trainer import passes, simple_fsdp
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    module = simple_fsdp.data_parallel(Body(), mesh, mode="fully_shard")
    annotate_module_fqns(module)
    step = make_fwd_bwd_step(module, lambda pred, labels, **_: (pred - labels).square().mean())
    batch = torch.randn(4, 8), torch.randn(4, 8), torch.tensor(4), {}
    loss, *gradients = step(*batch)
    traced = minimal_fx_tracer(step, module=module)(*batch)
    with user_pass("clamp_for_relu", clamp_for_relu) as mine:
        ours = [as_graph_pass(spec) for spec in (mine, *specs)]
        with user_pass("lose_a_gather", lose_a_gather) as broken:
            fault = as_graph_pass(broken)
            passes.apply_graph_passes(traced.gm, traced.example_inputs, [fault])
        traced.gm = passes.apply_graph_passes(traced.gm, traced.example_inputs, [
            passes.canonicalize_graph_pass, *ours, passes.eliminate_dead_code_pass])
    now, *others = run_traced(traced, module=module)(*batch)
    nodes = [n for n in traced.gm.graph.nodes if collective_kind(n.target)]
    return {
        "bitwise": torch.equal(loss, now) and all(
            torch.equal(g.to_local(), o.to_local()) for g, o in zip(gradients, others, strict=True)),
        "outcomes": {each.__name__: [str(r.outcome) for r in each.records] for each in ours},
        "collectives": [(collective_kind(n.target), n.meta.get("autograd_backward", False)) for n in nodes],
        "clamps": len(calls(traced.gm, "aten.clamp_min")), "fault": str(fault.records[0].verdict("collectives")),
    }


@TRAINER
@pytest.mark.ranks
@pytest.mark.nightly
def test_passes_of_ours_run_in_graph_trainers_list():
    """On its one graph of loss and gradients: 8 parameters, 2 buckets."""
    listed = [{"name": "transformer_block_bucketing", "buckets": BLOCKS}, "graph_cleanup"]
    with ranks(2, backend="gloo", timeout=200, echo="none") as pool:
        for found in pool.run(through_graph_trainer, listed, str(ROOT), str(GRAPH_TRAINER)):
            assert found["bitwise"] and found["clamps"] == len(BLOCKS)
            assert "FAIL" in found["fault"] and "all_gather" in found["fault"]
            assert found["outcomes"] == {
                "clamp_for_relu": ["PASS"], "transformer_block_bucketing": ["PASS"], "graph_cleanup": ["PASS"]}
            assert found["collectives"] == [("all_gather", False)] * 2 + [("reduce_scatter", True)] * 2


@pytest.mark.integration
def test_graphs_that_were_captured_elsewhere_get_the_same_verdicts():
    with fake_world(4) as world:
        joint = capture(author(small(FSDP_TP), world))
        tags = as_graph_pass({"name": "activation_checkpointing", "policy": "full"})
        set_facts(joint.graph, GraphFacts())
        with joint.context():
            joint.graph = tags(joint.graph)
        pair = partition(joint)
        idle = as_graph_pass({"name": "transformer_block_bucketing", "buckets": ("layer.0",)})
        buckets = as_graph_pass({"name": "transformer_block_bucketing", "buckets": ("layers.0",)})
        for graph_pass in (idle, buckets):
            for which in ("forward", "backward"):
                with pair.context(which) as inputs:
                    given = pair.by_part[which]
                    set_facts(given, GraphFacts())
                    text = given.code
                    result = graph_pass(given, inputs)
                    assert given.code == text and result is not given
    told = tags.records[0].verdict("effect")
    assert told.outcome is Outcome.UNKNOWN and told.message == TAGS
    (nothing,), (done,) = idle.records, buckets.records
    assert nothing.verdict("effect").outcome is Outcome.NO_EFFECT
    assert "no module path matches the buckets ['layer.0']" in nothing.verdict("effect").message
    assert done.outcome is Outcome.PASS and done.parts == ("forward", "backward")


def test_what_makes_a_callable_is_no_graph_pass():
    for name in ("full_inductor_compilation", "cudagraph"):
        with pytest.raises(WorkbenchError, match=f"pass '{name}' runs on the .* as_graph_pass, for graphs alone, runs"):
            as_graph_pass(name)
    assert as_graph_pass("graph_cleanup").__name__ == "graph_cleanup"
