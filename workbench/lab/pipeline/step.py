"""The step of a pipeline on ranks: torch's schedule, on stages that run graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from workbench.authoring.microbatches import cut as microbatches
from workbench.checks.agreement import schedule as launches
from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.lower import Step
from workbench.lab.pipeline.cut import PipelineCut
from workbench.lab.pipeline.phases import StageRun
from workbench.lab.pipeline.plan import Plan, Schedule, plan, schedule_of
from workbench.pipeline.run_passes import run_partitioned
from workbench.torch_api.tree import tree_leaves
from workbench.world.mesh import all_gather_object


class GraphStage(PipelineStage):
    """A stage of torch's pipelining, whose forward and backward are graphs."""

    def __init__(
        self, run: StageRun, cut: PipelineCut, device: torch.device, group: dist.ProcessGroup | None
    ):
        self.run, stage = run, run.stage
        sides, number = (stage.received, stage.sent or [cut.loss]), stage.number
        args, results = (tuple(n.meta["val"].detach().requires_grad_() for n in side) for side in sides)
        super().__init__(nn.Module(), number, len(cut.stages), device, args, results, group=group)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without a rank's own to itself, which torch 2.11 has for two neighbours on it, and gloo refuses."""
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != dist.get_rank()]

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *_: Any, **__: Any) -> Any:
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        results = tuple(self.run.forward(fwd_chunk_id, tree_leaves(args), received))
        # sends are without gaps
        self.fwd_cache[fwd_chunk_id] = tuple(t.contiguous() for t in results), []
        return results[0] if self.is_last else results

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = None,
    ) -> None:
        self.fwd_cache.pop(bwd_chunk_id)
        gradients: Any = [torch.ones_like(loss)] if self.is_last else None
        gradients = gradients or self._retrieve_recv_grads(bwd_chunk_id)
        sent = self.run.backward(bwd_chunk_id, gradients)
        self.bwd_cache[bwd_chunk_id] = tuple(t.contiguous() for t in sent)
        if full_backward and self.run.split:
            self.run.backward_weights(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = None) -> None:
        self.run.backward_weights(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.run.finish(grad_scale_factor)


class PipelineStep(Step):
    """One training step of all microbatches, on this rank's stages. Every rank calls it with the whole batch.

    schedule: torch's, by name or a class, or each rank's order. count: microbatches. passes: of the partitioned
    stage, by name. group: the ranks of the pipeline, by default all. Calling it runs forwards and backwards: it returns
    the mean loss, on every rank, and adds to the gradients of `trained`, this rank's parameters by name. `backward()`
    of that loss, which a training loop calls, does nothing more. Raises WorkbenchError, before anything is launched,
    where ranks would hang.
    """

    def __init__(
        self,
        cut: PipelineCut,
        schedule: Schedule,
        count: int,
        *,
        passes: Sequence[Any] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.cut, self.count, self.group = cut, count, group
        proposed = plan(schedule, dist.get_world_size(group), len(cut.stages), count)
        numbers = {action.stage for action in proposed.ranks[dist.get_rank(group)]}
        self.stages = [cut.stages[number] for number in sorted(numbers)]
        halves = ["split_backward"] if proposed.split else []
        for stage in self.stages:
            run_partitioned(stage.pair, [*passes, *halves])
        self.plan = self._agreed(proposed)
        super().__init__(self.stages[0].pair)
        self.device = cut.of.authored.world.device
        self.runs = [StageRun(stage, self.module, proposed.split) for stage in self.stages]
        stages = [GraphStage(run, cut, self.device, group) for run in self.runs]
        self.schedule = schedule_of(schedule, stages, count)
        names = {name for run in self.runs for name in run.gradients}
        self.trained = {n: p for n, p in self.module.named_parameters() if n in names}

    def _agreed(self, proposed: Plan) -> Plan:
        """The plan of the pipeline's ranks, checked, once all ranks have cut alike."""
        graphs = [graph for stage in self.stages for graph in stage.pair.graphs]
        actions = proposed.ranks[dist.get_rank(self.group)]
        mine = [stage.number for stage in self.stages], launches(graphs), repr(self.cut), actions
        answers = all_gather_object(mine)
        for other, (numbers, entries, cut, _) in enumerate(answers):
            if cut != mine[2] or (numbers == mine[0] and entries != mine[1]):
                raise WorkbenchError(
                    f"rank {other} has other stages, or other collectives in stages {numbers}, than "
                    f"rank {dist.get_rank()}: run the same cut and passes on all ranks"
                )
        if len(answers) > 1:  # and no fake world
            members = dist.get_process_group_ranks(self.group)
            rows = [answers[rank][3] for rank in members]
            proposed = Plan(rows, len(self.cut.stages), self.count)
        proposed.check()
        return proposed

    def __call__(self, *batch: Any) -> Any:
        name, losses = title(self.pair.authored), list[torch.Tensor]()
        self.pair.inputs.require(name, microbatches(batch, self.count)[0])
        self.schedule.step(*batch, target=batch[0], losses=losses, return_outputs=False)
        value = self.cut.loss.meta["val"]
        loss = sum(losses, torch.zeros(value.shape, dtype=value.dtype, device=self.device))
        dist.all_reduce(loss, group=self.group)  # the other ranks have none
        loss /= self.count
        return loss.requires_grad_()
