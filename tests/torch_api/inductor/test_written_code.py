"""A graph as bytes: it comes back as it was, equal graphs have equal digests, and what no file can hold is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from workbench.errors import WorkbenchError
from workbench.torch_api.inductor.written_code import Compiled, WrittenGraph

ATEN = torch.ops.aten
WHERE = "the forward graph"


def graph_of(target: Any, constant: torch.Tensor | None = None, name: str = "x") -> GraphModule:
    """`target(x, constant)`, or `target(x, x)` without one."""
    graph = Graph()
    x = graph.placeholder(name)
    second = x if constant is None else graph.get_attr("held")
    graph.output((graph.call_function(target, (x, second)),))
    return GraphModule({} if constant is None else {"held": constant}, graph)


def of_this_process(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x


def test_a_graph_comes_back_with_its_constants_and_a_digest_that_names_do_not_change() -> None:
    written = WrittenGraph.of(graph_of(ATEN.add.Tensor, torch.arange(3)), WHERE)
    graph, body = written.load(None)
    assert torch.equal(body([torch.ones(3)])[0], torch.tensor([1.0, 2.0, 3.0])) and "aten.add.Tensor" in graph.code
    assert WrittenGraph.of(graph_of(ATEN.add.Tensor, torch.arange(3), "y"), WHERE).digest == written.digest
    for other in (graph_of(ATEN.mul.Tensor, torch.arange(3)), graph_of(ATEN.add.Tensor, torch.arange(3) + 1),
                  graph_of(ATEN.add.Tensor, torch.arange(3.0)), graph_of(ATEN.add.Tensor)):
        assert WrittenGraph.of(other, WHERE).digest != written.digest


def test_what_no_file_can_hold_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="^the forward graph holds what no file can hold: .*of_this_process"):
        WrittenGraph.of(graph_of(of_this_process), WHERE)
    with FakeTensorMode():
        constant = torch.zeros(3)
    with pytest.raises(WorkbenchError, match="holds held, which add_tensor reads, a constant without values on a fake"):
        WrittenGraph.of(graph_of(ATEN.add.Tensor, constant), WHERE)
    with pytest.raises(WorkbenchError, match="^the forward graph was lowered to a function, which no file can hold"):
        Compiled.of(of_this_process, WHERE)
    made = SimpleNamespace(source_code="", inputs_to_check=[], constants={"c": constant}, torchbind_constants={})
    with pytest.raises(WorkbenchError, match="code that reads the constant 'c' from this process: make it a buffer"):
        Compiled.of(made, WHERE)
