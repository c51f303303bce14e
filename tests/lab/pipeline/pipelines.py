"""What the tests of pipelines run on ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from workbench import Batches, WorkbenchError, author, author_module, capture, current_world, load_recipe
from workbench.authoring.microbatches import cut as microbatches
from workbench.lab.pipeline.cut import cut_into_stages
from workbench.lab.pipeline.plan import Plan
from workbench.lab.pipeline.run import compare
from workbench.lab.pipeline.step import PipelineStep
from workbench.pipeline.train import clip, optimizer_of
from workbench.torch_api.determinism import deterministic
from workbench.world.mesh import World

ALONE = World("gloo", 1, 0, torch.device("cpu"))
COUNT = 4


def small(layers: int = 8, **changes: Any) -> Any:
    sizes = {"mesh.dp_shard": 1, "model.n_layers": layers, "model.dim": 32, "model.n_heads": 2, "model.n_kv_heads": 2,
             "model.ffn_dim": 48, "model.vocab_size": 256, "data.seq_len": 16, "data.batch_per_rank": COUNT,
             "joint_passes": [], "passes": [], "training.steps": 2}
    return load_recipe("llama3_fsdp").override(sizes | changes)


def piped(stages: Any, schedule: str = "1F1B", layers: int = 4, **changes: Any) -> Any:
    return small(layers, **{"training.step": "pipeline", "pipeline.stages": stages, "pipeline.schedule": schedule,
                            **changes})


class Skipping(nn.Module):
    """Three layers, the last of which reads what the first was given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = self.embed(x)
        for layer in self.layers:
            y = layer(y).sin()
        return (y * first).sum()


def captured(module: nn.Module, *batch: torch.Tensor) -> Any:
    return capture(author_module(module, ALONE, None, batch=lambda: batch))


def llama(layers: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A joint graph of a microbatch, on this process alone, and a batch of COUNT of them."""
    torch.manual_seed(0)
    batch = tuple(torch.randint(64, (COUNT, 8)) for _ in range(2))
    authored = author(small(layers), ALONE)
    return capture(authored, batch=microbatches(batch, COUNT)[0]), batch


def order_of(plan: Plan, stage: int) -> list[int]:
    """The microbatches in the order in which a stage's parameters get their gradients."""
    return [a.microbatch for rank in plan.ranks for a in rank if a.stage == stage and a.kind in ("B", "W")]


def eager(module: nn.Module, batch: Any, order: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss, and the mean gradients, summed in this order: by autograd alone."""
    parts, losses = microbatches(batch, COUNT), {}
    module.zero_grad()
    for number in order:
        losses[number] = module(*parts[number])
        losses[number].backward()
    gradients = {name: p.grad / COUNT for name, p in module.named_parameters()}
    module.zero_grad()
    return sum(losses[i].detach() for i in range(COUNT)) / COUNT, gradients


def differing(joint: Any, batch: Any, stages: Any, schedule: str) -> tuple[list[str], int]:
    """What a step of all ranks gives otherwise than eager, and how many gradients this rank has."""
    module = joint.authored.module
    step = PipelineStep(cut_into_stages(joint, stages), schedule, COUNT)
    loss, right = eager(module, batch, order_of(step.plan, 0))
    odd = [] if torch.equal(step(*batch).detach(), loss) else ["loss"]
    for run in step.runs:
        assert order_of(step.plan, run.stage.number) == order_of(step.plan, 0)
    odd += [name for name, p in step.trained.items() if not torch.equal(p.grad, right[name])]
    with_gradient = {name for name, p in module.named_parameters() if p.grad is not None}
    assert with_gradient == set(step.trained)
    return odd, len(with_gradient)


def all_schedules(layers: int, schedules: Any) -> list[tuple[list[str], int]]:
    """`differing` of each (schedule, stages), from one capture."""
    with deterministic(True):
        joint, batch = llama(layers)
        return [differing(joint, batch, stages, schedule) for schedule, stages in schedules]


def trained_beside_eager(recipe: Any) -> list[str]:
    """What two AdamW steps of a pipeline with FSDP compute otherwise than eager whole parameters do, whose gradients
    are summed over the microbatches and then averaged over the ranks of FSDP.
    """
    spec = recipe.pipeline
    world = replace(current_world(), pipeline=spec.multiplies_ranks)
    odd = []
    with deterministic(True):
        authored = author(recipe, world)
        plain = author(recipe.override({"mesh.dp_shard": 1, "passes": []}), ALONE).module
        whole = world.mesh_of({"pp": world.pipeline, "dp_shard": recipe.mesh.dp_shard})
        shards, group = whole["dp_shard"].get_group(), whole["pp"].get_group()
        batch = microbatches(authored.example_batch(), COUNT)[0]
        joint = capture(authored, batch=batch)
        cut = cut_into_stages(joint, spec.stages)
        step = PipelineStep(cut, spec.schedule, COUNT, passes=recipe.passes, group=group)
        optimizer = optimizer_of(authored)
        other = torch.optim.AdamW(plain.parameters(), lr=recipe.training.lr, fused=True)
        batches = Batches(authored)
        for number in range(2):
            loss, right = eager(plain, batches.at(number), order_of(step.plan, 0))
            for gradient in right.values():
                dist.all_reduce(gradient, group=shards)
                gradient /= recipe.mesh.dp_shard
            odd += ["loss"] * (not torch.equal(step(*batches.at(number)).detach(), loss))
            odd += [f"gradient {name}, step {number}" for name, p in step.trained.items()
                    if not torch.equal(p.grad.full_tensor(), right[name])]
            norm = clip(authored, None)
            norms = torch.stack([g.double().square().sum() for g in right.values()]).sum().sqrt()
            assert abs(float(norm) - float(norms)) < 1e-4 * float(norms)
            for name, p in plain.named_parameters():
                p.grad = right[name]
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
    return odd


def with_half_of_the_gradients() -> str:
    """What `compare` says where each rank divides its sums twice."""
    joint, batch = llama(2)
    step = PipelineStep(cut_into_stages(joint, ["layers.1"]), "1F1B", COUNT)
    (run,) = step.runs
    finish = run.finish
    with mock.patch.object(run, "finish", lambda count: finish(2 * count)):
        return str(compare(step, *batch))


def refused(changes: Any) -> list[str]:
    """What a step says, before anything is launched, where the last rank runs another one."""
    last = dist.get_rank() == dist.get_world_size() - 1
    joint, _ = llama(layers=3)
    told = []
    for change in changes:
        start = "layers.2" if last and change == "stages" else "layers.1"
        schedule = "GPipe" if last and change == "schedule" else "1F1B"
        try:
            PipelineStep(cut_into_stages(joint, [start]), schedule, COUNT - (last and change == "microbatches"))
        except WorkbenchError as error:
            told.append(f"WorkbenchError: {error}")
    return told
