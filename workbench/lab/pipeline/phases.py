"""What of a stage runs once a step, what runs for each microbatch, and the values that go from one to the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from workbench.graph.pair_function import gradient_like
from workbench.graph.partition import saved_nodes
from workbench.graph.pieces import named_outputs, pieces
from workbench.graph.read.nodes import output_values, reachable
from workbench.lab.pipeline.cut import Stage
from workbench.lab.pipeline.torch_api import RECEIVED, is_sent_gradient
from workbench.lab.pipeline.transform import second_half
from workbench.torch_api import aot
from workbench.torch_api.ops import collective_kind, is_random
from workbench.torch_api.restoring import shard_of


def once(gm: GraphModule, names: Collection[str]) -> set[Node]:
    """The nodes that depend on these inputs and on constants alone."""
    inside = set[Node]()
    for node in gm.graph.nodes:
        known = node.op == "get_attr" or node.name in names
        fixed = node.op == "call_function" and not is_random(node)
        if known or (fixed and inside.issuperset(node.all_input_nodes)):
            inside.add(node)
    return inside


def reductions(gm: GraphModule) -> set[Node]:
    """The collectives that only gradients of parameters depend on, and what comes behind them: linear, each of one
    input, so that it may run on the sum of the microbatches.
    """
    sent = {node for node, desc in named_outputs(gm) if is_sent_gradient(desc)}
    tail = set[Node]()
    for node in reversed(gm.graph.nodes):
        alone = node.op == "call_function" and len(node.all_input_nodes) == 1 and node not in sent
        if alone and all(n in tail or n.op == "output" for n in node.users):
            tail.add(node)
    starts = [node for node in tail if collective_kind(node.target) is not None]
    return reachable(starts, lambda node: tail.intersection(node.users))


class StageRun:
    """A stage's forward and backward, as its passes left them, in pieces, and their values during a step: forwards and
    backwards of microbatches by number, then `finish`. module: whose parameters it reads, and gives their gradients.

    gather, regather: what depends on no microbatch, such as FSDP's gathers, of the forward and of the backward: once a
    step. backward: in one piece, or `split` into the gradients that are sent and those of the parameters. reduce: from
    the first collective of a gradient on, such as FSDP's reduce-scatters: once a step.
    """

    def __init__(self, stage: Stage, module: nn.Module, split: bool) -> None:
        self.stage, self.module, self.split, pair = stage, module, split, stage.pair
        pair.require_usable()
        inputs = pair.forward.graph.find_nodes(op="placeholder")
        self._inputs = [n for n in inputs if aot.parameter_of(n)]
        self.given = [n for n in inputs if not aot.parameter_of(n)]
        fixed = once(pair.forward, {n.name for n in self._inputs})
        self.gather, self.forwards = pieces(pair.forward, lambda n: int(n not in fixed), 2)
        self.results = [n.name for n in output_values(pair.forward)[: len(stage.sent) or 1]]
        inputs = pair.backward.graph.find_nodes(op="placeholder")
        self.tangents = [n.name for n in inputs if aot.is_tangent(n)]
        names = [n.name for n in inputs if not aot.is_tangent(n)]
        saved = list(zip(names, saved_nodes(pair.forward, pair.backward), strict=True))
        # names in the backward, and in the forward
        self.shared = {name: node.name for name, node in saved if node in fixed}
        self.saved = {name: node.name for name, node in saved if node not in fixed}
        again, late = once(pair.backward, self.shared), reductions(pair.backward)
        second = set(second_half(pair.backward) if split else ())

        def phase(node: Node) -> int:
            if node in again or node in late:
                return 0 if node in again else 3
            return 2 if node in second else 1

        self.regather, *self.backwards, self.reduce = pieces(pair.backward, phase, 4)
        outputs = named_outputs(pair.backward)
        self.sent = [node.name for node, desc in outputs if is_sent_gradient(desc)]
        self.gradients = {
            name: node.name for node, desc in outputs if (name := aot.gradient_of(desc))
        }
        results = [name for piece in self.backwards for name in piece.gives]
        self.summed = {*self.reduce.takes, *self.gradients.values()}.intersection(results)
        self._begin()

    def _begin(self) -> None:
        self._values: dict[str, Any] = {}
        self._again: dict[str, Any] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        self._sums: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def forward(self, number: int, batch: Sequence[Any], received: Sequence[Any]) -> list[Any]:
        """The loss alone, or what is sent. batch: all tensors of the microbatch."""
        if not self._values:
            tensors: dict[str, Any] = dict(self.module.named_parameters(remove_duplicate=False))
            tensors |= self.module.named_buffers(remove_duplicate=False)
            for node in self._inputs:
                value = tensors[str(aot.parameter_of(node))]
                whole = isinstance(node.meta["val"], torch.Tensor)
                self._values[node.name] = shard_of(value) if whole else value.device_mesh
            self._values |= self.gather({}, self._values)
        arrived = dict(enumerate(batch)) | dict(enumerate(received, RECEIVED))
        values = {n.name: arrived[n.meta["desc"].idx] for n in self.given}
        values |= self.forwards(dict(values), self._values)
        self._saved[number] = {name: values[source] for name, source in self.saved.items()}
        return [values[name] for name in self.results]

    @torch.no_grad()
    def backward(self, number: int, tangents: Sequence[Any]) -> list[Any]:
        """What is sent to the stage before; of a split backward the half that this takes."""
        if not self._again:
            self._again = {name: self._values[source] for name, source in self.shared.items()}
            self._again |= self.regather({}, self._again)
        values = self._saved[number]
        values |= zip(self.tangents, tangents, strict=True)
        kept = {
            name: values[name] for name in {*self.backwards[1].takes, *self.sent}.intersection(values)
        }
        kept |= self.backwards[0](values, self._again)
        self._add(kept)
        values |= {name: kept[name] for name in self.backwards[1].takes if name in kept}
        if not self.split:
            self.backward_weights(number)
        return [kept[name] for name in self.sent]

    @torch.no_grad()
    def backward_weights(self, number: int) -> None:
        """The other half, which is empty where the backward is not split."""
        self._add(self.backwards[1](self._saved.pop(number), self._again))

    def _add(self, values: Mapping[str, Any]) -> None:
        sums = self._sums
        for name in self.summed.intersection(values):
            # a result may share its memory with another
            sums[name] = sums[name].add_(values[name]) if name in sums else values[name].clone()

    @torch.no_grad()
    def finish(self, microbatches: int) -> None:
        """Reduce the sums, divide them by the number of microbatches, and add them to the parameters' gradients."""
        sums = self._sums | self.reduce({}, self._again | self._sums)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, source in self.gradients.items():
            parameter = parameters[name]
            gradient = gradient_like(sums[source].div(microbatches), parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._begin()
