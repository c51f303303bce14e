"""The module of a node, from the module stack in its metadata, whose paths torch writes in several ways."""

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
    """The path of the innermost module, or of the forward node's for a backward node; "" outside any module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    innermost = next(reversed(stack.values()))
    return clean_path(innermost[0] if isinstance(innermost, tuple | list) else str(innermost))
