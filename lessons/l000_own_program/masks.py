"""The masks that the attentions of a step read, before and after `causal_attention`; failed checks of a pass."""

from __future__ import annotations

from typing import Any

from workbench.checks.verdicts import Outcome
from workbench.notebook.draw.picture import Table, table
from workbench.pipeline.report import Report
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.recorded_figures import json_lines

VARIANTS = {
    "cudagraph": "captured whole and replayed, with its masks",
    "cudagraph_causal": "captured whole and replayed, masks dropped",
    "fsdp2_per_block_compile": "FSDP2, torch.compile per block",
}
"""Of benchmarks/causal_attention.py."""
MASK_BYTES = 2 * 64 * 64 * 4
"""Of a float32 mask of the lesson's batch: 2 sequences of 64 tokens."""


def _evidence(report: Report) -> dict[str, Any]:
    effect = report.pass_row("causal_attention").verdict("effect")
    assert effect is not None
    return effect.evidence


def failed(report: Report, name: str) -> int:
    """How many checks of that pass say FAIL."""
    return sum(verdict.outcome is Outcome.FAIL for verdict in report.pass_row(name).verdicts)


def float_masks(report: Report) -> list[int]:
    """Different masks that attentions read, before and after; the evidence counts the bytes of each once."""
    return [size // MASK_BYTES for size in _evidence(report)["mask_bytes"]]


def masks(report: Report) -> Table:
    """Float masks and their bytes on a rank, and FLOP of all attentions, before and after."""
    evidence = _evidence(report)
    rows = [
        ("float masks that the attentions read", *float_masks(report)),
        ("bytes of these masks", *evidence["mask_bytes"]),
        ("FLOP of attention", *evidence["flop"]),
    ]
    return table("one step on a rank", ("", "before causal_attention", "after"), rows)


def kept(report: Report) -> tuple[float, str]:
    """Whether each attention reads its mask after the pass, too."""
    before, after = _evidence(report)["masked"]
    return float(0 < before == after), f"{after} of {before} attentions read a mask after the pass"


def measured() -> Table:
    """A larger Llama on one GPU, recorded by benchmarks/causal_attention.py in one call."""
    rows = json_lines(results_dir() / "causal_attention_h200x1.jsonl")
    last = {row["variant"]: row for row in rows if row["call"] == rows[-1]["call"]}
    first = next(iter(last.values()))
    cells = [(name, f"{last[key]['step_ms']:.1f} ms", f"{last[key]['attention_ms']:.1f} ms")
             for key, name in VARIANTS.items()]
    gpu, torch = first["machine"]["gpus"][0], first["versions"]["torch"].partition("+")[0]
    return table("a Llama of 16 layers, 4 x 2,048 tokens: one training step", ("", "step", "of it attention"), cells,
                 f"recorded on one {gpu}, torch {torch}")
