"""The passes that Inductor runs on a graph, observed while it runs them.

Source: torch/_inductor/compile_fx.py (`_recursive_pre_grad_passes`, `_recursive_joint_graph_passes`, and the post-grad
passes inside `compile_fx_inner`), torch/fx/passes/graph_transform_observer.py, torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.torch_api.flex import cpu_backward
from workbench.torch_api.ops import op_name

STAGES = {
    "pre_grad_passes": "pre-grad",
    "joint_graph_passes": "joint-graph",
    "post_grad_passes": "post-grad",
}
_TORCH = Path(torch.__file__).parent
_GRAPH_FILES = tuple(
    str(_TORCH / "fx" / name) for name in ("graph.py", "graph_module.py", "_lazy_graph_module.py")
)
_OBSERVER = str(_TORCH / "fx" / "passes" / "graph_transform_observer.py")
_MATCHER = str(_TORCH / "_inductor" / "pattern_matcher.py")


@dataclass(frozen=True)
class InductorPass:
    """One pass that ran: its graph, its changes (operators by name), and where torch defines it.

    nodes: numbers before and after. matched: of a pattern pass, the number of replacements by function. seconds: wall
    time, which includes the slowdown by the observation.
    """

    stage: str
    graph: str
    name: str
    where: str
    nodes: tuple[int, int]
    added: dict[str, int]
    removed: dict[str, int]
    reordered: bool
    matched: dict[str, int]
    seconds: float

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed or self.reordered)


def _names(graph: Graph) -> dict[Node, str]:
    def name(node: Node) -> str:
        return op_name(node.target) if node.op == "call_function" else f"{node.op} {node.target}"

    return {node: name(node) for node in graph.nodes}


def _place(code: CodeType) -> str:
    path = Path(code.co_filename)
    inside = path.is_relative_to(_TORCH.parent)
    return f"{path.relative_to(_TORCH.parent) if inside else path.name}:{code.co_firstlineno}"


def _graph_given(frame: FrameType) -> Graph | None:
    """The graph of the first argument that is a graph or a graph module."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount]:
        value = frame.f_locals.get(name)
        if isinstance(value, GraphModule | Graph):
            return value.graph if isinstance(value, GraphModule) else value
    return None


def _passes_through(code: CodeType) -> bool:
    return code.co_filename == _OBSERVER or code.co_name == "<lambda>"


def _caller(frame: FrameType, drivers: set[CodeType]) -> tuple[FrameType | None, str]:
    """The driver that calls this frame, directly or through an observer or lambda, and the observer's name for it."""
    name, up = "", frame.f_back
    while up is not None and _passes_through(up.f_code):
        name = name or str(getattr(up.f_locals.get("self"), "passname", ""))
        up = up.f_back
    return (up if up is not None and up.f_code in drivers else None), name


def _named(frame: FrameType, driver: FrameType, label: str) -> str:
    """The driver's name for a pass, with the name of its function, or of a method's object, where they differ."""
    own = frame.f_locals.get("self")
    holder = (
        next((k for k, v in driver.f_globals.items() if v is own), "") if own is not None else ""
    )
    function = holder or ("" if own is not None else frame.f_code.co_name.lstrip("_"))
    if not label or not function:
        return label or function or frame.f_code.co_name
    return (
        label
        if function.startswith(label) or label.startswith(function)
        else f"{label}: {function}"
    )


def _entry_name(entry: Any) -> str:
    handler = getattr(entry, "handler", None)
    return (
        getattr(handler, "__name__", None)
        or getattr(entry, "pattern_name", None)
        or "a replacement"
    )


