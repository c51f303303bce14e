"""The copies before a reduce-scatter: which tokens they hand out, which a graph has, and what one costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx import GraphModule, Node

from workbench import draw, find_nodes, on_gpus, provenance, simulated_world
from workbench.graph.capture import JointGraph
from workbench.notebook.draw.picture import Picture, Table
from workbench_lessons.course.lesson import Lesson
from workbench_lessons.course.recorded_figures import Figures
from workbench_lessons.l09_route_tokens_to_experts.slots import slots

Layout = Callable[[torch.Tensor, int], torch.Tensor]


def tokens_by_rank(sequences: int, *layouts: Layout) -> Picture:
    """Which of four tokens a sequence each of two ranks gets, for each layout: one that a reduce-scatter cuts along
    dim 0. A layout takes token numbers [sequences, 4, 1] and the number of ranks.
    """
    tokens = torch.arange(4 * sequences).reshape(sequences, 4, 1)
    buffers = []
    for layout in layouts:
        with simulated_world(2) as world:
            mesh = world.mesh_of({"tp": 2})
            local = distribute_tensor(layout(tokens, 2), mesh, [Shard(0)]).to_local()
            buffers.append((layout.__name__, local.flatten()))
    return slots(buffers, 2, per_rank=4, owner="sequence")


def copies(gm: GraphModule) -> list[Node]:
    """The `cat` nodes that only reduce-scatters read."""
    return [n for n in find_nodes(gm, op="cat") if all("reduce_scatter" in user.name for user in n.users)]


def copy_table(joint: JointGraph) -> Table:
    """A row for each of `copies`: its bytes, its half of the step, its module, and the pieces that it concatenates."""
    rows = []
    for node in copies(joint.graph):
        place = provenance(node)
        half = "backward" if place.backward else "forward"
        pieces = " ".join(map(_piece, node.all_input_nodes))
        rows.append((node.name, node.meta["val"].nbytes, half, place.module, pieces))
    return draw.table("copies before a reduce-scatter", ("node", "bytes", "half", "module", "concatenates"), rows)


def _piece(node: Node) -> str:
    return f"{node.args[0]}[{node.args[1]}]" if "getitem" in node.name else node.name


def copies_on_a_gpu(lesson: Lesson, *layouts: Layout) -> Figures:
    """Five matmuls of bfloat16 [2048, 1024] and [1024, 2048], each followed by a layout: milliseconds on one GPU,
    launched one by one and replayed as a CUDA graph. Elsewhere the recorded rows.
    """
    return on_gpus(lesson, "five copies", lambda: [_five(layout) for layout in layouts])


def _five(layout: Layout) -> dict[str, Any]:
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        return [layout((x @ w).view(1, 2048, 2048), 2) for _ in range(5)]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return {"five results": layout.__name__, "one by one, ms": _milliseconds(step),
            "replayed, ms": _milliseconds(graph.replay)}


def _milliseconds(run: Callable[[], Any], times: int = 50) -> float:
    for _ in range(20):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / times, 4)
