"""A joint graph cut into the stages of a pipeline: each has a joint graph, and so a forward and a backward, of its own.

An operator belongs to the stage of its module; without a module, to that of its inputs. What depends on parameters
alone, or on no parameter (a gathered weight, a mask, the targets), is copied into each stage that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph, title
from workbench.graph.facts import facts_of, set_facts
from workbench.graph.partition import ForwardBackward
from workbench.graph.pieces import Described, named_outputs
from workbench.graph.read.cost import DeviceSpec
from workbench.graph.read.nodes import blocks_of, described, is_backward, reachable
from workbench.graph.read.timeline import costs_of
from workbench.lab.pipeline import torch_api
from workbench.recipe.wording import counted, few
from workbench.torch_api import aot, partitioning
from workbench.torch_api.module_paths import module_path
from workbench.torch_api.ops import is_random, tensor_bytes
from workbench.torch_api.subgraph import subgraph

Places = dict[Node, int]
"""The stage of each node that depends on the batch and on parameters."""


@dataclass
class Stage:
    """One stage. joint: its joint graph, from what it receives to what it sends, and to gradients of its parameters.

    received, sent: activations, as nodes of the whole graph. received_gradients, sent_gradients: as many, of the same
    shapes, in the same order.
    """

    number: int
    of: JointGraph = field(repr=False)
    joint: GraphModule = field(repr=False)
    received: list[Node]
    sent: list[Node]
    received_gradients: list[Node]
    sent_gradients: list[Node]

    @cached_property
    def pair(self) -> ForwardBackward:
        """Its forward and backward, by torch's minimum cut; passes of the partitioned stage run on them."""
        of, options, slots = self.of, facts_of(self.joint).partition_options, []
        with aot.capture_settings(), aot.pass_context(of.tracing_context):
            for part in partitioning.cut(aot.clone(self.joint), len(self.sent) or 1, options):
                inputs = part.graph.find_nodes(op="placeholder")
                slots.append(aot.LateBound(part, [n.meta.get("val") for n in inputs]))
        pair = ForwardBackward(
            tuple(slots), of.authored, of.parameters, of.buffers, _no_step, of.inputs, writes=()
        )
        pair.cut_from(self.joint, of.known.fork())
        return pair


def _no_step(*_: Any) -> Any:
    raise WorkbenchError("a stage is a part of a step: PipelineStep(cut, ...) runs all of them")


@dataclass
class PipelineCut:
    """The stages of a joint graph. loss: its node."""

    of: JointGraph = field(repr=False)
    stages: list[Stage]
    loss: Node = field(repr=False)

    def __repr__(self) -> str:
        lines = [f"{title(self.of.authored)} in {counted(len(self.stages), 'stage')}"]
        for stage in self.stages:
            lines.append(f"  stage {stage.number}: {len(stage.joint.graph.nodes)} nodes")
            for node in [*stage.sent, *stage.received_gradients]:
                what = "gradient" if is_backward(node) else "activation"
                on = ", sent on" if node in [*stage.received, *stage.sent_gradients] else ""
                size = tensor_bytes(node.meta["val"])
                lines.append(f"    {what} {node.name}: {_kind(node)}, {size:,} B{on}")
        return "\n".join(lines)


def cut_into_stages(
    joint: JointGraph, stages: Sequence[str] | int, *, device: str | DeviceSpec = "h100"
) -> PipelineCut:
    """Cut `joint`, which stays open, into stages.

    stages: the module path that each stage but the first begins with, such as ["layers.2"], or a number of stages whose
    blocks take about the same time on `device`, as estimated. Raises WorkbenchError for a name that no module of the
    graph has, names out of order, more stages than blocks, a parameter that two stages read, a forward that writes a
    buffer or returns more than a loss, and what cannot be sent from stage to stage.
    """
    joint.require_open()
    graph = joint.graph
    starts = _even_starts(graph, stages, device) if isinstance(stages, int) else list(stages)
    outputs = named_outputs(graph)
    gradients = [row for row in outputs if row[1].is_grad()]
    losses = [row for row in outputs if not row[1].is_grad()]
    if len(losses) != 1 or losses[0][0].meta["val"].numel() != 1:
        raise _refused(
            f"the forward gives {len(losses)} values, and not a loss alone: return the loss, and "
            "write no buffers, as batch norm does"
        )
    places = _places(graph, starts)
    ahead, behind = _borders(graph, places, gradients, len(starts))
    inputs = [(n, n.meta["desc"]) for n in graph.graph.find_nodes(op="placeholder")]
    cut_stages = []
    for number in range(len(starts) + 1):
        received, sent = ahead[number : number + 2]
        sent_back, returned = behind[number : number + 2]
        arriving = _numbered(received, torch_api.received)
        arriving += _numbered(returned, torch_api.received_gradient)
        results = losses if number == len(starts) else _numbered(sent, torch_api.sent)
        trained = [row for row in gradients if places.get(row[0]) == number]
        leaving = [*results, *trained, *_numbered(sent_back, torch_api.sent_gradient)]
        part = _part(graph, inputs + arriving, leaving)
        set_facts(part, facts_of(graph).of("joint"))
        cut_stages.append(Stage(number, joint, part, received, sent, returned, sent_back))
    return PipelineCut(joint, cut_stages, losses[0][0])


