"""Measure what kernels, collectives and launches take on the ranks of this world.

Every figure is the mean over a window of repetitions, since a burst runs at a clock that a training step cannot hold.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.errors import WorkbenchError
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.progress import telling
from workbench.recipe.files import writable, write_whole
from workbench.recipe.wording import counted
from workbench.torch_api.devices.profile import Attention, MachineProfile, Matmul, Move, Sent
from workbench.torch_api.devices.specs import DEVICES
from workbench.world.mesh import World, current_world
from workbench.world.ranks import ranks

WINDOW = {"cuda": 0.05, "cpu": 0.02}
SIDES = {"cuda": (512, 2048, 8192, 32768), "cpu": (64, 256, 1024)}
LENGTHS = {"cuda": (512, 2048, 4096), "cpu": (128, 512)}
MOVED = {"cuda": range(16, 31, 2), "cpu": range(14, 25, 2)}
SENT = {"cuda": range(12, 30, 2), "cpu": range(12, 25, 3)}
HOST_BYTES = {"cuda": 2**28, "cpu": 2**24}
SMALL, REPLAYED, LINKS = 64, 10, (16, 64)
OVERLAPPED, LONG = (4096, 8192), 2**28
"""Sides of a short and a long product, and elements of an all-gather that takes longer than seven short ones."""
KINDS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "all_to_all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
}


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def window_ms(call: Callable[[], Any], device: torch.device, repeats: int = 0) -> float:
    """The mean milliseconds of a call, over `repeats` calls, or over as many as fill a window of time, after warm-up.

    A call that is longer than the window runs three times in all, so that a machine is measured in minutes.
    """
    call()
    if not repeats:
        once = _seconds(call, device)
        repeats = max(1, round(WINDOW[device.type] / max(once, 1e-6)))
    return _seconds(call, device, repeats) / repeats * 1e3


def kernel_ms(call: Callable[[], Any], device: torch.device, repeats: int = 0, replayed: int = REPLAYED) -> float:
    """The mean milliseconds of a call's kernels: on a GPU `replayed` calls are one graph, since launching may take
    longer.

    repeats: as in `window_ms`; ranks that communicate must agree on it.
    """
    if device.type == "cpu":
        return window_ms(call, device, repeats)
    call()
    if not repeats:
        replayed = max(1, min(replayed, round(WINDOW["cuda"] / _seconds(call, device))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        for _ in range(replayed):
            call()
    return window_ms(graph.replay, device, repeats) / replayed


def cold_ms(make: Callable[[], Callable[[], Any]], size: int, device: torch.device) -> float:
    """`kernel_ms` of calls on tensors of `size` bytes that are not in the GPU's cache: each has tensors of its own."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    calls = [make() for _ in range(min(512, 2 * cache // size) + 1)]
    turns = itertools.cycle(calls)
    return kernel_ms(lambda: next(turns)(), device, replayed=max(REPLAYED, len(calls)))


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def matmuls(device: torch.device) -> Iterator[Matmul]:
    """Products over all triples of sides, but for the largest of float32, which would take seconds."""
    sides = SIDES[device.type]
    for dtype, m, k, n in product(_dtypes(device), sides, sides, sides):
        if dtype is torch.float32 and m * k * n > sides[-2] ** 2 * sides[-1]:
            continue

        def make() -> Callable[[], Any]:
            a, b, out = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (k, n), (m, n)))  # noqa: B023
            return partial(torch.mm, a, b, out=out)

        size = (m * k + k * n + m * n) * dtype.itemsize
        yield Matmul(dtype=_name(dtype), m=m, k=k, n=n, ms=cold_ms(make, size, device))


def attentions(device: torch.device) -> Iterator[Attention]:
    """Causal attention, forward and backward, with as many heads as make up 16,384 queries."""
    for dtype, length, dim in product(_dtypes(device), LENGTHS[device.type], (64, 128)):
        heads = max(8, 16384 * 8 // length)
        query, key, value = (torch.randn(1, heads, length, dim, device=device, dtype=dtype, requires_grad=True)
                             for _ in range(3))

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)  # noqa: B023

        out = forward()
        grad = torch.randn_like(out)

        def backward() -> None:
            torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)  # noqa: B023

        for which, call in ((False, forward), (True, backward)):
            yield Attention(dtype=_name(dtype), heads=heads, length=length, dim=dim, backward=which,
                            ms=window_ms(call, device))


