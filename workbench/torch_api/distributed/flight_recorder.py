"""torch's flight recorder: the collectives that this process has launched, ended or not.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp; gloo and NCCL both write to it, TORCH_FR_BUFFER_SIZE entries.
torch/csrc/profiler/python/combined_traceback.cpp asks Inductor's code cache for the lines of generated code.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
           "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}


@dataclass(frozen=True)
class Launch:
    """One collective of one rank.

    number: position among the rank's launches on the group of `ranks`. shapes, dtypes: of the inputs. stack: (file,
    line, function), innermost first. source: text of the first line, if the rank had it. record: position among the
    rank's launches on all groups, from 0.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    done: bool
    stack: tuple[tuple[str, int, str], ...]
    record: int = 0
    source: str = ""


def launches(stacks: bool) -> list[Launch]:
    """The recorded launches, oldest first, without point-to-point operations. Safe in any thread, and never waits."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.distributed_c10d import _world

    if not dist.is_initialized():
        return []
    groups = {
        str(name): tuple(sorted(_world.pg_group_ranks[group]))
        for group, name in dict(_world.pg_names).items()
        if group in _world.pg_group_ranks
    }
    entries = []
    with _no_import_of_inductor() if stacks else nullcontext():
        for dump in ("_dump_fr_trace", "_dump_nccl_trace"):  # CPU backends; NCCL, where torch has it
            if hasattr(c10d, dump):
                # The bytes are this process's own, from the binding.
                entries += pickle.loads(getattr(c10d, dump)(includeStackTraces=stacks))["entries"]
    return [_launch(entry, groups) for entry in entries if not entry["is_p2p"]]


@contextmanager
def _no_import_of_inductor() -> Iterator[None]:
    """Inside, a code cache without entries stands for Inductor's where that is not imported: it takes 1.2 s of CPU on
    each rank, and has no entries then. Another thread that reads `torch._inductor` meanwhile finds the empty one, too.
    """
    import torch

    if "torch._inductor.codecache" in sys.modules:
        yield
        return
    empty = SimpleNamespace(stack_frames_for_code=lambda path, line: None)
    inductor = SimpleNamespace(codecache=SimpleNamespace(PyCodeCache=empty))
    torch._inductor = inductor  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._inductor  # torch's `__getattr__` finds the real one


def _launch(entry: dict, groups: dict[str, tuple[int, ...]]) -> Launch:  # type: ignore[type-arg]
    group, about = entry["process_group"]
    return Launch(
        group,
        about.removeprefix("mesh_"),
        groups.get(group, ()),
        entry["collective_seq_id"],
        entry["profiling_name"].split(":")[-1],
        tuple(map(tuple, entry["input_sizes"])),
        tuple(_DTYPES.get(name, name.lower()) for name in entry["input_dtypes"]),
        bool(entry["retired"]) or entry["state"] == "completed",
        tuple(
            (frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())
        ),
        entry["record_id"],
    )
