"""Whether a pass keeps the values within its contract: on the same inputs, on every real rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.checks.verdicts import SEVERITY, Outcome, Verdict
from workbench.recipe.contracts import Numerics, PassContract
from workbench.torch_api.ops import is_fake

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduction_order_bound(dtype: torch.dtype, group_size: int) -> float:
    """Norm-relative bound for sums in another order: 4 * eps * sqrt(terms).

    A sum of n terms rounds n - 1 times; errors of random sign grow as sqrt(n), and the factor 4 leaves room for the
    operators after the sum. `dtype` is the coarsest in which the graph sums.
    """
    return 4.0 * torch.finfo(dtype).eps * math.sqrt(max(group_size, 2))


def _plain(value: Any) -> Any:
    return getattr(value, "_local_tensor", value) if isinstance(value, torch.Tensor) else value


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: the same bits, or NaN in both whatever its payload. Minus zero is not zero."""
    if not a.is_floating_point():
        return a == b
    bits = _BITS[a.dtype.itemsize]
    same = a.contiguous().view(bits) == b.contiguous().view(bits)
    return same | (a.isnan() & b.isnan())


def _norm_relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|b - a| / |a| where `a` is finite, in float64; inf where `b` is not finite there, or they differ and |a| is 0."""
    x, y = a.double(), b.double()
    finite = x.isfinite()
    x, y = x[finite], y[finite]
    gap = float((y - x).norm())
    if not math.isfinite(gap):
        return math.inf
    return gap / norm if (norm := float(x.norm())) else (0.0 if gap == 0 else math.inf)


def _said(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def compare_one(a: Any, b: Any, bound: float | None) -> tuple[str, float]:
    """(problem or "", norm-relative difference) of one output; `bound` None asks for equal bits."""
    a, b = _plain(a), _plain(b)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = type(a) is type(b) and (a is b or bool(a == b))
        return ("" if same else f"was {_said(a)} and is {_said(b)}"), 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"was {_said(a)} and is {_said(b)}", math.inf
    if a.numel() == 0:
        return "", 0.0
    if a.is_complex():
        a, b = (torch.view_as_real(t.resolve_conj()) for t in (a, b))
    if bound is not None and a.is_floating_point() and a.dtype.itemsize == 1:
        a, b = a.float(), b.float()  # float32 holds every float8, and has the arithmetic
    if bound is None or not a.is_floating_point():
        wrong = int((~_same_bits(a, b)).sum())
        relative = _norm_relative(a, b) if wrong and a.is_floating_point() else 0.0
        problem = f"{wrong} of {a.numel()} elements differ, norm-relative {relative:.1e}"
        return problem if wrong else "", relative
    odd = int(((a.isnan() != b.isnan()) | (a.isinf() != b.isinf()) | (a.isinf() & (a != b))).sum())
    if odd:
        return f"{odd} elements are NaN or infinite in one of the two only", math.inf
    relative = _norm_relative(a, b)
    problem = f"norm-relative difference {relative:.1e}, bound {bound:.1e}"
    return "" if relative <= bound else problem, relative


def copies(values: Sequence[Any]) -> list[Any]:
    """Clones of the tensors and the other values as they are, for a run that may write to its inputs."""
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def coarsest(values: Sequence[Any]) -> torch.dtype:
    """The floating dtype with the largest eps among the tensors; float32 if there is none."""
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)


def bound_of(contract: PassContract, dtype: torch.dtype, group_size: int) -> float | None:
    """The norm-relative difference that the contract allows; None where it asks for equal bits."""
    return {Numerics.EXACT: None, Numerics.LOSSY: contract.tolerance,
            Numerics.REDUCTION_ORDER: reduction_order_bound(dtype, group_size)}[contract.numerics]


@dataclass(frozen=True)
class Comparison:
    """What one rank found, comparing two runs' outputs under a contract.

    bound: norm-relative; None where the contract asks for equal bits. problems: one line for each output that breaks
    the contract. worst: the largest norm-relative difference of all outputs. unknown: why nothing was compared.
    """

    contract: str
    bound: float | None
    outputs: int = 0
    problems: tuple[str, ...] = ()
    worst: float = 0.0
    unknown: str = ""


def compare(before: Sequence[Any], after: Sequence[Any], contract: PassContract, *, group_size: int = 1,
            names: Sequence[str] | None = None) -> Comparison:
    """Compare two runs' flat outputs under the contract, on this rank.

    EXACT: the same bits, and NaN where NaN was. REDUCTION_ORDER: `reduction_order_bound` of the outputs' coarsest
    dtype. LOSSY: the contract's tolerance. Both bounds are norm-relative for each output. names: of the outputs, for
    the message.
    """
    title = str(contract.numerics)
    if any(map(is_fake, [*before, *after])):
        return Comparison(title, None, unknown="fake tensors have no values: run on real ranks")
    if len(before) != len(after):
        problem = f"{len(before)} outputs before, {len(after)} after"
        return Comparison(title, None, len(before), (problem,), math.inf)
    limit = bound_of(contract, coarsest([*before, *after]), group_size)
    problems: list[str] = []
    worst = 0.0
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        problem, relative = compare_one(a, b, limit)
        worst = max(worst, relative)
        if problem:
            problems.append(f"{names[i] if names else f'output {i}'}: {problem}")
    return Comparison(title, limit, len(before), tuple(problems), worst)


def verdict(ranks: Sequence[Comparison]) -> Verdict:
    """One verdict for all ranks: that of the worst."""
    verdicts = [_of_rank(comparison) for comparison in ranks]
    rank = min(range(len(ranks)), key=lambda r: (SEVERITY.index(verdicts[r].outcome), -ranks[r].worst))
    worst = verdicts[rank]
    if len(ranks) == 1:
        return worst
    outcomes = [str(v.outcome) for v in verdicts]
    where = f"{len(ranks)} ranks, the worst" if worst.outcome is Outcome.PASS else f"rank {rank}"
    return Verdict("numerics", worst.outcome, f"{where}: {worst.message}",
                   {**worst.evidence, "ranks": outcomes, "worst_rank": rank})


def _of_rank(comparison: Comparison) -> Verdict:
    if comparison.unknown:
        return Verdict("numerics", Outcome.UNKNOWN, comparison.unknown)
    outputs, problems, bound = comparison.outputs, comparison.problems, comparison.bound
    evidence = {"contract": comparison.contract, "bound": bound, "worst": comparison.worst,
                "outputs": outputs, "wrong": len(problems)}
    if problems:
        text = f"{len(problems)} of {outputs} outputs break '{comparison.contract}'; {problems[0]}"
        return Verdict("numerics", Outcome.FAIL, text, evidence)
    within = "bitwise"
    if bound is not None:
        within = f"norm-relative at most {comparison.worst:.1e}, bound {bound:.1e}"
    return Verdict("numerics", Outcome.PASS, f"{outputs} outputs, {within}", evidence)
