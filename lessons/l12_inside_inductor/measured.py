"""What "Inside Inductor" measured on a GPU: the allocator's peaks, and an assert that names a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.authoring.models.layers import FeedForward
from workbench.lab.inside_inductor.function import look_inside
from workbench_lessons.course.lesson import Lesson
from workbench_lessons.course.recorded_figures import Figures, on_gpus
from workbench_lessons.l12_inside_inductor.buffers import buffers_of
from workbench_lessons.l12_inside_inductor.nan_asserts import first_failed


def memory_on_a_gpu(lesson: Lesson, options: Mapping[str, Mapping[str, Any]]) -> Figures:
    """The peak of two blocks with each of Inductor's options: read from the code, and measured by the allocator."""
    return on_gpus(lesson, "peak of two blocks, bytes", partial(_memory, options))


def _memory(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    model = nn.Sequential(FeedForward(1024, 3072), FeedForward(1024, 3072)).cuda()
    rows = []
    big = torch.randn(2048, 1024, device="cuda")
    for name, config in options.items():
        seen = look_inside(model, big, config=config)
        seen(big)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seen(big)
        measured = torch.cuda.max_memory_allocated() - before
        rows.append({"options": name, "read from the code": buffers_of(seen).peak, "measured": measured})
    return rows


def hidden_nan(lesson: Lesson) -> Figures:
    """What the asserts say of the log of a negative number that a later kernel hides."""
    return on_gpus(lesson, "log of a negative number, hidden in the end", _hidden_nan)


def _hidden_nan() -> list[dict[str, Any]]:
    def hides(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(torch.log(x) @ weight)

    inputs = torch.ones(64, 64, device="cuda").tril() - 0.5, torch.ones(64, 64, device="cuda")
    return [{"asserts say": first_failed(hides, *inputs)}]
