"""Step time of llama3 or deepseek_v3 on GPUs, ours and its peers: same model, data, seeds and optimizer, one process a
rank.

    python benchmarks/step_time.py RESULTS.jsonl VARIANT... [--family deepseek_v3] [--ranks 4] [--together 6]
                                   [--rounds 2] [--seconds 200] [--set KEY=VALUE ...]

A variant is `eager` (FSDP2 + TP + EP), `compile` (the same, each block by torch.compile), `compile_optimizer` (and the
optimizer's step), `compile_float8_tensorwise` or `_rowwise` (with torchao, the extra `float8`), one of
benchmarks/reference.py (torchtitan's compiler toolkit, the extra `reference`), one of OWN
below, or the name of a recipe of ours. Each runs in processes of its own, and appends a line to RESULTS.jsonl for
each round; a variant that has a line with the same settings is not run again. `--together` of them are built at once,
with a limit of `--seconds`; then they are timed one at a time, the others waiting, each once a round: so they share a
minute and a host.
`predicted_gib` is what the memory verdict predicts; `first_peak_gib` is the allocator's peak over the first steps, in
which CUDA graphs are recorded, and `peak_gib` that of the timed steps, in which they allocate nothing.
Medians of CUDA events over `--steps` steps after `--warmup`; kernels and exposed NCCL from one profiled step.
deepseek_v3 has the sizes of torchtitan's debug model. No variant moves its routers' bias between steps; static capacity
drops what finds no room: `dropped` is its part of a last step's copies on rank 0. `--traces FOLDER` also writes each
variant's two traced steps there, for `workbench order`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from workbench.recipe.recipe import Recipe

COMMON = {"data.seq_len": 2048, "data.batch_per_rank": 4, "precision.param": "bfloat16", "mesh.dp_shard": 2,
          "mesh.tp": 2, "training.deterministic": False}
DEEPSEEK = {"dim": 256, "n_layers": 6, "n_dense_layers": 1, "n_heads": 16, "vocab_size": 2048, "ffn_dim": 1024,
            "expert_dim": 256, "n_experts": 8, "n_shared_experts": 2, "top_k": 3, "n_groups": 1, "top_groups": 1,
            "score": "softmax", "normalise": False, "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_dim": 128,
            "qk_rope_dim": 64, "v_dim": 128, "norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {**COMMON, "model.flavor": "1b"},
    "deepseek_v3": {**COMMON, **{f"model.{name}": size for name, size in DEEPSEEK.items()},
                    "mesh.ep": 2, "mesh.ep_over": "dp_shard x tp"},
}
H200X2 = {"name": "overlap_collectives", "device": "h200x2"}  # by what was measured on two of them
OFFLOAD = {"name": "offload_activations", "device": "h200x2"}
BLOCKS, LOWERED = "transformer_block_bucketing", ["full_inductor_compilation", "cudagraph"]
FLOAT8 = ["inductor_decomposition", "float8_matmul"]
WHOLE_FLOAT8 = {"training.step": "whole", "joint_passes": FLOAT8,
                "passes": [BLOCKS, H200X2, "fused_clip_adamw", *LOWERED]}
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # of which recipe of ours, and what it changes
    "llama3_fsdp": ("llama3_fsdp", {"mesh.dp_shard": 4, "mesh.tp": 1}),
    "llama3_hsdp": ("llama3_hsdp", {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.tp": 1}),
    "llama3_tp": ("llama3_tp", {"mesh.dp_shard": 1, "mesh.tp": 4}),
    "llama3_full_inductor_cudagraph": ("llama3_full_inductor", {"passes": ["full_inductor_compilation", "cudagraph"]}),
    "llama3_calibrated_cudagraph": ("llama3_full_inductor", {"passes": [BLOCKS, H200X2, *LOWERED]}),
    "llama3_whole_step_cudagraph": ("llama3_whole_step", {"passes": [BLOCKS, H200X2, *LOWERED]}),
    "llama3_whole_step_fused_cudagraph": (
        "llama3_whole_step", {"passes": [BLOCKS, H200X2, "fused_clip_adamw", *LOWERED]}),
    "llama3_whole_step_fused": ("llama3_whole_step", {"passes": [BLOCKS, "fused_clip_adamw", LOWERED[0]]}),
    "llama3_float8_cudagraph": ("llama3_float8", {"joint_passes": FLOAT8, "passes": [BLOCKS, H200X2, *LOWERED]}),
    "llama3_float8_whole_step_cudagraph": ("llama3_float8", WHOLE_FLOAT8),
    "llama3_float8_whole_step_gathers_bfloat16": (
        "llama3_float8", {**WHOLE_FLOAT8, "joint_passes.float8_matmul.float8_gathers": False}),
    "llama3_float8_whole_step_all_sizes": (
        "llama3_float8", {**WHOLE_FLOAT8, "joint_passes.float8_matmul.smallest": 16}),
    "llama3_float8_whole_step_rowwise": (
        "llama3_float8", {**WHOLE_FLOAT8, "joint_passes.float8_matmul.scaling": "rowwise"}),
    "llama3_float8_whole_step_two_products": ("llama3_float8", {
        **WHOLE_FLOAT8, "joint_passes.float8_matmul.products": ["forward", "input_gradient"]}),
    "llama3_chunked_loss_cudagraph": ("llama3_chunked_loss", {"passes": [BLOCKS, *LOWERED]}),
    "llama3_whole_step_chunked_loss_cudagraph": ("llama3_chunked_loss", {"passes": [BLOCKS, *LOWERED],
                                                                         "training.step": "whole"}),
    "llama3_offload_hidden": ("llama3_offload", {"passes": [BLOCKS, OFFLOAD, LOWERED[0]]}),
    "llama3_offload_all": ("llama3_offload", {"passes": [BLOCKS, {**OFFLOAD, "choose": "all"}, LOWERED[0]]}),
    "llama3_offload_hidden_cudagraph": ("llama3_offload", {"passes": [BLOCKS, OFFLOAD, *LOWERED]}),
    "llama3_whole_step_offload_cudagraph": ("llama3_whole_step", {"passes": [BLOCKS, OFFLOAD, *LOWERED]}),
    "llama3_tp_calibrated_cudagraph": ("llama3_full_inductor", {"passes": [H200X2, *LOWERED]}),
    "llama3_tp_async_cudagraph": (
        "llama3_full_inductor", {"passes": [{"name": "async_tensor_parallel", "device": "h200x2"}, H200X2, *LOWERED]}),
    "llama3_tp_whole_step_cudagraph": ("llama3_whole_step", {"passes": [H200X2, "fused_clip_adamw", *LOWERED]}),
    "deepseek_v3_capacity": ("deepseek_v3", {"model.dispatch": "capacity"}),
    "deepseek_v3_capacity_cudagraph": ("deepseek_v3", {"model.dispatch": "capacity", "passes": ["cudagraph"]}),
    "deepseek_v3_capacity_block_bucketing_cudagraph": (
        "deepseek_v3", {"model.dispatch": "capacity", "passes": ["transformer_block_bucketing", "cudagraph"]}),
}
BUCKETED = "llama3_full_inductor_block_bucketing_cudagraph"


def joint(*passes: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return BUCKETED, {"joint_passes": ["inductor_decomposition", *passes]}


def budget(gib: float, **options: Any) -> dict[str, Any]:
    return {"name": "memory_budget", "gib": gib, "device": "h200x2", **options}


OWN |= {f"llama3_budget_{gib}": joint(budget(gib)) for gib in (10.0, 8.5, 7.0, 5.0)}
OWN |= {f"llama3_budget_{gib}_reshard": joint("reshard_after_forward", budget(gib)) for gib in (8.5, 7.0, 5.0, 3.0)}
THREE_WAY = [BLOCKS, {**OFFLOAD, "choose": "planned"}, *LOWERED]
OWN |= {f"llama3_budget_{gib}_offload": ("llama3_offload", {
    "joint_passes": ["inductor_decomposition", budget(gib, offload=True)], "passes": THREE_WAY})
    for gib in (8.5, 7.0, 5.0)}
OWN |= {f"llama3_float8_budget_{gib}": ("llama3_float8", {
    "joint_passes": [*FLOAT8, budget(gib)], "passes": [BLOCKS, H200X2, *LOWERED]}) for gib in (7.0, 5.0)}
OWN |= {f"llama3_float8_whole_step_reshard_budget_{gib}": ("llama3_float8", {
    **WHOLE_FLOAT8, "joint_passes": [*FLOAT8, "reshard_after_forward", budget(gib)]})
    for gib in (6.0, 5.7, 5.5, 5.4, 5.0)}
OWN |= {f"llama3_float8_budget_{gib}_offload": ("llama3_float8", {
    "joint_passes": [*FLOAT8, budget(gib, offload=True)], "passes": THREE_WAY}) for gib in (6.0, 5.4)}
OWN["llama3_8b_budget"] = "llama3_whole_step", {
    "joint_passes": ["inductor_decomposition", "reshard_after_forward", budget(45.0)],
    "passes": [BLOCKS, "fused_clip_adamw", LOWERED[0]]}
OWN["llama3_full_checkpointing"] = joint({"name": "activation_checkpointing", "policy": "full"})
TORCH = {f"llama3_torch_budget_{share}": share for share in (0.7, 0.5, 0.3)}
"""torch's own `activation_memory_budget`, in the place of ours."""
OWN |= {variant: joint() for variant in TORCH}
PEERS: dict[str, dict[str, Any]] = {
    "eager": {}, "compile": {"compiled": True}, "compile_optimizer": {"compiled": True},
    "compile_float8_tensorwise": {"compiled": True, "float8": "tensorwise"},  # torchao's, the extra `float8`
    "compile_float8_rowwise": {"compiled": True, "float8": "rowwise"},
}


