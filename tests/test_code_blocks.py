"""Each code block of the README and the documents runs as it stands there, or says what it needs.

A document is read from top to bottom: its Python blocks share their names, and a block whose first line is `# NAME.py`
is that file. A block whose first line says `# needs ...`, such as a GPU or minutes, is compiled, and its imports are
made. The lines of a shell block are parsed, and it runs where its output is shown: `workbench` in this process, and
torchrun's script on the session's ranks. Output that is shown is what is printed; `...` stands for what is left out.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from registrations import registrations_restored

from workbench.cli import main, parser
from workbench.pipeline import recipe_ranks
from workbench.recipe.recipe import load_recipe, parse_recipe
from workbench.world.ranks import RankPool

ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [path for path in TEXTS if "```" in path.read_text()]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
(PINNED,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
OTHER_PROGRAMS = {"cd", "pip", "conda", "papermill", "pytest", "srun"}


def blocks(text: str) -> list[tuple[str, str, str | None]]:
    """Language, code, and the output that follows it, if any, of each block."""
    found = []
    matches = list(BLOCK.finditer(text))
    for match, after in zip_longest(matches, matches[1:]):
        follows = after is not None and not text[match.end():after.start()].strip()
        shown = after[2] if follows and after[1] == "text" else None
        found.append((match[1], match[2], shown))
    return found


def shows(shown: str, printed: str) -> bool:
    """Whether `printed` is what is shown. Trailing blanks do not count."""
    parts = [re.escape(line.rstrip()) for line in shown.rstrip().splitlines()]
    pattern = "\n".join(parts).replace(r"\.\.\.", "(?:.|\n)*?")
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    return re.fullmatch(pattern, "\n".join(lines)) is not None


def check_command(words: list[str], folder: Path) -> None:
    """Raise for a command that could not start: no such command, option, recipe, key or file."""
    while "=" in words[0]:  # an environment variable
        words = words[1:]
    program, *rest = words
    if program == "workbench":
        args = parser().parse_args(rest)
        recipe = getattr(args, "recipe", "RECIPE")
        if not recipe.isupper():
            load_recipe(recipe).override(dict(args.set))
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(rest)
        if args.module:
            check_command([args.training_script, *args.training_script_args], folder)
        else:
            assert (folder / args.training_script).is_file(), words
    elif program == "python":
        assert rest[0] == "-m" or (folder / rest[0]).is_file(), words
    elif program == "make":
        assert rest[0] in TARGETS, words
    else:
        assert program in OTHER_PROGRAMS, words


def check_python(code: str, needs: str) -> None:
    """Compile, and make the imports; those of what is needed may be missing."""
    cell = re.sub(r"(?m)^%.*$", "", code)
    compile(cell, "block", "exec")
    for line in re.findall(r"^(?:from|import) .+$", cell, re.MULTILINE):
        try:
            exec(line, {})
        except ModuleNotFoundError as error:
            assert error.name is not None and error.name.split(".")[0] in needs, line


@pytest.mark.integration
@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"shown outputs are those of torch {PINNED}")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_block_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool2: RankPool) -> None:
    monkeypatch.setattr(recipe_ranks, "ranks", lambda n, **_: contextlib.nullcontext({2: pool2}[n]))
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = document.read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    with registrations_restored():
        for number, (language, code, shown) in enumerate(blocks(text)):
            run_block(language, code, shown, tmp_path / f"block_{number}.py", names, pool2)


def run_block(language: str, code: str, shown: str | None, file: Path, names: dict[str, Any],
              pool: RankPool | None = None) -> None:
    needs = re.match(r"# needs (.+)\n", code)
    saved = re.match(r"# (\w+\.py)\n", code)
    printed = None
    if language == "python" and needs:
        check_python(code, needs[1])
    elif language == "python" and saved:
        file.with_name(saved[1]).write_text(code)
        check_python(code, "")
    elif language == "python":
        file.write_text(code)  # source lines come from a file
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(file), "exec"), names)
        printed = out.getvalue()
    elif language == "sh":
        lines = code.replace("\\\n", "").splitlines()
        commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        for words in commands:
            check_command(words, file.parent)
        if shown is not None and not needs:
            printed = run_commands(commands, pool)
    elif language == "toml":
        data = tomllib.loads(code)
        if "project" not in data:  # it is a part of a recipe
            parse_recipe({**load_recipe("llama3").to_dict(), **data}, "block")
    else:
        assert language in ("text", "diff"), f"a block in {language!r}"
    if shown is not None and printed is not None:
        assert shows(shown, printed), f"shown:\n{shown}\nprinted:\n{printed}"


def run_commands(commands: Iterable[list[str]], pool: RankPool | None) -> str:
    """What the commands print; the folder is as before afterwards."""
    with contextlib.chdir("."), contextlib.redirect_stdout(io.StringIO()) as out:
        for words in commands:
            program, *rest = (word for word in words if not re.match(r"\w+=", word))
            if program == "cd":
                os.chdir(rest[0])
            elif program == "workbench":
                main(words[1:])
            else:
                assert (program, rest[:-1]) == ("torchrun", ["--nproc-per-node", "2"]) and pool is not None, words
                print(pool.run(printed_on_a_rank, Path(rest[-1]).absolute())[0], end="")
    return out.getvalue()


def printed_on_a_rank(script: Path) -> str:
    """What a script prints that would start this process group."""
    with (mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"),
          contextlib.redirect_stdout(io.StringIO()) as out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def test_every_block_names_its_language() -> None:
    indented = re.compile(r"^\n {4}\S", re.MULTILINE)
    assert [path.name for path in TEXTS if indented.search(BLOCK.sub("", path.read_text()))] == []
    assert indented.search("a\n\n    make tour\n") and not indented.search("- a\n\n  b\n")


def test_what_cannot_be_pasted_is_caught(tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    gpu = "# needs a GPU\n"
    for language, code, shown in (
            ("python", "print(1)", "2"), ("python", f"{gpu}from workbench import what_it", None),
            ("python", f"{gpu}import no_such_module", None), ("toml", 'passess = ["a"]', None),
            ("sh", "workbench rum llama3", None), ("sh", "workbench run lama3", None),
            ("sh", "workbench run llama3 --set mesh.tq=2", None), ("sh", "make coffee", None),
            ("sh", "torchrun --nproc-per-node 2 gone.py", None), ("", "x", None)):
        with pytest.raises((Exception, SystemExit)):
            run_block(language, code, shown, file, {})
    assert shows("a\n...\nb...", "a\n1\n2\nbc\n") and not shows("a\n...\nb", "a\n1\nbc")
    assert [block[2] for block in blocks("```sh\nx\n```\n\n```text\ny\n```\n\nand\n\n```text\nz\n```\n")] == [
        "y\n", None, None]
