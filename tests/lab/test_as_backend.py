"""The same passes under torch.compile, and as plain functions of graphs: records and verdicts as in a recipe."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from on_ranks import FSDP_TP, calls, gradients, small, user_pass
from torch import nn

from workbench import Batches, Outcome, Recipe, WorkbenchError, author, capture, current_world, fake_world, partition
from workbench.checks.record import TAGS
from workbench.graph.facts import GraphFacts, facts_of, set_facts
from workbench.lab.compile_backend.backend import Backend, as_backend
from workbench.lab.compile_backend.graph_pass import as_graph_pass
from workbench.torch_api.aot import parameter_of
from workbench.torch_api.ops import collective_kind
from workbench.world.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LIGHT = ["lint", "effect", "collectives"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mlp(nn.Module):
    """(batch, 8) and targets (batch, 8) -> mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x * self.scale - y) ** 2).mean()


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


def step_of(module: nn.Module, function: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    torch.manual_seed(1)
    module.zero_grad()
    loss = function(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters())]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, ours, theirs))


def compiled(backend: Backend, module: nn.Module | None = None) -> tuple[nn.Module, Any]:
    module = module or Mlp()
    return module, torch.compile(module, backend=backend)


@pytest.mark.compat
@pytest.mark.integration
def test_a_plain_module_gets_the_values_of_eager_and_a_record_of_each_pass():
    def relus_become_clamps(gm):
        for node in calls(gm, "aten.relu"):
            node.target, node.args = torch.ops.aten.clamp_min.default, (node.args[0], 0)
        return gm

    with user_pass("relus_become_clamps", relus_become_clamps) as mine:
        backend = as_backend([mine, {"name": "activation_checkpointing", "policy": "full"}, "graph_cleanup"])
        module, function = compiled(backend)
        inputs = batch()
        eager = copy.deepcopy(module)
        assert_same(step_of(module, function, inputs), step_of(eager, eager, inputs))
    assert [r.name for r in backend.records] == [mine, "activation_checkpointing", "graph_cleanup"]
    for record in backend.records:
        assert record.outcome is Outcome.PASS and {v.check for v in record.verdicts} == set(LIGHT)
    assert backend.records[1].verdict("effect").evidence["recomputed_matmuls"] > 0  # by the partition
    forward = backend.graphs[0].pair.forward
    assert calls(forward, "aten.clamp_min") and not calls(forward, "aten.relu")
    named = [parameter_of(n) for n in forward.graph.find_nodes(op="placeholder")]
    assert {n for n, _ in (*module.named_parameters(), *module.named_buffers())} == set(filter(None, named))
    shown = backend.table()
    assert "not checked: numerics: no graph is run while torch.compile compiles" in shown
    row = next(line for line in shown.splitlines() if line.startswith("graph_cleanup"))
    assert row.split()[1:] == ["PASS", "PASS", "PASS", "-"]


@pytest.mark.integration
def test_other_shapes_are_another_graph_and_a_forward_alone_is_left_as_it_is():
    backend = as_backend(["graph_cleanup"])
    module, function = compiled(backend)
    inputs = batch()
    with torch.no_grad():
        assert torch.equal(function(*inputs), module(*inputs))
    assert backend.forward_only == 1 and not backend.records and "call the compiled module first" in backend.table()
    for rows in (4, 6):
        eager = copy.deepcopy(module)
        inputs = batch(rows)
        assert_same(step_of(module, function, inputs), step_of(eager, eager, inputs))
    assert len(backend.graphs) == 2 and repr(backend) == (
        "Backend(graph_cleanup: 2 graphs compiled, 1 without a backward)")


@pytest.mark.integration
def test_a_pass_without_effect_warns_and_fails_where_strict():
    idle = {"name": "activation_checkpointing", "policy": "none"}
    module, function = compiled(as_backend([idle]))
    with pytest.warns(UserWarning, match="a pass had no effect: activation_checkpointing: the policy is none"):
        function(*batch())
    torch._dynamo.reset()
    _, function = compiled(as_backend([idle], strict=True), module)
    with pytest.raises(Exception, match="these passes had no effect: activation_checkpointing: the policy is none"):
        function(*batch())
    torch._dynamo.reset()
    allowed = Recipe(name="r", joint_passes=(idle,), expect={"no_effect": ("activation_checkpointing",)}, strict=True)
    _, function = compiled(as_backend(allowed), module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*batch())


@pytest.mark.integration
def test_a_pass_that_breaks_the_graph_is_told_in_its_record():
    def forgets_a_gradient(gm):
        output = gm.graph.output_node()
        given = list(output.args[0])
        given[1] = None
        output.args = (given,)
        return gm

    with user_pass("forgets_a_gradient", forgets_a_gradient) as mine:
        backend = as_backend([mine])
        _, function = compiled(backend)
        function(*batch())
        assert backend.records[0].verdict("lint").outcome is Outcome.FAIL


