"""`as_graph_pass`: a pass as a plain function of a graph, for the pass lists of other compilers' pipelines.

torchtitan's compiler toolkit (until 0.2) runs lists on a joint graph, and then on forward and backward. Its
graph_trainer (from 0.3) traces loss and gradients into one graph, without torch's descriptors, and runs one list on it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.facts import Part, StepFacts, facts_of, set_facts
from workbench.lab.graph_passes import bridge
from workbench.passes.registry import RegisteredPass
from workbench.pipeline.run_passes import apply_pass, choose, copy_graph
from workbench.recipe.contracts import Stage
from workbench.recipe.sections import PassSpec
from workbench.torch_api.aot import is_tangent


class GraphPass:
    """`pass_(gm, example_inputs) -> gm`, with the options bound; `gm` itself is not changed.

    records: one entry, with the verdicts of level light, for each joint or whole graph, and for each forward with its
    backward.
    The effect of a pass that only tags the joint graph is UNKNOWN, since the partitioner runs elsewhere.
    """

    def __init__(self, item: RegisteredPass, options: Any) -> None:
        self.item, self.options = item, options
        self.records: list[PassRecord] = []
        self.__name__ = item.name  # which torchtitan logs
        self._step = StepFacts()
        self._forward: tuple[GraphModule, GraphModule, float] | None = None

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> GraphModule:
        """Apply the pass. example_inputs: by default those of the placeholders; torchtitan gives joint passes none.

        Raises WorkbenchError, with the pass's name, where the pass raises.
        """
        inputs = gm.graph.find_nodes(op="placeholder")
        whole = bridge.is_whole(gm)
        part: Part = "backward" if any(map(is_tangent, inputs)) else "forward"
        if self.item.contract.stage is Stage.JOINT:
            part = "joint"
        elif whole:
            part = "step"
        if part in ("forward", "step"):
            self._step = StepFacts()
        if facts_of(gm).part != part:
            set_facts(gm, bridge.facts_outside(gm, part, self._step))
        before = copy_graph(gm)  # which others may edit later
        if whole:
            bridge.read_in(before)
        if example_inputs is None:
            example_inputs = [node.meta.get("val") for node in inputs]
        started = time.perf_counter()
        result = apply_pass(self.item, copy_graph(before), list(example_inputs), self.options)
        seconds = time.perf_counter() - started
        after = copy_graph(result)  # later passes of the list may edit what this one returns
        if whole:
            bridge.write_out(result)
        if part in ("joint", "step"):
            self._prove((before,), (after,), seconds)
        elif part == "forward":
            self._forward = before, after, seconds
        elif self._forward is not None:
            forward, changed, earlier = self._forward
            self._forward = None
            self._prove((forward, before), (changed, after), earlier + seconds)
        return result

    def _prove(self, before: tuple[Any, ...], after: tuple[Any, ...], seconds: float) -> None:
        record = PassRecord(self.item, self.options, before, after, seconds, 0.0)
        _ = record.verdicts  # a predicate that raises is told here
        self.records.append(record)

    def __repr__(self) -> str:
        return f"GraphPass({self.item.name}: {', '.join(r.outcome for r in self.records) or 'not run yet'})"


def as_graph_pass(spec: PassSpec | str | Mapping[str, Any]) -> GraphPass:
    """A registered pass for a list of `(gm, example_inputs) -> gm`, as torchtitan has them.

        bucketing = as_graph_pass({"name": "transformer_block_bucketing", "buckets": ["layers.0", "layers.1"]})
        fw_compiler, bw_compiler = make_compiler_with_passes([bucketing])                     # the compiler toolkit
        traced.gm = apply_graph_passes(traced.gm, traced.example_inputs, [bucketing])         # graph_trainer

    spec: its name, or a table with its options; a pass that reads the model's blocks needs them as an option here. Put
    a joint pass into a list of joint passes, and a partitioned pass into the list for forward and backward. The order
    of passes is not checked here.

    Raises WorkbenchError for an unknown pass, for wrong options, and for lowering and replay passes.
    """
    where = "as_graph_pass, for graphs alone,"
    return GraphPass(
        *choose(PassSpec.model_validate(spec), (Stage.JOINT, Stage.PARTITIONED), where)
    )