def finite(losses: Sequence[float]) -> list[str]:
    """The losses, exactly, as hexadecimal floats; ValueError where one is no number: such a run measures nothing."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise ValueError(f"step {step}: the loss is {loss}: what runs is not a training step")
    return [float(loss).hex() for loss in losses]


def recipe_of(variant: str, family: str, changes: dict[str, Any]) -> Recipe:
    """What the variant runs: the family's settings, then its own, then `changes`."""
    from benchmarks.reference import RECIPES
    from workbench import load_recipe

    base, own = OWN.get(variant, (family if variant in PEERS or variant in RECIPES else variant, {}))
    recipe = load_recipe(base)
    if recipe.model.family != family:
        raise ValueError(f"{variant} is of family {recipe.model.family}: run it with --family {recipe.model.family}")
    return recipe.override({**MODELS[recipe.model.family], **own, **changes})


def measure(options: argparse.Namespace, changes: dict[str, Any], rounds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One variant on this rank of the world that torchrun made: what was found in each of `rounds`."""
    import torch
    import torch.distributed as dist

    from benchmarks.peers import fsdp2, precompute
    from benchmarks.reference import RECIPES, close, toolkit
    from workbench import build
    from workbench.authoring.author import Authored
    from workbench.graph.whole_step import WholeStep
    from workbench.pipeline.expert_load import routed_layers
    from workbench.pipeline.machine import machine, versions
    from workbench.pipeline.run import predicted_peak
    from workbench.pipeline.run_passes import prove_replay
    from workbench.pipeline.step_profile import profile_of
    from workbench.pipeline.train import Batches, apart, optimizer_of
    from workbench.torch_api.partitioning import memory_budget
    from workbench.world.mesh import current_world

    variant, family, steps, warmup = options.variants[0], options.family, options.steps, options.warmup
    world = current_world()
    recipe = recipe_of(variant, family, changes)
    begun = time.perf_counter()
    built, step = None, None
    if variant in RECIPES:
        module, step = toolkit(recipe, world, variant)
    elif variant in PEERS:
        module = step = fsdp2(recipe, world, **PEERS[variant])
    else:
        with memory_budget(TORCH[variant]) if variant in TORCH else nullcontext():
            built = build(recipe, world)
        module, step = built.authored.module, built.step
    authored = built.authored if built else Authored(module, world, world.mesh(recipe.mesh), [], {}, recipe=recipe)
    batches = Batches(authored)
    data = [batches.at(i) for i in range(steps + warmup + 1)]
    if isinstance(step, WholeStep):
        train_step: Any = step
    else:
        optimizer = optimizer_of(authored)
        if variant == "compile_optimizer":
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        if PEERS.get(variant, {}).get("float8") == "tensorwise":
            optimizer.register_step_post_hook(lambda *_: precompute(module))
        train_step = apart(authored, step, optimizer)
    losses: list[torch.Tensor] = []

    def one(index: int) -> None:
        loss, _ = train_step(*data[index])
        losses.append((loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach().clone())

    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None

    def mark() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    wait()
    started = time.perf_counter()
    one(0)
    wait()
    first, first_peak = time.perf_counter() - started, 0
    for turn in rounds:
        for index in range(1, warmup):
            one(index)
        wait()
        if cuda:
            first_peak = max(first_peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        marks = [mark()]
        for index in range(steps):
            one(warmup + index)
            marks.append(mark())
        enqueue = (time.perf_counter() - begin) / steps
        wait()
        times = [a.elapsed_time(b) if cuda else (b - a) * 1e3 for a, b in itertools.pairwise(marks)]
        tokens = recipe.data.seq_len * recipe.data.batch_per_rank * recipe.mesh.dp
        found = {
            "variant": variant, "family": family, "changes": changes, "round": turn,
            "step_ms": statistics.median(times), "steps_ms": times,
            "tokens_per_second": tokens / statistics.median(times) * 1e3, "enqueue_ms": enqueue * 1e3,
            "first_step_s": first, "build_s": started - begun,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "losses": finite([float(x) for x in losses]),
            **(asdict(profile_of(lambda: one(warmup))) if cuda else {}),
            "machine": machine(), "versions": versions(), "command": options.command, "recipe": recipe.to_dict(),
        }
        if options.traces and turn == 0:
            from benchmarks.traces import save_trace

            save_trace(lambda: one(warmup), options.traces / f"{variant}.rank{dist.get_rank()}.json.gz")
        losses.clear()
        if built is not None:
            found |= {"predicted_gib": predicted_peak(built).bytes / 2**30, "first_peak_gib": first_peak / 2**30,
                      "saved_gib": built.saved_bytes / 2**30}
        if routed := list(routed_layers(authored.module).values()):
            found["dropped"] = float(sum(x.dropped for x in routed) / sum(x.tokens.sum() for x in routed))
        if built is not None:
            if turn == 0:
                prove_replay(built.records)
            found["passes"] = [{"name": r.name, "outcome": str(r.outcome), "seconds": r.seconds} for r in built.records]
        yield found
    if built is not None:
        built.step.close()
    if variant in RECIPES:
        close(module)


def worker(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.turns import append, rounds_of

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    changes = dict(item.split("=", 1) for item in options.set)
    rank = dist.get_rank()
    try:
        for found in measure(options, changes, rounds_of(options, rank)):
            if rank == 0:
                append(options.results, found)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error))
        problem = f"rank {rank}: {said[:1500]}\n{traceback.format_exc()[-3000:]}"
        append(options.results, {"variant": options.variants[0], "family": options.family, "changes": changes,
                                 "problem": problem})
        os._exit(1)  # the others may wait in a collective for ever: torchrun ends them
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--family", choices=MODELS, default="llama3")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--together", type=int, default=1, help="variants built at once, and timed in turn")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is timed")
    parser.add_argument("--seconds", type=float, default=200, help="limit of building together, and of one round")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=7)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--signs", default="", help=argparse.SUPPRESS)
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.command:
        options.command = " ".join(("python benchmarks/step_time.py", options.results.name, *sys.argv[2:]))
    options.results = options.results.resolve()
    options.traces = options.traces and options.traces.resolve()
    if options.signs:
        worker(options)
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from benchmarks.turns import drive

        drive(options)


if __name__ == "__main__":
    main()
