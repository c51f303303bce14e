"""Capture: an authored module becomes one graph of its forward and backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from workbench.authoring.authored import Authored
from workbench.errors import UnusableGraph, WorkbenchError, no_exit
from workbench.graph.facts import GraphFacts, Known, set_facts
from workbench.graph.input_check import InputCheck
from workbench.graph.model_contract import (
    NotCaptured,
    by_another,
    not_captured,
    refusing_inference_tensors,
    require_known_meshes,
    require_trainable,
)
from workbench.graph.read.nodes import may_differ
from workbench.graph.read.program import program
from workbench.recipe.hooks import hook_of
from workbench.recipe.wording import counted
from workbench.torch_api import aot
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.forked_joint import fork_joint
from workbench.torch_api.ops import calls_of, collective_kind, is_wait, keep_expected_sizes, reads_shape
from workbench.torch_api.partitioning import tag_units
from workbench.torch_api.refusals import refusing_none_gradients
from workbench.torch_api.tree import tree_leaves


@dataclass
class JointGraph:
    """The captured forward and backward in one FX graph.

    `graph` takes (primals, tangents) and returns (outputs, gradients); each placeholder and output has its
    descriptor in `meta["desc"]`. Nothing of torch's tracing state stays open after the capture. `close`, or the end
    of a `with` block, or `partition`, which uses it up, lets the capture's state go; `graph` can still be read.
    passes: those run so far. side_effects: sources, as Dynamo writes them, of the Python objects that the forward
    changes, and a compiled step does not.
    broken: why no stage can take `graph` as a pass left it, or None. by: how it was captured. cut: what takes the place
    of torch's partitioner, which a plugin's capture does not have. known: what the run has learned, for the verdicts.
    `print` shows the program.
    """

    authored: Authored
    export: Any = field(repr=False)
    contexts: aot.Contexts = field(repr=False)
    tracing_context: Any = field(repr=False)
    inputs: InputCheck = field(repr=False)
    side_effects: tuple[str, ...] = ()
    closed: bool = False
    passes: tuple[str, ...] = ()
    broken: UnusableGraph | None = None
    by: str = "captured by AOTAutograd"
    cut: Callable[[JointGraph], Any] | None = field(default=None, repr=False)
    known: Known = field(default_factory=Known, repr=False)

    @property
    def graph(self) -> GraphModule:
        return self.export.graph_module

    @graph.setter
    def graph(self, value: GraphModule) -> None:
        self.export.graph_module, self.broken = value, None

    @property
    def example_inputs(self) -> list[Any]:
        """The flat primals and tangents, without values: fake tensors, sizes and meshes."""
        return [n.meta.get("val") for n in self.graph.graph.find_nodes(op="placeholder")]

    @property
    def parameters(self) -> list[str]:
        """Qualified names in calling order."""
        return list(self.export.params_spec)

    @property
    def buffers(self) -> list[str]:
        return list(self.export.buffers_spec)

    def require_open(self) -> None:
        """Raise WorkbenchError where the capture has been used up, or a pass has broken the graph."""
        if self.broken is not None:
            raise self.broken
        if self.closed:
            raise WorkbenchError(
                f"the joint graph of {title(self.authored)} is closed, or partitioned already: capture again"
            )

    @contextlib.contextmanager
    def context(self) -> Iterator[list[Any]]:
        """torch's tracing state around a pass on this graph; gives its example inputs."""
        self.require_open()
        with aot.capture_settings(), aot.pass_context(self.tracing_context):
            yield self.example_inputs

    def fork(self) -> JointGraph:
        """Another joint graph of the same capture, to be changed and partitioned while this one stays open.

        Both hold the same `graph` until one is given another; passes and `partition` leave the one they got as it is.
        """
        self.require_open()
        export = fork_joint(self.export) if self.cut is None else copy.copy(self.export)
        return replace(self, export=export, known=self.known.fork())

    def close(self) -> None:
        self.closed = True
        self.contexts = aot.Contexts()

    def __enter__(self) -> JointGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        nodes = list(self.graph.graph.nodes)
        backward = sum(n.meta.get("partitioner_tag") == "is_backward" for n in nodes)
        return (
            f"JointGraph({title(self.authored)}: {len(nodes)} nodes, {backward} of them backward, "
            f"{counted(len(self.parameters), 'parameter')}, rank {self.authored.world.rank} of "
            f"{self.authored.world.size})"
        )

    def __str__(self) -> str:
        """One line of provenance, and the program: a line a node, with dtype and shape of its result."""
        world = self.authored.world
        header = f"# {title(self.authored)}, {self.by} on rank {world.rank} of {world.size}"
        return f"{header}; passes so far: {', '.join(self.passes) or 'none'}\n{program(self.graph)}"


