"""Pickle what parent and ranks send each other: functions and classes of cells by value, tensors on the host."""

from __future__ import annotations

import io
import pickle
import sys
import types
from functools import reduce
from typing import Any

import cloudpickle

LARGE_BYTES = 1 << 20
_OPERATORS = ("_Ops", "_OpNamespace", "OpOverloadPacket", "OpOverload")  # torch cannot pickle them


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for another process: a tensor is sent from the host, without the unused part of its storage."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            original = obj
            dtensor = sys.modules.get("torch.distributed.tensor")
            if dtensor is not None and isinstance(obj, dtensor.DTensor):
                return self.reduce_dtensor(obj)
            # the result of a functional collective, maybe unfinished
            if hasattr(obj, "trigger_wait"):
                obj = obj.trigger_wait()
            if type(obj) in (torch.Tensor, torch.nn.Parameter):
                sent = on_host(obj)
                if _is_plain_and_large(sent):
                    data = pickle.PickleBuffer(sent.detach().reshape(-1).view(torch.uint8).numpy())
                    return _rebuilt, (data, type(obj), sent.dtype, tuple(sent.shape), sent.requires_grad)
                if sent is not original:
                    return sent.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        elif (
            torch is not None
            and type(obj).__module__ == "torch._ops"
            and type(obj).__name__ in _OPERATORS
        ):
            name = obj.__name__ if isinstance(obj, types.ModuleType) else f"torch.ops.{obj}"
            return _operator, (name,)
        return super().reducer_override(obj)

    def reduce_dtensor(self, value: Any) -> Any:
        """DTensors are refused."""
        raise TypeError(
            "a DTensor means nothing outside its ranks: send x.to_local() or x.full_tensor()"
        )


def _operator(name: str) -> Any:
    """torch.ops, a namespace, an operator or an overload, from its dotted name."""
    import torch

    return reduce(getattr, name.split(".")[1:], torch)


def _is_plain_and_large(tensor: Any) -> bool:
    """Whether its bytes are all there is to send, and are many: torch's own pickling would copy them three times."""
    import torch

    return (tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
            and not tensor.is_conj() and not tensor.is_neg() and tensor.is_contiguous()
            and tensor.untyped_storage().nbytes() == tensor.nbytes >= LARGE_BYTES)


def _rebuilt(
    data: bytearray, kind: type, dtype: Any, shape: tuple[int, ...], requires_grad: bool
) -> Any:
    import torch

    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape)
    return torch.nn.Parameter(tensor, requires_grad) if kind is torch.nn.Parameter else \
        tensor.requires_grad_(requires_grad)


def on_host(tensor: Any) -> Any:
    """The tensor itself, or a copy if it is on a device or uses less than half of its storage."""
    import torch

    on_device = tensor.device.type not in ("cpu", "meta")
    dense = (
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    )
    # Pickling a view would send the whole storage. The copies no longer share it.
    wasteful = (
        dense and tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
    )
    if not (on_device or wasteful):
        return tensor
    host = tensor.detach().cpu() if on_device else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(host, tensor.requires_grad)
    return host.requires_grad_(tensor.requires_grad)


def dumps(value: Any, pickler: type[Pickler] = Pickler) -> bytes:
    """Pickle `value` for another process, cell-defined functions and classes by value.

    CUDA tensors arrive on the host. Raises TypeError for a DTensor and whatever pickle raises for the rest.
    """
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
