"""What figures were measured on: the machine, and the versions."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from workbench.torch_api.supported import cpu_name, installed
from workbench.world.bounds import cores


def gpus() -> int:
    """How many CUDA devices can be used."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    names = [torch.cuda.get_device_name(i) for i in range(gpus())]
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": cores(),
        "gpus": names,
    }


def versions() -> dict[str, str]:
    """Of torch, Python and this package, and of CUDA and NCCL where there is a GPU."""
    by_package = {
        "workbench": installed("torch-compiler-workbench") or "not installed",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    if gpus():
        by_package |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return by_package