def title(authored: Authored) -> str:
    """The recipe's name, or the class of a module that came without one."""
    return authored.recipe.name if authored.recipe is not None else type(authored.module).__name__


def authored_facts(authored: Authored) -> GraphFacts:
    """What passes may read of the world and the model, for the joint graph."""
    sizes = {name: authored.axes[axis.split(".")[0]] for axis, name in authored.groups.items()}
    return GraphFacts(
        "joint", dict(authored.groups), sizes, authored.world.kind, list(authored.buckets)
    )


@no_exit()
def capture(
    authored: Authored, *, decompositions: dict[Any, Callable[..., Any]] | None = None,
    batch: tuple[Any, ...] | None = None, by: str = "joint",
) -> JointGraph:
    """Trace one training step of `authored` on this rank, without running it.

    `batch` is the example input (tokens, targets), each int64 of shape (batch, seq_len); by default the recipe's own
    sizes. `decompositions` maps operators to their replacements, applied while tracing.

    by "joint": Dynamo reads the model and AOTAutograd makes the graph, which torch's partitioner can cut. Another name
    is a capture that a plugin declares. Where a mesh axis does not divide a parameter's rows, DTensor pads each smaller
    piece with operators of its own: ten thousand such pieces take half a minute.

    Raises WorkbenchError where the module cannot be traced, with torch's reason, or would take too long.
    """
    args = tuple(batch) if batch is not None else authored.microbatch()
    try:
        joint: JointGraph = hook_of("capture", by)(authored, args, decompositions)
    except NotCaptured as refusal:
        raise WorkbenchError(by_another(refusal, authored, args, by)) from refusal.__cause__
    set_facts(joint.graph, replace(authored_facts(authored), partitioner=joint.cut is None))
    settle(joint.graph)
    return joint


def by_aot_autograd(authored: Authored, args: tuple[Any, ...], decompositions: Any) -> JointGraph:
    """`capture` by "joint"."""
    try:
        with (
            refusing_inference_tensors(authored),
            refusing_none_gradients(),
            # torch refuses a deterministic run of a backward that was captured without
            deterministic(authored.deterministic),
            aot.Contexts() as contexts,
        ):
            contexts.enter_context(aot.capture_settings())
            graph = aot.dynamo_capture(contexts, authored.module, args)
            require_trainable(authored, graph, args)
            export = aot.export_joint(contexts, graph, args, decompositions)
            require_known_meshes(authored, export.graph_module)
    except WorkbenchError:
        raise
    except Exception as error:
        raise not_captured(authored, error) from error
    context = graph.meta["tracing_context"]
    writes = aot.writes_inputs(export, len(tree_leaves(args)))
    inputs = InputCheck.of(args, authored.module.forward, writes)
    return JointGraph(authored, export, contexts, context, inputs, graph.meta["side_effects"])


def settle(graph: GraphModule) -> None:
    """What every joint graph gets before its first pass, in place: hints of sizes, sizes read behind waits, and modules
    of gradient sums.

    Random numbers are saved where the model's own checkpoints would draw them a second time.
    """
    keep_expected_sizes(graph)
    tag_units(graph)
    _save_draws(graph)
    _read_sizes_of_results(graph)
    _place_gradient_sums(graph)


def _save_draws(graph: GraphModule) -> None:
    """The backward recomputes nothing that may draw: torch's partitioner would save the generator's state instead."""
    for node in graph.graph.nodes:
        if "recompute" in node.meta and may_differ(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _read_sizes_of_results(graph: GraphModule) -> None:
    """A size is read from what a collective gave, and not from the handle, which a partitioner would save for it."""
    for start in calls_of(graph.graph, lambda target: collective_kind(target) is not None):
        waits = [
            user for user in start.users if user.op == "call_function" and is_wait(user.target)
        ]
        for user in list(start.users):
            if waits and user.op == "call_function" and reads_shape(user.target):
                user.replace_input_with(start, waits[0])
                waits[0].append(user)
    graph.recompile()


def _place_gradient_sums(graph: GraphModule) -> None:
    """Autograd's own additions, where a value has several readers, get the module of the forward node behind them."""
    stacks: dict[int, Any] = {}
    for node in graph.graph.nodes:
        if "seq_nr" in node.meta and node.meta.get("nn_module_stack"):
            stacks[node.meta["seq_nr"]] = node.meta["nn_module_stack"]
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        meta = node.meta
        if meta.get("partitioner_tag") != "is_backward" or "nn_module_stack" in meta or "fwd_nn_module_stack" in meta:
            continue
        inputs = [n.meta.get("fwd_nn_module_stack") for n in node.all_input_nodes]
        stack = stacks.get(meta.get("seq_nr", -1)) or next((s for s in inputs if s), None)
        if stack:
            meta["fwd_nn_module_stack"] = stack