def _part(
    graph: GraphModule, inputs: Sequence[Described], outputs: Sequence[Described]
) -> GraphModule:
    """A joint graph of these outputs, which takes the inputs that it needs."""
    part = subgraph(graph, [node for node, _ in inputs], outputs)
    nodes = list(part.graph.find_nodes(op="placeholder"))
    for node, (_, desc) in zip(nodes, inputs, strict=True):
        node.meta["desc"] = desc
        if aot.is_tangent(node):
            node.target = f"tangents_{node.name}"  # by which torch's partitioner tells it
        if not node.users:
            part.graph.erase_node(node)
    part.recompile()
    return part


def _refused(why: str) -> WorkbenchError:
    return WorkbenchError(f"cut_into_stages: {why}")


def _even_starts(graph: GraphModule, count: int, device: str | DeviceSpec) -> list[str]:
    """What runs between two blocks counts to the first of them."""
    blocks, ms = blocks_of(graph), costs_of(graph, device).compute
    if not 1 <= count <= len(blocks):
        raise _refused(f"{counted(count, 'stage')} of {len(blocks)} blocks: ask for fewer stages")
    times = [0.0] * len(blocks)
    for node, block in _places(graph, blocks[1:]).items():
        times[block] += ms.get(node, 0.0)
    before, starts = [0.0, *accumulate(times)], [0]
    for number in range(1, count):
        share = before[-1] * number / count
        left = range(starts[-1] + 1, len(blocks) - count + number + 1)
        starts.append(min(left, key=lambda block: abs(before[block] - share)))
    return [blocks[block] for block in starts[1:]]


def _places(graph: GraphModule, starts: Sequence[str]) -> Places:
    """The forward goes from start to start, the backward back from stage to stage, whatever a module says."""
    nodes, inputs = graph.graph.nodes, graph.graph.find_nodes(op="placeholder")
    places: Places = {n: len(starts) for n in inputs if aot.is_tangent(n)}
    drawn = [*places, *(n for n in nodes if n.op == "call_function" and is_random(n))]
    parameters = [n for n in inputs if aot.parameter_of(n) is not None]
    batch = [n for n in inputs if n not in parameters]
    of_parameters = reachable([*parameters, *drawn], lambda n: n.users)
    of_batch = reachable([*batch, *drawn], lambda n: n.users)
    moving = of_parameters & of_batch
    passed, modules = 0, dict[str, set[int]]()
    for node in (n for n in nodes if n in moving and n.op == "call_function"):
        path = module_path(node)
        if not is_backward(node):
            if passed < len(starts) and f"{path}.".startswith(f"{starts[passed]}."):
                passed += 1
            places[node] = passed
            modules.setdefault(path, set()).add(passed)
            continue
        read = [n for n in node.all_input_nodes if n in places]
        stages = [places[n] for n in read if is_backward(n)]
        values = [places[n] for n in read if not is_backward(n)]
        of_module = modules.get(path, set())
        # autograd's sums of gradients belong to no module
        if len(of_module) == 1 and not (stages and node.target is torch.ops.aten.add.Tensor):
            stages += of_module
        places[node] = min(stages) if stages else max(values)
        if values and max(values) > places[node]:
            raise _refused(
                f"the backward of stage {places[node]} reads a value of stage {max(values)} in "
                f"{node.name}: start a stage elsewhere"
            )
    if passed < len(starts):
        raise _refused(
            f"no module {starts[passed]!r} runs, or not in this order: the blocks are "
            f"{few(blocks_of(graph), 12)}"
        )
    return places


def _borders(
    graph: GraphModule, places: Places, gradients: Sequence[Described], last: int
) -> tuple[list[list[Node]], list[list[Node]]]:
    """The activations and the gradients that cross the border in front of each stage, and behind the last one."""
    readers: dict[Node, set[int]] = {}
    for node in reversed(graph.graph.nodes):
        # what belongs to no stage is computed where it is read
        mine = {places[node]} if node in places else readers.get(node, set())
        for n in node.all_input_nodes if node.op != "output" else ():
            readers.setdefault(n, set()).update(mine)
    trained = {aot.gradient_of(desc) for _, desc in gradients}
    crossing = list[tuple[str, str, Node, set[int]]]()
    for node, stages in readers.items():
        if len(stages) > 1 and aot.parameter_of(node) in trained - {None}:
            raise _refused(
                f"stages {min(stages)} and {max(stages)} read parameter "
                f"{aot.parameter_of(node)!r}, and each would train a copy: untie it"
            )
        if node in places:
            crossing.append((_kind(node), node.name, node, {*stages, places[node]}))
    crossing.sort(key=lambda row: row[:2])
    ahead, behind = list[list[Node]](), list[list[Node]]()
    for number in range(last + 2):
        passing = [n for *_, n, stages in crossing if min(stages) < number <= max(stages)]
        ahead.append([n for n in passing if not is_backward(n)])
        behind.append([n for n in passing if is_backward(n)])
        kinds = [[_kind(n) for n in side[-1]] for side in (ahead, behind)]
        if kinds[0] != kinds[1]:
            raise _refused(
                "torch's stages send a gradient back for each activation, and in front of stage "
                f"{number} {few(kinds[0], 4)} would go and {few(kinds[1], 4)} come back: start a "
                "stage elsewhere"
            )
    return ahead, behind


def _kind(node: Node) -> str:
    return described(node.meta["val"])


def _numbered(nodes: Sequence[Node], describe: Any) -> list[Described]:
    """Descriptors whose numbers no input or result of the whole graph has."""
    return [(node, describe(place)) for place, node in enumerate(nodes, torch_api.RECEIVED)]
