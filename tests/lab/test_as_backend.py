"""The same passes under torch.compile: records and verdicts as in a recipe."""

import copy
import warnings
from typing import Any

import pytest
import torch
from blocks import Block
from faults import none_for_an_output
from on_ranks import FSDP_TP, calls, gradients, small, user_pass
from torch import nn

from workbench import Batches, Outcome, Recipe, WorkbenchError, author, current_world, facts_of
from workbench.lab.compile_backend.backend import Backend, as_backend
from workbench.torch_api.aot import parameter_of

LIGHT = ["lint", "effect", "collectives"]


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
        assert all(map(torch.equal, step_of(module, function, inputs), step_of(eager, eager, inputs)))
    assert [r.name for r in backend.records] == [mine, "activation_checkpointing", "graph_cleanup"]
    for record in backend.records:
        assert record.outcome is Outcome.PASS and {v.check for v in record.verdicts} == set(LIGHT)
    assert backend.records[1].verdict("effect").evidence["recomputed_matmuls"] > 0  # by the partition
    forward = backend.graphs[0].pair.forward
    assert calls(forward, "aten.clamp_min") and not calls(forward, "aten.relu")
    named = [parameter_of(n) for n in forward.graph.find_nodes(op="placeholder")]
    assert {n for n, _ in (*module.named_parameters(), *module.named_buffers())} == set(filter(None, named))
    assert "not checked: numerics: no graph is run while torch.compile compiles" in backend.table()


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
        assert all(map(torch.equal, step_of(module, function, inputs), step_of(eager, eager, inputs)))
    assert len(backend.graphs) == 2 and repr(backend) == (
        "Backend(graph_cleanup: 2 graphs compiled, 1 without a backward)")


def test_a_graph_without_collectives_on_several_ranks_points_to_adopt(monkeypatch):
    backend = as_backend([])
    _, function = compiled(backend)
    function(*batch())
    assert "adopt" not in backend.table()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    line = next(line for line in backend.table().splitlines() if "no collective here, on 2 ranks: FSDP2's" in line)
    assert line.endswith("call workbench.adopt(model) before torch.compile")


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
    with user_pass("forgets_a_gradient", none_for_an_output) as mine:
        backend = as_backend([mine])
        _, function = compiled(backend)
        function(*batch())
        assert backend.records[0].verdict("lint").outcome is Outcome.FAIL


def test_a_list_that_cannot_work_is_refused_at_once():
    for listed, message in [
        (["graph_cleanup", "activation_checkpointing"], "'activation_checkpointing' runs on the joint stage"),
        (["cudagraph"], "pass 'cudagraph' runs on the replay stage, and as_backend"),
        ([{"name": "activation_checkpointing", "polcy": "full"}], "polcy: Extra inputs are not permitted"),
        (["full_inductor_compilation"], "requires 'inductor_decomposition'"),
        ("graph_cleanup", r"^as_backend takes a list of passes, and got 'graph_cleanup': write \['graph_cleanup'\]$"),
    ]:
        with pytest.raises(WorkbenchError, match=message):
            as_backend(listed)


def under_compile(mesh: dict[str, int], joint: tuple[Any, ...], passes: tuple[Any, ...], told: bool) -> None:
    """A step of a small llama3 under torch.compile, and eagerly."""
    torch._dynamo.reset()
    world, recipe = current_world(), small(mesh, joint, passes)
    ours, theirs = author(recipe, world), author(recipe, world)
    backend = as_backend(recipe, authored=ours if told else None)
    function = torch.compile(ours.module, backend=backend, fullgraph=True)
    results = []
    for authored, step in ((ours, function), (theirs, theirs.module)):
        loss = step(*Batches(authored).at(0))
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(authored))
    values, expected = results
    assert len(expected) == 13 and [name for name in expected if not torch.equal(values[name], expected[name])] == []
    (graph,) = backend.graphs
    assert [record.outcome for record in backend.records] == [Outcome.PASS] * (len(joint) + len(passes))
    assert graph.schedule.outcome is Outcome.PASS
    assert {axis.split(".")[0] for axis in facts_of(graph.pair.forward).groups} == set(mesh)


@pytest.mark.parametrize(("mesh", "joint", "passes", "told"), [
    ({"dp_shard": 2}, ("reshard_after_forward",), ("transformer_block_bucketing", "graph_cleanup"), True),
    pytest.param({"dp_shard": 2}, (), ({"name": "transformer_block_bucketing", "buckets": ("layers.0",)},), False,
                 marks=pytest.mark.nightly),
    pytest.param(FSDP_TP, ("reshard_after_forward",), ("transformer_block_bucketing", "overlap_collectives"), True,
                 marks=[pytest.mark.compat, pytest.mark.nightly]),
], ids=["fsdp", "fsdp, groups from the DTensors", "fsdp x tp"])
def test_a_module_of_dtensors_on_real_ranks(pool2, pool4, mesh, joint, passes, told):
    (pool4 if mesh is FSDP_TP else pool2).run(under_compile, mesh, joint, passes, told)


def test_a_second_length_under_inductor_says_dynamic_false():
    model = torch.nn.Linear(8, 8)
    backend = as_backend(["inductor_decomposition", "full_inductor_compilation"])
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(4, 8)).sum().backward()
    with pytest.raises(Exception, match=r"'full_inductor_compilation' needs .*torch.compile\(..., dynamic=False\)"):
        compiled(torch.ones(6, 8))
    static = torch.compile(model, backend=backend, dynamic=False)
    x = torch.ones(6, 8)
    torch.testing.assert_close(step_of(model, lambda x: static(x).sum(), (x,)),
                               step_of(model, lambda x: model(x).sum(), (x,)))
    assert len(backend.graphs) == 2 and {record.outcome for record in backend.records} == {Outcome.PASS}
