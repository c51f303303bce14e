"""A rewrite of silu, and whether it keeps what it claims: run before and after on the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from workbench import (
    PassRecord,
    World,
    author_module,
    capture,
    compile_step,
    find_nodes,
    partition,
    prove_numerics,
    register_pass,
    replace_pattern,
    run_joint,
)
from workbench.authoring.models.layers import FeedForward
from workbench.checks.verdicts import Verdict
from workbench.notebook.draw.picture import Table, table

LEFT = ("aten.silu", "aten.exp", "aten.sigmoid")


class _Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def proved(name: str) -> tuple[Verdict, PassRecord]:
    """The pass on a feed-forward with random weights: its numerics, and its record."""
    torch.manual_seed(0)
    block, x = _Block(FeedForward(64, 128)), torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    alone = World("gloo", 1, 0, torch.device("cpu"))
    step = capture(author_module(block, alone, None, batch=lambda: (x,)))
    [record] = run_joint(step, [name])
    prove_numerics([record], compile_step(partition(step)))
    return record.verdict("numerics"), record


def claimed(silu: Callable[[torch.Tensor], torch.Tensor], **claim: Any) -> tuple[Verdict, PassRecord]:
    """A pass that puts `silu` in place of torch's, under this claim: numerics, and a tolerance."""

    @register_pass("own_silu", stage="joint", changes="silu becomes smaller operators", **claim)
    def own_silu(gm: GraphModule, example_inputs: list[Any], *, options: Any) -> GraphModule:
        replace_pattern(gm, lambda x: F.silu(x), silu)
        return gm

    return proved("own_silu")


def claim_table(silu: Callable[[torch.Tensor], torch.Tensor], *claims: dict[str, Any]) -> Table:
    """The verdict on one rewrite under each claim."""
    verdicts = [claimed(silu, **claim)[0] for claim in claims]
    rows = [(v.evidence["contract"], v.evidence["bound"] or "the same bits", str(v.outcome)) for v in verdicts]
    return table("one rewrite of silu, two claims", ("claim", "bound", "numerics"), rows)


def silu_faults(silu: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, int]:
    """What is wrong with a silu without exp and sigmoid, within 5e-6; prints its values beside silu's."""
    at = torch.tensor([-4.0, -1, 0, 1, 4])
    values = {"yours": silu(at), "silu": F.silu(at)}
    rows = [(name, *(f"{value + 0:.3f}" for value in row.tolist())) for name, row in values.items()]
    print(table("your silu", ("x", *at.int().tolist()), rows))
    verdict, record = claimed(silu, numerics="lossy", tolerance=5e-6)
    left = [n for op in LEFT for n in find_nodes(record.after[0], op=op)]
    return {"of a feed-forward's loss and 3 gradients, out of bound": verdict.evidence["wrong"],
            "exp, sigmoid or silu left": len(left)}
