"""The passes that Inductor runs on a graph, observed while it runs them.

Source: torch/_inductor/compile_fx.py (`_recursive_pre_grad_passes`, `_recursive_joint_graph_passes`, and the post-grad
passes inside `compile_fx_inner`), torch/fx/passes/graph_transform_observer.py (the context around each pass),
torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from workbench.torch_api.flex import cpu_backward
from workbench.torch_api.ops import op_name

_SITE = Path(torch.__file__).parent.parent


@dataclass(frozen=True)
class InductorPass:
    """One pass that ran: its graph, its changes (operators by name), and where it is defined, if torch says.

    nodes: numbers before and after. matched: how many matches of a pattern the pass replaced. seconds: wall
    time.
    """

    stage: str
    graph: str
    name: str
    where: str
    nodes: tuple[int, int]
    added: dict[str, int]
    removed: dict[str, int]
    reordered: bool
    matched: int
    seconds: float

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed or self.reordered)


def _names(graph: Graph) -> dict[Node, str]:
    def name(node: Node) -> str:
        return op_name(node.target) if node.op == "call_function" else f"{node.op} {node.target}"

    return {node: name(node) for node in graph.nodes}


def _place(function: Any) -> str:
    """File and line of a function, a method, a callable object, or a partial of one; "" without Python code."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    inside = path.is_relative_to(_SITE)
    return f"{path.relative_to(_SITE) if inside else path.name}:{code.co_firstlineno}"


@contextmanager
def _watched(stage: str, graph: str, passes: list[InductorPass]) -> Iterator[None]:
    """Inside, each pass around which torch puts its observer is added to the list; one within another counts as its."""
    from torch._dynamo.utils import counters

    enter, leave = GraphTransformObserver.__enter__, GraphTransformObserver.__exit__
    open_passes: list[tuple[str, dict[Node, str], str, int, float]] = []

    def entered(observer: Any) -> Any:
        # `apply_graph_pass` and `apply_gm_pass` enter the observer, and hold the pass's function in this variable;
        # so does a set of patterns without a name, which is a global of the code that applies it
        frame = sys._getframe(1)
        patterns, driver = frame.f_locals.get("self", frame), frame.f_back
        names = driver.f_globals.items() if driver is not None else ()
        name = next((name for name, value in names if value is patterns), observer.passname)
        open_passes.append((name, _names(observer.gm.graph), _place(frame.f_locals.get("pass_fn")),
                            counters["inductor"]["pattern_matcher_count"], time.perf_counter()))
        return enter(observer)

    def left(observer: Any, *error: Any) -> None:
        name, before, where, matched, started = open_passes.pop()
        seconds = time.perf_counter() - started
        leave(observer, *error)
        if open_passes or observer._check_disable_pass():
            return
        after = _names(observer.gm.graph)
        was, now = Counter(before.values()), Counter(after.values())
        reordered = [n for n in before if n in after] != [n for n in after if n in before]
        passes.append(InductorPass(
            stage, graph, name, where, (len(before), len(after)), dict(now - was), dict(was - now),
            reordered, counters["inductor"]["pattern_matcher_count"] - matched, seconds))

    with (patch.object(GraphTransformObserver, "__enter__", entered),
          patch.object(GraphTransformObserver, "__exit__", left)):
        yield


class _Enough(BaseException):
    """Stops a compilation after its passes. Not an Exception, which torch would wrap."""


def pre_grad(module: torch.nn.Module, args: tuple[Any, ...]) -> list[InductorPass]:
    """The passes that `torch.compile` of the module runs on Dynamo's graph."""
    import torch._inductor.compile_fx as compile_fx

    passes: list[InductorPass] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        with _watched("pre-grad", "module", passes):
            compile_fx._recursive_pre_grad_passes(graph, inputs)
        raise _Enough

    torch._dynamo.reset()
    with suppress(_Enough), cpu_backward():
        torch.compile(module, backend=backend, fullgraph=True)(*args)
    return passes


def joint_graph(graph: GraphModule) -> list[InductorPass]:
    """The passes that Inductor runs on a joint graph before its partition. The caller passes a copy."""
    import torch._inductor.compile_fx as compile_fx

    passes: list[InductorPass] = []
    with _watched("joint-graph", "joint", passes):
        compile_fx._recursive_joint_graph_passes(graph)
    return passes


def post_grad(compile_one: Callable[[], Any], which: str) -> list[InductorPass]:
    """The passes that `compile_one`, a call of `compile_fx_inner`, runs. It is stopped before the graph is lowered."""
    import torch._inductor.compile_fx as compile_fx

    def stop(*_: Any, **__: Any) -> Any:
        raise _Enough

    passes: list[InductorPass] = []
    with (
        _watched("post-grad", which, passes),
        patch.object(compile_fx, "GraphLowering", stop),
        torch._inductor.config.patch(force_disable_caches=True),
        suppress(_Enough),
    ):
        compile_one()
    return passes
