"""Each product of deepseek_v3's experts in bfloat16, and in float8 with a scale a row, casts included.

    python benchmarks/float8_grouped_products.py [FILE.json] [--tokens N]

One GPU of sm90: `_scaled_grouped_mm` takes float8 with rowwise scales there, and gives bfloat16. A rank of expert
parallelism holds `groups` experts, and gets as many rows as it sends: tokens x top_k, and 1.25 times as many under
static capacity. Every expert gets equally many. An expert layer x[M, K] -> y[M, N] with weights w[G, N, K] has three
products: forward y = x w^T, the input's gradient dx = dy w, and the weights' gradient dw = x^T dy, which sums over each
expert's rows. Dropless rows are one matrix that `offs` cuts; under static capacity all operands have three dimensions.

`unaligned` rows ask what dropless routing asks for: counts of rows that are no multiple of 16. Times are medians of
replays of a CUDA graph of ten calls, in milliseconds a call, and of CUDA events alone where `recorded` is false.
`error` is the distance to the bfloat16 product, relative to its norm. A case that fails has a `problem` instead.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from float8_products import CALLS, F8, LARGEST, REPLAYS, milliseconds
from result import tell
from torch import Tensor

from workbench.recipe.model_sizes import SIZES

EXPERT_RANKS = {"16b": 8, "671b": 64}
"""Ranks of expert parallelism, so that one GPU holds a rank's experts."""


@torch.compile(dynamic=False)
def rowwise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[..., M, K] in row-major float8, and each row's inverse scale [..., M]."""
    scale = LARGEST / tensor.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(F8), scale.reciprocal().squeeze(-1)


@torch.compile(dynamic=False)
def rowwise_transposed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[..., M, K] as [..., K, M] in row-major float8, and each of its rows' inverse scale [..., K]."""
    turned = tensor.transpose(-2, -1)
    scale = LARGEST / turned.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    cast = (turned.float() * scale).clamp(-LARGEST, LARGEST).to(F8)
    return cast.contiguous(), scale.reciprocal().squeeze(-1)


@torch.compile(dynamic=False)
def columnwise_by_group(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[G, M, K] as [K, G x M] in row-major float8, and the inverse scale of each column of each group [G x K]."""
    scale = LARGEST / tensor.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    cast = (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(F8)
    return cast.flatten(0, 1).t().contiguous(), scale.reciprocal().flatten()


def timed(call: Callable[[], Any]) -> tuple[float, bool]:
    """(milliseconds of a call, whether a CUDA graph recorded it)"""
    try:
        return milliseconds(call), True
    except Exception:
        traceback.print_exc()
        torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return sorted(times)[REPLAYS // 2], False


def away(found: Tensor, wanted: Tensor) -> float:
    """Distance relative to the norm of `wanted`."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def grouped(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], offs: Tensor | None, fast: bool) -> Tensor:
    return torch._scaled_grouped_mm(a, b, *scales, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast)


def one_by_one(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], fast: bool) -> Tensor:
    """a [G, M, K] by b [G, K, N], each expert's by a scaled product of its own."""
    return torch.stack([
        torch._scaled_mm(x, y, s.unsqueeze(1), t.unsqueeze(0), out_dtype=torch.bfloat16, use_fast_accum=fast)
        for x, y, s, t in zip(a, b, *scales, strict=True)])


def operands(product: str, dropless: bool, groups: int, rows: int, k: int, n: int) -> tuple[Any, ...]:
    """(left, right, their casts, offs, what the casts take) of a product, in bfloat16."""
    x, w, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((groups, rows, k), (groups, n, k), (groups, rows, n)))
    offs = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * rows if dropless else None
    if product == "dw":
        if dropless:
            both = columnwise_by_group, columnwise_by_group
            return x.flatten(0, 1).t(), dy.flatten(0, 1), both, offs, (x, dy)
        return x.transpose(1, 2), dy, (rowwise_transposed, rowwise_transposed), offs, (x, dy)
    left, right, turned = (x, w.transpose(1, 2), rowwise) if product == "forward" else (dy, w, rowwise_transposed)
    left = left.flatten(0, 1) if dropless else left
    return left, right, (rowwise, turned), offs, (left, w)


