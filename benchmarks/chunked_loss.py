"""An output layer and its loss, alone on one GPU: whole, in our pieces, and in those of auto_chunker.

    python benchmarks/chunked_loss.py [FILE.json] [--tokens 8192] [--dim 4096] [--vocabulary 128256] [--chunks 8]

Peak memory above what was allocated before, and the median time, of forward and backward in bfloat16. auto_chunker is
off by default, and on these sizes its threshold for the growth of a product leaves the loss as it is: here it is 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result import tell
from torch import nn

from workbench import as_backend
from workbench.lab.chunked_loss.loss import ChunkedLoss, OutputWeight

WAYS = ("eager", "compile", "auto_chunker", "whole", "pieces", "pieces_compile")
DECOMPOSE, LOWER = "inductor_decomposition", "full_inductor_compilation"


class Head(nn.Module):
    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """x (1, tokens, dim), targets (1, tokens) -> the mean cross entropy."""
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1).float(), targets.flatten())


class Pieces(nn.Module):
    def __init__(self, dim: int, vocabulary: int, chunks: int) -> None:
        super().__init__()
        self.output, self.loss = OutputWeight(dim, vocabulary, bias=False), ChunkedLoss(chunks)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """x (1, tokens, dim), targets (1, tokens) -> the mean cross entropy."""
        loss: torch.Tensor = self.loss(self.output(x), targets)
        return loss


def compiled(way: str, head: nn.Module) -> Callable[..., Any]:
    if way == "eager":
        return head
    if way in ("whole", "pieces"):
        return torch.compile(head, dynamic=False, backend=as_backend([DECOMPOSE, LOWER]))
    return torch.compile(head, dynamic=False)


def measured(way: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    in_pieces = way.startswith("pieces")
    sizes = (options.dim, options.vocabulary)
    head = (Pieces(*sizes, options.chunks) if in_pieces else Head(*sizes)).to(device, dtype)
    x = torch.randn(1, options.tokens, options.dim, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(options.vocabulary, (1, options.tokens), device=device)
    config = {"auto_chunker.enable": way == "auto_chunker", "auto_chunker.num_chunk": options.chunks,
              "auto_chunker.amplify_ratio_threshold": 1}
    step = compiled(way, head)
    before = torch._inductor.metrics.num_auto_chunking
    times, loss = [], torch.empty(())
    with torch._inductor.config.patch(config):
        for turn in range(options.steps + 3):
            head.zero_grad(set_to_none=True)
            x.grad = None
            if device.type == "cuda":
                if turn == 2:
                    torch.cuda.synchronize()
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            loss = step(x, targets)
            loss.backward()
            if device.type == "cuda":
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
    (weight_gradient,) = (parameter.grad for parameter in head.parameters())
    assert x.grad is not None and weight_gradient is not None
    found = {"way": way, "loss": float(loss.detach()), "grad_norms": [float(x.grad.float().norm()),
                                                            float(weight_gradient.float().norm())],
             "chunked_by_torch": torch._inductor.metrics.num_auto_chunking - before}
    if times:
        found |= {"ms": statistics.median(times[3:]), "peak_gib": (torch.cuda.max_memory_allocated() - held) / 2**30}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    for name, size in (("tokens", 8192), ("dim", 4096), ("vocabulary", 128_256), ("chunks", 8), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for way in options.ways:
        try:
            rows.append(measured(way, options, device))
        except Exception as error:
            rows.append({"way": way, "problem": f"{type(error).__name__}: {error}"[:1500]})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    sizes = {name: getattr(options, name) for name in ("tokens", "dim", "vocabulary", "chunks", "steps")}
    tell("python benchmarks/chunked_loss.py", {**sizes, "rows": rows}, options.target)


if __name__ == "__main__":
    main()
