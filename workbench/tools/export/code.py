"""One graph, or what Inductor made of it, as a Python file, with what it takes and returns as data."""

from __future__ import annotations

import hashlib
import importlib
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from workbench.errors import WorkbenchError
from workbench.graph.facts import Part, facts_of
from workbench.graph.read.nodes import module_path, output_values
from workbench.torch_api import aot
from workbench.torch_api.inductor.carried import RANK_GPU, for_any_gpu, kernels_for, text_for_any_gpu
from workbench.torch_api.inductor.regions import made_of_region
from workbench.torch_api.inductor.written_code import callable_of, input_description, one_list_code, written
from workbench.torch_api.ops import is_fake, is_symbolic

_REGIONS = "REGIONS"


@dataclass(frozen=True)
class Input:
    """One input of a graph. of: the parameter or buffer that it is, or is the mesh of. role: whose value it is, one of
    model, state, batch, saved, tangent. dtype, shape, stride: of a tensor of static sizes; else empty.
    """

    name: str
    role: str
    of: str | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Code:
    """source: a Python module, which reads the number of the process's GPU from its global RANK_GPU. kind: "graph" (its
    `forward` takes `self`, with the constants, and one list) or "inductor" (its `call` takes one list). align: of
    Inductor's inputs. outputs: for each output the buffer whose new value it is ("buffer"), the parameter whose
    gradient it is ("gradient"), or what else: "result", "saved", "none". on_gpu: the constants that lie on the GPU.
    regions: the code of the compiled regions, of which a graph calls the i-th as REGIONS[i].
    """

    part: Part
    kind: str
    source: str
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, str], ...]
    align: dict[str, list[int]] = field(default_factory=dict)
    on_gpu: tuple[str, ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    regions: tuple[Code, ...] = ()

    @property
    def results(self) -> int:
        """The number of outputs before the saved tensors; of a backward, none."""
        return sum(kind in ("buffer", "result") for kind, _ in self.outputs)

    @property
    def written(self) -> tuple[str, ...]:
        """The buffers whose new values the graph returns."""
        return tuple(of for kind, of in self.outputs if kind == "buffer")

    def signature(self) -> dict[str, Any]:
        """All but source, constants and regions, as JSON data."""
        return {key: value for key, value in asdict(self).items() if key not in ("source", "constants", "regions")}

    @classmethod
    def read(cls, signature: dict[str, Any], source: str, constants: dict[str, torch.Tensor],
             regions: tuple[Code, ...] = ()) -> Code:
        inputs = tuple(Input(**{**each, "shape": tuple(each["shape"]), "stride": tuple(each["stride"])})
                       for each in signature["inputs"])
        outputs = tuple((kind, of) for kind, of in signature["outputs"])
        return cls(signature["part"], signature["kind"], source, inputs, outputs, signature["align"],
                   tuple(signature["on_gpu"]), constants, regions)

    def function(self, file: Path, gpu: int | None = None) -> Callable[[list[Any]], Sequence[Any]]:
        """The boxed function of this code, which `file` holds. Runs it. gpu: this process's, where it has one."""
        module = types.ModuleType(f"workbench_artifact_{file.stem}")
        called = [_unboxed(region.function(region_file(file, i), gpu)) for i, region in enumerate(self.regions)]
        vars(module).update({"__file__": str(file), RANK_GPU: gpu, _REGIONS: called})
        with kernels_for(gpu):
            exec(compile(self.source, str(file), "exec"), vars(module))  # an import would write bytecode there
        if self.kind == "inductor":
            return callable_of(module, self.align)
        held = {name: value.to(f"cuda:{gpu}") if name in self.on_gpu else value
                for name, value in self.constants.items()}
        return types.MethodType(module.forward, types.SimpleNamespace(**held))

    def skeleton(self) -> GraphModule:
        """A graph of the inputs alone, from which a step reads what each of them is."""
        graph = Graph()
        for given in self.inputs:
            node = graph.placeholder(given.name)
            node.meta["val"] = torch.empty_strided(given.shape, given.stride, dtype=getattr(torch, given.dtype),
                                                   device="meta") if given.dtype else None
            if given.role != "state":
                node.meta["desc"] = input_description(given.of, given.role == "tangent")
        graph.output(())
        return GraphModule({}, graph)


def region_file(file: Path, number: int) -> Path:
    """The file of a region that the code in `file` calls."""
    return file.with_name(f"{file.stem}_region_{number}{file.suffix}")


def _unboxed(function: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    return lambda *args: function(list(args))


def text_of(graph: GraphModule) -> str:
    """Everything that a compiler reads of a graph: equal texts mean equal code.

    Nodes are numbered: their names depend on what torch has traced before in the process.
    """
    number = {node: f"%{i}" for i, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        what = _input(node, facts_of(graph).part).of if node.op == "placeholder" else (
            _text(graph, node) if node.op == "get_attr" else _name(node.target))
        if (made := made_of_region(node.target)) is not None:
            what = "".join(text_for_any_gpu(each.source_code) for each in made)
        given = for_any_gpu(str(map_arg((node.args, node.kwargs), number.__getitem__)))
        lines.append(f"{number[node]} {node.op} {what} {given} {_tensor(node)}")
    return "\n".join([*lines, str(_outputs(graph))])


def _name(target: Any) -> str:
    """An operator's name; a Python function's own text has its address."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, types.FunctionType) else str(target)


def written_out(graph: GraphModule, body: Any = None) -> Code:
    """The code of `graph`, or of what Inductor made of it. Raises WorkbenchError for what no file can hold."""
    facts = facts_of(graph)
    inputs = tuple(_input(node, facts.part) for node in graph.graph.find_nodes(op="placeholder"))
    outputs = tuple(_outputs(graph))
    where = f"the {facts.part} graph"
    if body is None:
        held, (numbers, regions) = _constants(graph), _regions(graph, where)
        return Code(facts.part, "graph", for_any_gpu(_source(graph, where, numbers)), inputs, outputs,
                    regions=regions, constants={name: value.cpu() for name, value in held.items()},
                    on_gpu=tuple(name for name, value in held.items() if value.is_cuda))
    found = written(body)
    if found is None:
        raise WorkbenchError(f"{where} was lowered to a {type(body).__name__}, which no file can hold: drop that pass")
    return Code(facts.part, "inductor", for_any_gpu(found[0]), inputs, outputs, found[1])


def _regions(graph: GraphModule, where: str) -> tuple[dict[Any, int], tuple[Code, ...]]:
    """The code of the graph's compiled regions, and for each function that runs one its number. Like blocks share one.
    """
    found, numbers = dict[str, Code](), dict[Any, int]()
    for target in dict.fromkeys(node.target for node in graph.graph.nodes if node.op == "call_function"):
        made = made_of_region(target)
        if made is None:
            continue
        code = written(made[0]) if len(made) == 1 else None
        if code is None:
            raise WorkbenchError(f"{where} calls the compiled region {target.__name__}, which Inductor made in "
                                 f"{len(made)} parts, and no file can hold that")
        text = f"{text_for_any_gpu(code[0])}\n{code[1]}"
        found.setdefault(text, Code("graph", "inductor", for_any_gpu(code[0]), (), (), code[1]))
        numbers[target] = [*found].index(text)
    return numbers, tuple(found.values())


def _source(graph: GraphModule, where: str, regions: dict[Any, int]) -> str:
    for node in graph.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise WorkbenchError(f"{where} calls {node.target} at {node.name}, which no file can hold")
    code = one_list_code(graph)
    lines = [line for name, value in code.globals.items() if re.search(rf"\b{re.escape(name)}\b", code.src)
             for line in [f"{name} = {_REGIONS}[{regions[value]}]" if made_of_region(value) is not None else
                          _import(name, value, where)]]
    return "\n".join([f'"""{where[4:].capitalize()} of a training step."""', *lines, "", code.src.strip(), ""])


def _import(name: str, value: Any, where: str) -> str:
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f'{name} = float("{value}")'
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if value is type(None):
        return f"{name} = type(None)"
    try:
        found: Any = importlib.import_module(str(module))
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        found = None
    if found is not value:
        raise WorkbenchError(f"{where} reads {name}, a {type(value).__name__} of this process, which no file can hold")
    return f"import {module}\n{name} = {module}.{qualified}"


def _constants(graph: GraphModule) -> dict[str, torch.Tensor]:
    found = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = _held(graph, node)
        if not isinstance(value, torch.Tensor) or "." in str(node.target):
            raise WorkbenchError(f"the {facts_of(graph).part} graph holds {node.target}, a {type(value).__name__} "
                                 f"({module_path(node) or 'no module'}), which no file can hold")
        found[str(node.target)] = value.detach()
    return found


def _held(graph: GraphModule, node: Node) -> Any:
    """The attribute that a node reads: a tensor with values, or a graph."""
    value: Any = graph
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, torch.Tensor) and is_fake(value):
        where = module_path(node) or "no module"
        raise WorkbenchError(f"the {facts_of(graph).part} graph holds {node.target} ({where}), a constant without "
                             "values on a fake world: make it a buffer of the model")
    return value


def _text(graph: GraphModule, node: Node) -> str:
    value = _held(graph, node)
    return _bytes(value) if isinstance(value, torch.Tensor) else text_of(value)


def _bytes(value: torch.Tensor) -> str:
    data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"


def _tensor(node: Node) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_symbolic(value):
        return "", (), ()
    shape, stride = (tuple(map(int, part)) for part in (value.shape, value.stride()))
    return str(value.dtype).removeprefix("torch."), shape, stride


def _input(node: Node, part: str) -> Input:
    if part == "backward":
        return Input(node.name, "tangent" if aot.is_tangent(node) else "saved", None, *_tensor(node))
    of = aot.parameter_of(node)
    role = "model" if of is not None else "state" if aot.is_state(node) else "batch"
    return Input(node.name, role, of, *_tensor(node))


def _outputs(graph: GraphModule) -> list[tuple[str, str]]:
    facts, values = facts_of(graph), output_values(graph)
    if facts.part in ("step", "graph"):
        return [("result", "")] * len(values)
    descs = graph.graph.output_node().meta["desc"]
    if facts.part == "backward":
        given = [aot.gradient_of(desc) if isinstance(n, Node) and isinstance(n.meta.get("val"), torch.Tensor) else None
                 for n, desc in zip(values, descs, strict=True)]
        return [("gradient", name) if name else ("none", "") for name in given]
    results = [aot.written_by(desc) for desc in descs[:facts.step.results]]
    if [name is None for name in results] != [False] * (len(results) - 1) + [True]:
        raise WorkbenchError(f"the forward returns {results.count(None)} results, and an artifact's step has one loss: "
                             "return the loss alone")
    return [*(("buffer", name) if name else ("result", "") for name in results),
            *[("saved", "")] * (len(values) - facts.step.results)]
