"""Measured milliseconds by operator signature: rank 0 times each operator for all ranks, and keeps them in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import is_compute
from workbench.recipe.files import json_of, reading, write_whole
from workbench.torch_api.devices.timing import measured_ms, signature
from workbench.torch_api.ops import multiplies, world_kind

FORMAT_VERSION = 1


def measure(gm: GraphModule, path: str = "") -> dict[str, float]:
    """Time each distinct matmul and attention of the graph on rank 0. Every rank calls this and gets rank 0's times.

    path: a JSON file that keeps the times; those that it holds already are not measured again.

    Raises WorkbenchError on a world without values, and for a file from another torch version or device.
    """
    if world_kind() not in ("gloo", "nccl"):
        raise WorkbenchError(
            f'estimates = "measured" needs ranks that run, and this world is {world_kind()}: take '
            'world gloo or nccl, or estimates = "analytical"'
        )
    shared: list[dict[str, float] | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            shared[0] = _measured(gm, path)
        except Exception as error:  # the other ranks wait for the result
            shared[0] = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(shared, src=0)
    times = shared[0]
    if not isinstance(times, dict):
        raise WorkbenchError(
            f"estimates cannot be measured: {times}" if times else "estimates: rank 0 sent none"
        )
    return times


def _measured(gm: GraphModule, path: str) -> dict[str, float]:
    cuda = world_kind() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    here = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu"}
    times = _kept(Path(path), here) if path and Path(path).exists() else {}
    for node in gm.graph.nodes:
        alone = is_compute(node) and not multiplies(node.target)  # the other ranks wait
        if alone and (name := signature(node)) not in times:
            times[name] = measured_ms(node, device)
    if path:
        text = json.dumps(
            {"format_version": FORMAT_VERSION, **here, "milliseconds": times}, indent=1
        )
        write_whole(path, text + "\n")
    return times


def _kept(path: Path, here: dict[str, str]) -> dict[str, float]:
    with reading(path, "a file of estimates", "remove it, or name another"):
        data = json_of(path.read_bytes())
        times = {str(name): float(ms) for name, ms in data["milliseconds"].items()}
        if not all(0 <= ms < math.inf for ms in times.values()):
            raise ValueError("a time must be 0 or more")
        version, there = data["format_version"], {key: str(data[key]) for key in here}
    if there != here or version != FORMAT_VERSION:
        raise WorkbenchError(
            f"{path}: estimates of torch {there['torch']} on {there['device']}, and this is torch "
            f"{here['torch']} on {here['device']}: remove it, or name another file"
        )
    return times
