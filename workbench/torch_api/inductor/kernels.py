"""The kernels that Inductor makes of a graph's nodes, observed while it writes their calls.

Source: torch/_inductor/debug.py (`set_kernel_post_grad_provenance_tracing`, called for each call that is written,
with the scheduler's nodes or the extern kernel), torch/_inductor/ir.py (`IRNode.get_origins`, `origin_node`),
torch/_inductor/compile_fx.py (`fx_codegen_and_compile`), torch/fx/graph_module.py (`_register_replace_node_hook`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest.mock import patch

from torch.fx import GraphModule, Node

from workbench.torch_api.inductor.saved_values import computed_by
from workbench.torch_api.ops import collective_kind, is_async_launch, waits

GENERATED = ("triton", "cpp")
KINDS = (*GENERATED, "extern", "collective", "wait", "other")
_MARKS: dict[str, Callable[[Any], Any]] = {"collective": is_async_launch, "wait": waits}
_WRITE_CALL = "set_kernel_post_grad_provenance_tracing"
_KEPT = "_workbench_kernels"
"""Attribute of Inductor's results. Plain data, since Inductor's cache stores it with the code that it describes."""


@dataclass(frozen=True)
class KernelCall:
    """One kernel call. kind: one of `KINDS`.

    nodes: names of the given graph's nodes, in their order. others: nodes that Inductor's passes added and that replace
    none of these.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """The record of one compilation.

    same: nodes that Inductor's passes removed, and the node that replaces each. removed: nodes that they removed
    without replacement. code: the wrapper in Python, with the kernels' sources. missing: what could not be observed.
    """

    calls: tuple[KernelCall, ...] = ()
    same: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    code: str = field(default="", repr=False)
    missing: tuple[str, ...] = ()


@dataclass
class _Call:
    """A kernel call as Inductor reports it. exact: the nodes that it computes. around: also those of its inputs.

    writes: the buffers that it writes.
    """

    name: str
    kind: str
    exact: list[Node]
    around: list[Node]
    writes: set[str]


class _Watch:
    """The observer of one compilation. It knows the graph's nodes by identity, since passes may rename them."""

    def __init__(self, graph: GraphModule):
        self.graph = graph
        self.ours = {n: computed_by(n).name for n in graph.graph.nodes if n.op == "call_function"}
        self.heirs: dict[Node, str] = {}
        self.calls: list[_Call] = []
        self.lowerings: dict[int, Any] = {}
        self.missing: list[str] = []
        graph._register_replace_node_hook(self._replaced)

    def _replaced(self, old: Node, new: str, user: Node, **_: Any) -> None:
        self.heirs[old] = new

    def close(self) -> None:
        self.graph._unregister_replace_node_hook(self._replaced)

    def tell(self, generated: str, scheduled: Any, name: str) -> None:
        """Note a kernel call that Inductor writes, for a list of the scheduler's nodes or for one extern kernel."""
        from torch._inductor.virtualized import V

        self.lowerings[id(V.graph)] = V.graph
        if isinstance(scheduled, list | tuple):
            parts = [part for n in scheduled if hasattr(n, "get_nodes") for part in n.get_nodes()]
            origins = [
                o for part in parts if part.node is not None for o in part.node.get_origins()
            ]
            writes = {name for part in parts for name in part.get_buffer_names()}
            exact = list(dict.fromkeys(origins))
            self.calls.append(_Call(name, generated or "other", exact, [], writes))
            return
        origins, kind = list(scheduled.get_origins()), _kind(scheduled)
        # the origins include the inputs' nodes; origin_node is the kernel's own, but wrong for a collective
        exact = [scheduled.origin_node] if scheduled.origin_node is not None else [
            o for o in origins if o.target is scheduled.op_overload]
        if kind in _MARKS:
            exact = [o for o in origins if o.op == "call_function" and _MARKS[kind](o.target)]
        self.calls.append(_Call(name, kind, exact or origins, origins, {scheduled.get_name()}))

    def _gone(self) -> tuple[dict[str, str], list[str], dict[Node, list[str]]]:
        """The nodes that passes removed: replaced by another of ours, without replacement, or by Inductor's own."""
        alive = {n.name: n for n in self.graph.graph.nodes}
        nodes = {n.name: n for n in self.ours} | alive
        same: dict[str, str] = {}
        removed: list[str] = []
        served: dict[Node, list[str]] = {}
        for node, name in self.ours.items():
            if alive.get(node.name) is node:
                continue
            heir = self.heirs.get(node)
            for _ in self.heirs:  # no chain of replacements is longer
                if heir is None or heir in alive or heir not in nodes:
                    break
                heir = self.heirs.get(nodes[heir])
            if heir is None or heir not in alive:
                removed.append(name)
            elif (replacement := alive[heir]) in self.ours or replacement.op != "call_function":
                same[name] = self.ours.get(replacement, heir)
            else:
                served.setdefault(replacement, []).append(name)
        return same, removed, served

    def facts(self) -> dict[str, Any]:
        """The record as plain data."""
        same, removed, served = self._gone()
        order = {name: i for i, name in enumerate(self.ours.values())}

        def named(nodes: Iterable[Node]) -> list[str]:
            names = [[self.ours[n]] if n in self.ours else served.get(n, []) for n in nodes]
            return list(chain.from_iterable(names))

        placed = {name for call in self.calls for name in named(call.exact)}
        inputs = [set(named(call.around)) - placed for call in self.calls]
        placed.update(*inputs)
        # a cat without a kernel: the kernels of its parts write into it
        operations = [o for lowering in self.lowerings.values() for o in lowering.operations]
        joined = [(set(named(cat.get_origins())) - placed, {part.get_name() for part in cat.inputs})
                  for cat in operations if type(cat).__name__ == "ConcatKernel"]
        calls = []
        for call, views in zip(self.calls, inputs, strict=True):
            # a view without a kernel belongs to the call that reads it
            nodes = views.union(
                named(call.exact), *(n for n, parts in joined if parts & call.writes)
            )
            others = [n.name for n in call.exact
                      if n.op == "call_function" and n not in self.ours and n not in served]
            calls.append(
                (call.name, call.kind, tuple(sorted(nodes, key=order.__getitem__)), tuple(others))
            )
        return {"calls": calls, "same": same, "removed": removed, "missing": self.missing}


