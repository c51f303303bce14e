"""`workbench ...`: run a recipe, list recipes and passes, check the machine, take the tour.

Help imports no torch. Everything of the command line is here: what is parsed, what runs, and what is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name

from workbench.errors import WorkbenchError
from workbench.pipeline.progress import loading_torch, telling
from workbench.recipe import listings
from workbench.recipe.arguments import add_pairs, count, seconds
from workbench.recipe.files import writable
from workbench.recipe.plugins import COMMANDS, load_plugins
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.tools.command_end import FAILED, PASSED, colored, run_program, status_of, tell_report
from workbench.tools.own_files import import_file
from workbench.torch_api.supported import installed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 pass, 1 fail, 2 bad input, 130 interrupted. argv: None for the program's own."""
    if argv is None:
        return run_program(lambda: main(sys.argv[1:]))
    return status_of(lambda: _command(argv))


_GONE = {"worker": "torchrun ... -m workbench run RECIPE",
         "export": "torchrun ... -m workbench run RECIPE --import FILE.py",
         "matrix": "python benchmarks/matrix.py", "ablate": "python benchmarks/ablate.py"}
"""Commands of the last release, and what to use."""
START = """Where to start:

  workbench tour            train a small llama3 on 2 ranks through four passes, and see what each proved
  workbench recipes         runs that are declared; workbench run NAME trains one
  workbench lab             the course: its notebooks in JupyterLab
  workbench doctor          what works on this machine

workbench --help lists all commands.
"""


def _command(argv: Sequence[str]) -> int:
    if not argv:
        print(START, end="")
        return PASSED
    if argv[0] in _GONE:
        raise WorkbenchError(f"{argv[0]}: this command is gone: use {_GONE[argv[0]]}")
    argument_parser = parser()
    args = argument_parser.parse_args(argv, argparse.Namespace(line=list(argv)))
    if args.command is None:
        argument_parser.error("give a COMMAND")
    return _COMMANDS.get(args.command, _plugin)(args)


def _versions() -> str:
    """The versions of the package and of torch, which is not imported."""
    names = "torch-compiler-workbench", "torch"
    return ", ".join(f"{name} {installed(name) or 'is not installed'}" for name in names)


def parser() -> argparse.ArgumentParser:
    """All commands. The parsed arguments hold the command's name in `command`."""
    argument_parser = argparse.ArgumentParser(
        prog="workbench",
        description="Carry one distributed model from authoring to "
        "real ranks; every graph pass proves itself.",
    )
    argument_parser.add_argument("--version", action="version", version=_versions())
    commands = argument_parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    run = commands.add_parser(
        "run",
        help="build and train a recipe, and report what each pass proved",
        description="Build and train a recipe on its ranks, and report what each pass did and "
        "proved. Also works under torchrun. Exit status: 0 everything held, 1 something failed, "
        "2 bad input.",
    )
    _add_recipe(run, "change the recipe, such as mesh.tp=2 or training.lr=1e-3; may be repeated")
    run.add_argument(
        "--world",
        choices=("auto", "fake", "gloo", "nccl"),
        default="auto",
        help="auto: nccl where there are enough GPUs, else gloo; fake: build only, no ranks needed",
    )
    run.add_argument("--level", choices=("light", "full"),
                     help="full, the default where ranks have values: compare values with eager, each graph with the "
                     "one before, the model with the plain one; light: run no graph twice")
    run.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report as JSON; - prints it alone"
    )
    run.add_argument("--html", type=Path, metavar="FILE",
                     help="also write the report as a page that a browser opens alone")
    run.add_argument("--strict", action="store_true", help="a pass without effect is a failure")
    run.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="resume from the newest checkpoint in this folder, and save one at the end",
    )
    run.add_argument(
        "--save-every", type=count, metavar="N", help="with --checkpoints: save every N steps too"
    )
    run.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for all ranks (default 600)",
    )

    recipes = commands.add_parser("recipes", help="list the recipes, or show one")
    recipes.add_argument("name", nargs="?", metavar="NAME", help="show this recipe as TOML")
    passes = commands.add_parser("passes", help="list the passes with their contracts, or show one")
    passes.add_argument(
        "name", nargs="?", metavar="NAME", help="also show what this pass does to a graph"
    )
    commands.add_parser("doctor", help="what works on this machine, and how to fix the rest")

    load_plugins()
    for command in COMMANDS.values():
        added = commands.add_parser(
            command.name, help=command.help, description=command.description
        )
        if command.recipe:
            _add_recipe(added, command.recipe)
        elif command.changes:
            _add_set(added, command.changes)
            _add_import(added)
        command.arguments(added)
    return argument_parser


def _add_recipe(parser: argparse.ArgumentParser, changes: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE",
                        help="a name from `workbench recipes`, or a path to a TOML file")
    _add_set(parser, changes)
    _add_import(parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="files",
        action="append",
        type=Path,
        default=[],
        metavar="FILE.py",
        help="first run this file, which registers your own passes or models; may be repeated",
    )


def _add_set(parser: argparse.ArgumentParser, text: str) -> None:
    add_pairs(parser, "--set", text, "KEY=VALUE, such as mesh.tp=2")


def _import(files: Sequence[Path]) -> None:
    with telling() as tell:
        for file in files:
            tell(f"import {file.name}")
            import_file(file)


def _recipe(args: argparse.Namespace) -> Recipe:
    """Import the user's files, then load the recipe and apply the changes."""
    _import(args.files)
    return load_recipe(args.recipe).override(dict(args.set))


def _run(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    if args.strict:
        recipe = recipe.model_copy(update={"strict": True})
    writable(args.json)
    writable(args.html, "--html")
    if args.save_every is not None and args.checkpoints is None:
        raise WorkbenchError(f"--save-every {args.save_every}: give --checkpoints DIR too")
    with loading_torch():
        from workbench.pipeline.run import run

    report = run(
        recipe,
        world=args.world,
        level=args.level,
        timeout=args.timeout,
        checkpoints=args.checkpoints,
        save_every=args.save_every,
    )
    return tell_report(report, args)


def _plugin(args: argparse.Namespace) -> int:
    """Run a command that a plugin has declared."""
    command = COMMANDS[args.command]
    recipe = [_recipe(args)] if command.recipe else []
    if command.changes:
        _import(args.files)
    with loading_torch() if command.torch else nullcontext():
        run = resolve_name(command.code)
    return int(run(*recipe, args))


def _doctor(args: argparse.Namespace) -> int:
    from workbench.tools.doctor import findings, look, text

    with telling() as tell:
        tell("look at this machine")
        results = findings(look())
    print(text(results, color=colored(sys.stdout)))
    return FAILED if any(f.mark == "bad" for f in results) else PASSED


_COMMANDS = {
    "run": _run,
    "recipes": listings.recipes,
    "passes": listings.passes,
    "doctor": _doctor,
}
