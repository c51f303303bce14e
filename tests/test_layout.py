"""The shape of DESIGN: imports go down, private torch names stay in torch_api, modules stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "workbench"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each layer may import its own and those above it in this list.
LAYERS = [
    {"errors", "garbage", "declare", "grading", "contracts", "recipe_rules", "recipe_parts", "recipe_edit", "sizes",
     "recipe", "lesson", "scores", "schemas", "supported", "compatibility", "words"},
    {"torch_api"},
    {"world", "models"},
    {"parallel"},
    {"stamp"},
    {"joint_graph", "forward_backward", "model_contract"},
    {"analysis"},
    {"passes"},
    {"verify"},
    {"pipeline"},
    {"compiled_step", "training", "expert_load", "data", "built", "numerics_proof", "time_proof", "dump", "roofline",
     "report", "report_text", "progress", "step_profile", "measured_run", "machine", "explain", "inside_inductor",
     "user_kernel", "schedules",
     "recipe_ranks", "run_recipe", "bisect_recipe", "propose", "matrix", "ablate", "backend", "graph_pass",
     "source_code", "export", "fingerprint", "variant", "study"},
    {"draw", "widgets", "display", "figures"},
    {"magics", "headless", "course", "course_commands", "doctor", "commands", "cli", "__main__", "__init__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Plain data that any layer may hold: no torch in them.
EVERYWHERE = {"verify.verdicts"}
PRIVATE = re.compile(r"(^|\.)_(?!_)\w")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever in the file; relative imports are resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["workbench", *([] if module == "__init__" else module.split("."))]
                up = node.level - (1 if is_package else 0)
                base = ".".join([*here[: len(here) - up], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that go up the list, and modules that stand in no layer."""
    top = module.split(".")[0]
    if top not in LEVEL:
        return [f"{module}: in no layer of tests/test_layout.py: add it where it belongs"]
    found = []
    for line, name in imports_of(source, module, is_package):
        parts = name.split(".")
        if parts[0] in ("lessons", "notebooks", "tests", "benchmarks"):
            found.append(f"{module}:{line}: imports {name}")
        if parts[0] != "workbench" or any(name.startswith(f"workbench.{e}") for e in EVERYWHERE):
            continue
        if len(parts) < 2 or parts[1] not in LEVEL:  # a public name of the package itself
            continue
        if LEVEL[parts[1]] > LEVEL[top]:
            found.append(f"{module}:{line}: imports {name}, which lies above it")
    return found


def private_torch(source: str, module: str) -> list[str]:
    """Private names of torch that are imported, or reached as an attribute of `torch` or an alias of its modules."""
    found = []
    tree = ast.parse(source)
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for line, name in imports_of(source, module, False):
        if name.split(".")[0] == "torch" and (PRIVATE.search(name) or "testing._internal" in name):
            found.append(f"{module}:{line}: {name}")
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is None:
            continue
        head, *rest = dotted.split(".")
        if head in aliases and rest:
            name = ".".join([aliases[head], *rest])
            # operators under torch.ops are called by their schema's name, also those with an underscore
            if PRIVATE.search(name) and not name.startswith("torch.ops."):
                found.append(f"{module}:{getattr(node, 'lineno', 0)}: {name}")
    return sorted(set(found))


def _dotted(node: ast.AST) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) and parts else None


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    assert upward(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize("path", [p for p in MODULES if "torch_api" not in p.parts], ids=module_name)
def test_private_torch_names_stay_in_torch_api(path: Path) -> None:
    assert private_torch(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 300
    assert path.name != "utils.py"


def test_the_gates_can_fail() -> None:
    assert upward("from workbench.cli import main", "models.llama3") == [
        "models.llama3:1: imports workbench.cli.main, which lies above it"]
    assert upward("from ..headless import x", "passes.reshard") == [
        "passes.reshard:1: imports workbench.headless.x, which lies above it"]
    assert upward("from . import draw", "pipeline") == ["pipeline:1: imports workbench.draw, which lies above it"]
    assert upward("def f():\n    import lessons.x", "pipeline") == ["pipeline:2: imports lessons.x"]
    assert upward("", "helpers") == ["helpers: in no layer of tests/test_layout.py: add it where it belongs"]
    assert upward("from .recipe import Recipe\nfrom workbench.verify.verdicts import Verdict", "pipeline") == []
    for bad in ("import torch._dynamo", "from torch._inductor import config", "import torch\ntorch._C.x()",
                "from torch.distributed.tensor import _api", "import torch.distributed as d\nd._symm(1)",
                "from torch.testing._internal.distributed import fake_pg", "from torch import fx\nfx._x"):
        assert private_torch(bad, "m"), bad
    for good in ("import torch\ntorch.ops.aten._to_copy.default", "import torch\ntorch.Tensor.__add__", "x._y"):
        assert private_torch(good, "m") == [], good


@pytest.mark.parametrize("name", [*sorted(LAYERS[0] - {"schemas"}), "verify.verdicts", "headless"])
def test_no_torch_to_read_what_is_declared(name: str) -> None:
    code = f"import sys, workbench.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_tests_mirror_the_package() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        if folder == Path("browser"):  # what a reader sees of all of it
            continue
        assert (PACKAGE / folder).is_dir(), f"tests/{folder} has no counterpart in workbench/"
