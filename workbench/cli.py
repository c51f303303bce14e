"""`workbench ...`: run a recipe, list recipes and passes, check the machine, take the tour.

Help imports no torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.notebook.lessons import commands
from workbench.pipeline.progress import loading_torch, telling
from workbench.recipe import listings
from workbench.recipe.edits import parse_value
from workbench.recipe.files import write_whole
from workbench.recipe.plugins import COMMANDS
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.recipe.wording import counted, json_text
from workbench.tools.command_end import FAILED, PASSED, first_rank, run_program, status_of
from workbench.tools.command_line import parser
from workbench.tools.own_files import import_file
from workbench.tools.timing.timing_commands import calibrate, order, writable

if TYPE_CHECKING:
    from workbench.pipeline.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 pass, 1 fail, 2 bad input, 130 interrupted. argv: None for the program's own."""
    if argv is None:
        return run_program(lambda: main(sys.argv[1:]))
    return status_of(lambda: _command(argv))


_GONE = {"worker": "torchrun ... -m workbench run RECIPE",  # refused with what to use, for one release
         "export": "torchrun ... -m workbench run RECIPE --import FILE.py",
         "matrix": "python benchmarks/matrix.py", "ablate": "python benchmarks/ablate.py"}


def _command(argv: Sequence[str]) -> int:
    if argv and argv[0] in _GONE:
        raise WorkbenchError(f"{argv[0]}: this command is gone: use {_GONE[argv[0]]}")
    args = parser().parse_args(argv, argparse.Namespace(line=list(argv)))
    return _COMMANDS.get(args.command, _plugin)(args)


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
    if args.artifact is not None:
        return _run_artifact(args)
    if args.verify:
        raise WorkbenchError("run --verify: it compares an artifact with each rank's own capture: give --artifact DIR")
    if args.recipe is None:
        raise WorkbenchError("run: give a RECIPE, or --artifact DIR")
    recipe = _recipe(args)
    if args.strict:
        recipe = recipe.model_copy(update={"strict": True})
    writable(args.json)
    if args.save_every is not None and args.checkpoints is None:
        raise WorkbenchError(f"--save-every {args.save_every}: give --checkpoints DIR too")
    with loading_torch():
        from workbench.pipeline.run import run

    report = run(recipe, world=args.world, level=args.level, timeout=args.timeout, checkpoints=args.checkpoints,
                 save_every=args.save_every)
    return _tell(report, args)


def _tell(report: Report, args: argparse.Namespace) -> int:
    if not first_rank():
        return PASSED if report.ok else FAILED
    report = replace(report, command=shlex.join(["workbench", *args.line]))
    print(report.table(color=_colored(sys.stdout)))
    if args.json is not None:
        report.to_json(args.json)
    for name, why in report.idle:
        kind = "error" if report.recipe.strict else "warning"
        print(f"workbench: {kind}: pass {name!r} had no effect: {why}", file=sys.stderr)
    return PASSED if report.ok else FAILED


def _run_artifact(args: argparse.Namespace) -> int:
    given = {"--strict": args.strict, "--level": args.level != "light", "--world": args.world != "auto"}
    if wrong := [name for name, value in given.items() if value]:
        raise WorkbenchError(f"run --artifact {args.artifact}: leave out {wrong[0]}: an artifact has its recipe, built "
                             "for one kind of ranks")
    writable(args.json)
    with loading_torch():
        from workbench.tools.export.artifact import read
        from workbench.tools.export.run_artifact import run_artifact

    if args.recipe is not None:
        raise WorkbenchError(f"run {args.recipe} --artifact {args.artifact}: leave out {args.recipe}: the artifact was "
                             f"compiled from recipe {read(args.artifact).recipe['name']!r}")
    if first_rank():
        print(f"workbench: running the code in {args.artifact}: run only artifacts that you trust", file=sys.stderr)
    _import(args.files)
    report = run_artifact(args.artifact, changes=dict(args.set), timeout=args.timeout, checkpoints=args.checkpoints,
                          save_every=args.save_every, verify=args.verify)
    return _tell(report, args)


def _compile(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    with loading_torch():
        from workbench.tools.export.compiled import compile_recipe

    made = compile_recipe(recipe, args.out, world=args.world)
    lowered = len(made.programs)
    print(f"{args.out}: the step of {counted(len(made.ranks), 'rank')} as {counted(lowered, 'program')}, and its "
          f"verdicts\nworkbench run --artifact {args.out}")
    return PASSED


def _bisect(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    writable(args.json)
    with loading_torch():
        from workbench.tools.bisect import bisect

    found = bisect(recipe, args.check, world=args.world, timeout=args.timeout)
    if first_rank():
        print(found)
        if args.json is not None:
            write_whole(args.json, json_text(found.to_dict()))
    return PASSED if found.ok else FAILED


def _explain(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    config = {key: parse_value(text) for key, text in args.config}
    writable(args.json)
    with loading_torch():
        from workbench.tools.inductor_passes import inductor_passes

    found = inductor_passes(recipe, config=config)
    print(found.table(idle=not args.changed))
    if args.json is not None:
        write_whole(args.json, found.to_json())
    return PASSED


def _schedule(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    named = all(part.strip().isdecimal() for part in args.ranks.split(","))
    with loading_torch():
        from workbench.tools.schedule import compare_schedules

    found = compare_schedules(recipe, [int(rank) for rank in args.ranks.split(",")] if named else args.ranks)
    print(found)
    return FAILED if found.verdict.outcome == "FAIL" else PASSED


def _plugin(args: argparse.Namespace) -> int:
    """Run a command that a plugin has declared."""
    command = COMMANDS[args.command]
    recipe = [_recipe(args)] if command.recipe else []
    module, _, function = command.code.partition(":")
    with loading_torch():
        run = getattr(import_module(module), function)
    return int(run(*recipe, args))


def _colored(stream: Any) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _doctor(args: argparse.Namespace) -> int:
    from workbench.tools.doctor import findings, look, text

    with telling() as tell:
        tell("look at this machine")
        found = findings(look())
    print(text(found, color=_colored(sys.stdout)))
    return FAILED if any(f.mark == "bad" for f in found) else PASSED


def _tour(args: argparse.Namespace) -> int:
    with loading_torch():
        from workbench.notebook.lessons.headless import from_text, run_lesson

    values = from_text("00_tour", dict(args.set))
    done = run_lesson("00_tour", values, args.out)
    for table in done.tables[:1]:  # of the four passes; the others are of passes that the lesson breaks
        print(f"\n{table.rstrip()}")
    print(f"\nexecuted notebook: {done.notebook}\nas a page:         {done.page}")
    return PASSED


# handlers by name, and no set_defaults(func=): the parser is in `tools`, which may not import this file
_COMMANDS = {"run": _run, "bisect": _bisect, "compile": _compile,
             "explain": _explain, "schedule": _schedule, "order": order,
             "calibrate": calibrate, "recipes": listings.recipes, "passes": listings.passes,
             "doctor": _doctor, "tour": _tour, "course": commands.course, "lessons": commands.lessons,
             "check": commands.check, "hint": commands.hint}
