"""Kinds of nodes, and the module, source line and parameter that each node came from."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from workbench.errors import shown_file
from workbench.recipe.wording import few
from workbench.torch_api.aot import parameter_of
from workbench.torch_api.module_paths import module_path
from workbench.torch_api.ops import aliased_inputs, collective_kind, host_copy, is_random, multiplies, op_name, waits

KINDS = ("collective", "host copy", "wait", "attention", "matmul", "view", "copy", "create", "pointwise", "reduction",
         "random", "index", "bookkeeping", "other")
_OPERATORS = {
    "matmul": "mm addmm bmm baddbmm _scaled_mm _grouped_mm _scaled_grouped_mm convolution convolution_backward "
    "linear matmul",
    "copy": "_to_copy clone cat copy copy_ contiguous constant_pad_nd _foreach_copy_ stack all_gather_copy_in "
    "_pre_bucket_all_gather _pre_bucket_reduce_scatter convert_element_type",
    "create": "empty empty_strided zeros ones full arange scalar_tensor new_empty new_zeros zeros_like ones_like "
    "full_like empty_like new_empty_strided new_ones new_full eye",
    "index": "embedding embedding_dense_backward index index_put index_put_ gather scatter scatter_add "
    "index_select slice_backward select_backward select_scatter slice_scatter embedding_backward "
    "nll_loss_forward nll_loss_backward",
    "reduction": "sum mean amax amin max min var var_mean any all argmax _softmax _log_softmax "
    "_softmax_backward_data _log_softmax_backward_data logsumexp cumsum norm linalg_vector_norm "
    "_fused_rms_norm _fused_rms_norm_backward native_layer_norm native_layer_norm_backward sort topk prod",
}
_BY_NAME = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
_BLOCK = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")
Item = TypeVar("Item")


def reachable(starts: Iterable[Item], neighbours: Callable[[Item], Iterable[Item]]) -> set[Item]:
    """The starts, and all that a walk from them reaches: ancestors of nodes, or readers, as `neighbours` says."""
    visited = set(starts)
    todo = list(visited)
    while todo:
        new = set(neighbours(todo.pop())) - visited
        visited |= new
        todo += new
    return visited


def block_of(node: torch.fx.Node) -> str:
    """The path of the outermost numbered module that the node is of, such as `layers.0` or `model.h.3`; or ""."""
    match = _BLOCK.match(module_path(node))
    return match[0] if match else ""


def blocks_of(gm: torch.fx.GraphModule) -> list[str]:
    """The blocks of all nodes, in the order of the graph."""
    return [block for block in dict.fromkeys(map(block_of, gm.graph.nodes)) if block]


@functools.cache
def _kind(target: Any) -> str:
    name = op_name(target)
    if name.startswith("operator."):
        return "bookkeeping"
    short = name.partition(".")[2]
    tags = getattr(target, "tags", ())
    if collective_kind(target) is not None:
        return "collective"
    if waits(target):
        return "wait"
    if host_copy(target) is not None:
        return "host copy"
    if "scaled_dot_product" in short or "flex_attention" in short or "flash_attention" in short:
        return "attention"
    kind = _BY_NAME.get(short, "other")
    if kind not in ("other", "reduction"):
        return kind
    if torch.Tag.nondeterministic_seeded in tags:
        return "random"
    return "pointwise" if torch.Tag.pointwise in tags else kind


def kind_of(node: torch.fx.Node) -> str:
    """One of `KINDS`; `bookkeeping` for nodes that compute no tensor (sizes, meshes, items of a list)."""
    if node.op != "call_function":
        return "bookkeeping"
    kind = _kind(node.target)
    if kind == "other":
        if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            return "bookkeeping"
        if aliased_inputs(node):
            return "view"
    return kind


def is_compute(node: torch.fx.Node) -> bool:
    """Whether the node is a matmul or attention, which are long enough to hide a collective."""
    long = node.op == "call_function" and _kind(node.target) in ("matmul", "attention")
    return long or multiplies(node.target)


def updates_of(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The optimizer's updates in the graph of a whole step, in node order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and op_name(node.target) == _UPDATE]


def lists_of_update(update: torch.fx.Node) -> list[list[Any]]:
    """Nodes of an update: parameters, gradients, exp_avg, exp_avg_sq, nothing (max_exp_avg_sq), step counts."""
    return [list(nodes) for nodes in update.args[:6]]  # type: ignore[arg-type]


_UPDATE = "aten._fused_adamw_"


def is_backward(node: torch.fx.Node) -> bool:
    """Whether a node of a joint graph belongs to the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


