"""Whether a pass keeps the values within its contract: on the same inputs, on every real rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.checks.verdicts import SEVERITY, Outcome, Verdict
from workbench.recipe.contracts import Numerics, PassContract
from workbench.torch_api.ops import is_fake

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIMES_MOVED = 8.0
_HALF = 0.5
"""A result may differ by this many times what it moves where the inputs move by one eps."""


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


def allowance(value: Any, moved: Any) -> float:
    """The norm-relative difference that rounding alone may make of a result: eight times that of `moved`, its value on
    inputs that `moved_by_eps` made, or in a second run.

    At most one half, which a lost or a doubled gradient exceeds, unless the result moves by more: then it is rounding
    alone. 0 for zeros, for integers, and where the two are NaN or infinite in different places.
    """
    relative = compare_one(value, moved, 0.0)[1]
    if not math.isfinite(relative):
        return 0.0
    return _TIMES_MOVED * relative if relative > _HALF else min(_TIMES_MOVED * relative, _HALF)


def moved_by_eps(values: Sequence[Any], eps: float) -> list[Any]:
    """Copies of the floating-point tensors, each element times 1 + eps or 1 - eps; the other values as they are.

    The signs are a fixed pattern, the same on every rank, as replicated parameters must be. float8 stays: it has no
    arithmetic.
    """
    moved = []
    for place, value in enumerate(values):
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype.itemsize > 1
        ):
            generator = torch.Generator().manual_seed(place)
            signs = 2 * torch.randint(2, value.shape, generator=generator).double() - 1
            value = value.detach().clone().mul_((1 + eps * signs).to(value.device, value.dtype))
        moved.append(value)
    return moved


def eps_of(graphs: Sequence[torch.fx.GraphModule]) -> float:
    """That of the lowest floating dtype in which the graphs compute; float8 has no arithmetic, and does not count."""
    values = [node.meta.get("val") for graph in graphs for node in graph.graph.nodes]
    wide = [v for v in values if isinstance(v, torch.Tensor) and v.dtype.itemsize > 1]
    return torch.finfo(coarsest(wide)).eps


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
    the contract. worst: the largest norm-relative difference of all outputs but those of `moved`. moved: the outputs
    beyond the bound, and within `allowance`, by name: (difference, allowance). unknown: why nothing was compared.
    """

    contract: str
    bound: float | None
    outputs: int = 0
    problems: tuple[str, ...] = ()
    worst: float = 0.0
    moved: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unknown: str = ""


def compare(before: Sequence[Any], after: Sequence[Any], contract: PassContract, *, group_size: int = 1,
            names: Sequence[str] | None = None, moved: Sequence[Any] | None = None) -> Comparison:
    """Compare two runs' flat outputs under the contract, on this rank.

    EXACT: the same bits, and NaN where NaN was. REDUCTION_ORDER: `reduction_order_bound` of the outputs' coarsest
    dtype. LOSSY: the contract's tolerance. Both bounds are norm-relative for each output. names: of the outputs, for
    the message. moved: the outputs before on inputs that `moved_by_eps` made, and for EXACT on the same ones, where
    `allowance` may widen a bound.
    """
    title = str(contract.numerics)
    if any(map(is_fake, [*before, *after])):
        return Comparison(title, None, unknown="fake tensors have no values: run on real ranks")
    if len(before) != len(after):
        problem = f"{len(before)} outputs before, {len(after)} after"
        return Comparison(title, None, len(before), (problem,), math.inf)
    limit = bound_of(contract, coarsest([*before, *after]), group_size)
    problems: list[str] = []
    worst, widened = 0.0, dict[str, tuple[float, float]]()
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        name = names[i] if names else f"output {i}"
        problem, relative = compare_one(a, b, limit)
        if problem and moved is not None:
            wide = max(limit or 0.0, allowance(a, moved[i]))
            if wide and not compare_one(a, b, wide)[0]:
                widened[name] = relative, wide
                continue
        worst = max(worst, relative)
        if problem:
            problems.append(f"{name}: {problem}")
    return Comparison(title, limit, len(before), tuple(problems), worst, widened)


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
    evidence: dict[str, Any] = {
        "contract": comparison.contract, "bound": bound, "worst": comparison.worst,
        "outputs": outputs, "wrong": len(problems),
    }
    if comparison.moved:
        evidence["moved"] = dict(comparison.moved)
    if problems:
        text = f"{len(problems)} of {outputs} outputs break '{comparison.contract}'; {problems[0]}"
        return Verdict("numerics", Outcome.FAIL, text, evidence)
    within = "bitwise"
    if bound is not None:
        within = f"norm-relative at most {comparison.worst:.1e}, bound {bound:.1e}"
    if comparison.moved:
        name, (relative, wide) = max(comparison.moved.items(), key=lambda entry: entry[1])
        why = "differ by no more than two runs of the graph before"
        if bound is not None:
            why = "beyond it by rounding alone, as inputs moved by one eps show"
        within += f"; {len(comparison.moved)} {why}: {name}, {relative:.1e}, bound {wide:.1e}"
    return Verdict("numerics", Outcome.PASS, f"{outputs} outputs, {within}", evidence)
