"""Rules that span a recipe's sections: passes against their contracts, the mesh against model and data. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from workbench.recipe.contracts import CONTRACTS, GONE, Stage, check_capture, check_passes, check_step
from workbench.recipe.strict_toml import Problem, check, freeze


def rule_problems(parts: Mapping[str, Any], sizes: Mapping[str, Any] | None) -> list[Problem]:
    """Every broken rule of the given parts (dumped sections of a recipe); absent parts are not checked."""
    joint, passes = parts.get("joint_passes", ()), parts.get("passes", ())
    problems = pass_problems(joint, passes, parts.get("free_order", False))
    mesh, data, expect = parts.get("mesh"), parts.get("data"), parts.get("expect")
    if mesh is not None:
        if mesh["dp_shard"] == mesh["dp_replicate"] == 1:
            problems += _needing(
                "fsdp",
                joint,
                passes,
                "needs FSDP, and the mesh has dp_shard 1 and dp_replicate 1: "
                "set mesh.dp_shard to 2 or more, or drop the pass",
            )
        problems += _expert_mesh_problems(mesh, sizes)
    if sizes is not None:
        problems += _model_problems(sizes)
        if sizes.get("dispatch") == "dropless":
            problems += _needing(
                "static_shapes",
                joint,
                passes,
                "needs sizes that are the same in every step, and dropless dispatch reads them from "
                'the device: set model.dispatch to "capacity", or drop the pass',
            )
    if mesh is not None and sizes is not None:
        for key in (k for k in ("n_heads", "n_kv_heads") if k in sizes):
            problems += _divides(f"model.{key}", sizes[key], "mesh.tp", mesh["tp"], "mesh.tp")
    if data is not None:
        if mesh is not None:
            problems += _divides("data.seq_len", data["seq_len"], "mesh.tp", mesh["tp"], "data.seq_len",
                                 " (the sequence is split over the tp axis)")
        longest = (sizes or {}).get("max_seq_len")
        if longest is not None and data["seq_len"] > longest:
            problems.append(
                Problem(
                    "data.seq_len",
                    f"{data['seq_len']} is more than model.max_seq_len "
                    f"{longest}: make it smaller, or that larger",
                )
            )
    if (training := parts.get("training")) is not None:
        problems += [Problem(f"passes[{i}]", message)
                     for i, message in check_step([p["name"] for p in passes], training["step"])]
        problems += _accumulation_problems(training, data, passes)
    problems += [
        Problem("capture", message)
        for _, message in check_capture(
            [p["name"] for p in (*joint, *passes)], parts.get("capture", "joint")
        )
    ]
    if expect is not None:
        listed = [p["name"] for p in (*joint, *passes)]
        problems += [
            Problem(
                "expect.no_effect", f"pass {name!r} is not in the recipe: list it, or drop it here"
            )
            for name in expect["no_effect"]
            if name not in listed
        ]
    return problems


def _accumulation_problems(
    training: Mapping[str, Any], data: Mapping[str, Any] | None, passes: Sequence[Mapping[str, Any]]
) -> list[Problem]:
    key, count, problems = "training.accumulate", training["accumulate"], list[Problem]()
    if count == 1:
        return []
    if training["step"] != "pair":
        problems.append(
            Problem(
                key,
                f"{count} microbatches have their gradients added up outside any graph, and "
                f'training.step is "{training["step"]}": set it to "pair", or accumulate to 1',
            )
        )
    if data is not None:
        problems += _divides("data.batch_per_rank", data["batch_per_rank"], key, count, key)
    for place, spec in enumerate(passes):
        if spec["name"] in CONTRACTS and CONTRACTS[spec["name"]].stage is Stage.REPLAY:
            problems.append(
                Problem(
                    f"passes[{place}]",
                    f"pass {spec['name']!r} writes over the gradients of the "
                    f"microbatch before, and training.accumulate is {count}: set it to 1, or drop the "
                    "pass",
                )
            )
    return problems


def pass_problems(
    joint: Sequence[Mapping[str, Any]],
    passes: Sequence[Mapping[str, Any]],
    free_order: bool = False,
) -> list[Problem]:
    """Misspelt names, wrong options, and broken rules of order."""
    problems: list[Problem] = []
    for where, listed in (("joint_passes", joint), ("passes", passes)):
        for i, spec in enumerate(listed):
            key, name = f"{where}[{i}]", spec["name"]
            contract = CONTRACTS.get(name)
            if contract is not None:
                problems += check(contract.options, freeze(spec["options"]), key)[1]
            # another name may be a user's pass, registered later: build checks those
            elif (
                close := [GONE[name]]
                if name in GONE
                else get_close_matches(name, CONTRACTS, 1, cutoff=0.8)
            ):
                problems.append(Problem(key, f"unknown pass {name!r}; did you mean {close[0]!r}?"))
    names = [[p["name"] for p in listed if p["name"]] for listed in (joint, passes)]
    return problems + [
        Problem("joint_passes, passes", m) for m in check_passes(*names, free_order=free_order)
    ]


def cuda_reasons(names: Sequence[str], attention: str) -> dict[str, str]:
    """Why passes of these names cannot run on CPU ranks: pass -> reason. Empty: CPU ranks are enough."""
    needs = {name: CONTRACTS[name].needs for name in names if name in CONTRACTS}
    return {
        name: "it runs on a GPU only"
        if "cuda" in need
        else "Inductor has no lowering for the backward of FlexAttention on a CPU"
        for name, need in needs.items()
        if "cuda" in need or ("compiler" in need and attention == "flex")
    }


def _needing(
    need: str, joint: Sequence[Mapping[str, Any]], passes: Sequence[Mapping[str, Any]], why: str
) -> list[Problem]:
    """A problem for each pass of the lists whose contract has this need."""
    return [
        Problem(f"{where}[{i}]", f"pass {spec['name']!r} {why}")
        for where, listed in (("joint_passes", joint), ("passes", passes))
        for i, spec in enumerate(listed)
        if spec["name"] in CONTRACTS and need in CONTRACTS[spec["name"]].needs
    ]


def _expert_mesh_problems(
    mesh: Mapping[str, Any], sizes: Mapping[str, Any] | None
) -> list[Problem]:
    ep, over = mesh["ep"], mesh["ep_over"]
    if ep == 1:
        return []
    if sizes is not None and (
        "n_experts" not in sizes or sizes.get("n_dense_layers", 0) >= sizes.get("n_layers", 1)
    ):
        return [Problem("mesh.ep", f"the model has no experts to place on {ep} ranks: set it to 1")]
    within = mesh["dp_shard"] * (mesh["tp"] if over == "dp_shard x tp" else 1)
    problems = _divides(f"{over}", within, "mesh.ep", ep, "mesh.ep")
    if sizes is not None:
        problems += _divides("model.n_experts", sizes["n_experts"], "mesh.ep", ep, "mesh.ep")
    return problems


_EXPERT_SIZES = {"n_experts", "n_groups", "top_groups", "top_k", "qk_rope_dim", "capacity_factor", "n_dense_layers",
                 "n_layers"}


def _model_problems(sizes: Mapping[str, Any]) -> list[Problem]:
    if set(sizes) >= _EXPERT_SIZES:
        return _expert_problems(sizes)
    if not {"dim", "n_heads", "n_kv_heads"} <= set(sizes):  # a user's own model
        return []
    dim, heads, kv_heads = sizes["dim"], sizes["n_heads"], sizes["n_kv_heads"]
    problems = _divides("model.dim", dim, "model.n_heads", heads, "model.dim")
    problems += _divides("model.n_heads", heads, "model.n_kv_heads", kv_heads, "model.n_kv_heads")
    if dim % heads == 0 and (dim // heads) % 2:
        problems.append(
            Problem(
                "model.dim",
                f"a head has {int(dim // heads)} channels ({dim} / {heads}), and rotary "
                f"embeddings rotate pairs: make it even",
            )
        )
    return problems


def _expert_problems(sizes: Mapping[str, Any]) -> list[Problem]:
    experts, groups, top_groups, top_k = (
        sizes[key] for key in ("n_experts", "n_groups", "top_groups", "top_k")
    )
    problems = _divides("model.n_experts", experts, "model.n_groups", groups, "model.n_groups")
    if top_groups > groups:
        problems.append(
            Problem(
                "model.top_groups",
                f"{top_groups} of {groups} groups cannot be chosen: at most {groups}",
            )
        )
    elif not problems and top_k > (limit := top_groups * (experts // groups)):
        problems.append(
            Problem(
                "model.top_k",
                f"{top_k} experts a token, and {top_groups} of {groups} groups hold "
                f"{limit}: lower it, or raise model.top_groups",
            )
        )
    if sizes["qk_rope_dim"] % 2:
        problems.append(
            Problem(
                "model.qk_rope_dim",
                f"{sizes['qk_rope_dim']} is odd, and rotary embeddings rotate pairs: make it even",
            )
        )
    if sizes["capacity_factor"] < 1:
        problems.append(
            Problem(
                "model.capacity_factor",
                f"{sizes['capacity_factor']} leaves too few rows even where "
                f"the load is balanced: make it 1 or more",
            )
        )
    if sizes["n_dense_layers"] > sizes["n_layers"]:
        problems.append(
            Problem(
                "model.n_dense_layers",
                f"{sizes['n_dense_layers']} of {sizes['n_layers']} layers: lower it",
            )
        )
    return problems


def _divides(
    quantity: str, size: float, by: str, parts: float, key: str, why: str = ""
) -> list[Problem]:
    if size % parts == 0:
        return []
    return [
        Problem(key, f"{quantity} {size} does not divide by {by} {parts}{why}: change one of them")
    ]
