"""Step time of llama3 or deepseek_v3 on GPUs, ours and its peers: same model, data, seeds and optimizer, one process a
rank.

    python benchmarks/step_time.py RESULTS.jsonl VARIANT... [--family deepseek_v3] [--ranks 4] [--together 6]
                                   [--rounds 2] [--seconds 200] [--no-optimizer] [--set KEY=VALUE ...]

A variant is `eager` (FSDP2 + TP + EP), `compile` (the same, each block by torch.compile), `compile_optimizer` (and the
optimizer's step), `compile_keep` (gathered weights stay until the backward), `compile_loss`, `compile_keep_loss`,
`compile_float8_tensorwise` or `_rowwise` (with torchao, the extra `float8`), one of benchmarks/reference.py
(torchtitan's compiler toolkit, the extra `reference`), one of OWN in benchmarks/variants.py, or the name of a recipe of
ours. Each runs in processes of its own, and appends a line to RESULTS.jsonl for each round; a
variant that has a line with the same settings is not run again. `--together` of them are built at once, with a limit of
`--seconds`; then each is timed once a round, the others waiting: so they share a minute and a host.
With `--no-optimizer` a step is the forward and backward, as the simulator has it; a whole step keeps its optimizer.
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def finite(losses: Sequence[float]) -> list[str]:
    """The losses, exactly, as hexadecimal floats; ValueError where one is no number: such a run measures nothing."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise ValueError(f"step {step}: the loss is {loss}: what runs is not a training step")
    return [float(loss).hex() for loss in losses]


def measure(options: argparse.Namespace, changes: dict[str, Any], rounds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One variant on this rank of the world that torchrun made: what was found in each of `rounds`."""
    import torch
    import torch.distributed as dist

    from benchmarks.peers import fsdp2, precompute
    from benchmarks.reference import RECIPES, close, toolkit
    from benchmarks.variants import PEERS, recipe_of
    from workbench import build
    from workbench.authoring.authored import Authored
    from workbench.pipeline.expert_load import routed_layers
    from workbench.pipeline.machine import machine, versions
    from workbench.pipeline.run import predicted_peak
    from workbench.pipeline.step_profile import profiled, step_profile
    from workbench.pipeline.train import Batches, apart, optimizer_of
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
        built = build(recipe, world)
        module, step = built.authored.module, built.step
    authored = built.authored if built else Authored(module, world, world.mesh(recipe.mesh), [], {}, recipe=recipe)
    batches = Batches(authored)
    data = [batches.at(i) for i in range(steps + warmup + 1)]
    whole = recipe.training.step != "pair"
    if whole:
        train_step: Any = step
    elif options.no_optimizer:
        def train_step(*batch: torch.Tensor) -> tuple[torch.Tensor, None]:
            module.zero_grad(set_to_none=True)
            loss = step(*batch)
            loss.backward()
            return loss, None
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
            "optimizer": whole or not options.no_optimizer,
            "step_ms": statistics.median(times), "steps_ms": times,
            "tokens_per_second": tokens / statistics.median(times) * 1e3, "enqueue_ms": enqueue * 1e3,
            "first_step_s": first, "build_s": started - begun,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "losses": finite([float(x) for x in losses]),
            **(asdict(step_profile(*profiled(lambda: one(warmup)))) if cuda else {}),
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.variants import MODELS

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
    parser.add_argument("--no-optimizer", action="store_true")
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
        from benchmarks.turns import drive

        drive(options)


if __name__ == "__main__":
    main()
