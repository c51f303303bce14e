"""Find the first collective of a group that only some of its ranks launched, or that they launched differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.errors import is_library
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import by_text, file_name, ranks_text, source_line

_UNEVEN = ("scatter", "gather", "all_to_all", "alltoall")
"""Prefixes of the collectives whose inputs may differ between ranks."""


@dataclass(frozen=True)
class Divergence:
    """Collective `number` of a group. `launched`: what each rank launched as that collective. `missing`: for each rank
    that did not launch it, its last launch in that group, or None."""

    axis: str
    ranks: tuple[int, ...]
    number: int
    launched: dict[int, Launch]
    missing: dict[int, Launch | None]

    def odd_one(self) -> int:
        """A rank whose launch the fewest ranks share."""
        signatures = {rank: _signature(launch) for rank, launch in self.launched.items()}
        counts = Counter(signatures.values())
        return min(self.launched, key=lambda rank: (counts[signatures[rank]], -rank))

    def __str__(self) -> str:
        over = f"group {self.axis or 'of'} ({ranks_text(self.ranks)})"
        texts = [(rank, described(launch)) for rank, launch in sorted(self.launched.items())]
        texts += [(rank, "did not launch it; " + (f"the last one there is {described(last)}" if last else
                                                  "none was launched there"))
                  for rank, last in sorted(self.missing.items())]
        return "\n  ".join(
            [f"The ranks part at collective {self.number} of {over}:", *by_text(texts)]
        )


def user_frame(launch: Launch) -> Launch:
    """The launch with its stack cut to the innermost frame outside torch and Python, and with that line's text.

    To be called in the rank: only the rank has the text of a generated graph.
    """
    stack = (
        tuple(frame for frame in launch.stack if not is_library(frame[0]))[:1] or launch.stack[:1]
    )
    return replace(launch, stack=stack, source=source_line(*stack[0][:2]) if stack else "")


def described(launch: Launch) -> str:
    """`all_reduce of float32 [3, 4], in step (cell 3, line 2): dist.all_reduce(x)`."""
    tensors = ", ".join(
        f"{dtype} {list(shape)}" for dtype, shape in zip(launch.dtypes, launch.shapes, strict=False)
    )
    text = launch.op + (f" of {tensors}" if tensors else "")
    for file, line, name in launch.stack[:1]:
        source = launch.source or source_line(file, line)
        text += f", in {name} ({file_name(file)}, line {line})" + (f": {source}" if source else "")
    return text


def first_divergence(launches: Mapping[int, Sequence[Launch]]) -> Divergence | None:
    """The first difference between the ranks' launches, or None. `launches`: each rank's, oldest first.

    Different collectives come before a missing one. Of the missing ones, those of ranks that wait in no other group
    come first: a rank that hangs in another group is missing here as a consequence. Of equals, the lowest rank's,
    whichever rank answered first.
    """
    groups: dict[str, dict[int, dict[int, Launch]]] = {}
    # lost their oldest launches
    forgetful = {rank for rank, log in launches.items() if log and log[0].record > 0}
    for rank, log in sorted(launches.items()):
        for launch in log:
            for member in launch.ranks:
                if member in launches and member not in forgetful:
                    groups.setdefault(launch.group, {}).setdefault(member, {})
            groups.setdefault(launch.group, {}).setdefault(rank, {})[launch.number] = launch
    divergences = [d for by_rank in groups.values() if (d := _in_group(by_rank))]
    waiting = {rank for rank, log in launches.items() if any(not launch.done for launch in log)}
    return min(
        divergences,
        key=lambda d: (bool(d.missing), bool(waiting & set(d.missing)), d.number),
        default=None,
    )


def _in_group(by_rank: dict[int, dict[int, Launch]]) -> Divergence | None:
    logs = [log for log in by_rank.values() if log]
    first = max(min(log) for log in logs)  # the recorder forgets the oldest
    for number in range(first, max(max(log) for log in logs) + 1):
        launched = {rank: log[number] for rank, log in by_rank.items() if number in log}
        if not launched:  # the number of one of torch's detailed checks
            continue
        some = next(iter(launched.values()))
        if (
            len(launched) < len(by_rank)
            or len({_signature(launch) for launch in launched.values()}) > 1
        ):
            missing = {
                rank: log[max(log)] if log else None
                for rank, log in by_rank.items()
                if rank not in launched
            }
            return Divergence(some.axis, some.ranks, number, launched, missing)
    return None


def _signature(launch: Launch) -> tuple[object, ...]:
    if launch.op.lower().startswith(_UNEVEN):
        return (launch.op,)
    return launch.op, launch.shapes, launch.dtypes