def test_a_list_that_cannot_work_is_refused_at_once():
    for listed, message in [
        (["graph_cleanup", "activation_checkpointing"], "'activation_checkpointing' runs on the joint stage"),
        (["cudagraph"], "pass 'cudagraph' runs on the replay stage, and as_backend"),
        (["fused_clip_adamw"], "'fused_clip_adamw' runs on the step stage, and as_backend"),
        ([{"name": "activation_checkpointing", "polcy": "full"}], "polcy: Extra inputs are not permitted"),
        (["full_inductor_compilation"], "requires 'inductor_decomposition'"),
        ("graph_cleanup", r"^as_backend takes a list of passes, and got 'graph_cleanup': write \['graph_cleanup'\]$"),
    ]:
        with pytest.raises(WorkbenchError, match=message):
            as_backend(listed)


@pytest.mark.integration
@pytest.mark.nightly
def test_full_inductor_under_torch_compile():
    backend = as_backend(["inductor_decomposition", "full_inductor_compilation"])
    module, function = compiled(backend)
    inputs = batch()
    eager = copy.deepcopy(module)
    torch.testing.assert_close(step_of(module, function, inputs), step_of(eager, eager, inputs))
    assert {r.outcome for r in backend.records} == {Outcome.PASS}


def under_compile(mesh: dict[str, int], joint: tuple[Any, ...], passes: tuple[Any, ...], told: bool) -> dict[str, Any]:
    """Two AdamW steps of a small llama3 under torch.compile, and eagerly from the same start."""
    torch._dynamo.reset()
    world, recipe = current_world(), small(mesh, joint, passes)
    ours, theirs = author(recipe, world), author(recipe, world)
    backend = as_backend(recipe, authored=ours if told else None)
    function = torch.compile(ours.module, backend=backend, fullgraph=True)
    seen: list[list[dict[str, torch.Tensor]]] = [[], []]
    for found, authored, step in zip(seen, (ours, theirs), (function, theirs.module), strict=True):
        optimizer = torch.optim.AdamW(authored.module.parameters(), lr=1e-3, foreach=False)
        for index in range(2):
            loss = step(*Batches(authored).at(index))
            loss.backward()
            found.append({"loss": loss.detach()} | {n: g.clone() for n, g in gradients(authored).items()})
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    differing = {name for a, b in zip(*seen, strict=True) for name in a if not torch.equal(a[name], b[name])}
    facts = facts_of(backend.graphs[0].pair.forward)
    return {"differing": sorted(differing), "outcomes": {r.name: str(r.outcome) for r in backend.records},
            "schedule": str(backend.graphs[0].schedule), "axes": sorted({a.split(".")[0] for a in facts.groups}),
            "graphs": len(backend.graphs), "tensors": len(seen[0][0])}


@pytest.mark.parametrize(("mesh", "joint", "passes", "told"), [
    ({"dp_shard": 2}, ("reshard_after_forward",), ("transformer_block_bucketing", "graph_cleanup"), True),
    pytest.param({"dp_shard": 2}, (), ({"name": "transformer_block_bucketing", "buckets": ("layers.0",)},), False,
                 marks=pytest.mark.nightly),
    pytest.param(FSDP_TP, ("reshard_after_forward",), ("transformer_block_bucketing", "overlap_collectives"), True,
                 marks=[pytest.mark.compat, pytest.mark.nightly]),
], ids=["fsdp", "fsdp, groups from the DTensors", "fsdp x tp"])
def test_a_module_of_dtensors_on_real_ranks(pool2, pool4, mesh, joint, passes, told):
    for found in (pool4 if mesh is FSDP_TP else pool2).run(under_compile, mesh, joint, passes, told):
        assert found["differing"] == [] and found["tensors"] == 13
        assert set(found["outcomes"].values()) == {"PASS"} and len(found["outcomes"]) == len(joint) + len(passes)
        assert "PASS" in found["schedule"] and found["graphs"] == 1 and found["axes"] == sorted(mesh)


# A pass as a plain function of a graph, in torchtitan's own pass lists and without it.

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


def test_a_second_length_under_inductor_says_dynamic_false():
    model = torch.nn.Linear(8, 8)
    backend = as_backend(["inductor_decomposition", "full_inductor_compilation"])
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(4, 8)).sum().backward()
    with pytest.raises(Exception, match=r"'full_inductor_compilation' needs .*torch.compile\(..., dynamic=False\)"):
        compiled(torch.ones(6, 8))
    static = torch.compile(model, backend=backend, dynamic=False)
    static(torch.ones(6, 8)).sum().backward()
    assert len(backend.graphs) == 2
