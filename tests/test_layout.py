"""The shape of the package: rooms whose imports only go down, small files, and maps that name each of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
from imports import imported_modules, private_torch

from workbench.passes.registry import find_pass
from workbench.recipe.contracts import package_contracts

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "workbench"
ROOMS = ["errors", "torch_api", "recipe", "world", "authoring", "graph", "passes", "checks", "pipeline", "tools",
         "notebook", "cli", "__main__", "__init__"]  # from the ground up
PASSES = PACKAGE / "passes"
NO_PASS = {"passes", *(path.stem for path in PASSES.glob("[a-z]*.py"))}  # the room itself and what passes share
FILES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = sorted({path.parent for path in FILES})


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {module_name(path): path for path in FILES}


def problems(name: str, text: str) -> list[str]:
    """What one module does that its place forbids."""
    room, found = name.split(".")[0], []
    for line, target in imported_modules(text, NAMES):
        if target.split(".")[0] in ROOMS and ROOMS.index(target.split(".")[0]) > ROOMS.index(room):
            found.append(f"{name}:{line}: imports {target}, which lies above it")
        if room == "passes" and target.startswith("passes.") and target.split(".")[1] not in {
                *NO_PASS, *name.split(".")[1:2]}:
            found.append(f"{name}:{line}: a pass imports the pass {target}")
    if room != "torch_api":
        found += private_torch(text, name)
    if (length := len(text.splitlines())) >= (200 if room == "passes" else 300):
        found.append(f"{name}: {length} lines")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_each_module_keeps_to_its_place(path: Path) -> None:
    assert problems(module_name(path), FILES[path]) == [] and path.name != "utils.py"


def test_imports_form_no_circle() -> None:
    graph = nx.DiGraph((name, target) for name, path in NAMES.items()
                       for _, target in imported_modules(FILES[path], NAMES) if target != name)
    assert list(nx.simple_cycles(graph)) == []


def test_a_pass_is_one_short_folder_with_its_contract_and_no_list_names_them() -> None:
    lengths = {}
    for name, contract in package_contracts().items():
        both = [PASSES / name / file for file in ("__init__.py", "transform.py")]
        lengths[name] = sum(len(FILES[path].splitlines()) for path in both)
        assert contract.name == name and find_pass(name).contract is contract
    assert max(lengths.values()) < 200 and sorted(lengths.values())[len(lengths) // 2] < 150, lengths
    files = [path for path in (*FILES, *(ROOT / "tests").rglob("*.py")) if path != PASSES / "__init__.py"]  # the map
    assert [path for path in files if all(name in path.read_text() for name in lengths)] == []


def test_only_rooms_lie_at_the_top() -> None:
    assert {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.name != "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_is_small_and_its_map_names_each_file(folder: Path) -> None:
    inside = {p.stem for p in folder.glob("*.py")} | {p.name for p in FOLDERS if p.parent == folder}
    text = ast.get_docstring(ast.parse(FILES[folder / "__init__.py"]), clean=False) or ""
    named = re.findall(r"^ {4}(\w+) {2,}\S", text, re.M)
    told = {"__init__", "transform"} if folder.parent == PASSES else {"__init__"}  # the room says what a transform is
    assert named == sorted(inside - told) and len(named) <= 20


def test_the_gates_can_fail() -> None:
    above = "which lies above it"
    assert problems("authoring.models.llama3", "from workbench.cli import main") == [
        f"authoring.models.llama3:1: imports cli, {above}"]
    assert problems("graph.capture", "def f():\n    from workbench.checks import lint") == [
        f"graph.capture:2: imports checks.lint, {above}"]
    assert problems("passes.cudagraph.transform", "from workbench.passes.graph_cleanup import x") == [
        "passes.cudagraph.transform:1: a pass imports the pass passes.graph_cleanup"]
    assert problems("passes.cudagraph", "\n" * 200) == ["passes.cudagraph: 200 lines"]
    assert problems("recipe.recipe", "\n" * 300) == ["recipe.recipe: 300 lines"]
    for bad in ("from . import doctor", "import lessons.x"):
        with pytest.raises(ValueError, match="line 1 imports"):
            problems("tools.ablate", bad)
    for bad in ("import torch._dynamo", "from torch._inductor import config", "import torch\ntorch._C.x()",
                "from torch.distributed.tensor import _api", "import torch.distributed as d\nd._symm(1)",
                "from torch.testing._internal.distributed import fake_pg", "from torch import fx\nfx._x"):
        assert private_torch(bad, "m"), bad
    for good in ("import torch\ntorch.ops.aten._to_copy.default", "import torch\ntorch.Tensor.__add__", "x._y"):
        assert private_torch(good, "m") == [], good


def test_all_contracts_are_read_without_torch() -> None:
    code = "import sys, workbench.recipe.contracts as c; sys.exit(not c.CONTRACTS or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


NO_TORCH = [f"recipe.{path.stem}" for path in sorted((PACKAGE / "recipe").glob("[a-z]*.py"))] + [
    "errors", "torch_api.garbage", "torch_api.supported", "checks.verdicts", "tools.compatibility",
    *(f"notebook.lessons.{name}" for name in ("grading", "headless", "lesson", "scores"))]


@pytest.mark.parametrize("name", NO_TORCH)
def test_no_torch_to_read_what_is_declared(name: str) -> None:
    code = f"import sys, workbench.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_tests_mirror_the_package() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        if folder.name in ("browser", "zoo", "mutants", "odd_inputs"):  # these test the package as a whole
            continue
        assert (PACKAGE / folder).is_dir(), f"tests/{folder} has no counterpart in workbench/"
