"""A recipe as a script: it trains under torchrun to the losses of `run`, with the user's own pass in it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from workbench.authoring import families
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.passes import registry
from workbench.pipeline.run import run
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.model_sizes import SIZES
from workbench.recipe.recipe import Recipe, load_recipe, parse_recipe
from workbench.tools.export.script import export_script, own_module
from workbench.tools.export.source_code import import_file

SMALL = ["mesh.dp_shard=2", "model.n_layers=1", "training.steps=3", "data.seq_len=16"]
OWN = '''
import logging

import torch
from torch.fx import Node

import workbench
from workbench.passes.effect import Effect as Said
from workbench.torch_api.ops import op_name

AT_LEAST = 1
unused = object()
log = logging.getLogger(__name__)


class SwapOptions(workbench.Options):
    count: int = 2


def is_product(node: "Node") -> bool:
    return op_name(node.target) == "aten.mul" and all(isinstance(a, Node) for a in node.args)


def swapped(before, after, options):
    was, now = ([n.args for n in g[0].graph.nodes if is_product(n)] for g in (before, after))
    count = sum([str(a) != str(b) for a, b in zip(was, now)])
    return Said(count >= AT_LEAST, "" if count else "no product of two tensors", {"swapped": count})


@workbench.register_pass("swap_factors", stage="joint", numerics="exact", options=SwapOptions, effect=swapped)
def swap_factors(gm: torch.fx.GraphModule, example_inputs, *, options):
    """a * b becomes b * a."""
    log.info("swapping")
    for node in [n for n in gm.graph.nodes if is_product(n)][: options.count]:
        node.args = node.args[::-1]
    return gm
'''


@pytest.fixture
def module_of(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import a text as a module of its own; what it registers is gone afterwards."""
    known = set(CONTRACTS)

    def load(text: str) -> ModuleType:
        path = tmp_path / "own_passes.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("own_passes", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["own_passes"] = module
        spec.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)  # ranks cannot import it
        return module

    yield load
    sys.modules.pop("own_passes", None)
    for name in set(CONTRACTS) - known:
        CONTRACTS.pop(name), registry._PASSES.pop(name)
    for family in families.own_families():
        families._FAMILIES.pop(family.name), SIZES.pop(family.name)


PASS_FILE = """\
from workbench import register_pass

MARK = "seen"


@register_pass("marks", stage="joint", changes="a mark on the first node")
def marks(gm, example_inputs, *, options):
    next(iter(gm.graph.nodes)).meta[MARK] = True
    return gm
"""


def test_a_file_is_imported_and_what_it_registers_goes_to_another(tmp_path, module_of, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "own_passes.py"
    file.write_text(PASS_FILE)
    import_file(file)
    import_file(file)  # it is there already
    assert CONTRACTS["marks"].source == "user" and sys.path[0] == str(tmp_path)
    text = own_module(with_own("marks"))
    assert text.startswith("from __future__ import annotations\n\nfrom workbench import register_pass\n")
    assert "MARK = 'seen'" in text and text.rstrip().endswith("return gm")
    assert own_module(Recipe(name="none")) == ""
    CONTRACTS.pop("marks"), registry._PASSES.pop("marks")
    module_of(text)
    assert CONTRACTS["marks"].changes == "a mark on the first node"


def test_another_path_to_a_file_that_can_be_found_already_is_the_same_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "found_twice.py").write_text("x = 1\n")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "there"), *sys.path])
    for path in ("there/../there", "link"):
        import_file(tmp_path / path / "found_twice.py")
    assert sys.modules.pop("found_twice").x == 1


@pytest.mark.parametrize(("name", "text", "message"), [
    ("own_passes.py", None, "{}: no such file"),
    ("my-passes.py", "", "{}: 'my-passes' cannot be its name as a module, or is another's: rename the file"),
    ("json.py", "", "{}: 'json' cannot be its name as a module, or is another's: rename the file"),
    ("own_passes.py", "x = 1\ny = z\n", "{}, line 2: NameError: name 'z' is not defined"),
    ("own_passes.py", "x = (1\n", "{}: SyntaxError: '(' was never closed (own_passes.py, line 1)"),
])
def test_a_file_that_cannot_be_imported(tmp_path, module_of, monkeypatch, capsys, name, text, message) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert main(["run", "llama3", "--import", str(file)]) == 2
    assert capsys.readouterr().err == f"workbench: error: {message.format(file)}\n"


