"""A loop of captures in a process of its own, and the resident memory that each of them keeps.

    python tests/kept_by_captures.py ours | torch | held
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._guards import tracing

from workbench.authoring.author import author_module
from workbench.authoring.authored import Authored
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.recipe.sections import MeshSpec
from workbench.torch_api import aot
from workbench.world.fake import fake_world
from workbench.world.mesh import World

WARM_UP, CAPTURES = 5, 15


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x).tanh() - y).square().mean()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def batch(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    assert world.fake_mode is not None
    with world.fake_mode:
        return torch.empty(8, 16), torch.empty(8, 16)


def ours(authored: Authored) -> int:
    joint = capture(authored)
    partition(joint)
    return len(joint.graph.graph.nodes)


def torch_alone(authored: Authored) -> int:
    """The calls that `capture` and `partition` make of torch."""
    args = authored.example_batch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(aot.capture_settings())
        graph = dynamo_graph_capture_for_export(authored.module)(*args)
        stack.enter_context(tracing(graph.meta["tracing_context"]))
        joint = aot_export_joint_with_descriptors(stack, graph, args)
        nodes = len(joint.graph_module.graph.nodes)
        aot_compile_joint_with_descriptors(joint)
    return nodes


HELD: list[Any] = []


def held(authored: Authored) -> int:
    """The fault: each joint graph stays alive."""
    HELD.append(capture(authored))
    return len(HELD[-1].graph.graph.nodes)


LOOPS: dict[str, Callable[[Authored], int]] = {"ours": ours, "torch": torch_alone, "held": held}


def resident() -> float:
    """MB of this process once garbage is collected and free memory is given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main(which: str) -> None:
    with fake_world(4) as world:
        mesh = world.mesh(MeshSpec(dp_shard=4))
        sizes = []
        for _ in range(WARM_UP + CAPTURES):
            nodes = LOOPS[which](author_module(Mlp(), world, mesh, batch=lambda: batch(world)))
            sizes.append(resident())
    slope = statistics.linear_regression(range(CAPTURES), sizes[WARM_UP:]).slope
    print(json.dumps({"nodes": nodes, "kept": slope}))


if __name__ == "__main__":
    main(sys.argv[1])
