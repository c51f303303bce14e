"""What was measured of one machine, as a device that the cost model simulates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from workbench.errors import WorkbenchError
from workbench.torch_api.devices.specs import DEVICES, DeviceSpec
from workbench.torch_api.supported import cpu_name

MACHINES = Path(__file__).parent / "machines"


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Matmul(_Data):
    """One product of an m x k and a k x n matrix."""

    dtype: str
    m: PositiveInt
    k: PositiveInt
    n: PositiveInt
    ms: PositiveFloat


class Attention(_Data):
    """Causal attention of `heads` (batch and heads together); the backward alone where `backward`."""

    dtype: str
    heads: PositiveInt
    length: PositiveInt
    dim: PositiveInt
    backward: bool
    ms: PositiveFloat


class Move(_Data):
    """One fused pointwise kernel; bytes: read and written."""

    bytes: PositiveInt
    ms: PositiveFloat


class Sent(_Data):
    """One collective alone. bytes: of the unsharded side, on each rank."""

    kind: str
    ranks: int = Field(gt=1)
    bytes: PositiveInt
    ms: PositiveFloat


class MachineProfile(_Data):
    """The file that `workbench calibrate` writes.

    device: name of the data sheet for what was not measured. compute_slowdown, collective_slowdown: factors on each
    while a collective and compute overlap, and product_delays, see `DeviceSpec`: None without a second GPU, the last in
    older files, too. launch_us, view_us: CPU time of an operator that launches a kernel, and of one that launches none,
    where a graph runs node by node. wrapper_us: of a kernel's launch by code that Inductor wrote. host_gbps: 1e9
    bytes/s of a large copy to pinned host memory or back, the slower way. Older files lack the last three. replay_us:
    GPU time of a small kernel in a CUDA graph, all gaps included; None on a CPU. errors: how far simulated steps of
    this machine were from measured ones, of "compute", and with several ranks of "exposure": 0.04 for a median of 4 %.
    """

    format_version: Literal[1] = 1
    device: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    matmuls: tuple[Matmul, ...] = Field(min_length=1)
    attentions: tuple[Attention, ...] = Field(min_length=1)
    moves: tuple[Move, ...] = Field(min_length=2)
    collectives: tuple[Sent, ...] = ()
    compute_slowdown: float | None = Field(None, ge=1, le=100)
    collective_slowdown: float | None = Field(None, ge=1, le=100)
    product_delays: float | None = Field(None, ge=0, le=2)
    launch_us: PositiveFloat
    view_us: PositiveFloat | None = None
    wrapper_us: PositiveFloat | None = None
    host_gbps: PositiveFloat | None = None
    replay_us: PositiveFloat | None = None
    errors: dict[str, float] = {}

    def to_json(self) -> str:
        """What `load_profile` reads."""
        return self.model_dump_json(indent=1) + "\n"


def load_profile(path: Path) -> MachineProfile:
    """Read such a file. Raises WorkbenchError with the file and the first key that is wrong in it."""
    try:
        return MachineProfile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the whole file"
        raise WorkbenchError(
            f"{path}: {where}: missing, unknown or not as `workbench calibrate` writes it: measure "
            "the machine again"
        ) from None


def _elsewhere(profile: MachineProfile) -> str:
    """What to add where a reader could take the profile for one of this machine and torch, and it is not.

    Nothing where GPUs are simulated in a process that uses none: that is what profiles are for.
    """
    gpus = profile.machine.get("gpus")
    if gpus and not torch.cuda.is_initialized():
        return ""
    there = str(gpus[0] if isinstance(gpus, list) and gpus else profile.machine.get("cpu"))
    here = torch.cuda.get_device_name() if gpus else cpu_name()
    then, now = profile.versions.get("torch", "unknown"), torch.__version__
    if there == here and then.split(".")[:2] == now.split(".")[:2]:
        return ""
    return f", calibrated on {there} with torch {then}, and this is {here} with torch {now}"


def _between(grid: Mapping[tuple[int, ...], float], at: Sequence[float]) -> float:
    """Interpolated between the corners of a grid, all on a logarithmic scale; outside the grid, its border's value.

    A corner that was not measured takes no part.
    """
    sides = []
    for axis, wanted in enumerate(at):
        known = sorted({corner[axis] for corner in grid})
        low = max((c for c in known if c <= wanted), default=known[0])
        high = min((c for c in known if c >= wanted), default=known[-1])
        share = math.log(wanted / low) / math.log(high / low) if low < wanted < high else 0.0
        sides.append(((low, 1 - share), (high, share)))
    corners = [
        (tuple(c for c, _ in picked), math.prod(w for _, w in picked))
        for picked in itertools.product(*sides)
    ]
    weighted = [(grid[corner], weight) for corner, weight in corners if weight and corner in grid]
    if not weighted:
        return grid[min(grid, key=lambda corner: sum(math.log(c / max(w, 1)) ** 2
                                                     for c, w in zip(corner, at, strict=True)))]
    return math.exp(
        sum(weight * math.log(value) for value, weight in weighted)
        / sum(weight for _, weight in weighted)
    )


def _along(rows: Iterable[tuple[float, float]], at: float) -> float:
    """Linear between measured (bytes, ms), in order of bytes; beyond the last at its rate."""
    sizes, times = zip(*rows, strict=True)
    return float(np.interp(at, sizes, times)) * max(1.0, at / sizes[-1])


@dataclass(frozen=True, kw_only=True)
class MeasuredSpec(DeviceSpec):
    """A device whose times come from a profile, and from its data sheet where nothing was measured."""

    profile: MachineProfile = field(repr=False, compare=False)

    @property
    def trust(self) -> str:
        errors = [f"{kind} within {error:.0%}" for kind, error in self.profile.errors.items()]
        known = f"{' and '.join(errors)} as a median" if errors else "error unknown"
        return known + _elsewhere(self.profile)

    def moving_ms(self, moved: float) -> float:
        return _along(sorted((row.bytes, row.ms) for row in self.profile.moves), moved)

    def product_ms(self, flop: float, m: int, n: int, dtype: torch.dtype) -> float:
        rows = [row for row in self.profile.matmuls if f"torch.{row.dtype}" == str(dtype)]
        if not rows:
            return super().product_ms(flop, m, n, dtype)
        k = flop / (2 * m * n)
        rate = _between({(r.m, r.k, r.n): 2 * r.m * r.k * r.n / r.ms for r in rows}, (m, k, n))
        return flop / rate

    def attention_ms(
        self, flop: float, length: int, dim: int, backward: bool, dtype: torch.dtype
    ) -> float:
        rows = [row for row in self.profile.attentions
                if f"torch.{row.dtype}" == str(dtype) and row.backward == backward]
        if not rows:
            return super().attention_ms(flop, length, dim, backward, dtype)
        per = 10 if backward else 4  # FLOP of unmasked attention, as the cost model counts them
        rate = _between(
            {(r.length, r.dim): per * r.heads * r.length**2 * r.dim / r.ms for r in rows},
            (length, dim),
        )
        return flop / rate

    def sending_ms(self, kind: str, ranks: int, payload: float) -> float:
        rows = [(row.bytes, row.ms) for row in self.profile.collectives if (row.kind, row.ranks) == (kind, ranks)]
        if not rows:
            return super().sending_ms(kind, ranks, payload)
        # no message costs more than a larger one
        rows = [(size, min(ms for more, ms in rows if more >= size)) for size, _ in sorted(rows)]
        largest, ms = rows[-1]
        if payload <= largest or ms >= 2 * rows[0][1]:
            return _along(rows, payload)
        # only latency was measured: the link says what bytes cost
        link = super().sending_ms
        return ms + link(kind, ranks, payload) - link(kind, ranks, largest)


def measured_spec(name: str, profile: MachineProfile) -> MeasuredSpec:
    """The device of a profile. Raises WorkbenchError where the profile names no device of ours."""
    if profile.device not in DEVICES:
        raise WorkbenchError(f"{name}: device {profile.device!r}: one of {', '.join(DEVICES)}")
    sheet = DEVICES[profile.device]
    fields = {key: getattr(sheet, key) for key in DeviceSpec.__dataclass_fields__}
    for key in fields.keys() & MachineProfile.model_fields.keys():
        if (measured := getattr(profile, key)) is not None:
            fields[key] = measured
    return MeasuredSpec(**fields | {"name": name}, profile=profile)


def device_spec(device: str | DeviceSpec) -> DeviceSpec:
    """The device of that name: a data sheet's, one of the measured `machines`, or a file of `workbench calibrate`.

    A spec is returned unchanged.
    """
    if isinstance(device, DeviceSpec):
        return device
    if device in DEVICES:
        return DEVICES[device]
    path = Path(device) if device.endswith(".json") else MACHINES / f"{device}.json"
    if not path.is_file():
        known = [*DEVICES, *sorted(p.stem for p in MACHINES.glob("*.json"))]
        raise WorkbenchError(
            f"unknown device {device!r}: one of {', '.join(known)}, a file that `workbench calibrate` "
            "wrote, or a DeviceSpec with your own figures"
        )
    return _loaded(path, path.stat().st_mtime_ns)


@cache
def _loaded(path: Path, _: int) -> MeasuredSpec:
    return measured_spec(path.stem, load_profile(path))
