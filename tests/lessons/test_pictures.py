"""What the pictures of the lessons say and refuse. What they draw is compared with the outputs of the notebooks."""


import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.fx import symbolic_trace

from workbench import PassRecord, WorkbenchError, author, load_recipe, shards, simulated_world
from workbench.graph.callables import Body
from workbench.graph.facts import StepFacts
from workbench.graph.read.replay import Replay, ReplayInput
from workbench.passes.cudagraph import CUDAGraphRunner
from workbench.passes.registry import find_pass
from workbench.pipeline.expert_load import ExpertLoad
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import Failure, RankError
from workbench_lessons.l01_author_with_dtensor.slices import placements, slices
from workbench_lessons.l05_bucket_and_overlap.stacked import stacked
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import draw_pace
from workbench_lessons.l08_replay_with_cudagraphs.pictures import addresses
from workbench_lessons.l09_route_tokens_to_experts.load_picture import expert_load
from workbench_lessons.l10_run_on_real_ranks.pictures import lanes, waits_for
from workbench_lessons.l14_read_your_own_trace.pictures import dots, kernels_over_time
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import operators_in_order


def record(*after, name="cudagraph"):
    graph = symbolic_trace(torch.nn.ReLU())
    return PassRecord(find_pass(name), None, (Body(print, graph, StepFacts()),) * len(after), after, 0, 0)


class Recorded(CUDAGraphRunner):
    """A CUDA graph with an input."""

    def __init__(self):
        pass

    @property
    def facts(self):
        return Replay("forward", (ReplayInput("primals_1", (4, 8), 128, True),), 4096, 17, "calls of kernels", 3)


REFUSED = [
    (addresses, (record(print, name="regional_inductor"), {}), "pass 'regional_inductor' records no CUDA graph"),
    (addresses, (record(*[Recorded()] * 61), {}), "61 inputs are too many"),
    (kernels_over_time, ({"x": []},), "give one"),
    (dots, ({"x": ([], [1])},), "give one"), (draw_pace, ({},), "give one step or more"),
    (stacked, ({"x": {"a": 1}, "y": {"b": 1}},), "give one"),
    (operators_in_order, ({"a": ["R0", "X1"]},), "give one row or more"),
    (expert_load, (ExpertLoad(["moe"]),), "no step has recorded the experts' load"),
]


def test_what_cannot_be_drawn_is_refused():
    for draw, given, says in REFUSED:
        with pytest.raises(WorkbenchError, match=says):
            draw(*given)


@pytest.mark.integration
def test_slices_are_the_shards():
    uneven = {"model.n_layers": 1, "model.ffn_dim": 386, "mesh.dp_shard": 4, "mesh.tp": 1}
    recipe = load_recipe("llama3").override(uneven)
    with simulated_world(1) as alone:
        one_rank = recipe.override({"mesh.dp_shard": 1})
        whole = {name: shards(p)[0] for name, p in author(one_rank, alone).module.named_parameters()}
    with simulated_world(recipe.mesh.world_size) as world:
        checked = 0
        for name, param in author(recipe, world).module.named_parameters():
            for rank, bounds in slices(param).items() if isinstance(param, DTensor) else ():
                where = tuple(slice(start, start + length) for start, length in bounds)
                assert torch.equal(shards(param)[rank], whole[name][where]), (name, rank)
                checked += 1
    assert checked >= 11 * recipe.mesh.world_size


def test_a_whole_tensor_has_no_placement():
    with pytest.raises(ValueError, match="w is a Tensor, whole on every rank: there is nothing to place"):
        placements(torch.ones(2), "w")


def launched(number, done, op="all_reduce"):
    stack = (("cell 3", 6 + number, "step"),)
    return Launch("0", "", (0, 1, 2), number, op, ((4,),), ("float32",), done, stack)


def test_the_others_wait_for_a_rank_that_raised():
    waiting = [launched(1, True), launched(2, False)]
    failures = [Failure(0, "waiting", ""), Failure(1, "error", "ValueError: a bad batch"), Failure(2, "waiting", "")]
    error = RankError("hangs", failures, launches={0: waiting, 1: waiting[:1], 2: waiting})
    assert lanes(error).text.splitlines()[1:] == [
        "rank 0: all_reduce, line 7; waits in all_reduce, line 8; waits for rank 1",
        "rank 1: all_reduce, line 7; ValueError: a bad batch",
        "rank 2: all_reduce, line 7; waits in all_reduce, line 8; waits for rank 1"]


def test_a_rank_that_is_elsewhere_at_that_position_is_waited_for():
    assert waits_for({0: [launched(1, False, "broadcast")], 1: [launched(1, False)], 2: [launched(1, False)]}) == {
        0: [1, 2], 1: [0], 2: [0]}
    assert waits_for({0: [launched(1, True)], 1: []}) == {}  # of rank 2 nothing is known


def test_a_lane_goes_on_in_the_order_of_a_rank_that_waits():
    error = RankError("hangs", [Failure(0, "waiting", "")], launches={0: [launched(1, False)], 1: []})
    first, second = lanes(error, {0: ["dp", "tp"], 1: []}).text.splitlines()[1:]
    assert first == "rank 0: waits in all_reduce; later all_reduce over tp; waits for rank 1"
    assert second == "rank 1: returned"


def test_what_a_rank_left_out_stands_in_its_place():
    tp, dp = (Launch(axis, axis, (0, 1), 1, "all_reduce", ((4,),), ("float32",), axis == "dp", ())
              for axis in ("tp", "dp"))
    error = RankError("hangs", [Failure(0, "waiting", "")], launches={0: [tp], 1: [dp]})
    first, second = lanes(error, {0: ["tp", "dp"], 1: ["tp", "dp"]}).text.splitlines()[1:]
    assert first == "rank 0: waits in all_reduce over tp {0, 1}; later all_reduce over dp; waits for rank 1"
    assert second == "rank 1: never launched all_reduce over tp; all_reduce over dp {0, 1}; returned"
