"""The tensor that an assert of generated code stopped at, and the kernel before it."""

import linecache
from types import SimpleNamespace

import pytest
import torch

from workbench_lessons.l12_inside_inductor.nan_asserts import failed_assert, first_failed


@pytest.mark.integration
def test_an_output_is_named():
    large = torch.full((8, 8), 1e30)
    said = first_failed(lambda x, w: x @ w, large, large.clone())
    assert said.startswith("output 0 of the graph holds an infinity")


def test_a_buffer_is_named_with_the_kernel_before_it(tmp_path):
    file = tmp_path / "written.py"
    file.write_text("def call(triton_poi_log_0, buf1):\n    triton_poi_log_0.run(buf1, 64)\n"
                    "    assert not buf1.isnan().any().item()\n")
    linecache.checkcache()
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    graph = torch.fx.symbolic_trace(lambda x: x)
    with pytest.raises(AssertionError) as error:
        scope["call"](SimpleNamespace(run=lambda *args: None), torch.ones(4) * float("nan"))
    assert failed_assert(SimpleNamespace(graph=graph), error.value).startswith(
        "buf1, which triton_poi_log_0 reads or writes, holds NaN")
