"""What works on this machine, what does not, and how to fix it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.wording import counted
from workbench.tools.compatibility import Table, load_tables, results_dir
from workbench.torch_api.supported import (
    TESTED_PLATFORM,
    TESTED_PYTHON,
    cxx_compiler,
    installed,
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
    gloo: bool = True
    nccl: bool = False
    triton: bool = False
    packages: dict[str, str | None] = field(default_factory=dict)
    tables: list[Table] | str = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One line: mark "ok", "note" or "bad", what was checked, what was found, and what to do (or "")."""

    mark: str
    topic: str
    state: str
    do: str = ""


def look() -> Facts:
    """The facts of this machine. Imports torch only if its version is supported."""
    compiler, tables = cxx_compiler(), list[Table]()
    if compiler is not None:
        shown = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
        compiler = shown.partition("\n")[0] or compiler
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "system": platform_name(),
        "torch": installed_torch(),
        "cores": cores(),
        "compiler": compiler,
        "packages": {name: installed(name) for name in PACKAGES},
        "triton": installed("triton") is not None,
        "tables": tables,
    }
    try:
        tables += load_tables(results_dir())
    except WorkbenchError as error:
        facts["tables"] = str(error)
    if not torch_problem(facts["torch"]):
        import torch
        import torch.distributed as dist

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        facts |= {
            "torch": torch.__version__,
            "gpus": list(map(torch.cuda.get_device_name, range(count))),
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        }
    return Facts(**facts)


def findings(facts: Facts) -> list[Finding]:
    """What the facts mean: versions, then what works here."""
    return [*_versions(facts), *_torch(facts), *_abilities(facts)]


def _tested(name: str, state: str, tested: bool, do: str) -> Finding:
    return Finding("ok", name, state) if tested else Finding("note", name, f"{state}, untested", do)


def _versions(facts: Facts) -> list[Finding]:
    missing = [name for name, have in facts.packages.items() if have is None]
    packages = Finding(
        "ok", "packages", ", ".join(f"{name} {have}" for name, have in facts.packages.items())
    )
    if missing:
        packages = Finding(
            "bad", "packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return [_tested("platform", " ".join(facts.system), facts.system == TESTED_PLATFORM,
                    "it may work: tests run on Linux x86-64 only"),
            _tested("python", facts.python, facts.python.rpartition(".")[0] in TESTED_PYTHON,
                    f"tested on Python {' and '.join(TESTED_PYTHON)}"), packages]


def _torch(facts: Facts) -> list[Finding]:
    """The installed torch: what its minor version's table of tests says, and each test that did not pass."""
    version, problem = facts.torch, torch_problem(facts.torch)
    if version is None or problem:
        return [Finding("bad", "torch", version or "not installed", problem.rpartition(": ")[2])]
    if isinstance(facts.tables, str):
        return [Finding("note", "torch", f"{version}; {facts.tables}")]
    table = next((t for t in facts.tables if minor(t.torch) == minor(version)), None)
    if table is None:
        return [Finding("note", "torch", f"{version}: no table of its tests here",
                        f"make test-fast TORCH={version.split('+')[0]} in a checkout writes one")]
    passed = (
        f"{version}: {table.passed} of {len(table.rows)} tests pass on "
        f"{table.torch}, {table.platform}"
    )
    return [Finding("note" if table.others else "ok", "torch", passed),
            *(Finding("note", outcome, test) for test, outcome in table.others)]


def _abilities(facts: Facts) -> list[Finding]:
    rows = []
    if not torch_problem(facts.torch):
        rows.append(
            Finding("ok", "fake world", "any mesh, one process: capture, passes, estimates")
        )
        gloo = f"real ranks on {counted(facts.cores, 'core')}: training and every verdict but GPU memory"
        rows.append(Finding("ok", "gloo ranks", gloo) if facts.gloo else Finding(
            "bad", "gloo ranks", "this torch has no gloo", "install a torch build with gloo"))
        kinds = ", ".join(
            f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus)
        )
        if facts.gpus and facts.nccl:
            rows.append(Finding("ok", "nccl ranks", f"up to {len(facts.gpus)}: {kinds}"))
        else:
            rows.append(
                Finding(
                    "note",
                    "nccl ranks",
                    f"not here: {kinds or 'no CUDA GPU can be used'}",
                    "GPUs need a CUDA build of torch; without: gloo, or a fake world",
                )
            )
    if facts.compiler:
        rows.append(Finding("ok", "full Inductor", f"compiler: {facts.compiler}"))
    else:
        rows.append(
            Finding(
                "note",
                "full Inductor",
                "no C++ compiler: full_inductor_compilation is refused",
                "apt-get install g++, or conda install cxx-compiler, or set CXX",
            )
        )
    if facts.gpus and not facts.triton:
        rows.append(Finding("note", "triton", "not installed: Inductor compiles nothing for GPUs",
                             "pip install triton"))
    return rows


_COLORS = {"ok": "32", "note": "33", "bad": "1;31"}


def text(findings: list[Finding], *, color: bool = False) -> str:
    """One line for each finding, with what to do below it."""
    lines = []
    for finding in findings:
        mark = f"{finding.mark:<4}"
        shown = f"\033[{_COLORS[finding.mark]}m{mark}\033[0m" if color else mark
        lines.append(f"{shown}  {finding.topic:<14}{finding.state}")
        if finding.do:
            lines.append(f"{'':20}-> {finding.do}")
    bad = [finding.topic for finding in findings if finding.mark == "bad"]
    return "\n".join(
        [*lines, "", f"fix first: {', '.join(bad)}" if bad else "ready: try `workbench tour`"]
    )
