"""pyproject, constraints and environment.yml say the same, and dependencies are those that are imported."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEV = PROJECT["optional-dependencies"]["dev"]
# Run as commands or plugins, not imported: the file that runs each.
RUN = {
    "ipykernel": "notebooks/00_tour.ipynb", "jupyterlab": "Makefile", "mypy": "Makefile", "nbval": "Makefile",
    "pre-commit": ".pre-commit-config.yaml", "pytest-timeout": "pyproject.toml", "pytest-xdist": "Makefile",
    "ruff": "Makefile",
}
MODULES = {
    "ipython": "IPython", "jupyter-client": "jupyter_client", "pillow": "PIL", "pyyaml": "yaml", "tomli-w": "tomli_w",
}
# Comes with torch where it can, used only if there.
OPTIONAL = {"triton", "jsonschema"}


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))


def fits(version: str, requirement: str) -> bool:
    for op, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        if (numbers(version) >= numbers(bound)) != (op == ">="):
            return False
    return True


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def imported(*folders: str) -> set[str]:
    found: set[str] = set()
    for folder in folders:
        sources = [p.read_text() for p in (ROOT / folder).rglob("*.py")]
        for path in (ROOT / folder).glob("*.ipynb"):
            cells = json.loads(path.read_text())["cells"]
            code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
            sources += [re.sub(r"(?m)^\s*[%!].*$", "", text) for text in code]
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Import):
                    found |= {a.name.split(".")[0] for a in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - {"workbench", "workbench_lessons", "conftest", "tests"}


def test_constraints_pin_what_is_declared_and_conda_declares_no_more() -> None:
    declared = {name_of(r): r for r in PROJECT["dependencies"] + DEV}
    assert set(constraints()) == set(declared)
    for name, version in constraints().items():
        assert fits(version, declared[name]), f"{name}=={version} does not fit {declared[name]}"
    assert constraints()["torch"] == "2.13.0" and "torch>=2.11,<2.16" in PROJECT["dependencies"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    plain = [each for each in environment if isinstance(each, str)]
    assert {"pip": ["-c constraints.txt", "-e .[dev]"]} in environment
    assert {name_of(each) for each in plain} == {"python", "pip", "cxx-compiler", "make"}
    python = next(each for each in plain if each.startswith("python="))
    assert fits(python.removeprefix("python="), PROJECT["requires-python"])


def test_every_import_is_declared() -> None:
    modules = {MODULES.get(name_of(r), name_of(r)) for r in PROJECT["dependencies"]}
    hf = set(map(name_of, PROJECT["optional-dependencies"]["hf"]))  # of lesson 000, which says so
    assert imported("workbench", "lessons") - modules - OPTIONAL == imported("notebooks") - modules - hf == set()
    everywhere = modules | {MODULES.get(name_of(r), name_of(r)) for r in DEV}
    ours = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    siblings = {name for p in ours for name in (p.stem, p.parent.name)}
    made = re.compile(r'"(\w+)\.py"|ModuleType\("(\w+)"\)')  # by a test
    siblings |= {name for p in ours for found in made.findall(p.read_text()) for name in found}
    extras = {"torchtitan", "torchao"}
    assert imported("tests", "benchmarks") - everywhere - siblings - OPTIONAL - extras - {"benchmarks"} == set()


def test_every_dependency_is_used() -> None:
    runtime = imported("workbench", "lessons", "notebooks")
    everywhere = runtime | imported("tests", "benchmarks")
    unused = []
    for requirement in PROJECT["dependencies"] + DEV:
        name = name_of(requirement)
        used = runtime if requirement in PROJECT["dependencies"] else everywhere
        there = (ROOT / RUN[name]).is_file() if name in RUN else MODULES.get(name, name.replace("-", "_")) in used
        unused += [] if there else [name]
    assert unused == []


def test_each_folder_with_code_or_a_lesson_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, list[str]] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", installed.update)
    runpy.run_path("setup.py")
    lessons = {path.parent for end in ("py", "toml") for path in Path("lessons").rglob(f"*.{end}")}
    rooms = {path.parent for path in Path("workbench").rglob("*.py")}
    names = {".".join(folder.parts) for folder in lessons | rooms}
    assert set(installed["packages"]) == {re.sub("^lessons", "workbench_lessons", name) for name in names}
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"workbench_lessons": "lessons"}
    assert setuptools["package-data"]["*"] == ["*.toml"]


COMMANDS = """
import os
from workbench.cli import main
def execv(_, command):
    print("then", *command[1:])
    return 0
