"""The door: what another package adds by an entry point, and what is left where a folder of the lab is gone."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from workbench.recipe.contracts import package_contracts
from workbench.recipe.hooks import HOOKS
from workbench.recipe.plugins import COMMANDS, load_plugins

ROOT = Path(__file__).parents[2]
PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["workbench.plugins"]
LAB = {name: module for name, module in PLUGINS.items() if module.startswith("workbench.lab.")}
DECLARATIONS = '''
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage, declare
from workbench.recipe.hooks import declare_hook
from workbench.recipe.plugins import Command, declare_command

declare_hook("training.step.announced", "sample_code:Announced")
declare(PassContract("says_hello", Stage.JOINT, Numerics.EXACT, "nothing but a name", Options, source="a sample",
                     code="sample_code"))
declare_command(Command("greet", "say hello", "Say hello to a recipe.",
                        lambda parser: parser.add_argument("--loud", action="store_true"), "sample_code:greet",
                        recipe="change the recipe"))
'''
CODE = '''
from workbench.passes.effect import Effect
from workbench.passes.registry import register_pass
from workbench.pipeline.stages import PairStep

class Announced(PairStep):
    def step(self, split):
        print("a step of", split.pair.authored.recipe.name)
        return super().step(split)

@register_pass("says_hello", effect=lambda before, after, options: Effect(True, "hello"))
def says_hello(gm, example_inputs, *, options):
    return gm

def greet(recipe, args):
    print(f"hello {recipe.name}" + "!" * args.loud)
    return 0
'''


def installed(folder: Path, entries: dict[str, str]) -> None:
    """Metadata of a distribution in `folder` whose entry points are plugins."""
    info = folder / "sample-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
    lines = [f"{name} = {module}\n" for name, module in entries.items()]
    (info / "entry_points.txt").write_text("".join(["[workbench.plugins]\n", *lines]))


def python(*command: str, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)),
                                "WORKBENCH_RECIPES": str(ROOT / "lessons/recipes")}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=path[0],
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.integration
def test_a_package_adds_a_pass_a_command_and_a_kind_of_step_and_a_broken_one_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "sample_declarations.py").write_text(DECLARATIONS)
    (tmp_path / "sample_code.py").write_text(CODE)
    installed(tmp_path, {"broken": "sample_that_is_gone", "sample": "sample_declarations"})
    ran = python("-c", (
        "from workbench import build, fake_world, load_recipe\n"
        "from workbench.cli import main\n"
        "assert main(['greet', 'tour', '--loud']) == 0\n"
        "recipe = load_recipe('tour').override({'model.n_layers': 1, 'joint_passes': ['says_hello'], 'passes': [],\n"
        "                                       'training.step': 'announced'})\n"
        "with fake_world(recipe.mesh.world_size) as world:\n"
        "    print(build(recipe, world, progress=False).records[0].verdict('effect'))\n"), path=(tmp_path, ROOT))
    assert ran.stdout == "hello tour!\na step of tour\neffect: PASS (hello)\n"
    assert ran.stderr.count("plugin 'broken' (sample_that_is_gone) cannot be loaded, and is left out: "
                            "ModuleNotFoundError") == 1


def without(folder: Path, names: tuple[str, ...]) -> Path:
    """A copy of the package without these folders of the lab."""
    gone = {LAB[name].rpartition(".")[2] for name in names}
    shutil.copytree(ROOT / "workbench", folder / "workbench", ignore=lambda where, found: [
        name for name in found if name == "__pycache__" or (Path(where).name == "lab" and name in gone)])
    installed(folder, LAB)
    return folder


LISTED = """
import warnings
warnings.simplefilter("ignore")
import workbench
from workbench.passes.registry import find_pass
from workbench.recipe.contracts import package_contracts
from workbench.recipe.hooks import HOOKS
from workbench.recipe.plugins import COMMANDS
print(*(find_pass(name).name for name in package_contracts()), *COMMANDS, *HOOKS)
"""
ALONE = """
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


def declared_in(module: str) -> set[str]:
    """The passes, commands and hooks whose code's module begins so."""
    load_plugins()
    known = {name: declared.code for name, declared in (*package_contracts().items(), *COMMANDS.items())} | HOOKS
    return {what for what, code in known.items() if code.startswith(module)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAB)
def test_a_folder_of_the_lab_takes_nothing_else_with_it(name: str, tmp_path: Path) -> None:
    folder = without(tmp_path, (name,))
    left = python("-c", LISTED, path=(folder,)).stdout.split()
    gone = declared_in(f"{LAB[name]}.") | declared_in(f"{LAB[name]}:")
    assert set(left) == declared_in("") - gone


@pytest.mark.integration
def test_without_the_lab_the_core_lists_its_passes_and_builds_the_tour(tmp_path: Path) -> None:
    folder = without(tmp_path, tuple(LAB))
    listed, built, *refused = python("-c", LISTED + ALONE, path=(folder,)).stdout.splitlines()
    left = set(listed.split()) - declared_in("workbench_lessons.")  # where the course is installed, it stays
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
