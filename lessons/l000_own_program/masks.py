"""The masks that the attentions of a step read, before and after `causal_attention`."""

from __future__ import annotations

from typing import Any

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


def _evidence(report: Report) -> dict[str, Any]:
    effect = report.pass_row("causal_attention").verdict("effect")
    assert effect is not None
    return effect.evidence


def masks(report: Report) -> Table:
    """Attentions that read a mask, bytes of the masks on a rank, and FLOP of all attentions, before and after."""
    evidence = _evidence(report)
    names = {"masked": "attentions that read a mask", "mask_bytes": "bytes of these masks", "flop": "FLOP of attention"}
    rows = [(name, *evidence[key]) for key, name in names.items()]
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
