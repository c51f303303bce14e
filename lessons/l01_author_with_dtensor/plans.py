"""Plans of a stack of linears on 4 ranks: what they send, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from workbench import ParallelPlan, author_module, capture, fake_world, partition, shards, simulated_world
from workbench.graph.read.collectives import Collective, list_collectives
from workbench.notebook.draw.picture import Table, table
from workbench_lessons.l01_author_with_dtensor.slices import Slice

Style = str | Mapping[str, Any]
WORDS = {"replicate": "whole", "shard(-1)": "cut"}


class Stack(nn.Sequential):
    """Linears without bias from each width to the next, with a relu between them; the loss is the sum."""

    def __init__(self, *widths: int):
        torch.manual_seed(0)
        linears = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(widths)]
        super().__init__(*[layer for linear in linears for layer in (linear, nn.ReLU())][:-1])

    def forward(self, x: torch.Tensor, total: bool = True) -> torch.Tensor:
        result = super().forward(x)
        return result.sum() if total else result


def cost(collective: Collective) -> int:
    """Bytes of one rank; an all-reduce counts twice."""
    return collective.payload * (2 if collective.kind == "all_reduce" else 1)


def _sent(widths: Sequence[int], plan: ParallelPlan, columns: int) -> list[Collective]:
    with fake_world(4) as world:
        batch = (torch.empty(2, columns),)
        module = author_module(Stack(*widths), world, world.mesh_of({"tp": 4}), plan, batch=lambda: batch)
        return list_collectives(partition(capture(module)).forward)


def _listed(sent: Sequence[Collective]) -> str:
    lines = [f"linear {c.module}: {c.kind.replace('_', '-')} {cost(c):,} B" for c in sent]
    return ", ".join(lines) or "none"


def style_table() -> Table:
    """What each style of one linear sends."""
    uses: tuple[tuple[str, dict[str, str], str, str], ...] = (
        ("colwise", {}, "whole", "cut"),
        ("colwise", {"output": "replicate"}, "whole", "whole"),
        ("colwise", {"input": "shard(-1)"}, "cut", "cut"),
        ("rowwise", {}, "cut", "whole"),
        ("rowwise", {"input": "replicate"}, "whole", "whole"),
    )
    rows = []
    for style, options, arrives, leaves in uses:
        plan = ParallelPlan(tensor={"0": {"style": style, **options}})
        sent = _sent((64, 16), plan, 16 if arrives == "cut" else 64)
        spec: Style = {"style": style, **options} if options else style
        rows.append((str(spec), arrives, leaves, _listed(sent)))
    columns = ("style", "input", "output", "costs")
    return table("one linear, 64 → 16, on 2 rows of float32", columns, rows)


def _unknown(styles: Mapping[str, Any], linears: int) -> list[str]:
    """The keys that are no linear, and the linears without one of the two styles."""
    paths = [str(2 * i) for i in range(linears)]
    wrong = [f"{key!r} is no linear: the linears are {', '.join(paths)}" for key in styles if key not in paths]
    for path in paths:
        style = styles.get(path)
        style = style.get("style") if isinstance(style, dict) else style
        if style not in ("colwise", "rowwise"):
            problem = f"the unknown style {style!r}" if style else "no style"
            wrong.append(f"linear {path} has {problem}")
    return wrong


def _misfits(styles: Mapping[str, Any], linears: int) -> list[str]:
    """The linears that expect a whole input and get a cut one, or the reverse."""
    wrong, arrives = [], "replicate"
    for path in map(str, range(0, 2 * linears, 2)):
        spec = styles[path]
        spec = {"style": spec} if isinstance(spec, str) else spec
        wanted = spec.get("input", "shard(-1)" if spec["style"] == "rowwise" else "replicate")
        if wanted != arrives:
            expects, gets = (WORDS.get(word, word) for word in (wanted, arrives))
            wrong.append(f"linear {path} expects a {expects} input and gets a {gets} one")
        arrives = spec.get("output", "shard(-1)" if spec["style"] == "colwise" else "replicate")
    return wrong


def tried(widths: Sequence[int], styles: Mapping[Any, Any], **most: int) -> dict[str, Any]:
    """Run a plan on 4 ranks, print what it sends, and return what `targets` grades it by. most: limits by figure.

    A plan whose neighbours do not fit does not run: the printed lines name the linears.
    """
    styles = {str(path): style for path, style in styles.items()}
    for fault, find in {"missing or unknown styles": _unknown, "inputs that do not fit": _misfits}.items():
        if wrong := find(styles, len(widths) - 1):
            print(*wrong, sep="\n")
            return {"answer": {fault: len(wrong)}, "at_most": {fault: 0}}
    plan, x = ParallelPlan(tensor=styles), torch.ones(2, widths[0])
    wanted = Stack(*widths)(x, total=False)
    with simulated_world(4) as world:
        module = author_module(Stack(*widths), world, world.mesh_of({"tp": 4}), plan).module
        outputs = shards(module(x, total=False)).values()
    sent = _sent(widths, plan, widths[0])
    wrong_results = sum(y.shape != wanted.shape or not torch.allclose(y, wanted, atol=1e-5) for y in outputs)
    figures = {"collectives": len(sent), "bytes": sum(map(cost, sent)), "wrong results": wrong_results}
    print(f"{_listed(sent)}; total {figures['bytes']:,} B")
    return {"answer": figures, "at_most": {**most, "wrong results": 0}}


def row_faults(answer: Any, parts: Mapping[int, Slice]) -> dict[str, Any]:
    """What `targets` grades first rows by: the ranks in the block of another tp position, and at a wrong place in it.

    parts: the slices of all ranks; the first eight are asked. Prints the first rank of each fault.
    """
    block = parts[1][0][0]  # rank 1 is the second tp position
    rows = answer if isinstance(answer, dict) else dict(enumerate(answer))
    mine = {rank: divmod(row, block) for rank, row in rows.items()}
    true = {rank: divmod(bounds[0][0], block) for rank, bounds in parts.items() if rank < 8}
    both = [rank for rank in true if rank in mine]
    faults = {"ranks not given": [rank for rank in true if rank not in mine],
              "ranks too many": [rank for rank in mine if rank not in true],
              "ranks in the wrong block": [rank for rank in both if mine[rank][0] != true[rank][0]],
              "ranks at the wrong place": [rank for rank in both if mine[rank][1] != true[rank][1]]}
    for fault, ranks in faults.items():
        if ranks:
            print(f"{len(ranks)} of 8 {fault}, first rank {ranks[0]}")
    return {"answer": {fault: len(ranks) for fault, ranks in faults.items()}, "at_most": dict.fromkeys(faults, 0),
            "start": {"ranks in the wrong block": 4, "ranks at the wrong place": 7}}