os.execv = execv
for command in ["recipes", "lessons", "passes", "lab", "run tour --world fake --set model.n_layers=1"]:
    assert not main(command.split()), command
"""


@pytest.mark.integration
def test_a_wheel_works_without_a_checkout(tmp_path: Path) -> None:
    """It is unpacked before the path's other packages, and the commands run in an empty folder."""
    built, site, empty = (tmp_path / name for name in ("built", "site", "empty"))
    empty.mkdir()
    built.mkdir()
    steps = (f"egg_info --egg-base {built} build --build-base {built} "
             f"bdist_wheel --bdist-dir {built}/wheel --dist-dir {built}")
    subprocess.run([sys.executable, "setup.py", "-q", *steps.split()], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    assert wheel.stat().st_size < 6 * 2**20
    course = site / "workbench_lessons"
    assert {path.name for path in (course / "notebooks").iterdir()} == {
        path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert [name for name in results_that_are_read() if not (course / "benchmarks/results" / name).exists()] == []
    env = {**os.environ, "PYTHONPATH": str(site), "WORKBENCH_PROGRESS": "0"}
    done = subprocess.run([sys.executable, "-c", COMMANDS], cwd=empty, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\ntour\n" in done.stdout and "\n00_tour: " in done.stdout and "tour on 8 fake ranks" in done.stdout
    assert "then -m jupyterlab --notebook-dir=course course/notebooks/00_tour.ipynb\n" in done.stdout
    assert (empty / "course/docs/glossary.md").read_bytes() == (ROOT / "docs/glossary.md").read_bytes()
    assert str(ROOT) not in done.stdout


def results_that_are_read() -> list[str]:
    """The files and folders of benchmarks/results that code of the course names."""
    sources = [*(ROOT / "lessons").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb"),
               *(ROOT / "workbench").rglob("*.py")]
    texts = [path.read_text() for path in sources]
    results = {path.name for path in (ROOT / "benchmarks/results").iterdir()}
    results -= {"gloo", "h200x2"}  # also the names of a world and of a device
    return [name for name in sorted(results) if any(f'"{name}' in text or f'\\"{name}' in text for text in texts)]


def test_ci_runs_make_test_and_make_test_all_checks_everything() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make test"] and os.access(ROOT / ".ci/run", os.X_OK)
    plan = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = ("ruff check", "mypy", "pytest tests notebooks", "course --profile small", "pytest --nbval ", "-m nightly")
    order = [plan.index(step) for step in steps]
    assert order == sorted(order) and "--nbval-lax" not in plan and "--nbval-cell-timeout" in plan


def test_make_venv_keeps_a_torch_that_fits_and_refuses_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_venv = runpy.run_path(str(ROOT / ".ci" / "make_venv"), run_name="make_venv")
    for version, fit in (("2.11.0+cu130", True), ("2.15.1", True), ("2.10.9", False), ("2.16.0", False)):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert make_venv["installed_torch"](">=2.11,<2.16") == (version if fit else None)
    run = subprocess.run([sys.executable, ROOT / ".ci" / "make_venv", tmp_path / "v", "--torch", "2.9.0"],
                         capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "torch 2.9.0 does not fit >=2.11,<2.16 of pyproject.toml\n")
    assert not (tmp_path / "v").exists()