def expert_product(product: str, dropless: bool, groups: int, rows: int, k: int, n: int) -> dict[str, Any]:
    """One product of an expert layer of k to n features, `rows` rows an expert."""
    left, right, casts, offs, sources = operands(product, dropless, groups, rows, k, n)
    plain = (lambda: torch._grouped_mm(left, right, offs=offs)) if dropless else (lambda: torch.bmm(left, right))
    row: dict[str, Any] = {}
    row["bfloat16_ms"], recorded = timed(plain)
    (a, a_scale), (b, b_scale) = (cast(source) for cast, source in zip(casts, sources, strict=True))
    scales, ways = (a_scale, b_scale), {"grouped": lambda fast: grouped(a, b.transpose(-2, -1), scales, offs, fast)}
    if not dropless:
        ways["one_by_one"] = lambda fast: one_by_one(a, b.transpose(-2, -1), scales, fast)
    wanted = plain()
    row["cast_ms"] = [timed(lambda c=cast, s=source: c(s))[0]  # type: ignore[misc]
                      for cast, source in zip(casts, sources, strict=True)]
    for way, call in ways.items():
        try:
            row[f"{way}_error"] = away(call(True), wanted)
            for fast in (True, False):
                ms, again = timed(lambda f=fast, c=call: c(f))  # type: ignore[misc]
                row[f"{way}_{'fast' if fast else 'full'}_ms"], recorded = ms, recorded and again
        except Exception as error:
            row[f"{way}_problem"] = f"{type(error).__name__}: {error}"[:400]
    torch._dynamo.reset()  # else the casts of the ninth shape would run uncompiled
    return {**row, "recorded": recorded}


def unaligned(product: str, groups: int, rows: int, k: int, n: int) -> dict[str, Any]:
    """A dropless product whose experts get 1, 3, 5 ... rows more or fewer than `rows`, with scales of 1."""
    more = [(2 * i + 1) * (1 if i % 2 else -1) for i in range(groups)]
    counts = [rows + each for each in more]
    offs = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    m = sum(counts)
    m16 = -(-m // 16) * 16  # rows that no expert has, so that strides are multiples of 16
    if product == "dw":
        a, b = (torch.randn(width, m16, device="cuda").to(F8) for width in (k, n))
        wanted = torch.stack([x.float() @ y.float().t() for x, y in zip(
            a[:, :m].split(counts, 1), b[:, :m].split(counts, 1), strict=True)])
        scales = tuple(torch.ones(groups * width, device="cuda") for width in (k, n))
        found = grouped(a, b.t(), scales, offs, True)  # type: ignore[arg-type]
    else:
        x, w = torch.randn(m, k, device="cuda").to(F8), torch.randn(groups, n, k, device="cuda").to(F8)
        wanted = torch.cat([part.float() @ each.float().t() for part, each in zip(x.split(counts), w, strict=True)])
        scales = torch.ones(m, device="cuda"), torch.ones(groups, n, device="cuda")
        found = grouped(x, w.transpose(1, 2), scales, offs, True)
    torch.cuda.synchronize()
    return {"error": away(found, wanted)}


def layers(flavor: str) -> dict[str, tuple[int, int, int]]:
    """Each kind of routed expert layer: features in, features out, and how many the model has."""
    size = SIZES["deepseek_v3"][flavor]
    deep = size["n_layers"] - size["n_dense_layers"]
    return {"w1, w3": (size["dim"], size["expert_dim"], 2 * deep), "w2": (size["expert_dim"], size["dim"], deep)}


def tried(case: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What the case found, or what it failed with."""
    try:
        return case(*given)
    except Exception as error:
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"[:400]}
    finally:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a rank (default 8192)")
    args = parser.parse_args()
    found: dict[str, Any] = {"tokens": args.tokens, "rows": [], "unaligned": []}
    command = f"python benchmarks/float8_grouped_products.py --tokens {args.tokens}"
    for flavor, ranks in EXPERT_RANKS.items():
        size = SIZES["deepseek_v3"][flavor]
        groups = size["n_experts"] // ranks
        even = args.tokens * size["top_k"] // groups // 16 * 16
        for dispatch, rows in (("dropless", even), ("capacity", int(size["capacity_factor"] * even) // 16 * 16)):
            for kind, (k, n, count) in layers(flavor).items():
                for product in ("forward", "dx", "dw"):
                    case = {"model": f"deepseek_v3 {flavor}", "dispatch": dispatch, "layers": kind, "count": count,
                            "product": product, "groups": groups, "rows": rows, "k": k, "n": n}
                    row = tried(expert_product, product, dispatch == "dropless", groups, rows, k, n)
                    found["rows"].append(case | row)
                    print(json.dumps(case | row), flush=True)
    for product in ("forward", "dw"):  # last: a kernel that fails on the GPU takes all later ones with it
        found["unaligned"].append({"product": product, **tried(unaligned, product, 8, 6144, 2048, 1408)})
    tell(command, found, args.target)


if __name__ == "__main__":
    main()
