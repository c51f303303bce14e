"""What the pictures of the lessons say and refuse. What they draw is compared with the outputs of the notebooks."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx import symbolic_trace

from workbench import PassRecord, WorkbenchError, author, load_recipe, shards, simulated_world
from workbench.graph.callables import Body
from workbench.graph.facts import StepFacts
from workbench.graph.read.replay import Replay, ReplayInput
from workbench.passes.cudagraph import CUDAGraphRunner
from workbench.passes.registry import find_pass
from workbench.pipeline.expert_load import ExpertLoad
from workbench_lessons.l01_author_with_dtensor.slices import placements, slices
from workbench_lessons.l05_bucket_and_overlap.stacked import stacked
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import Pace, draw_pace
from workbench_lessons.l08_replay_with_cudagraphs.pictures import addresses
from workbench_lessons.l09_route_tokens_to_experts.load_picture import expert_load
from workbench_lessons.l14_read_your_own_trace.pictures import dots, kernels_over_time
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import operators_in_order

KINDS = {"R": "reads", "M": "another", "U": "an update"}


def record(*after, name="cudagraph"):
    graph = symbolic_trace(torch.nn.ReLU())
    return PassRecord(find_pass(name), None, (Body(print, graph, StepFacts()),) * len(after), after, 0, 0)


class Recorded(CUDAGraphRunner):
    """A CUDA graph that reads a parameter at an address, and a copy."""

    def __init__(self, address):
        self.address = address

    @property
    def facts(self):
        inputs = (ReplayInput("primals_1", (4, 8), 128, True, "up.weight", self.address),
                  ReplayInput("primals_2", (3,), 24, False))
        return Replay("forward", inputs, 4096, 17, "calls of kernels", 3)


REFUSED = [
    (addresses, (record(print, name="regional_inductor"), {}), "pass 'regional_inductor' records no CUDA graph"),
    (addresses, (record(*[Recorded(0xABC)] * 31), {}), "62 inputs are too many"),
    (kernels_over_time, ({"x": []},), "give one"),
    (dots, ({"x": ([], [1])},), "give one"), (draw_pace, ({},), "give one step or more"),
    (stacked, ({"x": {"a": 1}, "y": {"b": 1}},), "give one"),
    (operators_in_order, ({"a": "R"}, {**KINDS, "X": "one more"}), "give one row or more"),
    (expert_load, (ExpertLoad(["moe"]),), "no step has recorded the experts' load"),
]


def test_what_cannot_be_drawn_is_refused():
    for draw, given, says in REFUSED:
        with pytest.raises(WorkbenchError, match=says):
            draw(*given)


@pytest.mark.integration
@pytest.mark.parametrize("mesh", [{"mesh.dp_shard": 4, "mesh.tp": 1, "model.ffn_dim": 386},
                                  {"mesh.dp_replicate": 2, "mesh.dp_shard": 1, "mesh.tp": 2}], ids=str)
def test_slices_are_the_shards(mesh):
    recipe = load_recipe("llama3").override({"model.n_layers": 1, **mesh})
    with simulated_world(1) as alone:
        one_rank = recipe.override({"mesh.dp_replicate": 1, "mesh.dp_shard": 1, "mesh.tp": 1})
        whole = {name: shards(p)[0] for name, p in author(one_rank, alone).module.named_parameters()}
    with simulated_world(recipe.mesh.world_size) as world:
        checked = 0
        for name, param in author(recipe, world).module.named_parameters():
            for rank, bounds in slices(param).items() if isinstance(param, DTensor) else ():
                where = tuple(slice(start, start + length) for start, length in bounds)
                assert torch.equal(shards(param)[rank], whole[name][where]), (name, rank)
                checked += 1
    assert checked >= 11 * recipe.mesh.world_size


def test_a_rank_that_holds_nothing_is_named_and_a_whole_tensor_refused():
    with simulated_world(4) as world:
        uneven = distribute_tensor(torch.ones(9, 8), world.mesh_of({"dp": 4}), [Shard(0)])
        assert placements(uneven, "w1").text.splitlines()[-1] == "rank 3: dim 0 nothing, dim 1 [0:8]"
    with pytest.raises(ValueError, match="w is a Tensor, whole on every rank: there is nothing to place"):
        placements(torch.ones(2), "w")


def test_each_step_says_what_binds_it_and_work_before_a_part_is_told_apart():
    slow = Pace("simulated", 2, 10.0, 4.0, 12.0, ((0.0, 5.0), (5.0, 10.0)), ((5.0, 7.0), (10.0, 12.0)))
    fast = Pace("simulated", 1, 5.0, 8.0, 13.0, ((0.0, 5.0),), ((5.0, 13.0),))
    assert draw_pace({"slow": slow, "fast": fast}).text.splitlines() == [
        "pace of a step, simulated",
        "slow: 2 launches, CPU 10 µs, device 4 µs of work; step 12 µs, device busy 33%: bound by launches",
        "fast: 1 launch, CPU 5 µs, device 8 µs of work; step 13 µs, device busy 62%: bound by work"]
    tail = replace(slow, what="tail", before_us=6.0)
    assert draw_pace({"a": tail}, one_scale=False).text.splitlines()[1] == (
        "a: 2 launches in 0.01 ms; the tail takes 0.01 ms, of which the device waits 0.00 ms")


def test_inputs_of_a_replay_by_the_names_that_a_reader_knows():
    assert addresses(record(Recorded(0xABC)), {"primals_2": "x"}).text.splitlines()[1] == (
        "forward: reads up.weight in place; copies x")
