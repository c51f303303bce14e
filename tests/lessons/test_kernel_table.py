"""A table of kernels: its text holds counts and names, and no path."""

from __future__ import annotations

from notebook.draw.test_kernels import made

from workbench_lessons.l07_compile_everything.pictures import kernel_table


def test_a_row_a_call_and_names_in_the_html_only():
    table = kernel_table([made(), made("backward", 1)])
    assert [row[2] for row in table.rows if row[0] == "forward"] == ["all_gather", "wait", "cpp_0", "cpp_1",
                                                                      "cpp_2"]
    assert "layers.0, layers.1 and 1 more  llama3.py:9" in repr(table)
    assert "a1, b1" in table._repr_html_() and "a1" not in repr(table)
    one = kernel_table(made(), kind="wait")
    assert [row[0] for row in one.rows] == [1] and not {"graph", "kind"} & {*one.columns}
    assert [row[0] for row in kernel_table(made(), nodes={"a1", "w"}).rows] == [1, 3]
