"""A graph, and what Inductor made of one, taken out of one process and loaded in another.

Source: torch/fx/_graph_pickler.py, torch/_inductor/output_code.py (`CompiledFxGraph`), torch/_inductor/utils.py
(`align_inputs_from_check_idxs`).
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
import torch.fx._graph_pickler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from workbench.errors import WorkbenchError
from workbench.torch_api import aot
from workbench.torch_api.inductor.carried import (
    RANK_GPU,
    for_any_gpu,
    kernels_for,
    text_for_any_gpu,
)
from workbench.torch_api.inductor.regions import inductor_results
from workbench.torch_api.ops import is_fake, is_symbolic

Boxed = Callable[[list[Any]], Sequence[Any]]
_FILE = "code that Inductor wrote"


@dataclass(frozen=True)
class Compiled:
    """Inductor's code: a Python module whose `call` takes one list, and which of its inputs it aligns and writes.

    The source reads the number of the process's GPU from its global RANK_GPU.
    """

    source: str
    checked: list[int]
    written: list[int]

    @classmethod
    def of(cls, result: Any, where: str) -> Compiled:
        """The code of what `compile_fx_inner` returned. WorkbenchError for others, and for constants in it.

        where: names the graph in messages.
        """
        source = getattr(result, "source_code", None)
        if not isinstance(source, str) or not hasattr(result, "inputs_to_check"):
            raise WorkbenchError(
                f"{where} was lowered to a {type(result).__name__}, which no file can "
                "hold: drop that pass"
            )
        constants = [*(result.constants or {}), *(result.torchbind_constants or {})]
        if constants:
            raise WorkbenchError(
                f"{where} was lowered to code that reads the constant {constants[0]!r} "
                "from this process: make it a buffer of the model"
            )
        written = sorted(result.mutated_input_idxs or ())
        return cls(for_any_gpu(source), list(result.inputs_to_check), written)

    @property
    def text(self) -> str:
        """What is the same in every process that compiles the same."""
        return f"{text_for_any_gpu(self.source)}\n{self.checked} {self.written}"

    def load(self, gpu: int | None) -> Boxed:
        """The boxed function of this code. Runs it. gpu: this process's, where it has one."""
        from torch._inductor.utils import align_inputs_from_check_idxs
        from torch.utils._ordered_set import OrderedSet

        module: Any = types.ModuleType("workbench_artifact")
        vars(module).update({"__file__": _FILE, RANK_GPU: gpu})
        with kernels_for(gpu):
            exec(compile(self.source, _FILE, "exec"), vars(module))
        written = OrderedSet(self.written)
        function: Boxed = align_inputs_from_check_idxs(module.call, self.checked, written)
        return function


@dataclass(frozen=True)
class WrittenGraph:
    """A graph with numbered nodes, whose metadata is `desc`, and of the inputs their layout as `val`.

    source: all that a compiler reads of it, the same in every process. pickled: by torch. constants: its tensors by
    name. regions: what Inductor made of the parts that it calls as its submodules `region_0` and so on; like blocks
    share one. compiled: what it made of the whole graph, if anything.
    """

    source: str
    pickled: bytes
    constants: dict[str, torch.Tensor]
    regions: list[Compiled]
    compiled: Compiled | None = None

    @classmethod
    def of(cls, graph: GraphModule, where: str) -> WrittenGraph:
        """Raises WorkbenchError for what no file can hold: a function of this process, or a tensor without values.

        where: names the graph in messages.
        """
        copy, constants = _numbered(graph), _constants(graph, where)
        regions = _take_regions(copy, where)
        for name in constants:
            delattr(copy, name)
        options = torch.fx._graph_pickler.Options(ops_filter=None)
        try:
            pickled = torch.fx._graph_pickler.GraphPickler.dumps(copy, options)
        except Exception as error:  # of any kind: each value has its own
            raise WorkbenchError(f"{where} holds what no file can hold: {error}") from None
        return cls(_source(copy), pickled, constants, regions)

    @property
    def digest(self) -> str:
        """SHA-256 of all that a compiler reads: equal digests mean equal code."""
        constants = [
            (name, str(value.dtype), value.tolist()) for name, value in self.constants.items()
        ]
        texts = [self.source, str(constants), *(region.text for region in self.regions)]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def load(self, gpu: int | None) -> tuple[GraphModule, Boxed]:
        """The graph and the boxed function that runs it. Runs what Inductor wrote: only load what you would run."""
        loads = torch.fx._graph_pickler.GraphPickler.loads
        graph = cast(GraphModule, loads(self.pickled, FakeTensorMode()))
        for name, value in self.constants.items():
            graph.register_buffer(name, value)
        for number, region in enumerate(self.regions):
            graph.add_module(f"region_{number}", _Region(region.load(gpu)))
        return graph, aot.boxed(graph) if self.compiled is None else self.compiled.load(gpu)