def _kind(kernel: Any) -> str:
    if type(kernel).__name__ == "UserDefinedTritonKernel":
        return "triton"
    operator = getattr(kernel, "op_overload", None)
    if waits(operator):
        return "wait"
    return "collective" if collective_kind(operator) or is_async_launch(operator) else "extern"


@contextmanager
def watched() -> Iterator[None]:
    """Inside, the results of `compile_fx_inner` carry the record that `seen` reads, and what it could not observe."""
    import torch._inductor.codegen.cpp as cpp
    import torch._inductor.codegen.triton as triton
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.debug as debug

    open_watches: list[_Watch] = []
    compile_one = compile_fx.fx_codegen_and_compile

    def compiling(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        watch = _Watch(graph)
        open_watches.append(watch)
        try:
            result = compile_one(graph, *args, **kwargs)
        finally:
            open_watches.remove(watch)
            watch.close()
        setattr(result, _KEPT, watch.facts())
        return result

    def telling(generated: str, tell: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if open_watches:
                try:
                    open_watches[-1].tell(generated, *args[:2])
                except Exception as error:
                    open_watches[-1].missing.append(
                        f"a kernel's origins: {type(error).__name__}: {error}"
                    )
            return tell(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        stack.enter_context(patch.object(compile_fx, "fx_codegen_and_compile", compiling))
        for generated, module in (("", debug), ("cpp", cpp), ("triton", triton)):
            stack.enter_context(
                patch.object(module, _WRITE_CALL, telling(generated, getattr(module, _WRITE_CALL)))
            )
        yield


@contextmanager
def collected() -> Iterator[list[Any]]:
    """Like `watched`, with a list of all that Inductor compiles or takes from its cache. `seen` reads each of them.

    A compiled region needs it, which hides Inductor's results behind functions of AOTAutograd.
    """
    from torch._inductor.output_code import CompiledFxGraph

    outputs: list[Any] = []
    finish = CompiledFxGraph.post_compile

    def finishing(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.append(self)
        return finish(self, *args, **kwargs)

    with watched(), patch.object(CompiledFxGraph, "post_compile", finishing):
        yield outputs


def seen(compiled: Any) -> Seen | None:
    """The record of the compilation that returned `compiled`; None if Inductor did not compile it."""
    kept, code = getattr(compiled, _KEPT, None), getattr(compiled, "source_code", None) or ""
    if kept is None:
        why = ("Inductor took the code from its cache, where another program had left it: set "
               "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, or empty the cache")
        return Seen(code=code, missing=(why,)) if code else None
    calls, missing = tuple(KernelCall(*call) for call in kept["calls"]), list(kept["missing"])
    if unseen := sources(code).keys() - {call.name for call in calls}:
        missing.append(
            f"the calls of {len(unseen)} kernels that the code defines: {', '.join(sorted(unseen))}"
        )
    return Seen(calls, kept["same"], tuple(kept["removed"]), code, tuple(missing))


def sources(code: str) -> dict[str, str]:
    """The source of each kernel that a wrapper's Python code defines, by the kernel's name."""
    by_name = {}
    for line in ast.parse(code).body:
        if (
            isinstance(line, ast.Assign)
            and isinstance(line.targets[0], ast.Name)
            and isinstance(line.value, ast.Call)
            and ast.unparse(line.value.func).startswith("async_compile.")
        ):
            texts = [
                a.value
                for a in line.value.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            if texts:
                by_name[line.targets[0].id] = max(texts, key=len).strip("\n") + "\n"
    return by_name
