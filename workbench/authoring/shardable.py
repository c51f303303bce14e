"""What a module's parameters must be like, so that ranks can hold shards in their place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

import torch
from torch import nn

from workbench.authoring.plans import AuthoringError
from workbench.authoring.simple_fsdp import Precision


def require_shardable(module: nn.Module, precision: Precision) -> None:
    """AuthoringError, with the model, the parameter or buffer, and the remedy, for what sharding would change."""
    problems = chain(
        _scripted(module),
        _of_precision(module, precision),
        _with_hooks(module),
        _overlapping(module),
    )
    if problem := next(problems, ""):
        raise AuthoringError(f"model {type(module).__name__}: {problem}")


def _scripted(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            yield (
                f"module {path} is compiled by TorchScript, which cannot be traced: put the module that it was made "
                "of in its place"
            )


def _of_precision(module: nn.Module, precision: Precision) -> Iterator[str]:
    """Parameters that are neither float32 nor of the dtype in which the step computes."""
    for name, param in module.named_parameters():
        if param.dtype.is_floating_point and param.dtype not in (torch.float32, precision.param):
            yield (
                f"parameter {name} is {param.dtype}, and the step would compute in {precision.param}: call .float() on "
                "the model, and give the dtype to compute in as precision.param"
            )


def _with_hooks(module: nn.Module) -> Iterator[str]:
    for name, param in module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            yield (
                f"parameter {name} has a hook, and a shard that takes its place has none: register the hook on the "
                "parameter of the authored module"
            )


def _overlapping(module: nn.Module) -> Iterator[str]:
    """Parameters that share memory with another tensor of the module: a write to one no longer reaches the other."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    tensors: dict[str, torch.Tensor] = {
        f"parameter {name}": value for name, value in module.named_parameters()
    }
    tensors |= {f"buffer {name}": value for name, value in module.named_buffers()} | dict(
        _attributes(module)
    )
    for name, tensor in tensors.items():
        if not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in by_storage.values():
        for (name, first), (other_name, other) in combinations(sharing, 2):
            (start, end), (other_start, other_end) = _span(first), _span(other)
            if name.startswith("parameter ") and start < other_end and other_start < end:
                yield (
                    f"{name} shares memory with {other_name}, and its shards would not: give each memory of its own "
                    "with .clone()"
                )


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors of modules, but for those that a hook may compute before each forward, as `spectral_norm` does."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not part._forward_pre_hooks:
                yield f"attribute {name} of {f'module {path}' if path else 'the model'}", value


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes between the first and the last element of a tensor, by their places in its storage."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first, size = tensor.storage_offset(), tensor.element_size()
    return int(first * size), int((first + reach + 1) * size)