class _Region(torch.nn.Module):
    def __init__(self, function: Boxed) -> None:
        super().__init__()
        self.forward = lambda *args: function(list(args))


def _numbered(graph: GraphModule) -> GraphModule:
    """A copy, for the names of nodes depend on what torch has traced before in the process."""
    numbered, copies = torch.fx.Graph(), dict[Node, Node]()
    for number, node in enumerate(graph.graph.nodes):
        args, kwargs = (map_arg(values, copies.__getitem__) for values in (node.args, node.kwargs))
        meta = {"desc": node.meta["desc"]} if "desc" in node.meta else {}
        copies[node] = aot.put(numbered, node, f"n{number}", args, kwargs, meta)
        if node.op == "placeholder":
            copies[node].target = f"n{number}"
            meta["val"] = _layout(node)
    copy = aot.like(graph, numbered)
    copy.meta = {}
    for name, inner in copy.named_children():
        if isinstance(inner, GraphModule):
            setattr(copy, name, _numbered(inner))
    return copy


def _layout(node: Node) -> torch.Tensor | None:
    """The input as a tensor without memory; None for a mesh, and for a tensor whose size is read from the device."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_symbolic(value):
        return None
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _source(graph: GraphModule) -> str:
    inputs = []
    for node in graph.graph.find_nodes(op="placeholder"):
        layout = node.meta["val"]
        inputs.append(str(aot.parameter_of(node)))
        if layout is not None:
            inputs.append(f"{layout.dtype} {layout.shape} {layout.stride()}")
    descs = graph.graph.output_node().meta.get("desc", [])
    outputs = [(aot.written_by(desc), aot.gradient_of(desc)) for desc in descs]
    inner = [_source(child) for child in graph.children() if isinstance(child, GraphModule)]
    code = for_any_gpu(graph.graph.python_code("self").src)
    return "\n".join([code, *inputs, str(outputs), *inner])


def _constants(graph: GraphModule, where: str) -> dict[str, torch.Tensor]:
    constants = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(graph)
        if isinstance(value, torch.Tensor):
            if is_fake(value):
                reader = next(iter(node.users))
                raise WorkbenchError(
                    f"{where} holds {node.target}, which {reader} reads, a constant "
                    "without values on a fake world: make it a buffer of the model"
                )
            constants[node.target] = value.detach()
    return constants


def _take_regions(graph: GraphModule, where: str) -> list[Compiled]:
    """Let the graph call its compiled regions as submodules, and return what Inductor made of them."""
    regions: dict[str, Compiled] = {}
    for node in graph.graph.nodes:
        parts = inductor_results(node.target)
        if parts is None:
            continue
        (part,) = parts  # of more, AOTAutograd would put them together, and no file can hold that
        region = Compiled.of(part, where)
        regions.setdefault(region.text, region)
        node.op, node.target = "call_module", f"region_{list(regions).index(region.text)}"
    return list(regions.values())
