"""The door: what another package adds by an entry point, and what is left where a folder of the lab is gone."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from workbench.recipe.contracts import package_contracts
from workbench.recipe.hooks import HOOKS
from workbench.recipe.plugins import COMMANDS, GROUP, load_plugins

ROOT = Path(__file__).parents[2]
PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["workbench.plugins"]
LAB = {name: module for name, module in PLUGINS.items() if module.startswith("workbench.lab.")}


def test_a_plugin_that_cannot_be_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("broken", "sample_that_is_gone", GROUP), EntryPoint("bisect", LAB["bisect"], GROUP)]
    monkeypatch.setattr("workbench.recipe.plugins.entry_points", lambda group: found)
    told = r"plugin 'broken' \(sample_that_is_gone\) cannot be loaded, and is left out: ModuleNotFoundError"
    with pytest.warns(UserWarning, match=told):
        load_plugins.__wrapped__()


WITHOUT_THE_LAB = """
import warnings
warnings.simplefilter("ignore")
import workbench
from workbench.passes.registry import find_pass
from workbench.recipe.contracts import package_contracts
from workbench.recipe.hooks import HOOKS
from workbench.recipe.plugins import COMMANDS
print(*(find_pass(name).name for name in package_contracts()), *COMMANDS, *HOOKS)
from workbench import WorkbenchError, author, build, fake_world, load_recipe, run
recipe = load_recipe("tour").override({"model.n_layers": 1})
with fake_world(recipe.mesh.world_size) as world:
    print(*(record.outcome for record in build(recipe, world, progress=False).records))
one = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 1})
for ask in (lambda: run(one, checkpoints="c"), lambda: workbench.save_weights,
            lambda: author(one.override({"model.weights": "w"}), world),
            lambda: recipe.override({"training.step": "whole"}), lambda: recipe.override({"capture": "traced"})):
    try:
        with fake_world(1) as world:
            ask()
    except WorkbenchError as error:
        print(error)
"""


NAMES = {"artifacts": "compile_recipe run_artifact", "bisect": "Bisection bisect", "traces": "read_order",
         "compile_backend": "as_backend", "graph_passes": "as_graph_pass", "schedule": "compare_schedules",
         "inside_inductor": "Explanation inductor_passes look_inside watched"}


def test_public_names_of_the_lab_load_on_use() -> None:
    for folder, names in NAMES.items():
        package = import_module(f"workbench.lab.{folder}")
        assert [name for name in names.split() if not hasattr(package, name)] == [], folder
        assert not hasattr(package, "nothing")


@pytest.mark.integration
def test_without_the_lab_the_core_lists_its_passes_and_builds_the_tour(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "workbench", tmp_path / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    for module in LAB.values():
        shutil.rmtree(tmp_path / module.replace(".", "/"))
    environment = {"PYTHONPATH": str(tmp_path), "WORKBENCH_RECIPES": str(ROOT / "lessons/recipes")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_LAB], env=os.environ | environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    listed, built, *refused = done.stdout.splitlines()
    load_plugins()
    declared = {name: item.code for name, item in (package_contracts() | COMMANDS).items()} | HOOKS
    course = {name for name, code in declared.items() if code.startswith("workbench_lessons.")}
    left = set(listed.split()) - course  # where the course is installed, it stays
    core = {path.stem for path in (ROOT / "workbench/passes").glob("*.py")}
    core |= {"capture.joint", "check.agreement", "check.order", "level.full", "training.step.pair"}
    assert left <= core and len(left) == 16
    assert set(built.split()) == {"PASS"}
    missing = "this needs the plugin 'weights', which is missing: install the workbench again"
    asked = "checkpoints c", "save_weights", "model.weights 'w'"
    told = [f"{each}: {missing}, or leave this out" for each in asked]
    told += ["recipe 'tour' with training.step=whole: training.step: unknown 'whole': one of "
             "pair, or of a plugin that is not installed",
             "recipe 'tour' with capture=traced: capture: unknown 'traced': one of "
             "joint, or of a plugin that is not installed"]
    assert refused == told
