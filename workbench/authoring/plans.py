"""How a model is laid out on a mesh, as data: no model code, and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from workbench.errors import WorkbenchError


class AuthoringError(WorkbenchError):
    """A plan, a mesh and a model that do not fit together."""


@dataclass(frozen=True)
class ParallelPlan:
    """Where tensor parallelism cuts a model, and what FSDP gathers together.

    tensor: module path pattern to style; the styles are in `tensor_parallel.py`. `*` stands for one path component
    ("layers.*.attention.wq"). Modules without a pattern keep whole parameters on each rank of the axis.
    units: patterns of what is gathered together, in the order of the forward; a tuple joins several into one unit.
    experts: patterns of modules whose parameters stack experts on dim 0. Each has an attribute `mesh`, which is set to
    the expert-parallel axis where there is one.
    """

    tensor: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    units: tuple[str | tuple[str, ...], ...] = ()
    experts: tuple[str, ...] = ()


def _swiglu(path: str) -> dict[str, Any]:
    return {
        path: {"style": "inputs", "input": ["shard(1)"], "wanted": ["replicate"]},
        f"{path}.w1": "colwise",
        f"{path}.w3": "colwise",
        f"{path}.w2": {"style": "rowwise", "output": "shard(1)"},
    }


LLAMA3_PLAN = ParallelPlan(
    tensor={
        "tok_embeddings": {"style": "rowwise", "input": "replicate", "output": "shard(1)"},
        "layers.*.attention_norm": "sequence",
        "layers.*.attention": {
            "style": "inputs",
            "input": ["shard(1)", None, None],
            "wanted": ["replicate", None, None],
        },
        "layers.*.attention.wq": "colwise",
        "layers.*.attention.wk": "colwise",
        "layers.*.attention.wv": "colwise",
        "layers.*.attention.wo": {"style": "rowwise", "output": "shard(1)"},
        "layers.*.ffn_norm": "sequence",
        **_swiglu("layers.*.feed_forward"),
        "norm": "sequence",
        "output": {"style": "colwise", "input": "shard(1)"},
        "loss": "vocabulary",
    },
    units=("tok_embeddings", "layers.*", ("norm", "output")),
)


def llama3_plan(sizes: Mapping[str, Any], tp: int) -> ParallelPlan:
    """LLAMA3_PLAN; where tp does not divide the vocabulary, logits are gathered for the loss."""
    return replace(
        LLAMA3_PLAN, tensor=_whole_vocabulary(LLAMA3_PLAN.tensor, sizes["vocab_size"], tp)
    )


def _whole_vocabulary(tensor: Mapping[str, Any], vocab_size: int, tp: int) -> Mapping[str, Any]:
    if vocab_size % tp == 0:
        return tensor
    gathered = {
        **tensor,
        "output": {"style": "colwise", "input": "shard(1)", "output": "replicate"},
    }
    del gathered["loss"]
    return gathered


_LOCAL_SEQUENCE = {"style": "sequence", "local": True}
_ROWS = {**_LOCAL_SEQUENCE, "dim": 0}


def deepseek_v3_plan(sizes: Mapping[str, Any], tp: int) -> ParallelPlan:
    """Heads and dense layers over tp, as in llama3; latents, router and experts on each rank's part of the sequence.

    The narrow latents are computed on that part, and gathered afterwards.
    """
    gathering = {"style": "colwise", "input": "shard(1)"}
    attention: dict[str, Any] = {
        "wq": gathering,
        "wkv_a": _ROWS,
        "kv_norm": _LOCAL_SEQUENCE,
        "wkv": gathering,
        "rope_key": "everywhere",
        "wo": {"style": "rowwise", "output": "shard(1)"},
    }
    if sizes["q_lora_rank"]:
        attention |= {"wq_a": _ROWS, "q_norm": _LOCAL_SEQUENCE}
    dense, layers = sizes["n_dense_layers"], sizes["n_layers"]
    tensor: dict[str, Any] = {
        "tok_embeddings": LLAMA3_PLAN.tensor["tok_embeddings"],
        "layers.*.attention_norm": _LOCAL_SEQUENCE,
        **{f"layers.*.attention.{name}": style for name, style in attention.items()},
        "layers.*.ffn_norm": _LOCAL_SEQUENCE,
    }
    if dense:
        tensor |= _swiglu("layers.*.feed_forward")
    if dense < layers:
        tensor["layers.*.moe.router.gate"] = _ROWS
        tensor |= _swiglu("layers.*.moe.shared_experts")
    tensor |= {path: LLAMA3_PLAN.tensor[path] for path in ("norm", "output", "loss")}
    experts = ("layers.*.moe.experts",) if dense < layers else ()
    return ParallelPlan(
        _whole_vocabulary(tensor, sizes["vocab_size"], tp), LLAMA3_PLAN.units, experts
    )


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that `pattern` matches, component by component, in their given order."""
    parts = pattern.split(".")
    return [
        path
        for path in paths
        if len(path.split(".")) == len(parts)
        and all(fnmatchcase(have, want) for have, want in zip(path.split("."), parts, strict=True))
    ]


def matched(pattern: str, paths: Iterable[str], where: str) -> list[str]:
    """The same; AuthoringError, which begins with `where`, if `pattern` matches no path."""
    paths = list(paths)
    if matches := matching(pattern, paths):
        return matches
    named = [path for path in paths if path]
    some = ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")
    raise AuthoringError(f"plan: {where} {pattern!r} matches no module; modules are {some}")


def expand_units(plan: ParallelPlan, paths: Iterable[str]) -> list[str | list[str]]:
    """The plan's units with their patterns replaced by module paths. AuthoringError for one that matches nothing."""
    paths = list(paths)
    units: list[str | list[str]] = []
    for unit in plan.units:
        if isinstance(unit, str):
            units += matched(unit, paths, "unit")
        else:
            units.append([name for pattern in unit for name in matched(pattern, paths, "unit")])
    return units
