"""The supported torch, Python and platform. Imports no torch, since the check comes before that import."""

from __future__ import annotations

import os
import platform
import re
import shutil
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from workbench.errors import WorkbenchError

TORCH_RANGE = "torch>=2.11,<2.16"
TESTED_PYTHON = ("3.11", "3.12")
TESTED_PLATFORM = ("Linux", "x86_64")
_LOWEST, _ABOVE = (2, 11), (2, 16)


def installed(package: str) -> str | None:
    """The installed version of a package, without its import; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_torch() -> str | None:
    return installed("torch")


def minor(version: str) -> tuple[int, ...]:
    """(2, 13) for "2.13.0+cpu"."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def torch_problem(version: str | None) -> str:
    """Why that version is not supported and what to do, or ""."""
    remedy = f"pip install '{TORCH_RANGE}'"
    if version is None:
        return f"torch is not installed, and this package needs {TORCH_RANGE}: {remedy}"
    if not _LOWEST <= minor(version) < _ABOVE:
        return f"torch {version} is not supported, this package needs {TORCH_RANGE}: {remedy}"
    return ""


def require_torch() -> None:
    """Raise WorkbenchError if the installed torch is not supported."""
    if problem := torch_problem(installed_torch()):
        raise WorkbenchError(problem)


def cxx_compiler() -> str | None:
    """The path of the C++ compiler that Inductor would use; None where there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next(filter(None, map(shutil.which, names)), None)


def require_compiler() -> None:
    """Raise WorkbenchError, before anything is captured, where no C++ compiler is found."""
    if cxx_compiler() is None:
        raise WorkbenchError("full_inductor_compilation needs a C++ compiler and none was found: install g++ (apt-get "
                             "install g++, or conda install cxx-compiler), or set CXX")


def platform_name() -> tuple[str, str]:
    """(system, machine), such as ("Linux", "x86_64")."""
    return platform.system(), platform.machine()


@cache
def cpu_name() -> str:
    """Its model, such as "Intel(R) Xeon(R) Processor"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
