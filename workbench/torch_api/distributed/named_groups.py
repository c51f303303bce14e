"""Process groups under chosen names, so that an artifact finds the groups that it names.

Source: torch/csrc/distributed/c10d/GroupRegistry.cpp, through its Python binding.
"""

from __future__ import annotations

import contextlib

import torch._inductor.fx_passes.bucketing  # registers the operators of bucketed collectives
import torch.distributed._symmetric_memory  # noqa: F401  registers operators that send while they multiply
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _resolve_process_group


def alias_groups(groups: dict[str, str]) -> None:
    """Let each of these names find the process group that has the name on its right. A group that had it loses it."""
    for name, group in groups.items():
        resolved = _resolve_process_group(group)  # type: ignore[arg-type]
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(name)  # type: ignore[arg-type]
        _register_process_group(name, resolved)  # type: ignore[arg-type]
