"""Which tensor an assert of Inductor's option `nan_asserts` has stopped at."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any

from workbench.lab.inside_inductor.function import Inside, look_inside

_ASSERT = re.compile(r"assert not (\w+)\.is(nan|inf)\(\)")
_KINDS = {"nan": "NaN", "inf": "an infinity"}


def first_failed(function: Callable[..., Any], *inputs: Any) -> str:
    """What the first assert that fails says of a compiled function and these inputs, or "none"."""
    checked = look_inside(function, *inputs, config={"nan_asserts": True})
    try:
        checked(*inputs)
    except AssertionError as error:
        return failed_assert(checked, error)
    return "none"


def failed_assert(inside: Inside, error: AssertionError) -> str:
    """One sentence: the tensor, what it holds, and the assert. An error of something else is raised again."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    file, variables = frame.f_code.co_filename, frame.f_locals
    failed = _ASSERT.search(linecache.getline(file, line))
    if failed is None:
        raise error
    name, kind = failed.group(1), _KINDS[failed.group(2)]
    inputs = {f"arg{i}_1": node.name for i, node in enumerate(inside.graph.graph.find_nodes(op="placeholder"))}
    if name == "var":
        position = next(i for i, value in enumerate(variables["return_vars"]) if value is variables["var"])
        where = f"output {position} of the graph"
    elif name.startswith("buf"):
        before = [linecache.getline(file, i).strip() for i in range(1, line)]
        launches = [text.partition(".run(")[0] for text in before if ".run(" in text] or ["a kernel"]
        where = f"{name}, which {launches[-1]} reads or writes,"
    else:
        where = f"input {inputs.get(name, name)} of the graph"
    return f"{where} holds {kind}: the option nan_asserts put `{failed.group(0)}` into the code"
