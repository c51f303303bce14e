"""The shape of the package: rooms whose imports only go down, small files, and maps that name each of them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
from imports import FILES, PACKAGE, all_imports, graph_of_imports, imported_modules, private_torch

from workbench.passes.registry import find_pass
from workbench.recipe.contracts import package_contracts

TESTS = Path(__file__).parent
ROOMS = ["errors", "torch_api", "recipe", "world", "authoring", "graph", "passes", "checks", "pipeline", "tools",
         "notebook", "lab", "cli", "__main__", "__init__"]  # from the ground up
LESSONS = TESTS.parent / "lessons"
PASSES = package_contracts()
DECLARATIONS = [name for name in FILES if name.startswith("lab.") and name.count(".") == 1]
NO_TORCH = [*(name for name in FILES if name.startswith("recipe")), *DECLARATIONS, "errors", "torch_api.garbage",
            "torch_api.supported", "checks.verdicts", "tools.compatibility"]
NO_TORCH_OF_THE_COURSE = ["", ".commands", ".grading", ".headless", ".lesson", ".scores"]


def problems(name: str, text: str) -> list[str]:
    """What one module does that its place forbids."""
    room, *inner = name.split(".")
    found = [] if "torch_api" in name.split(".") else private_torch(text, name)
    for line, target in imported_modules(text, FILES):
        there, *parts = target.split(".")
        if ROOMS.index(there) > ROOMS.index(room):
            found.append(f"{name}:{line}: imports {target}, which lies above it")
        if room == there == "passes" and parts and parts[0] in PASSES and parts[:1] != inner[:1]:
            found.append(f"{name}:{line}: a pass imports the pass {target}")
        if room == there == "lab" and parts[:1] != inner[:1] and inner:
            found.append(f"{name}:{line}: a folder of the lab imports another, {target}")
    if not inner and (hidden := {each.rpartition(".")[2] for _, each in all_imports(text)} & set(inside(name))):
        found.append(f"{name}: a public name hides the module {hidden}")
    if (length := len(text.splitlines())) >= (300 if room == "passes" else 600):
        found.append(f"{name}: {length} lines")
    return found


def inside(folder: str) -> list[str]:
    return [name.rpartition(".")[2] for name in FILES if name.rpartition(".")[0] == folder]


def test_each_module_keeps_to_its_place() -> None:
    assert [problem for name, text in FILES.items() for problem in problems(name, text)] == []
    assert [name for name in FILES if name.endswith("utils")] == []


def test_imports_form_no_circle_and_only_rooms_lie_at_the_top() -> None:
    assert [circle for circle in nx.simple_cycles(graph_of_imports()) if len(circle) > 1] == []
    assert {path.stem for path in PACKAGE.iterdir()} - {"__pycache__"} == set(ROOMS)


def test_a_core_pass_is_one_short_file_and_no_list_names_them() -> None:
    assert all(contract.name == name and find_pass(name).contract is contract for name, contract in PASSES.items())
    core = [name for name in PASSES if not PASSES[name].code]
    assert len(core) >= 10 and all(f"passes.{name}" in FILES for name in core)
    assert all(PASSES[name].code.startswith("workbench.lab.") for name in PASSES if name not in core)
    texts = {**FILES, "passes": "", **{path: path.read_text() for path in TESTS.rglob("*.py")}}  # passes has the map
    assert [place for place, text in texts.items() if all(name in text for name in PASSES)] == []


def names_of_map(text: str) -> list[str]:
    return re.findall(r"^ {4}(\w+) {2,}\S", text, re.M)


def test_a_room_is_small_and_its_map_names_each_file() -> None:
    for folder in {name.rpartition(".")[0] for name in FILES} - {""}:
        named = names_of_map(ast.get_docstring(ast.parse(FILES[folder]), clean=False) or "")
        told = {"transform", "torch_api"} if folder.startswith("lab.") else set()  # the rooms say what these are
        assert named == sorted({*inside(folder)} - told) and len(named) <= 20, folder


def test_a_lesson_s_files_are_short_named_in_its_map_and_use_no_private_name_of_torch() -> None:
    for path in LESSONS.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 600 and private_torch(text, path.stem) == [], path
    for folder in LESSONS.glob("l*/"):
        helpers = sorted({path.stem for path in folder.glob("*.py")} - {"__init__", "solution"})
        assert names_of_map((folder / "__init__.py").read_text() if helpers else "") == helpers, folder


def test_the_gates_can_fail() -> None:
    for name, text, told in [
        ("authoring.models.llama3", "from workbench.cli import main", ":1: imports cli, which lies above it"),
        ("graph.capture", "def f():\n    from workbench.checks import lint",
         ":2: imports checks.lint, which lies above it"),
        ("passes.cudagraph", "from workbench.passes.graph_cleanup import x",
         ":1: a pass imports the pass passes.graph_cleanup"),
        ("graph", "from workbench.graph.capture import capture", ": a public name hides the module {'capture'}"),
        ("passes.cudagraph", "\n" * 300, ": 300 lines"), ("recipe.recipe", "\n" * 600, ": 600 lines"),
        ("lab.traces.order", "import torch._inductor", ":1: torch._inductor"),
        ("lab.traces.torch_api", "from workbench.lab.bisect.nodes import x",
         ":1: a folder of the lab imports another, lab.bisect.nodes"),
    ]:
        assert problems(name, text) == [name + told]
    for bad in ("from . import doctor", "import lessons.x"):
        with pytest.raises(ValueError, match="line 1 imports"):
            problems("graph.capture", bad)
    for bad in ("import torch\ntorch._C.x()", "import torch.distributed as d\nd._symm(1)",
                "from torch.testing._internal.distributed import fake_pg", "from torch import fx\nfx._x"):
        assert private_torch(bad, "m"), bad
    for good in ("import torch\ntorch.ops.aten._to_copy.default", "import torch\ntorch.Tensor.__add__", "x._y"):
        assert private_torch(good, "m") == [], good


def test_what_is_declared_is_read_without_torch() -> None:
    code = ("import sys\nfor name in sys.argv[1:]:\n"
            "    __import__(name)\n    assert 'torch' not in sys.modules, name")
    names = [*(f"workbench.{name}" for name in NO_TORCH),
             *(f"workbench_lessons.course{name}" for name in NO_TORCH_OF_THE_COURSE)]
    subprocess.run([sys.executable, "-c", code, *names], cwd=TESTS.parent, check=True)


def test_tests_mirror_the_package() -> None:
    whole = {"browser", "lessons", "zoo", "mutants", "odd_inputs"}  # not of one folder of the package
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert [folder for folder in folders if folder.name not in whole and not (PACKAGE / folder).is_dir()] == []
