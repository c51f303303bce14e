"""The passes of torchtitan 0.3.0's graph_trainer under the verdicts of this package: nodes, launches, outcomes.

    python benchmarks/graph_trainer_passes.py FILE.jsonl [--torchtitan FOLDER] [--recipes NAME ...] [--lists NAME ...]

Three recipes on gloo ranks, or where there is a GPU three on one NCCL rank, and then the faults of
graph_trainer_exhibits.py. FOLDER is what `pip install --no-deps --target FOLDER torchtitan==0.3.0 spmd_types==0.2.3`
filled: by default the folder graph_trainer of this Python's environment, and without that an installed torchtitan. What
torchtitan imports for data, command lines and boards is not used here, and is replaced where it is missing (`prepare`).
A line of FILE is a pass in a list on a recipe, as soon as that list has run.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.reference import fill_in  # noqa: E402
from workbench import WorkbenchError, author, capture, current_world, judge_graph_passes, judged  # noqa: E402
from workbench.checks.collectives import collectives_of  # noqa: E402
from workbench.checks.record import PassRecord, step_verdicts  # noqa: E402
from workbench.graph.read.peak import live_bytes  # noqa: E402
from workbench.passes.activation_checkpointing import CheckpointOptions  # noqa: E402
from workbench.passes.registry import find_pass  # noqa: E402
from workbench.pipeline.machine import gpus, machine, versions  # noqa: E402
from workbench.recipe.recipe import Recipe  # noqa: E402
from workbench.torch_api import aot  # noqa: E402
from workbench.torch_api.restoring import shard_of  # noqa: E402
from workbench.world.ranks import RankError, ranks  # noqa: E402

Row = dict[str, Any]
Pass = Callable[..., Any]
FOLDER = Path(sys.prefix) / "graph_trainer"
PACKAGE = "torchtitan.experiments.graph_trainer"
RENAMES = {"output": "lm_head", "moe.experts": "moe.routed_experts.inner_experts"}
"""Parts of our module paths, and what torchtitan calls them."""
_SMALL: dict[str, Any] = {"model": {"n_layers": 2}, "data": {"seq_len": 64}}
_EXPERTS: dict[str, Any] = _SMALL | {"model": {"family": "deepseek_v3", "n_layers": 2}}
_HALF: dict[str, Any] = _SMALL | {"precision": {"param": "bfloat16", "reduce": "float32"}}
RECIPES: dict[str, dict[str, Any]] = {
    "llama3_fsdp2": _SMALL | {"mesh": {"dp_shard": 2}},
    "llama3_fsdp2_tp2": _SMALL | {"mesh": {"dp_shard": 2, "tp": 2}},
    "deepseek_v3_fsdp2_tp2_ep2": _EXPERTS | {"mesh": {"dp_shard": 2, "tp": 2, "ep": 2}},
    "llama3_one_rank": _SMALL,
    "llama3_bfloat16_one_rank": _HALF,
    "deepseek_v3_one_rank": _EXPERTS,
}


def prepare(folder: str | None) -> None:
    """Let this process import torchtitan's graph_trainer; empty modules stand for what it imports and is not used."""
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    fill_in()


def theirs(place: str, **bound: Any) -> Pass:
    """The pass "MODULE:NAME" of graph_trainer; where it cannot be imported, one that raises what the import did."""
    module, name = place.split(":")
    try:
        function = getattr(import_module(f"{PACKAGE}.{module}"), name)
    except ImportError as error:
        reason = error

        def function(gm: Any, example_inputs: Any) -> Any:
            raise reason

        function.__name__ = name
        return function
    return functools.partial(function, **bound) if bound else function


def without_triton(function: Pass) -> Pass:
    """Bucketing asks triton for the bandwidth of a GPU's memory, to estimate times: here it is that of an H100."""
    if torch.cuda.is_available():
        return function
    triton, testing = types.ModuleType("triton"), types.ModuleType("triton.testing")
    triton.__path__ = []
    testing.get_dram_gbps = lambda *_: 3350.0  # type: ignore[attr-defined]

    @functools.wraps(getattr(function, "func", function))
    def run(gm: Any, example_inputs: Any) -> Any:
        with mock.patch.dict(sys.modules, {"triton": triton, "triton.testing": testing}):
            return function(gm, example_inputs)

    del run.__wrapped__  # its signature has a plan, which is bound
    return run