@contextmanager
def watched(graph: str, seen: list[InductorPass]) -> Iterator[None]:
    """Inside, each pass that Inductor runs is added to `seen`, with `graph` as the name of its graph."""
    import torch._inductor.compile_fx as compile_fx

    drivers: dict[CodeType, str] = {}
    matches: list[Counter[str]] = []

    def on_return(frame: FrameType, driver: FrameType, name: str) -> Callable[..., Any]:
        given = _graph_given(frame)
        assert given is not None
        before, started = _names(given), time.perf_counter()
        matches.append(Counter())

        def local(frame: FrameType, event: str, result: Any) -> Any:
            if event != "return":
                return local
            seconds, matched = time.perf_counter() - started, matches.pop()
            after = _names(result.graph if isinstance(result, GraphModule) else given)
            was, now = Counter(before.values()), Counter(after.values())
            kept = [n for n in before if n in after]
            found = InductorPass(
                drivers[driver.f_code], graph, _named(frame, driver, name), _place(frame.f_code),
                (len(before), len(after)), dict(now - was), dict(was - now), kept != [n for n in after if n in before],
                dict(matched), seconds)
            asks = result is not None and not isinstance(result, int | GraphModule | Graph)
            if found.changed or not (asks or frame.f_code.co_filename in _GRAPH_FILES):
                seen.append(found)
            return local

        return local

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if (
            matches
            and code.co_name == "apply"
            and code.co_filename == _MATCHER
            and "match" in code.co_varnames[:2]
        ):
            matches[-1][_entry_name(frame.f_locals["self"])] += 1
        if _passes_through(code) or frame.f_back is None:
            return None
        if frame.f_back.f_code not in drivers and not _passes_through(frame.f_back.f_code):
            return None
        driver, name = _caller(frame, drivers.keys())  # type: ignore[arg-type]
        if (
            driver is None
            or code in drivers
            or code.co_name == "__init__"
            or _graph_given(frame) is None
        ):
            return None
        frame.f_trace_lines = False
        return on_return(frame, driver, name)

    def tracing(driver: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(driver)
        def run(*args: Any, **kwargs: Any) -> Any:
            previous = sys.gettrace()
            sys.settrace(on_call)
            try:
                return driver(*args, **kwargs)
            finally:
                sys.settrace(previous)

        return run

    with ExitStack() as stack:
        for name, stage in STAGES.items():
            driver = getattr(compile_fx, name)
            drivers[driver.__code__] = stage
            stack.enter_context(patch.object(compile_fx, name, tracing(driver)))
        yield


class _Enough(BaseException):
    """Stops a compilation after its passes. Not an Exception, which torch would wrap."""


def pre_grad(module: torch.nn.Module, args: tuple[Any, ...]) -> list[InductorPass]:
    """The passes that `torch.compile` of the module runs on Dynamo's graph."""
    import torch._inductor.compile_fx as compile_fx

    seen: list[InductorPass] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        with watched("module", seen):
            compile_fx._recursive_pre_grad_passes(graph, inputs)
        raise _Enough

    torch._dynamo.reset()
    with suppress(_Enough), cpu_backward():
        torch.compile(module, backend=backend, fullgraph=True)(*args)
    return seen


def joint_graph(graph: GraphModule) -> list[InductorPass]:
    """The passes that Inductor runs on a joint graph before its partition. The caller passes a copy."""
    import torch._inductor.compile_fx as compile_fx

    seen: list[InductorPass] = []
    with watched("joint", seen):
        compile_fx._recursive_joint_graph_passes(graph)
    return seen


def post_grad(compile_one: Callable[[], Any], which: str) -> list[InductorPass]:
    """The passes that `compile_one`, a call of `compile_fx_inner`, runs. It is stopped before the graph is lowered."""
    import torch._inductor.compile_fx as compile_fx

    def stop(*_: Any, **__: Any) -> Any:
        raise _Enough

    seen: list[InductorPass] = []
    caches = torch._inductor.config.patch(force_disable_caches=True)
    with (
        watched(which, seen),
        patch.object(compile_fx, "GraphLowering", stop),
        caches,
        suppress(_Enough),
    ):
        compile_one()
    return seen