def moves(device: torch.device) -> Iterator[Move]:
    """One pointwise kernel with two inputs and a result."""
    for power in MOVED[device.type]:
        def make() -> Callable[[], Any]:
            a, b, out = (torch.ones(2**power // 2, device=device, dtype=torch.bfloat16) for _ in range(3))  # noqa: B023
            return partial(torch.add, a, b, out=out)

        yield Move(bytes=3 * 2**power, ms=cold_ms(make, 3 * 2**power, device))


def collectives(world: World) -> Iterator[Sent]:
    """Each kind over all ranks, alone. Every rank calls it."""
    for kind, power in product(KINDS, SENT[world.device.type]):
        whole = torch.ones(2**power // 4, device=world.device)
        part = torch.ones(2**power // 4 // world.size, device=world.device)
        if kind == "all_to_all" and world.device.type == "cpu":
            continue  # gloo has none
        dist.barrier()
        ms = kernel_ms(lambda: KINDS[kind](whole, part), world.device, repeats=20 if power < 24 else 8)  # noqa: B023
        yield Sent(kind=kind, ranks=world.size, bytes=2**power, ms=ms)


def overlapped(world: World) -> tuple[float, float, float]:
    """(compute, collective, delay): how much longer each takes beside the other, where the collective began first; and
    what part of a product's time a collective ends later that is launched right after the product.

    On a GPU of each rank, a long all-gather beside products of several waves of blocks; medians of five.
    """
    short, long = (torch.randn(side, side, device=world.device, dtype=torch.bfloat16) for side in OVERLAPPED)
    whole, part = torch.ones(LONG, device=world.device), torch.ones(LONG // world.size, device=world.device)
    lanes = {"gather": torch.cuda.Stream()}
    calls: dict[str, Callable[[], Any]] = {
        "short": partial(torch.mm, short, short, out=torch.empty_like(short)),
        "long": partial(torch.mm, long, long, out=torch.empty_like(long)),
        "gather": lambda: dist.all_gather_into_tensor(whole, part)}

    def ends(*order: str) -> list[float]:
        """When each call has ended, in milliseconds from the launch of the first; the median of five times."""
        runs = []
        for _ in range(6):  # the first warms up
            dist.barrier()
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
            events[0].record(lanes.get(order[0]))
            for name, event in zip(order, events[1:], strict=True):
                with torch.cuda.stream(lanes.get(name)):
                    calls[name]()
                    event.record()
            torch.cuda.synchronize()
            runs.append([events[0].elapsed_time(event) for event in events[1:]])
        return [statistics.median(times) for times in zip(*runs[1:], strict=True)]

    products = ["short"] * 30
    alone, (beside, *slower), gather = ends(*products), ends("gather", *products), ends("gather")[0]
    compute = (slower[6] - slower[0]) / (alone[6] - alone[0])
    delay = (ends("long", "gather")[1] - gather) / ends("long")[0]
    return max(1.0, compute), max(1.0, beside / gather), min(2.0, max(0.0, delay))


def node_us(link: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> float:
    """CPU microseconds of an operator of `link`, which keeps the shape, where a graph of such links runs node by node.

    The tensors are so small that a GPU waits for the CPU. The median of several windows.
    """
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(LINKS[0]):
            x = link(x)
        return x

    x = torch.ones(SMALL, SMALL, device=device)
    graph = make_fx(chain)(x)
    nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
    return statistics.median(window_ms(partial(graph, x), device, 100) for _ in range(5)) / nodes * 1e3


def launch_us(device: torch.device) -> float:
    """CPU microseconds of an operator that launches a kernel and allocates its result."""
    return node_us(lambda x: F.silu(x @ x) * x + x, device)


def view_us(device: torch.device) -> float:
    """CPU microseconds of an operator that launches none."""
    return node_us(lambda x: x.view(-1).view(SMALL, SMALL).t().t(), device)


def wrapper_us(device: torch.device) -> float:
    """CPU microseconds of a kernel's launch by Inductor's code: what a kernel more adds to a chain of small ones.

    Each link of the chain is a matmul by a weight of its own and a pointwise kernel, so the checks of inputs, the
    buffers and the views count, and the costs of the whole call do not.
    """
    def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = F.silu(x @ weight) + x
        return x

    times = []
    x = torch.ones(SMALL, SMALL, device=device)
    for links in LINKS:
        weights = [torch.full((SMALL, SMALL), 1e-3, device=device) for _ in range(links)]
        compiled = torch.compile(chain, fullgraph=True, dynamic=False)
        with torch.no_grad():
            call = partial(compiled, x, weights)
            call()
            times.append(statistics.median(window_ms(call, device, 100) for _ in range(5)))
    return (times[1] - times[0]) / (2 * (LINKS[1] - LINKS[0])) * 1e3


def replay_us(device: torch.device) -> float:
    """GPU microseconds of a small kernel in a CUDA graph, with the gap to the next one."""
    a = torch.ones(SMALL, device=device)
    return kernel_ms(lambda: a.add_(1), device) * 1e3


def host_gbps(device: torch.device) -> float:
    """1e9 bytes a second of a large copy to the host or back, the slower way; pinned host memory on a GPU."""
    there = torch.empty(HOST_BYTES[device.type], dtype=torch.uint8, device=device)
    host = torch.empty(HOST_BYTES[device.type], dtype=torch.uint8, pin_memory=device.type == "cuda")
    ways = (partial(host.copy_, there, non_blocking=True), partial(there.copy_, host, non_blocking=True))
    return there.nbytes / max(window_ms(way, device) for way in ways) / 1e6


def measure(command: str) -> MachineProfile | None:
    """Measure the machine of this world's ranks; every rank calls it, and rank 0 gets the profile.

    Compute is measured on rank 0 while the others wait. Raises WorkbenchError for a GPU without a data sheet.
    """
    world = current_world()
    device, cuda = world.device, world.device.type == "cuda"
    name = next((d for d in DEVICES if d in torch.cuda.get_device_name().lower()), None) if cuda else "cpu"
    if name is None:
        raise WorkbenchError(f"{torch.cuda.get_device_name()}: no data sheet of it: add a DeviceSpec to "
                             "workbench/torch_api/devices/specs.py")
    sent = tuple(collectives(world)) if world.size > 1 else ()
    slower = overlapped(world) if cuda and world.size > 1 else (None, None, None)
    profile = None
    if world.rank == 0:
        profile = MachineProfile(
            device=name, command=command, machine=machine(), versions=versions(), matmuls=tuple(matmuls(device)),
            attentions=tuple(attentions(device)), moves=tuple(moves(device)), collectives=sent,
            compute_slowdown=slower[0], collective_slowdown=slower[1], product_delays=slower[2],
            launch_us=launch_us(device), view_us=view_us(device), wrapper_us=wrapper_us(device),
            host_gbps=host_gbps(device), replay_us=replay_us(device) if cuda else None)
    if world.size > 1:
        dist.barrier()
    return profile


def command(args: argparse.Namespace) -> int:
    """`workbench calibrate`."""
    writable(args.out, "--out")
    with telling() as tell:
        tell(f"start {counted(args.ranks, 'rank')}")
        with ranks(args.ranks, timeout=args.timeout, echo="none") as pool:
            tell("measure")
            profile = pool.run(measure, shlex.join(["workbench", *args.line]))[0]
    write_whole(args.out, profile.to_json())
    gpus, about = profile.machine["gpus"], profile.machine
    where = f"{len(gpus)} {gpus[0]}" if gpus else f"{about['cores']} cores, {about['cpu']}"
    print(f"{args.out}: {where}, torch {profile.versions['torch']}: {len(profile.matmuls)} matmuls, "
          f"{len(profile.attentions)} attentions, {len(profile.moves)} moves, {len(profile.collectives)} collectives")
    return 0
