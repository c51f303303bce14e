"""pyproject, constraints and environment.yml say the same, and dependencies are those that are imported."""

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
from imports import all_imports

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEV = PROJECT["optional-dependencies"]["dev"]
MAKE_VENV = runpy.run_path(str(ROOT / ".ci" / "make_venv"), run_name="make_venv")
MODULES = {
    "ipython": "IPython", "jupyter-client": "jupyter_client", "pillow": "PIL", "pyyaml": "yaml", "tomli-w": "tomli_w",
}
# Run as commands or plugins, not imported: the file that runs each.
RUN = {
    "ipykernel": "notebooks/00_tour.ipynb", "jupyterlab": "Makefile", "mypy": "Makefile", "nbval": "Makefile",
    "pre-commit": ".pre-commit-config.yaml", "pytest-timeout": "pyproject.toml", "pytest-xdist": "Makefile",
    "ruff": "Makefile",
}
# Comes with torch where it can, used only if there.
OPTIONAL = {"triton", "jsonschema"}


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0]


def imported(*folders: str) -> set[str]:
    """The packages of others that the modules and notebooks of these folders import."""
    sources = []
    for folder in folders:
        sources += [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        for path in (ROOT / folder).glob("*.ipynb"):
            cells = json.loads(path.read_text())["cells"]
            code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
            sources += [re.sub(r"(?m)^\s*[%!].*$", "", text) for text in code]
    names = {name.split(".")[0] for source in sources for _, name in all_imports(source)}
    return names - set(sys.stdlib_module_names) - {"", "workbench", "workbench_lessons", "conftest", "tests"}


def test_constraints_pin_what_is_declared_and_conda_declares_no_more() -> None:
    declared = {name_of(r): r for r in PROJECT["dependencies"] + DEV}
    constraints = dict(re.findall(r"(?m)^([^#=]+)==(.+)$", (ROOT / "constraints.txt").read_text()))
    assert set(constraints) == set(declared)
    for name, version in constraints.items():
        assert MAKE_VENV["fits"](version, declared[name]), f"{name} {version}: {declared[name]}"
    assert constraints["torch"] == "2.13.0" and "torch>=2.11,<2.16" in PROJECT["dependencies"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    plain = [each for each in environment if isinstance(each, str)]
    assert {"pip": ["-c constraints.txt", "-e .[dev]"]} in environment
    assert {name_of(each) for each in plain} == {"python", "pip", "cxx-compiler", "make"}
    python = next(each for each in plain if each.startswith("python="))
    assert MAKE_VENV["fits"](python.removeprefix("python="), PROJECT["requires-python"])


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
    run = {name for name, file in RUN.items() if (ROOT / file).is_file()}
    for requirements, used in ((PROJECT["dependencies"], runtime), (DEV, everywhere)):
        names = {name_of(requirement) for requirement in requirements} - run
        assert {name for name in names if MODULES.get(name, name.replace("-", "_")) not in used} == set()


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
    for folder in (built, empty):
        folder.mkdir()
    steps = (f"egg_info --egg-base {built} build --build-base {built} "
             f"bdist_wheel --bdist-dir {built}/wheel --dist-dir {built}")
    subprocess.run([sys.executable, "setup.py", "-q", *steps.split()], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    assert wheel.stat().st_size < 6 * 2**20
    course = site / "workbench_lessons"
    for folder, installed in ((ROOT / "workbench", site / "workbench"), (ROOT / "lessons", course)):
        needed = {path.relative_to(folder) for path in (*folder.rglob("*.py"), *folder.rglob("*.toml"))}
        assert needed - {path.relative_to(installed) for path in installed.rglob("*")} == set()
    assert {path.name for path in (course / "notebooks").iterdir()} == {
        path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    code = [*ROOT.glob("lessons/**/*.py"), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("workbench/**/*.py")]
    named = set(re.findall(r'"([^"/\\]+)', "".join(path.read_text() for path in code)))
    named -= {"gloo", "h200x2"}  # a world and a device
    results = {path.name for path in (ROOT / "benchmarks/results").iterdir()} & named
    assert "course" in results
    assert [name for name in results if not (course / "benchmarks/results" / name).exists()] == []
    env = {**os.environ, "PYTHONPATH": str(site), "WORKBENCH_PROGRESS": "0"}
    done = subprocess.run([sys.executable, "-c", COMMANDS], cwd=empty, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\ntour\n" in done.stdout and "\n00_tour: " in done.stdout and "tour on 8 fake ranks" in done.stdout
    assert "then -m jupyterlab --notebook-dir=course course/notebooks/00_tour.ipynb\n" in done.stdout
    assert (empty / "course/docs/glossary.md").read_bytes() == (ROOT / "docs/glossary.md").read_bytes()
    assert str(ROOT) not in done.stdout


def test_ci_runs_make_test_and_make_test_all_checks_everything() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make test"]
    plan = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = ("ruff check", "mypy", "pytest tests notebooks", "course --profile small", "pytest --nbval ", "-m nightly")
    assert [step for step in steps if step not in plan] == [] and "--nbval-lax" not in plan


def test_make_venv_refuses_a_torch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version, fit in (("2.11.0+cu130", True), ("2.15.1", True), ("2.10.9", False), ("2.16.0", False)):
        assert MAKE_VENV["fits"](version, ">=2.11,<2.16") is fit
    monkeypatch.setattr(sys, "argv", ["make_venv", str(tmp_path / "v"), "--torch", "2.9.0"])
    with pytest.raises(SystemExit, match="^torch 2.9.0 does not fit >=2.11,<2.16 of pyproject.toml$"):
        MAKE_VENV["main"]()
    assert not (tmp_path / "v").exists()