def tag_full_recomputation(gm: Any, example_inputs: Any) -> Any:
    """Our own tags, for a torch on which their policies cannot be imported."""
    options = CheckpointOptions(policy="full")
    return find_pass("activation_checkpointing").function(gm, example_inputs, options=options)


def full_recomputation() -> Pass:
    policy = theirs("memory_policy:tag_with_memory_policy_pass", config=SimpleNamespace(
        compile=SimpleNamespace(memory_policy="full", cpu_offload_budget_gb=100.0),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward="always", pipeline_parallel_degree=1)))
    return policy if isinstance(policy, functools.partial) else tag_full_recomputation


def default(names: list[str]) -> list[Pass]:
    """Their default list with full recomputation, a second group for gathers, and async tensor parallelism.

    names: of the parameters, as torchtitan has them. Left out: CUDA graphs, which replace the module's forward.
    """
    numbers = {int(name.split(".")[1]): ".moe." in name for name in sorted(names) if name.startswith("layers.")}
    plan = import_module(f"{PACKAGE}.common_utils").get_default_transformer_block_buckets(
        len(numbers), moe_layer_ids=frozenset(n for n, experts in numbers.items() if experts),
        split_moe_expert_buckets=True)
    order = import_module(f"{PACKAGE}.fsdp_passes").get_fsdp_param_module_order(names)
    bucketing = theirs("fsdp_passes:joint_transformer_block_bucketing_reordering_pass", module_bucket_plans=plan,
                       fsdp_param_module_order=order)
    return [
        theirs("remove_noop_passes:eliminate_dead_code_pass"),
        theirs("remove_noop_passes:canonicalize_graph_pass"),
        theirs("fsdp_passes:deduplicate_fsdp_unshard_chains_pass"),
        full_recomputation(),
        theirs("cpu_offload:apply_cpu_offload_pass", prefetch_lookahead=1, defer_n_layers=1),
        theirs("selective_activation_remat:selective_activation_remat_pass"),
        theirs("fsdp_passes:reassign_collective_pgs_pass"),
        without_triton(bucketing),
        theirs("passes:async_tensor_parallel_pass"),
        theirs("inductor_passes:annotate_flex_attention_for_regional_inductor_pass", flex_compile_config={}),
        theirs("inductor_passes:regional_inductor_pass"),
    ]


def offload(names: list[str]) -> list[Pass]:
    """All large activations but the last layer's go to the host."""
    return [
        theirs("remove_noop_passes:canonicalize_graph_pass"),
        theirs("cpu_offload:tag_all_offloadable_activations"),
        theirs("cpu_offload:apply_cpu_offload_pass", prefetch_lookahead=1, defer_n_layers=1),
    ]


def inductor(names: list[str]) -> list[Pass]:
    """Inductor compiles loss and gradients as one."""
    return [
        theirs("remove_noop_passes:canonicalize_graph_pass"),
        theirs("inductor_passes:full_inductor_compilation_pass"),
    ]


LISTS: dict[str, Callable[[list[str]], list[Pass]]] = {
    "default": default, "offload": offload, "inductor": inductor}


def judge_on_rank(folder: str | None, described: dict[str, Any], listed: str) -> list[Row]:
    """The rows of one list on one recipe. Every rank of the world calls it; a refused pass is a row, and left out."""
    prepare(folder)
    recipe, world = Recipe(**described), current_world()
    authored = author(recipe, world)
    names = [_renamed(name) for name, _ in authored.module.named_parameters()]
    passes, rows = LISTS[listed](names), list[Row]()
    while True:
        try:
            if listed == "inductor":  # one call, which cannot be cut into forward and backward
                records, verdicts = _whole(authored, passes), []
            else:
                records, step = judge_graph_passes(passes, recipe, world, renames=RENAMES)
                verdicts = step_verdicts(step.split.known)
                step.close()
            break
        except WorkbenchError as error:
            refused = re.search(r"pass '(\w+)' (.*)", str(error), re.DOTALL)
            kept = [p for p in passes if refused is None or _name(p) != refused[1]]
            if refused is None or len(kept) == len(passes):
                raise
            reason = refused[2].replace(f"{folder}/", "").replace(f"{ROOT}/", "")  # may lie in ROOT
            rows.append({"pass": refused[1], "refused": reason})
            passes = kept
    rows += map(_row, records)
    if verdicts:
        rows.append({"pass": "", "verdicts": {v.check: str(v.outcome) for v in verdicts},
                     "messages": {v.check: v.message for v in verdicts}})
    return rows