def with_own(name: str) -> Recipe:
    return Recipe(name="own", joint_passes=(name,))


def recipe_in(text: str) -> Recipe:
    """What the script would read."""
    found = re.search(r"RECIPE = r'''\n(.*?)'''", text, re.S)
    assert found is not None
    return parse_recipe(tomllib.loads(found.group(1)), "script")


@pytest.mark.ranks
@pytest.mark.compat
@pytest.mark.nightly
def test_the_script_trains_under_torchrun_to_the_losses_of_run(tmp_path, module_of) -> None:
    module_of(OWN)
    recipe = load_recipe("llama3_block_bucketing").override(
        dict(item.split("=") for item in SMALL) | {"mesh.tp": 1, "joint_passes": ["swap_factors"]})
    script = tmp_path / "train.py"
    script.write_text(export_script(recipe))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = [re.fullmatch(r"step (\d+): loss (\S+)", line) for line in lines[:3]]
    report = run(recipe, world="gloo", progress=False)
    assert report.training is not None
    assert [(int(m.group(1)), float(m.group(2))) for m in told if m] == list(enumerate(report.training.losses))
    assert lines[-1] == "PASS" and done.stdout.count("llama3_block_bucketing on 2 gloo ranks (dp_shard 2)") == 1
    shown, expected = done.stdout.splitlines(), report.table().splitlines()
    for name in ("swap_factors", "transformer_block_bucketing", "whole step"):
        row = next(line for line in expected if line.startswith(name))
        assert row in shown and ("PASS" in row)


