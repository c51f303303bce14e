"""What the pictures of the lessons say and refuse. What they draw is compared with the outputs of the notebooks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import WorkbenchError, author, load_recipe, simulated_world
from workbench.graph.callables import Body
from workbench.graph.facts import StepFacts
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.graph.read.replay import Replay, ReplayInput
from workbench.passes.cudagraph import CUDAGraphRunner
from workbench.passes.registry import find_pass
from workbench.pipeline.expert_load import ExpertLoad
from workbench.pipeline.run_passes import PassRecord
from workbench.world.simulated import shards
from workbench_lessons.l01_author_with_dtensor.slices import placements, slices
from workbench_lessons.l03_split_forward_and_backward.pictures import unbeaten
from workbench_lessons.l04_decompose.pictures import census, kernel_traffic
from workbench_lessons.l05_bucket_and_overlap.stacked import stacked
from workbench_lessons.l07_compile_everything.pictures import MOST, draw_kernels
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import Pace, draw_pace
from workbench_lessons.l08_replay_with_cudagraphs.pictures import addresses, replay
from workbench_lessons.l09_route_tokens_to_experts.load_picture import expert_load
from workbench_lessons.l09_route_tokens_to_experts.pictures import routing
from workbench_lessons.l09_route_tokens_to_experts.slots import slots
from workbench_lessons.l14_read_your_own_trace.pictures import dots, kernels_over_time
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import operators_in_order

KINDS = {"R": "reads", "M": "another", "U": "an update"}
SCORES = torch.rand(3, 4)
BYTES = 4 * 64  # of one tensor


@pytest.fixture(scope="module")
def graph():
    """exp and add of an input, with a view between, and the sum of an expanded vector."""
    def function(x, y):
        return (x.exp().view(8, 8) + y.view(8, 8), y.view(8, 8)[0].expand(8, 8) + 1)

    return make_fx(function, tracing_mode="fake")(torch.ones(64), torch.ones(64))


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


@pytest.mark.parametrize(("draw", "given", "says"), [
    (routing, (SCORES, SCORES.topk(1).indices, 3), r"4 experts do not divide by ranks \(1\) and groups \(3\)"),
    (replay, (record(print, name="regional_inductor"),), "pass 'regional_inductor' records no CUDA graph"),
    (addresses, (record(*[Recorded(0xABC)] * 31),), "62 inputs are too many"),
    (draw_kernels, (record(print),), "pass 'cudagraph' has no kernels of Inductor"),
    (kernels_over_time, ({"x": []},), "give one"),
    (dots, ({"x": ([], [1])},), "give one"), (draw_pace, ({},), "give one step or more"),
    (stacked, ({"x": {"a": 1}, "y": {"b": 1}},), "give one"),
    (operators_in_order, ({"a": "R"}, {**KINDS, "X": "one more"}), "give one row or more"),
    (expert_load, (ExpertLoad(["moe"]),), "no step has recorded the experts' load"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_drawn_is_refused(draw, given, says):
    with pytest.raises(WorkbenchError, match=says):
        draw(*given)


def test_operators_are_counted_by_name_and_by_kind(graph):
    assert census(graph).ops == {"aten.view": 3, "aten.add": 2, "aten.exp": 1, "aten.select": 1, "aten.expand": 1}
    assert census(graph).kinds == {"view": 5, "pointwise": 3}


def test_one_kernel_keeps_what_is_between_its_operators_out_of_memory(graph):
    apart = kernel_traffic(graph, [["exp"], ["add"]])
    (fused,), (row,) = kernel_traffic(graph, [["exp", "add"]]), kernel_traffic(graph, [["add_1"]])
    assert [kernel.bytes for kernel in apart] == [2 * BYTES, 3 * BYTES] and fused.bytes == 3 * BYTES
    assert fused.reads == {"x_1": BYTES, "y_1": BYTES} and fused.writes == {"add": BYTES}
    assert fused.readers["y_1"].name == "add"
    assert row.reads == {"y_1": BYTES // 8} and row.writes == {"add_1": BYTES}  # an expanded row is read once


def test_equal_points_do_not_beat_each_other():
    points = {"all": (8, 0), "some": (4, 0), "few": (4, 3), "none": (0, 6), "worse": (8, 6), "one": (2, 3)}
    assert unbeaten(points) == ["none", "one", "some"] and unbeaten({"a": (1, 1), "b": (1, 1)}) == ["a", "b"]


@pytest.mark.integration
@pytest.mark.parametrize("mesh", [{"mesh.dp_shard": 4, "mesh.tp": 1, "model.ffn_dim": 386},
                                  {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.tp": 2}], ids=str)
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


def test_parts_of_bars_are_told():
    rows = {"x": {"products": 1.25, "idle": 2}, "y": {"products": 0, "idle": 1}}
    assert stacked(rows).text == "x: products 1.2, idle 2.0\ny: products 0.0, idle 1.0"


def test_each_step_says_what_binds_it_and_work_before_a_part_is_told_apart():
    slow = Pace("simulated", 2, 10.0, 4.0, 12.0, ((0.0, 5.0), (5.0, 10.0)), ((5.0, 7.0), (10.0, 12.0)))
    fast = Pace("simulated", 1, 5.0, 8.0, 13.0, ((0.0, 5.0),), ((5.0, 13.0),))
    assert draw_pace({"slow": slow, "fast": fast}).text.splitlines() == [
        "pace of a step, simulated",
        "slow: 2 launches, CPU 10 µs, device 4 µs of work; step 12 µs, device busy 33%: bound by launches",
        "fast: 1 launch, CPU 5 µs, device 8 µs of work; step 13 µs, device busy 62%: bound by work"]
    tail = replace(slow, what="tail", before_us=6.0)
    assert draw_pace({"a": tail}, one_scale=False).text.splitlines()[1] == (
        "a: 2 launches, CPU 0.01 ms; behind the work before it the tail takes 0.01 ms, the device waits 0.00 ms of it")


def test_bars_of_both_directions_and_many_kernels_are_folded_with_their_count():
    def kernels(fused):
        calls = [Kernel(0, "torch.ops.all_gather", "collective", ("gather",)),
                 Kernel(1, "torch.ops.wait", "wait", ("w",))]
        calls += [Kernel(i + 2, f"cpp_{i}", "cpp", (f"a{i}", f"b{i}")) for i in range(fused)]
        nodes = tuple(node for kernel in calls for node in kernel.nodes)
        return Kernels("forward", tuple(calls), (*nodes, "lost"), not_found=("lost",))

    both = [kernels(3), kernels(1)]
    assert draw_kernels(both).text.splitlines() == [
        "kernels",
        both[0].summary(), "  cpp: 3 calls of 3 kernels, 6 nodes", "  collective: 1 calls of 1 kernels, 1 nodes",
        both[1].summary(), "  cpp: 1 calls of 1 kernels, 2 nodes", "  collective: 1 calls of 1 kernels, 1 nodes"]
    assert "  not drawn: 9 more calls, 18 nodes" in draw_kernels(kernels(MOST + 8)).text.splitlines()


def test_inputs_of_a_replay_and_no_address_in_the_text():
    table = replay(record(Recorded(0xABC)))
    assert [row[3] for row in table.rows] == ["static", "copied"]
    assert table.notes == (Recorded(0xABC).facts.summary(),)
    assert "0xabc" in table._repr_html_() and "address" not in repr(table) and "0xabc" not in repr(table)


def test_slots_are_told_before_and_after_the_exchange():
    with simulated_world(2) as world:
        sent = distribute_tensor(torch.tensor([0, -1, 1, 0, 2, 3, -1, -1]), world.mesh_of({"ep": 2}), [Shard(0)])
        sent = sent.to_local()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
    picture = slots([("sent", sent), ("received", received)], capacity=2, per_rank=2)
    assert picture.text.splitlines() == ["sent", "rank 0: 0 . | 1 0", "rank 1: 2 3 | . .",
                                         "received", "rank 0: 0 . | 2 3", "rank 1: 1 0 | . ."]


def test_the_load_of_experts_holds_the_table_and_who_sent_what():
    load = ExpertLoad([f"layers.{i}.moe" for i in range(6)])
    for ahead in (2, 0):
        load.tokens.append([[[4 + ahead * (layer + 1), 4]] * 2 for layer in range(6)])
        load.dropped.append([[ahead, 0]] * 6)
    load.tokens[-1][0] = [[99, 4], [4, 4]]  # the first layer is the most uneven of the last step
    picture = expert_load(load)
    assert load.table() in picture.text and "layers.0.moe, rank 0: 99 4, 0 dropped" in picture.text
    assert "layers.0.moe" in picture.alt and picture.alt.count("first step") == 4
    assert picture.text.endswith("drawn: the 4 most uneven of 6 layers")
