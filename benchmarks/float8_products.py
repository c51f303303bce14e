"""Each matrix product of llama3's linear layers in bfloat16, and as a scaled product of float8, casts included.

    python benchmarks/float8_products.py [FILE.json] [--tokens N]

One GPU with float8 products. A linear layer x[T, K] -> y[T, N] has three: forward y = x w^T, the input's gradient
dx = dy w, the weight's gradient dw = dy^T x. The left operand of a scaled product is row-major and the right one
column-major, so that dx needs another copy of w, and dw one of dy and one of x: `cast_ms` makes every operand from
its bfloat16 tensor, in one compiled function with the scale (tensorwise: largest magnitude of the tensor; rowwise: of
each row along the contracted axis). Times are medians of replays of a CUDA graph of ten calls, in milliseconds a call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result import tell
from torch import Tensor

from workbench.recipe.model_sizes import SIZES

CALLS, REPLAYS = 10, 15
F8 = torch.float8_e4m3fn
LARGEST = torch.finfo(F8).max


def recorded(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`CALLS` calls as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def milliseconds(call: Callable[[], Any]) -> float:
    """The median time of one call, launched from a CUDA graph, so that the CPU does not count."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = recorded(call)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return sorted(times)[REPLAYS // 2]


@torch.compile(dynamic=False)
def tensorwise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] in row-major float8, and its inverse scale []."""
    scale = LARGEST / tensor.abs().amax().float().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(F8), scale.reciprocal()


@torch.compile(dynamic=False)
def tensorwise_transposed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] as [K, M] in row-major float8, and its inverse scale []."""
    scale = LARGEST / tensor.abs().amax().float().clamp(min=1e-12)
    return (tensor.t().float() * scale).clamp(-LARGEST, LARGEST).to(F8).contiguous(), scale.reciprocal()


@torch.compile(dynamic=False)
def rowwise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] in row-major float8, and each row's inverse scale [M, 1]."""
    scale = LARGEST / tensor.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(F8), scale.reciprocal()


@torch.compile(dynamic=False)
def rowwise_transposed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] as [K, M] in row-major float8, and each of its rows' inverse scale [K, 1]."""
    turned = tensor.t()
    scale = LARGEST / turned.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    return (turned.float() * scale).clamp(-LARGEST, LARGEST).to(F8).contiguous(), scale.reciprocal()


CASTS = {"tensorwise": (tensorwise, tensorwise_transposed), "rowwise": (rowwise, rowwise_transposed)}


def product(left: Tensor, right: Tensor) -> dict[str, float]:
    """Milliseconds of left [M, K] by right [N, K] transposed: bfloat16, and each scaling, with fast or full sums."""
    row = {"bfloat16_ms": milliseconds(lambda: left @ right.t())}
    for scaling, (cast, _) in CASTS.items():
        (a, a_scale), (b, b_scale) = cast(left), cast(right)
        if scaling == "rowwise":
            b_scale = b_scale.t().contiguous()
        for fast in (True, False):
            call = lambda a=a, b=b, s=a_scale, t=b_scale, f=fast: torch._scaled_mm(  # noqa: E731
                a, b.t(), s, t, out_dtype=torch.bfloat16, use_fast_accum=f)
            row[f"{scaling}_{'fast' if fast else 'full'}_ms"] = milliseconds(call)
    return row


def linear(tokens: int, k: int, n: int) -> list[dict[str, Any]]:
    """The three products of a linear layer from k to n features, with the casts of their operands."""
    x, w, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((tokens, k), (n, k), (tokens, n)))
    rows = []
    for name, left, right, turned in (("forward", x, w, (False, False)), ("dx", dy, w, (False, True)),
                                      ("dw", dy, x, (True, True))):
        a, b = (t.t().contiguous() if turn else t for t, turn in zip((left, right), turned, strict=True))
        row = {"product": name, "m": a.shape[0], "k": a.shape[1], "n": b.shape[0], **product(a, b)}
        for scaling, casts in CASTS.items():
            row[f"{scaling}_cast_ms"] = [milliseconds(lambda c=casts[turn], t=t: c(t))  # type: ignore[misc]
                                         for t, turn in zip((left, right), turned, strict=True)]
        rows.append(row)
        torch._dynamo.reset()  # else the casts of the ninth shape would run uncompiled
    return rows


def layers(flavor: str) -> dict[str, tuple[int, int, int]]:
    """Each kind of linear layer of llama3: features in, features out, and how many the model has."""
    size = SIZES["llama3"][flavor]
    dim, ffn, deep = size["dim"], size["ffn_dim"], size["n_layers"]
    kv = dim // size["n_heads"] * size["n_kv_heads"]
    return {"wq, wo": (dim, dim, 2 * deep), "wk, wv": (dim, kv, 2 * deep), "w1, w3": (dim, ffn, 2 * deep),
            "w2": (ffn, dim, deep), "output": (dim, size["vocab_size"], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a rank (default 8192)")
    args = parser.parse_args()
    rows = []
    for flavor in ("1b", "8b"):
        for kind, (k, n, count) in layers(flavor).items():
            for row in linear(args.tokens, k, n):
                rows.append({"model": f"llama3 {flavor}", "layers": kind, "count": count, **row})
    tell(f"python benchmarks/float8_products.py --tokens {args.tokens}", {"tokens": args.tokens, "rows": rows},
         args.target)


if __name__ == "__main__":
    main()
