"""Two passes of benchmarks/step_time.py that did not pay, so the package has none such: figures in docs/results.md.

`interleaved_microbatches`: a step of two microbatches on tensor parallelism, in which one half's collectives run beside
the other half's products. `copy_engines`: torch's low-contention collectives in the place of NCCL's large ones; the
check `collectives` does not know these, and says FAIL.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench import register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.aot import parameter_of
from workbench.torch_api.distributed.symmetric_memory import reserve
from workbench.torch_api.ops import is_wait

BOTH = -1
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def halves(gm: GraphModule) -> dict[Node, int | None]:
    """Which microbatch each node belongs to: by the rows it descends from; `BOTH`, or None for neither."""
    found: dict[Node, int | None] = {}
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.slice.Tensor and node.args[0].op == "placeholder" and (
                parameter_of(node.args[0]) is None):
            found[node] = 0 if node.args[2] == 0 else 1
            continue
        of = {found[n] for n in node.all_input_nodes} - {None}
        found[node] = None if not of else of.pop() if len(of) == 1 else BOTH
    return found


def is_product(node: Node) -> bool:
    return node.target in PRODUCTS


def sections(nodes: list[Node]) -> deque[list[Node]]:
    """The nodes, cut before each wait."""
    found = deque([list[Node]()])
    for node in nodes:
        if is_wait(node.target):
            found.append([])
        found[-1].append(node)
    return found


@register_pass("interleaved_microbatches", stage="step", numerics="exact",
               changes="each half of the batch goes on at a wait of the other's")
def interleaved_microbatches(gm: GraphModule, example_inputs: list[Any], *, options: Any) -> GraphModule:
    """The halves in turn, from wait to wait; what one does without products stands amid the other's products.

    So a collective that follows products, and the one that it leads to, each run beside half of the other's products.
    Sums of both halves follow their terms, and the update comes last.
    """
    half, placed = halves(gm), dict[Node, None]()
    placed.update(dict.fromkeys(n for n in gm.graph.nodes if n.op == "placeholder"))

    def place(node: Node) -> None:
        if node not in placed:
            for given in node.all_input_nodes:
                place(given)
            placed[node] = None
            for user in node.users:  # the sum of two gradients frees both
                if half[user] == BOTH and user.target is torch.ops.aten.add.Tensor and all(
                        n in placed and half[n] != BOTH for n in user.all_input_nodes):
                    placed[user] = None

    parts = [sections([n for n in gm.graph.nodes if half[n] == index]) for index in (0, 1)]
    turn = 0
    while any(parts):
        if parts[turn]:
            part = parts[turn].popleft()
            left = total = sum(map(is_product, part))
            for node in part:
                place(node)
                left -= is_product(node)
                other = parts[1 - turn]
                if is_product(node) and 2 * left <= total and other and not any(map(is_product, other[0])):
                    for each in other.popleft():
                        place(each)
        turn = 1 - turn
    for node in gm.graph.nodes:
        place(node)
    end = gm.graph.output_node()
    for node in placed:
        if node is not end:
            end.prepend(node)
    return gm


SMALL = 2**20  # bytes; barriers cost more than they save below
GATHER = torch.ops.symm_mem._low_contention_all_gather.default
SCATTER = torch.ops.symm_mem._low_contention_reduce_scatter.default
LOW = {torch.ops._c10d_functional.all_gather_into_tensor.default: GATHER,
       torch.ops._c10d_functional.reduce_scatter_tensor.default: SCATTER}


class CopyOptions(Options):
    """scatters: reduce-scatters, too; a rank adds them up in a kernel of its own."""

    scatters: bool = True


def lowered(operator: Any) -> None:
    """Inductor keeps the operator's input until its wait, as it does for other collectives (torch 2.13 does too)."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    register_lowering(operator)(lambda given, *args: ir.TensorBox.create(
        ir._CollectiveKernel.create_out_of_place(operator, given, *args)))


@register_pass("copy_engines", stage="step", numerics="reduction_order", options=CopyOptions,
               changes="large collectives are copies between the GPUs' memories")
def copy_engines(gm: GraphModule, example_inputs: list[Any], *, options: CopyOptions) -> GraphModule:
    """Each large all-gather, and each reduce-scatter if asked for, through the group's symmetric memory."""
    needed: dict[str, int] = {}
    for node in list(gm.graph.nodes):
        low = LOW.get(node.target)
        sent = low and node.args[0].meta["val"]
        if low is None or sent.nbytes < SMALL or (low is SCATTER and not options.scatters):
            continue
        given, *reduction, _, group = node.args
        needed[group] = max(needed.get(group, 0), sent.nbytes)
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(low, (given, *reduction, group))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    if torch.cuda.is_available():
        for group in sorted(needed):
            reserve(group, needed[group])
        for operator in (GATHER, SCATTER):
            lowered(operator)
    return gm
