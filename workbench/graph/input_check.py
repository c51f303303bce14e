"""A compiled step's inputs against those of its capture: another structure, dtype, shape, stride or device is refused.

A graph is made for one kind of input, and would compute something else, or fail far from the cause, with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class InputCheck:
    """What each input was at the capture, as JSON data.

    writes: whether the forward writes into an input in place; then inputs share memory as they did, or not at all.
    """

    inputs: list[dict[str, Any]]
    writes: bool = False
    shared: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Sequence[Any], writes: bool = False) -> InputCheck:
        return cls([_described(value) for value in batch], writes, _shared(batch))

    def require(self, step: str, batch: Sequence[Any]) -> None:
        """Raise WorkbenchError for the first input that is of another kind. step: its title, for the message."""
        if len(batch) != len(self.inputs):
            raise WorkbenchError(
                f"the compiled step of {step} takes {len(self.inputs)} inputs, as at the capture, and "
                f"got {len(batch)}"
            )
        for number, (captured, value) in enumerate(zip(self.inputs, batch, strict=True), 1):
            described = _described(value)
            if described != captured:
                name = next(name for name in captured if described.get(name) != captured[name])
                now = described.get(name, "absent")
                raise WorkbenchError(
                    f"the compiled step of {step}: the {name} of input {number} was {captured[name]} "
                    f"at the capture and is {now}: capture again with such inputs, or convert it"
                )
        if self.writes and _shared(batch) != self.shared:
            raise WorkbenchError(
                f"the compiled step of {step} writes into its inputs, and other inputs than at the "
                "capture share memory: give each its own with .clone()"
            )


_DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"type": type(value).__name__, "value": repr(value)}
    return {"type": "Tensor", "dtype": _DTYPES[value.dtype], "shape": list(value.shape),
            "stride": list(value.stride()), "device": value.device.type}


def _shared(batch: Sequence[Any]) -> list[int]:
    """For each tensor the first that it shares memory with: itself, where there is none before it."""
    places: dict[int, int] = {}
    tensors = [value for value in batch if isinstance(value, torch.Tensor) and not value.is_meta]
    return [
        places.setdefault(tensor.untyped_storage()._cdata, i) for i, tensor in enumerate(tensors)
    ]