def test_the_command_writes_a_script_that_holds_the_whole_recipe(tmp_path, capsys) -> None:
    out = tmp_path / "mine.py"
    assert main(["export", "llama3_fsdp", "--set", *SMALL, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"torchrun --nproc-per-node 2 {out}\n"
    text = out.read_text()
    assert "    torchrun --nproc-per-node 2 mine.py\n" in text and "    workbench export llama3_fsdp --set" in text
    assert max(map(len, text.partition('"""\n\nfrom')[2].splitlines())) <= 120 and len(text.splitlines()) < 100
    recipe = load_recipe("llama3_fsdp").override(dict(item.split("=") for item in SMALL))
    assert recipe_in(text) == recipe
    assert main(["export", "llama3_fsdp", "--set", *SMALL]) == 0
    assert "torchrun --nproc-per-node 2 llama3_fsdp.py" in capsys.readouterr().out


def test_words_that_python_or_toml_would_read_otherwise_come_through() -> None:
    recipe = Recipe(name="odd", about="it's '''quoted''' \\ and \"\"\"so\"\"\" {braced}")
    text = export_script(recipe)
    compile(text, "script", "exec")
    assert recipe_in(text) == recipe


def test_alone_it_says_how_to_start_it(tmp_path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(export_script(load_recipe("llama3_fsdp")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "recipe 'llama3_fsdp' needs 8 ranks, and nothing started this process as one: start it with torchrun "
        "--nproc-per-node 8")


def test_a_pass_comes_with_what_it_uses_and_nothing_else(module_of) -> None:
    module_of(OWN)
    text = export_script(with_own("swap_factors"))
    assert "unused" not in text and "AT_LEAST = 1\n" in text
    assert "log = logging.getLogger(__name__)\n" in text and "__name__ = " not in text  # the script's own name
    assert {"import logging", "import torch", "import workbench", "from torch.fx import Node",
            "from workbench import Effect as Said"} <= set(text.splitlines())
    order = [text.index(part) for part in ("class SwapOptions", "def is_product", "def swapped", "def swap_factors")]
    assert text.index("@workbench.register_pass") < order[3] and max(order[:3]) < order[3]
    compile(text, "script", "exec")


OWN_MODEL = '''
import torch
from torch import nn

from workbench import register_model
from workbench.authoring.plans import ParallelPlan

aten = torch.ops.aten
PLAN = ParallelPlan(units=("head",))


class Tiny(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embed = nn.Embedding(sizes["vocab_size"], 8)
        self.head = nn.Linear(8, sizes["vocab_size"])

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(aten.relu(self.embed(tokens))).flatten(0, 1), targets.flatten())


@register_model("tiny", sizes={"vocab_size": 256, "max_seq_len": 32}, plan=PLAN)
def make(sizes):
    return Tiny(sizes)
'''


def test_a_model_of_the_users_own_is_exported_with_its_plan(module_of) -> None:
    module_of(OWN_MODEL)
    recipe = Recipe(name="own", model={"family": "tiny"}, data={"seq_len": 16})
    text = export_script(recipe)
    order = [text.index(part) for part in ("aten = torch.ops.aten", "class Tiny", "@register_model", "def main")]
    assert order == sorted(order) and text.index("PLAN = ParallelPlan") < order[2]
    assert {"import torch.nn as nn", "import torch", "from workbench import ParallelPlan"} <= set(
        text.splitlines())
    lines: dict = {"__name__": "script"}
    exec(compile(text, "script", "exec"), lines)  # registers the model once more, as the script will
    assert parse_recipe(tomllib.loads(lines["RECIPE"]), "script") == recipe


def test_a_checkpoint_rule_is_exported_as_it_was_written(module_of) -> None:
    module_of("from workbench.graph.read.nodes import module_path\n"
              "from workbench.passes.activation_checkpointing import checkpoint_rule\n\n\n"
              "@checkpoint_rule('keep_norms')\ndef keep_norms(node):\n"
              "    return True if 'norm' in module_path(node) else None\n")
    text = export_script(with_own("keep_norms"))
    assert "@checkpoint_rule('keep_norms')\ndef keep_norms(node):\n" in text
    assert "from workbench.passes.activation_checkpointing import checkpoint_rule\n" in text


HEAD = "import torch\nfrom workbench import register_pass\n"
TOP = '@register_pass("own", stage="joint", numerics="exact")\n'
DEF = "def own(gm, example_inputs, *, options):\n    return gm\n"
REFUSED = {
    "closure": (HEAD + "def make(k):\n    " + TOP + "    def own(gm, e, *, options):\n        k\n"
                "        return gm\nmake(1)\n", "it uses 'k' of the function around it"),
    "local": (HEAD + "def make(s):\n    @register_pass('own', stage=s, numerics='exact')\n"
              "    def own(gm, e, *, options):\n        return gm\nmake('joint')\n",
              "it uses 's', which is no name of its module"),
    "call": (HEAD + DEF + 'register_pass("own", stage="joint", numerics="exact")(own)\n',
             "own was registered by a call"),
    "lambda": (HEAD + 'register_pass("own", stage="joint", numerics="exact")(lambda gm, e, *, options: gm)\n',
               "it is no function with a name"),
    "object": (HEAD + "handle = 1\nhandle = object()\n" + TOP + DEF.replace("return gm", "return handle and gm"),
               "it uses 'handle', whose type is object: assign it once, at the top of its module"),
    "taken": (HEAD + "def main():\n    pass\n" + TOP + DEF.replace("return gm", "return main and gm"),
              "the script has another 'main' already"),
    "no source": (HEAD + f"exec({TOP + DEF!r})\n", "the source of 'own' cannot be found"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_along_is_named(case, module_of) -> None:
    text, why = REFUSED[case]
    module_of(text)
    with pytest.raises(WorkbenchError, match=re.escape(f"pass 'own' cannot be exported: {why}")):
        export_script(with_own("own"))


def test_a_class_of_a_notebooks_cell_is_found(module_of) -> None:
    cell = "%magic\n"
    options = "class Mine(Options):\n    n: int = 1\n"
    module = module_of(HEAD + "from workbench import Options\n" f"exec({options!r})\n"
                       + TOP.replace(")\n", ", options=Mine)\n") + DEF)
    module.In = [options.replace("1", "0"), options, cell]  # as IPython keeps them: the last one counts
    text = export_script(with_own("own"))
    assert "class Mine(Options):\n    n: int = 1\n" in text and "from workbench import Options" in text


def test_an_unknown_pass_and_a_missing_folder(capsys, tmp_path) -> None:
    with pytest.raises(WorkbenchError, match="unknown pass 'mine': register it"):
        export_script(with_own("mine"))
    assert main(["export", "llama3_fsdp", "--out", str(tmp_path / "no" / "x.py")]) == 2
    assert f"--out {tmp_path / 'no' / 'x.py'}: the folder" in capsys.readouterr().err
    assert main(["export", "llama3_fsdp", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path}: is a folder: give a file" in capsys.readouterr().err
