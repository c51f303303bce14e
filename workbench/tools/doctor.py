"""What works on this machine, what does not, and how to fix it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.wording import counted
from workbench.tools.compatibility import Table, load_tables, results_dir
from workbench.torch_api.supported import (
    TESTED_PLATFORM,
    TESTED_PYTHON,
    installed_torch,
    minor,
    platform_name,
    torch_problem,
)
from workbench.world.bounds import cores

PACKAGES = ("pydantic", "papermill", "nbconvert", "ipykernel", "jupyterlab")


@dataclass(frozen=True)
class Facts:
    """What the findings are derived from. `packages`: version by name, None if missing. `gpus`: names.

    `tables`: test results by torch version, or why they cannot be read.
    """

    python: str
    system: tuple[str, str]
    torch: str | None
    cores: int
    compiler: str | None
    gpus: list[str] = field(default_factory=list)
    cuda_build: str | None = None
    gloo: bool = True
    nccl: bool = False
    triton: bool = False
    packages: dict[str, str | None] = field(default_factory=dict)
    tables: list[Table] | str = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One line: mark "ok", "note" or "bad", what was checked, what was found, and what to do (or "")."""

    mark: str
    what: str
    found: str
    do: str = ""


def compiler_version() -> str | None:
    """The first line of `--version` of the C++ compiler that Inductor would use, or None."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    paths = [path for path in map(shutil.which, names) if path]
    if not paths:
        return None
    shown = subprocess.run(
        [paths[0], "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    return shown.partition("\n")[0] or paths[0]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _tables() -> list[Table] | str:
    try:
        return load_tables(results_dir())
    except WorkbenchError as error:
        return str(error)


def look() -> Facts:
    """The facts of this machine. Imports torch only if its version is supported."""
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "system": platform_name(),
        "torch": installed_torch(),
        "cores": cores(),
        "compiler": compiler_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tables": _tables(),
    }
    if not torch_problem(facts["torch"]):
        import torch
        import torch.distributed as dist

        usable = torch.cuda.is_available()
        facts |= {
            "torch": torch.__version__,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if usable
            else [],
            "cuda_build": torch.version.cuda,
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "triton": _version("triton") is not None,
        }
    return Facts(**facts)


def findings(facts: Facts) -> list[Finding]:
    """What the facts mean: versions, then what works here."""
    return [*_versions(facts), *_abilities(facts)]


def _versions(facts: Facts) -> list[Finding]:
    system, arch = facts.system
    tested = facts.system == TESTED_PLATFORM
    found = [Finding("ok" if tested else "note", "platform", f"{system} {arch}" + ("" if tested else ", untested"),
                     "" if tested else "it may work: tests run on Linux x86-64 only")]
    tested = facts.python.rpartition(".")[0] in TESTED_PYTHON
    found.append(Finding("ok" if tested else "note", "python", facts.python + ("" if tested else ", untested"),
                         "" if tested else f"tested on Python {' and '.join(TESTED_PYTHON)}"))
    found += _torch(facts)
    missing = [name for name, have in facts.packages.items() if have is None]
    found.append(Finding("bad" if missing else "ok", "packages",
                         f"missing: {', '.join(missing)}" if missing else
                         ", ".join(f"{name} {have}" for name, have in facts.packages.items()),
                         f"pip install {' '.join(missing)}" if missing else ""))
    return found


def _torch(facts: Facts) -> list[Finding]:
    """The installed torch: what its minor version's table of tests says, and each test that did not pass."""
    here, problem = facts.torch, torch_problem(facts.torch)
    if here is None or problem:
        return [Finding("bad", "torch", here or "not installed", problem.rpartition(": ")[2])]
    if isinstance(facts.tables, str):
        return [Finding("note", "torch", f"{here}; {facts.tables}")]
    table = next((t for t in facts.tables if minor(t.torch) == minor(here)), None)
    if table is None:
        release = here.split("+")[0]
        return [Finding("note", "torch", f"{here}: no table of its tests here",
                        f"make test-fast TORCH={release} in a checkout writes one")]
    found = (
        f"{here}: {table.passed} of {len(table.rows)} tests pass on {table.torch}, {table.platform}"
    )
    return [Finding("note" if table.others else "ok", "torch", found),
            *(Finding("note", outcome, test) for test, outcome in table.others)]


def _abilities(facts: Facts) -> list[Finding]:
    found = []
    if not torch_problem(facts.torch):
        found.append(
            Finding("ok", "fake world", "any mesh, one process: capture, passes, estimates")
        )
        gloo = f"real ranks on {counted(facts.cores, 'core')}: training and every verdict but GPU memory"
        found.append(
            Finding("ok", "gloo ranks", gloo)
            if facts.gloo
            else Finding(
                "bad", "gloo ranks", "this torch has no gloo", "install a torch build with gloo"
            )
        )
        found.append(_nccl(facts))
    if facts.compiler:
        found.append(Finding("ok", "full Inductor", f"compiler: {facts.compiler}"))
    else:
        found.append(Finding("note", "full Inductor", "no C++ compiler: full_inductor_compilation is refused",
                             "apt-get install g++, or conda install cxx-compiler, or set CXX"))
    if facts.gpus and not facts.triton:
        found.append(Finding("note", "triton", "not installed: Inductor compiles nothing for GPUs",
                             "pip install triton"))
    return found


def _nccl(facts: Facts) -> Finding:
    if facts.gpus and facts.nccl:
        kinds = ", ".join(
            f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus)
        )
        return Finding("ok", "nccl ranks", f"up to {len(facts.gpus)}: {kinds}")
    if facts.gpus:
        return Finding(
            "note", "nccl ranks", "GPUs, and a torch without NCCL", "install a CUDA build of torch"
        )
    if facts.cuda_build is None:
        return Finding(
            "note",
            "nccl ranks",
            "not here: torch is built for the CPU",
            "with a GPU, install a CUDA build",
        )
    return Finding(
        "note",
        "nccl ranks",
        "not here: no CUDA GPU can be used",
        "without one: gloo, or a fake world",
    )


_MARKS = {"ok": ("ok  ", "32"), "note": ("note", "33"), "bad": ("bad ", "1;31")}


def text(found: list[Finding], *, color: bool = False) -> str:
    """One line for each finding, with what to do below it."""
    lines = []
    for f in found:
        mark, paint = _MARKS[f.mark]
        shown = f"\033[{paint}m{mark}\033[0m" if color else mark
        lines.append(f"{shown}  {f.what:<14}{f.found}")
        if f.do:
            lines.append(f"{'':20}-> {f.do}")
    bad = [f.what for f in found if f.mark == "bad"]
    return "\n".join(
        [*lines, "", f"fix first: {', '.join(bad)}" if bad else "ready: try `workbench tour`"]
    )
