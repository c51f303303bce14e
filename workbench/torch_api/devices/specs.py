"""Devices by their data sheets, and the time of a kernel or collective by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

EFFICIENCY = 0.75
"""Of a product or an attention that was not measured: its share of the peak."""


@dataclass(frozen=True)
class DeviceSpec:
    """Peak figures of a device.

    tflops: dense 1e12 FLOP/s by dtype name. dram_gbps, link_gbps, net_gbps: 1e9 bytes/s of memory, of one rank's link
    inside a host, and of its link between hosts. latency_us: of a collective. compute_slowdown, collective_slowdown:
    factors on the time of each while both run. product_delays: how much of a product's time a collective waits that
    starts with it, and finds no free multiprocessor. launch_us, view_us: CPU time of an operator that launches a kernel
    and of one that launches none, where a graph runs node by node; wrapper_us: of a kernel's launch by Inductor's code.
    None if not measured.
    host_gbps: 1e9 bytes/s of a copy to pinned host memory or back.
    composite_kernels: whether attention and RMS norm run as one kernel each, whatever their sizes.
    """

    name: str
    tflops: Mapping[str, float]
    dram_gbps: float
    link_gbps: float
    net_gbps: float
    latency_us: float = 10.0
    ranks_per_host: int = 8
    generation: str = "HOPPER"
    compute_slowdown: float = 1.0
    collective_slowdown: float = 1.0
    product_delays: float = 0.0
    launch_us: float | None = None
    view_us: float | None = None
    wrapper_us: float | None = None
    composite_kernels: bool = True
    host_gbps: float = 50.0

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s for a dtype; those of float32 for a dtype that is not listed."""
        return self.tflops.get(str(dtype).removeprefix("torch."), self.tflops["float32"]) * 1e12

    def launching_us(self, *, compiled: bool) -> tuple[float, float]:
        """CPU time of a kernel's launch and of a view, by Inductor's code or node by node; 0 if not measured."""
        if compiled and self.wrapper_us is not None:
            return self.wrapper_us, 0.0
        return self.launch_us or 0.0, 0.0 if compiled else self.view_us or 0.0

    @property
    def trust(self) -> str:
        """What is known of the error of times that are simulated on this device."""
        return "not calibrated"

    def moving_ms(self, moved: float) -> float:
        """A kernel that reads and writes this many bytes, at full memory bandwidth."""
        return moved / (self.dram_gbps * 1e9) * 1e3

    def copying_ms(self, copied: float) -> float:
        """A copy of this many bytes to pinned host memory, or back."""
        return self.latency_us / 1e3 + copied / (self.host_gbps * 1e9) * 1e3

    def product_ms(self, flop: float, m: int, n: int, dtype: torch.dtype) -> float:
        """A product whose result is m x n, at EFFICIENCY of the peak; n counts the columns of all of a batch."""
        return 1e3 * flop / (EFFICIENCY * self.peak(dtype))

    def attention_ms(
        self, flop: float, length: int, dim: int, backward: bool, dtype: torch.dtype
    ) -> float:
        """Attention over `length` keys with heads of size `dim`; flop: of all pairs, also where a mask leaves some out.
        """
        return 1e3 * flop / (EFFICIENCY * self.peak(dtype))

    def sending_ms(self, kind: str, ranks: int, payload: float) -> float:
        """A collective over `ranks` by the ring model: latency, and the bytes that a rank sends over its slowest link.

        payload: bytes of the unsharded side.
        """
        rate = self.link_gbps if ranks <= self.ranks_per_host else self.net_gbps
        trips = 2.0 if kind == "all_reduce" else 1.0
        return self.latency_us / 1e3 + trips * payload * (ranks - 1) / ranks / (rate * 1e9) * 1e3


def _gpu(
    name: str, half: float, single: float, double: float, dram: float, link: float, generation: str
) -> DeviceSpec:
    tflops = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    pcie = 50.0 if generation == "HOPPER" else 25.0
    return DeviceSpec(name, tflops, dram, link, pcie, generation=generation, host_gbps=pcie)


# From the vendor's data sheets, without sparsity. NVLink per direction.
DEVICES: dict[str, DeviceSpec] = {spec.name: spec for spec in (
    _gpu("h100", 989.0, 67.0, 67.0, 3350.0, 450.0, "HOPPER"),
    _gpu("h200", 989.0, 67.0, 67.0, 4800.0, 450.0, "HOPPER"),
    _gpu("a100", 312.0, 19.5, 19.5, 2039.0, 300.0, "AMPERE"),
    # One core of a server with AVX2 and its share of the memory bandwidth; gloo over loopback.
    DeviceSpec("cpu", {"bfloat16": 0.05, "float16": 0.05, "float32": 0.1, "float64": 0.05}, 10.0, 2.0, 1.0, 100.0,
               64, "AMPERE", composite_kernels=False, host_gbps=10.0),
)}
