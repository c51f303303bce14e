"""A pipeline's step and bubble on CPU ranks, beside torch.distributed.pipelining on plain modules.

    python benchmarks/pipeline.py FILE.jsonl [--variants NAME ...] [--rounds 1] [--threads 3] [--timeout 900] [--tiny]

llama3 of 8 layers, dim 512, feed-forward 1536, 8 heads, vocabulary 4096; a batch of 8 x 256 tokens in 8 microbatches on
4 gloo ranks, forwards and backwards of one step, no optimizer. 1F1B has 4 stages of 2 layers, zero-bubble (ZBV) 8 of 1.
A rank is busy while a stage's method runs; the bubble is the rest of the step, the mean of all ranks. Medians of 10
steps, each between two barriers. Each variant is a run of processes of its own, and a line of FILE once it is done;
`--tiny` is for two cores, and times nothing worth knowing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result import of_process, tell_variants
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from workbench import author, capture, current_world, load_recipe
from workbench.authoring.microbatches import cut as microbatches
from workbench.authoring.models.llama3 import Llama3
from workbench.lab.pipeline.cut import cut_into_stages
from workbench.lab.pipeline.estimate import estimate
from workbench.lab.pipeline.plan import plan
from workbench.lab.pipeline.step import GraphStage, PipelineStep
from workbench.world.mesh import World

RANKS, MICROBATCHES, LAYERS = 4, 8, 8
SIZES = {"dim": 512, "ffn_dim": 1536, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 4096}
TINY = {"dim": 32, "ffn_dim": 48, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64}
SCHEDULES = {"1f1b": ("1F1B", LAYERS // RANKS), "zero_bubble": ("ZBVZeroBubble", LAYERS // RANKS // 2)}
METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")
VARIANTS = ["workbench_1f1b", "torch_1f1b", "workbench_zero_bubble", "torch_zero_bubble", "uncut_eager"]
BUSY = [0.0]
"""Seconds of this rank in stages."""


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            BUSY[0] += time.perf_counter() - begin

    return run


def recipe_of(tiny: bool) -> Any:
    sizes = {f"model.{name}": size for name, size in (TINY if tiny else SIZES).items()}
    return load_recipe("llama3").override(sizes | {
        "model.n_layers": LAYERS, "mesh.dp_shard": 1, "mesh.tp": 1, "joint_passes": [], "passes": [],
        "data.seq_len": 16 if tiny else 256, "data.batch_per_rank": MICROBATCHES, "training.deterministic": False})


class Part(nn.Module):
    """Some layers of a llama3, with what is in front of them and behind them; the loss is the schedule's."""

    def __init__(self, model: Llama3, number: int, layers: int, stages: int) -> None:
        super().__init__()
        self.embed = model.tok_embeddings if number == 0 else None
        self.layers = model.layers[number * layers:(number + 1) * layers]
        self.head = nn.Sequential(model.norm, model.output) if number == stages - 1 else nn.Identity()
        self.rope = model.rope_cos, model.rope_sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        cos, sin = (table[:x.shape[1]] for table in self.rope)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x)


class Plain(PipelineStage):
    """torch's, which in 2.11 would greet a neighbour on its own rank, and gloo refuses that."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


def of_workbench(schedule: str, layers: int, recipe: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    for name in METHODS:
        setattr(GraphStage, name, timed(getattr(GraphStage, name)))
    authored = author(recipe, replace(current_world(), pipeline=RANKS))
    joint = capture(authored, batch=microbatches(authored.example_batch(), MICROBATCHES)[0])
    cut = cut_into_stages(joint, [f"layers.{i}" for i in range(layers, LAYERS, layers)])
    step = PipelineStep(cut, schedule, MICROBATCHES)
    figures = {"estimated_bubble": estimate(cut, step.plan, "cpu").bubble, "borders": repr(cut).splitlines()}
    return lambda *batch: float(step(*batch)), figures


def of_torch(schedule: str, layers: int, recipe: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    model = author(recipe, World("gloo", 1, 0, torch.device("cpu"))).module
    count = LAYERS // layers
    own = sorted({a.stage for a in plan(schedule, RANKS, count, MICROBATCHES).ranks[dist.get_rank()]})
    timing = type("Timed", (Plain,), {name: timed(getattr(PipelineStage, name)) for name in METHODS})
    stages = [timing(Part(model, number, layers, count), number, count, torch.device("cpu")) for number in own]
    kind = get_schedule_class(schedule)
    runner = kind(stages if len(own) > 1 else stages[0], MICROBATCHES, loss_fn=timed(model.loss))

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        inputs = [tokens] if 0 in own else []
        runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)

    return step, {}


def uncut(recipe: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """All microbatches on one rank; the others wait."""
    module = author(recipe, World("gloo", 1, 0, torch.device("cpu"))).module

    @timed
    def step(*batch: torch.Tensor) -> float:
        losses = []
        for part in microbatches(batch, MICROBATCHES):
            loss = module(*part)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return lambda *batch: step(*batch) if dist.get_rank() == 0 else 0.0, {}


def measured(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all ranks: every rank calls it."""
    torch.set_num_threads(options.threads)
    recipe = recipe_of(options.tiny)
    if variant == "uncut_eager":
        step, figures = uncut(recipe)
    else:
        who, _, schedule = variant.partition("_")
        step, figures = (of_workbench if who == "workbench" else of_torch)(*SCHEDULES[schedule], recipe)
    generator = torch.Generator().manual_seed(1)
    shape = MICROBATCHES, recipe.data.seq_len + 1
    tokens = torch.randint(recipe.model.sizes()["vocab_size"], shape, generator=generator)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps, busy, losses = [], [], []
    for _ in range(options.warmup + options.steps):
        dist.barrier()
        BUSY[0], begin = 0.0, time.perf_counter()
        losses.append(step(*batch))
        own_busy = BUSY[0]
        dist.barrier()
        steps.append(1e3 * (time.perf_counter() - begin))
        each = [torch.zeros(()) for _ in range(RANKS)]
        dist.all_gather(each, torch.tensor(1e3 * own_busy))
        busy.append([float(ms) for ms in each])
    steps, busy = steps[options.warmup:], busy[options.warmup:]
    bubbles = [1 - sum(row) / RANKS / ms for row, ms in zip(busy, steps, strict=True)]
    if variant != "uncut_eager":
        ideal = (RANKS - 1) / (MICROBATCHES + RANKS - 1)
        figures |= {"bubble": statistics.median(bubbles), "ideal_1f1b": ideal}
    return {
        "step_ms": statistics.median(steps), "steps_ms": steps,
        "busy_ms": [statistics.median(column) for column in zip(*busy, strict=True)], "loss": losses[0], **figures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=3, help="of each rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=900)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        dist.init_process_group("gloo")
        figures = measured(options.variants[0], options)
        if dist.get_rank() == 0:
            print(json.dumps(figures), flush=True)
        dist.destroy_process_group()
        return 0

    def alone(variant: str) -> dict[str, Any]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
        counts = {name: str(getattr(options, name)) for name in ("threads", "steps", "warmup")}
        chosen = [f"--{name}={count}" for name, count in counts.items()] + ["--tiny"] * options.tiny
        command = [sys.executable, *launch, "--variants", variant, "--alone", *chosen]
        return of_process(command, {"OMP_NUM_THREADS": counts["threads"]}, options.timeout)

    shown = ["step_ms", "bubble", "ideal_1f1b", "loss"]
    return tell_variants(alone, shown, options, threads=options.threads, tiny=options.tiny)


if __name__ == "__main__":
    sys.exit(main())