_TAGGED = frozenset({"aten", "prims", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "c10d",
                     "bucketing", "flex_lib", "fsdp", "inductor", "higher_order", "quantized", "rngprims", "streams",
                     "ao", "workbench", None})
"""Namespaces whose operators have torch's tag where they draw random numbers; None is that of plain functions."""


def unknown_operator(node: torch.fx.Node) -> str | None:
    """`mylib.noise` of a node that calls it, itself or through a wrapper of torch, if its library is not torch's."""
    targets: list[Any] = [node.target, *node.args]
    return next((op_name(t) for t in targets if getattr(t, "namespace", None) not in _TAGGED), None)


def may_differ(node: torch.fx.Node, recomputable: Collection[str] = ()) -> bool:
    """Whether a second run may give other values: of a draw, an unknown operator not in `recomputable`, or its item."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return is_random(node) or unknown_operator(node) not in (None, *recomputable)


_AUTHORING = (Path(__file__).parents[2] / "authoring").glob("*.py")
_LIBRARIES = (str(Path(torch.__file__).parent), *map(str, _AUTHORING))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.+))?')


@dataclass(frozen=True)
class Provenance:
    """The origin of a node. A field is empty or None where the node's metadata has no entry.

    file, line: the innermost frame outside torch and outside `workbench.authoring`. text: that source line.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    parameter: str | None = None
    backward: bool = False

    @property
    def place(self) -> str:
        """`llama3.py:98`, `Cell In[3]:8` in a notebook; "" without a source line."""
        return f"{Path(shown_file(self.file)).name}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        source = f"{self.place}: {self.text}" if self.file else "no source line"
        parts = [self.parameter and f"parameter {self.parameter}", self.module or None, source]
        return ", ".join(p for p in parts if p) + (" (backward)" if self.backward else "")


@functools.lru_cache(maxsize=8192)
def _source(trace: str) -> tuple[str, int, str]:
    frames = _FRAME.findall(trace)
    if not frames:
        return "", 0, ""
    # The model's own line, and not the line of the library that it calls.
    file, line, _, text = next(
        (f for f in reversed(frames) if not f[0].startswith(_LIBRARIES)), frames[-1]
    )
    return file, int(line), text.strip()


def provenance(node: torch.fx.Node) -> Provenance:
    """Module path, source line and parameter of a node. A backward node has those of its forward node."""
    file, line, text = _source(node.meta.get("stack_trace") or "")
    backward = is_backward(node) or "fwd_nn_module_stack" in node.meta
    return Provenance(module_path(node), file, line, text, parameter_of(node), backward)


def output_values(gm: torch.fx.GraphModule) -> list[Any]:
    """The output node's arguments as a flat list: nodes, and constants such as None."""
    output = next(iter(reversed(gm.graph.nodes)))
    values = output.args[0] if output.op == "output" else ()
    return list(values) if isinstance(values, list | tuple) else [values]


def nodes_from_line(gm: torch.fx.GraphModule, file: str, line: int) -> list[torch.fx.Node]:
    """The nodes from line `line` of a file whose path ends in `file`."""
    places = ((node, provenance(node)) for node in gm.graph.nodes)
    return [node for node, place in places if place.line == line and place.file.endswith(file)]


def placed(value: Any) -> str:
    """`float32[2, 64] on cpu`; the type of a value that is no tensor."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, value.shape))}] on {value.device.type}"


def described(value: Any) -> str:
    """`float32 [2, 64]`; the first four items of a list."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return few(list(map(described, value)), 4)
    return "not recorded" if value is None else type(value).__name__
