"""What each rank does in a step, in order: torch's table of a schedule, checked, and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from workbench.errors import WorkbenchError
from workbench.lab.pipeline.torch_api import in_order


class Action(NamedTuple):
    """kind: as in torch's tables: F, B, I, W; SEND_F, RECV_F, SEND_B, RECV_B of what the stage gives or takes."""

    kind: str
    stage: int
    microbatch: int

    @property
    def other(self) -> Action:
        """The peer's: a stage's activation goes to the next one, its gradient to the one before."""
        way = 1 if self.kind in ("SEND_F", "RECV_B") else -1
        kind = ("RECV_" if self.kind.startswith("SEND") else "SEND_") + self.kind[-1]
        return Action(kind, self.stage + way, self.microbatch)

    def __str__(self) -> str:
        what = "activation" if self.kind.endswith("F") else "gradient"
        way = "sends" if self.kind.startswith("SEND") else "receives"
        return f"stage {self.stage} {way} the {what} of microbatch {self.microbatch}"


Schedule = str | type | list[str]
"""torch's schedule by name, a class, or each rank's computations in order, as "0F0 0F1 0I0 0W0"."""
Span = tuple[int, Action, float, float]
"""A rank's computation, and its begin and end in milliseconds."""


def schedule_of(schedule: Schedule, stages: Sequence[Any], microbatches: int) -> Any:
    """The schedule of one rank's stages, the last of which gives losses. WorkbenchError where torch refuses."""
    try:
        kind: Any = in_order(schedule) if isinstance(schedule, list) else schedule
        kind = get_schedule_class(kind) if isinstance(kind, str) else kind
        of = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        return kind(of, microbatches, loss_fn=lambda loss, target: loss)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise WorkbenchError(f"{schedule}, {microbatches} microbatches: {error}") from None


def plan(schedule: Schedule, ranks: int, stages: int, microbatches: int) -> Plan:
    """What a schedule has all ranks do: torch's table, or what its code of GPipe and 1F1B does. Nothing is launched."""
    stage = SimpleNamespace(
        stage_index=0, num_stages=stages, group_rank=0, group_size=ranks, submod=None
    )
    each_rank, left = divmod(stages, ranks)
    runner = schedule_of(schedule, [stage] * each_rank, microbatches)
    table = getattr(runner, "pipeline_order_with_comms", None)
    if left or (table is None and each_rank > 1):
        raise WorkbenchError(f"{schedule} cannot deal out {stages} stages to {ranks} ranks")
    if table is None:  # torch's table of 1F1B counts the last rank's microbatches from 1 (2.13)
        ahead = ranks + microbatches if isinstance(runner, ScheduleGPipe) else ranks
        orders = [_one_stage(rank, microbatches, ahead - rank) for rank in range(ranks)]
        return plan(orders, ranks, stages, microbatches)
    rows = []
    for rank in range(ranks):
        flat = [part for action in table[rank] for part in action.sub_actions or (action,)]
        named = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in flat]
        rows.append([Action(*row) for row in named if row[2] is not None])
    return Plan(rows, stages, microbatches)


def _one_stage(rank: int, count: int, ahead: int) -> str:
    """`ahead` forwards, and then a backward and a forward in turn, as torch's code runs them."""
    order = [("F", i) for i in range(ahead)]
    for i in range(count):
        order += [("B", i), ("F", ahead + i)]
    return " ".join(f"{rank}{kind}{i}" for kind, i in order if i < count)


@dataclass
class Plan:
    """The actions of all ranks, with a number of stages and microbatches."""

    ranks: list[list[Action]] = field(repr=False)
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        self.rank_of = {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}
        self.split = any(a.kind == "W" for actions in self.ranks for a in actions)

    def check(self) -> None:
        """Raise WorkbenchError for a send without its receive, and for ranks that would wait for each other.

        As in NCCL, a transfer between two ranks begins once both have come to it, and what either launched to the other
        before has begun.
        """
        if problem := self.spans()[1]:
            raise WorkbenchError(f"this schedule would hang: {problem}")

    def spans(
        self,
        ms: Callable[[Action], float] = lambda _: 1.0,
        send_ms: Callable[[Action], float] = lambda _: 0.0,
    ) -> tuple[list[Span], str]:
        """When each computation runs, and which ranks wait for each other, or "". ms, send_ms: of an action."""
        spans, queues = list[Span](), dict[tuple[int, int], list[Action]]()
        posted, arrived = dict[Action, float](), dict[Action, float]()
        now, place = [0.0] * len(self.ranks), [0] * len(self.ranks)
        todo = set(range(len(self.ranks)))
        while todo:
            rank = todo.pop()
            for action in self.ranks[rank][place[rank] :]:
                if len(action.kind) > 1:  # a transfer
                    posted[action] = now[rank]
                    peer = self.rank_of[action.other.stage]
                    mine = queues.setdefault((rank, peer), [])
                    theirs = queues.setdefault((peer, rank), [])
                    mine.append(action)
                    while mine and theirs and mine[0].other == theirs[0]:
                        both = mine.pop(0), theirs.pop(0)
                        began = max(posted[one] for one in both)
                        # SEND comes behind RECV
                        arrives = began + send_ms(max(both))
                        arrived |= dict.fromkeys(both, arrives)
                        todo |= {rank, peer}
                else:
                    needs = Action("RECV_F" if action.kind == "F" else "RECV_B", *action[1:])
                    if needs in posted and needs not in arrived:
                        break
                    begin = max(now[rank], arrived.get(needs, 0.0))
                    now[rank] = begin + ms(action)
                    spans.append((rank, action, begin, now[rank]))
                place[rank] += 1
        return spans, self._blocked(queues)

    def _blocked(self, queues: dict[tuple[int, int], list[Action]]) -> str:
        """What keeps the first transfers that have not begun from beginning."""
        heads = {pair: queue[0] for pair, queue in queues.items() if queue}
        for (rank, peer), action in heads.items():
            if action.other not in self.ranks[peer]:
                return f"on rank {rank} {action}, and nothing on rank {peer} answers it"
        mutual = {pair: action for pair, action in heads.items() if pair[::-1] in heads}
        for (rank, peer), action in (mutual or heads).items():
            theirs = heads.get((peer, rank), action)
            how = "both send first" if action.kind[0] == theirs.kind[0] == "S" else "wait"
            return f"ranks {rank} and {peer} {how}: {action}, and {theirs}"
        return ""