def _renamed(name: str) -> str:
    from workbench.lab.graph_passes.bridge import renamed

    return renamed(name, RENAMES)


def _name(function: Pass) -> str:
    return str(getattr(function, "func", function).__name__)


def _whole(authored: Any, passes: list[Pass]) -> list[PassRecord]:
    """The passes inside a trainer that calls the graph of loss and gradients with flat inputs."""
    batch = authored.microbatch()
    with capture(authored, by="traced") as joint:
        gm = aot.clone(joint.graph)
        inputs = joint.example_inputs
    aot.set_convention(gm, torch.fx.graph.CodeGen())
    tangent = torch.ones((), device=authored.world.device)
    state = [*authored.module.parameters(), *authored.module.buffers()]
    return judged(gm, inputs, passes, [*(shard_of(value).detach() for value in state), *batch, tangent])[1]


def _row(record: PassRecord) -> Row:
    sides = [record.before, record.after]
    return {
        "pass": record.name,
        "nodes": [sum(len(graph.graph.nodes) for graph in graphs) for graphs in sides],
        "launches": [len(collectives_of(graphs)) for graphs in sides],
        "peak_bytes": [max(live_bytes(graph).peak_bytes for graph in graphs) for graphs in sides],
        "seconds": record.seconds,
        "contract": record.item.contract.changes,
        "verdicts": {verdict.check: str(verdict.outcome) for verdict in record.verdicts},
        "messages": {verdict.check: verdict.message for verdict in record.verdicts if verdict.message},
    }


def rows_of(name: str, listed: str, folder: str | None) -> Iterator[Row]:
    """The rows of one list on one recipe, on as many new ranks as its mesh has; one that says why there are none."""
    described = {"name": name, **RECIPES[name]}
    size = 1
    for axis, ranks_of in described.get("mesh", {}).items():
        size *= 1 if axis == "ep" else ranks_of  # the experts' ranks are among the others
    backend = "nccl" if gpus() else "gloo"
    common = {"recipe": described, "list": listed, "world": backend, "ranks": size}
    if gpus() and gpus() < size:
        yield common | {"pass": "", "refused": f"needs {size} GPUs, and there are {gpus()}"}
        return
    try:
        with ranks(size, backend=backend, timeout=500, echo="none") as pool:
            yield from (common | row for row in pool.run(judge_on_rank, folder, described, listed)[0])
    except RankError as error:
        yield common | {"pass": "", "refused": str(error).splitlines()[0]}


def exhibits() -> Iterator[Row]:
    """What is told of each exhibit, or why it cannot be shown here."""
    from benchmarks.graph_trainer_exhibits import EXHIBITS

    for exhibit in EXHIBITS:
        row = {"exhibit": exhibit.name, "bug": exhibit.bug, "seen": exhibit.seen, "caught": exhibit.caught}
        try:
            yield row | {"verdict": exhibit.shown()}
        except ImportError as error:
            yield row | {"refused": f"torch {torch.__version__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--torchtitan", default=str(FOLDER) if FOLDER.is_dir() else None)
    recipes = [name for name in RECIPES if name.endswith("one_rank") == bool(gpus())]
    parser.add_argument("--recipes", nargs="*", default=recipes, choices=RECIPES)
    parser.add_argument("--lists", nargs="*", default=list(LISTS), choices=LISTS)
    args = parser.parse_args()
    prepare(args.torchtitan)
    of_all = {"command": f"python benchmarks/graph_trainer_passes.py {args.file}", "machine": machine(),
              "versions": versions() | {"torchtitan": metadata.version("torchtitan")}}
    with args.file.open("w", encoding="utf-8") as file:
        for name in args.recipes:
            for listed in args.lists:
                for row in rows_of(name, listed, args.torchtitan):
                    file.write(json.dumps(of_all | row) + "\n")
                    print(name, listed, row["pass"], row.get("verdicts") or row.get("refused"), flush=True)
                file.flush()
        for row in exhibits():
            file.write(json.dumps(of_all | row) + "\n")
            print(row["exhibit"], row.get("verdict") or row.get("refused"), flush=True)


if __name__ == "__main__":
    main()
