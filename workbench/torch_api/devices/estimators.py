"""A context in which Inductor's schedulers and estimators use a device's figures for this machine.

Source: torch/utils/_runtime_estimation.py, torch/_inductor/{utils,scheduler,comm_analysis,codecache}.py and
torch/_inductor/fx_passes/overlap_scheduling.py. Works without a GPU and without triton on torch 2.11 to 2.15.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from workbench.errors import temporary
from workbench.torch_api.devices.profile import device_spec
from workbench.torch_api.devices.specs import DeviceSpec
from workbench.torch_api.ops import with_hints

# Imported on first use: the scheduler's import takes a second.
_ESTIMATION = "torch.utils._runtime_estimation"
_OVERLAP = "torch._inductor.fx_passes.overlap_scheduling"
_RUNTIMES = "torch._inductor.fx_passes.node_runtime_estimation"


def _scale() -> float:
    """The factor by which torch's estimator reads a TFLOP figure too high, measured: some releases read petaFLOP."""
    estimation: Any = import_module(_ESTIMATION)
    a = torch.empty(1000, 1000, device="meta")
    with patch.object(estimation, "get_device_tflops", lambda *_, **__: 1.0):
        ns = estimation.get_compute_time(torch.ops.aten.mm, (a, a), {}, a, {torch.float32})
    return round((1e9 / (0.75 * 1e12) * 1e9) / ns)


def repeat_heads(count: Callable[..., int]) -> Callable[..., int]:
    """torch's count of attention FLOP, also for fewer key than query heads, which 2.11 refuses: keys are repeated."""

    def counted(*shapes: Any) -> int:
        query = shapes[-3] if len(shapes) == 3 else shapes[1]
        heads = query[1]
        return count(*((s[0], heads, *s[2:]) for s in shapes))

    return counted


def _roofline_ms(node: torch.fx.Node) -> float:
    """The larger of compute time and transfer time, by torch's formulas and the current device's figures."""
    estimation: Any = import_module(_ESTIMATION)
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda n: with_hints(n.meta["val"])
    )
    value = with_hints(node.meta["val"])
    tensors = [
        t
        for t in (value if isinstance(value, list | tuple) else [value])
        if isinstance(t, torch.Tensor)
    ]
    inputs = [with_hints(n.meta["val"]) for n in node.all_input_nodes]
    compute = estimation.get_compute_time(
        node.target.overloadpacket,  # type: ignore[union-attr]
        args,
        kwargs,
        value,
        {tensors[0].dtype},
    )
    return max(compute, estimation.get_transfer_time(inputs, tensors)) / 1e6


def _without_benchmarks(stack: ExitStack, overlap: Any) -> None:
    """Give torch 2.11 estimates: it measures each matmul on a GPU and exchanges the times between ranks.

    Estimates depend on shapes only, so the ranks agree without an exchange, which later releases skip too.
    """
    if not hasattr(overlap, "estimate_runtime_analytical"):
        return
    scheduler = overlap.OverlapScheduler
    align = "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks"
    stack.enter_context(patch.object(overlap, "estimate_runtime_analytical", _roofline_ms))
    stack.enter_context(patch.object(overlap, "benchmark_node", _roofline_ms))
    stack.enter_context(patch.object(
        overlap, "benchmark_node_with_cache_key", lambda node, *_: (_roofline_ms(node), None)))
    stack.enter_context(patch.object(scheduler, align, lambda self: None))


def _clear_estimates() -> None:
    """Clear Inductor's caches in this process: the path of the disk cache, and the estimates of collectives."""
    import_module("torch._inductor.codecache").CacheBase.get_local_cache_path.cache_clear()
    import_module(_OVERLAP).get_benchmark_cache.cache_clear()
    import_module(_RUNTIMES)._get_collective_cache.cache_clear()


@contextmanager
def device_specs(device: str | DeviceSpec) -> Iterator[DeviceSpec]:
    """Inside, Inductor estimates for this device, and caches the estimates in a temporary folder.

    The folder is needed because Inductor looks up estimates on disk before it asks for the device's figures.
    """
    spec = device_spec(device)
    scale = _scale()

    def tflops(dtype: torch.dtype, *_: Any, **__: Any) -> float:
        return spec.peak(dtype) / 1e12

    def dram(*_: Any, **__: Any) -> float:
        return spec.dram_gbps

    estimation: Any = import_module(_ESTIMATION)
    overlap: Any = import_module(_OVERLAP)
    runtimes: Any = import_module(_RUNTIMES)
    comm: Any = import_module("torch._inductor.comm_analysis")
    flop_counter: Any = import_module("torch.utils.flop_counter")
    importers = (
        estimation,
        import_module("torch._inductor.utils"),
        import_module("torch._inductor.scheduler"),
    )
    with ExitStack() as stack:
        for module in importers:
            factor = 1.0 / scale if module is estimation else 1.0
            figures = {"get_device_tflops": lambda *a, f=factor, **k: tflops(*a, **k) * f,
                       "get_gpu_dram_gbps": dram, "get_device_dram_gbps": dram}
            for name, figure in figures.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, figure))
        _without_benchmarks(stack, overlap)
        # a table for TORCH_TRACE; torch 2.12 fails to count the FLOP of sizes that a step decides
        stack.enter_context(patch.object(runtimes, "_log_compute_estimations", lambda *_: None))
        for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
            stack.enter_context(
                patch.object(flop_counter, name, repeat_heads(getattr(flop_counter, name)))
            )
        generation = comm.NVIDIA_GPU_TYPE[spec.generation]
        stack.enter_context(patch.object(comm, "get_gpu_type", lambda: generation))
        folder = stack.enter_context(
            temporary(lambda: tempfile.TemporaryDirectory(prefix="workbench-estimates-"))
        )
        stack.callback(_clear_estimates)
        stack.enter_context(patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}))
        _clear_estimates()
        yield spec
