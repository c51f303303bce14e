"""Where a node came from: the module stack that torch keeps in its metadata, and how torch writes a path there."""

from __future__ import annotations

import functools
import re

import torch

_SELF = re.compile(r"^L\['\w+'\]\.?|^L__self___?|^self\.")
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")


@functools.lru_cache(maxsize=8192)
def clean_path(path: str) -> str:
    """`L['self'].layers.0.attention` and `L['self'].layers['0'].attention` become `layers.0.attention`."""
    path = _INDEX.sub(r".\1", _SELF.sub("", path))
    return path.replace("._modules.", ".").replace("_modules.", "").strip(".")


def module_path(node: torch.fx.Node) -> str:
    """The innermost module's path, of the forward node's module for a backward node; "" outside any module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    innermost = next(reversed(stack.values()))
    return clean_path(innermost[0] if isinstance(innermost, tuple | list) else str(innermost))
