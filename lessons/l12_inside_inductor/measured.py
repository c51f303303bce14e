"""What "Inside Inductor" measured on a GPU: the allocator's peaks."""

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
