"""The tensor that an assert of generated code stopped at, and the kernel before it."""

import linecache
from types import SimpleNamespace

import pytest
import torch

from workbench.lab.inside_inductor import look_inside
from workbench_lessons.l12_inside_inductor.nan_asserts import failed_assert

X, SQUARE = torch.ones(4, 8), torch.ones(8, 8)


@pytest.mark.integration
def test_an_output_and_an_input_are_named():
    inside = look_inside(lambda x, w: x @ w, X, SQUARE, config={"nan_asserts": True})
    assert torch.equal(inside(X, SQUARE), X @ SQUARE)
    assert "        arg0_1, arg1_1 = args\n" in inside.code  # as torch.compile names them
    for inputs, said in ([(X * 1e30, SQUARE * 1e30), "output 0 of the graph holds an infinity"],
                         [(X * float("nan"), SQUARE), "input x of the graph holds NaN"]):
        with pytest.raises(AssertionError) as error:
            inside(*inputs)
        assert failed_assert(inside, error.value).startswith(said)


def test_a_buffer_is_named_with_the_kernel_before_it(tmp_path):
    file = tmp_path / "written.py"
    file.write_text("def call(triton_poi_log_0, buf1):\n    triton_poi_log_0.run(buf1, 64)\n"
                    "    assert not buf1.isnan().any().item()\n")
    linecache.checkcache()
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    graph = torch.fx.symbolic_trace(lambda x: x)
    with pytest.raises(AssertionError) as error:
        scope["call"](SimpleNamespace(run=lambda *args: None), X * float("nan"))
    assert failed_assert(SimpleNamespace(graph=graph), error.value).startswith(
        "buf1, which triton_poi_log_0 reads or writes, holds NaN")
