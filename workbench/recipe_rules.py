"""Rules between the parts of a recipe: passes against their contracts, the mesh against model and data. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .contracts import CONTRACTS, check_passes
from .declare import Problem, check, freeze


def rule_problems(parts: Mapping[str, Any], sizes: Mapping[str, float] | None) -> list[Problem]:
    """Every broken rule of the parts given (dumped sections of a recipe); a part that is absent is not checked."""
    joint, passes = parts.get("joint_passes", ()), parts.get("passes", ())
    problems = pass_problems(joint, passes)
    mesh, data, expect = parts.get("mesh"), parts.get("data"), parts.get("expect")
    if mesh is not None:
        problems += _needs_fsdp(joint, passes, mesh)
        if mesh["ep"] > 1:
            problems.append(Problem("mesh.ep", f"the model has no experts to place on {mesh['ep']} ranks: set it to 1"))
    if sizes is not None:
        problems += _model_problems(sizes)
    if mesh is not None and sizes is not None:
        for key in ("n_heads", "n_kv_heads"):
            problems += _divides(f"model.{key}", sizes[key], "mesh.tp", mesh["tp"], "mesh.tp")
    if data is not None:
        if mesh is not None:
            problems += _divides("data.seq_len", data["seq_len"], "mesh.tp", mesh["tp"], "data.seq_len",
                                 " (the sequence is split over the tp axis)")
        longest = (sizes or {}).get("max_seq_len")
        if longest is not None and data["seq_len"] > longest:
            problems.append(Problem("data.seq_len", f"{data['seq_len']} is more than model.max_seq_len "
                                                    f"{longest}: make it smaller, or that larger"))
    if expect is not None:
        listed = [p["name"] for p in (*joint, *passes)]
        problems += [
            Problem("expect.no_effect", f"pass {name!r} is not in the recipe: list it, or drop it here")
            for name in expect["no_effect"] if name not in listed
        ]
    return problems


def pass_problems(joint: Sequence[Mapping[str, Any]], passes: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Misspelt names, options against the contracts' models, and the order rules."""
    problems: list[Problem] = []
    for where, listed in (("joint_passes", joint), ("passes", passes)):
        for i, spec in enumerate(listed):
            key, name = f"{where}[{i}]", spec["name"]
            contract = CONTRACTS.get(name)
            if contract is not None:
                problems += check(contract.options, freeze(spec["options"]), key)[1]
            # a far name may be a user's own pass, registered later: build checks those
            elif close := get_close_matches(name, CONTRACTS, 1, cutoff=0.8):
                problems.append(Problem(key, f"unknown pass {name!r}; did you mean {close[0]!r}?"))
    names = [[p["name"] for p in listed if p["name"]] for listed in (joint, passes)]
    return problems + [Problem("joint_passes, passes", m) for m in check_passes(*names)]


def cuda_reasons(names: Sequence[str], attention: str) -> dict[str, str]:
    """Why passes of these names keep a recipe from CPU ranks: pass -> reason. Empty: CPU ranks will do."""
    needs = {name: CONTRACTS[name].needs for name in names if name in CONTRACTS}
    return {
        name: "it runs on a GPU only" if "cuda" in need
        else "Inductor has no lowering for the backward of FlexAttention on a CPU"
        for name, need in needs.items() if "cuda" in need or ("compiler" in need and attention == "flex")
    }


def _needs_fsdp(joint: Sequence[Mapping[str, Any]], passes: Sequence[Mapping[str, Any]],
                mesh: Mapping[str, int]) -> list[Problem]:
    if mesh["dp_shard"] > 1 or mesh["dp_replicate"] > 1:
        return []
    return [
        Problem(f"{where}[{i}]", f"pass {spec['name']!r} needs FSDP, and the mesh has dp_shard 1 and dp_replicate 1: "
                                 f"set mesh.dp_shard to 2 or more, or drop the pass")
        for where, listed in (("joint_passes", joint), ("passes", passes))
        for i, spec in enumerate(listed)
        if spec["name"] in CONTRACTS and "fsdp" in CONTRACTS[spec["name"]].needs
    ]


def _model_problems(sizes: Mapping[str, float]) -> list[Problem]:
    dim, heads, kv_heads = sizes["dim"], sizes["n_heads"], sizes["n_kv_heads"]
    problems = _divides("model.dim", dim, "model.n_heads", heads, "model.dim")
    problems += _divides("model.n_heads", heads, "model.n_kv_heads", kv_heads, "model.n_kv_heads")
    if dim % heads == 0 and (dim // heads) % 2:
        problems.append(Problem("model.dim", f"a head has {int(dim // heads)} channels ({dim} / {heads}), and rotary "
                                             f"embeddings rotate pairs: make it even"))
    return problems


def _divides(what: str, size: float, by: str, parts: float, key: str, why: str = "") -> list[Problem]:
    if size % parts == 0:
        return []
    return [Problem(key, f"{what} {size} does not divide by {by} {parts}{why}: change one of them")]
