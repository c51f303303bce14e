"""`workbench ...`: run a recipe, list what there is, look at the machine, take the tour.

Reading recipes, passes and help imports no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import textwrap
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.contracts import CONTRACTS, PassContract
from workbench.declare import DeclarationError
from workbench.errors import WorkbenchError
from workbench.recipe import Recipe, load_recipe, recipe_names
from workbench.supported import require_torch

PASSED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
WIDTH = 100
FIRST_RANK_SECONDS = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status says pass (0), fail (1) or bad input (2)."""
    args = _parser().parse_args(argv, argparse.Namespace(line=list(sys.argv[1:] if argv is None else argv)))
    try:
        return args.command(args)
    except WorkbenchError as error:
        return _tell(error)
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _tell(error: WorkbenchError) -> int:
    """The message on stderr, without our frames. What a rank refused is told as it was said there."""
    message, status = str(error), BAD_INPUT
    if hasattr(error, "remote_traceback"):
        status = FAILED
        ours = re.match(r"workbench\.[\w.]*Error: ", error.summary)  # type: ignore[attr-defined]
        if ours:
            message = f"rank {error.rank}: {error.summary[ours.end():]}"  # type: ignore[attr-defined]
    if getattr(error, "failed_run", False):
        status = FAILED
    if not _first_rank():  # torchrun ends the others as soon as rank 0 has told it; if it has not, this rank does
        time.sleep(FIRST_RANK_SECONDS)
        message = f"rank {os.environ['RANK']}: {message}"
    lines = message.splitlines() if isinstance(error, DeclarationError) else [message]
    for line in lines:
        print(f"workbench: error: {line}", file=sys.stderr)
    return status


def _first_rank() -> bool:
    """False on the ranks that torchrun started beside rank 0: what all of them find is said once."""
    return os.environ.get("RANK", "0") == "0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workbench", description="Carry one distributed model from authoring to "
                                     "real ranks; every graph pass proves itself.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="build and train a recipe, and report what each pass proved",
                              description="Build and train a recipe on its ranks, and report what each pass did and "
                              "proved. Also works under torchrun. Exit status: 0 all held, 1 something failed, "
                              "2 bad input.")
    run.add_argument("recipe", metavar="RECIPE", help="a name from `workbench recipes`, or a path to a TOML file")
    _add_set(run, "change the recipe, such as mesh.tp=2 or training.lr=1e-3; may be repeated")
    run.add_argument("--world", choices=("auto", "fake", "gloo", "nccl"), default="auto",
                     help="auto: nccl where there are enough GPUs, else gloo; fake: build only, no ranks needed")
    run.add_argument("--level", choices=("light", "full"), default="light",
                     help="full: also run each pass's graph against the one it received")
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    run.add_argument("--strict", action="store_true", help="a pass without effect is a failure")
    run.add_argument("--dump", type=Path, metavar="DIR", help="write each rank's graphs there, as files that run")
    run.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="seconds for all ranks (default 600)")
    run.set_defaults(command=_run)

    matrix = commands.add_parser("matrix", help="run several recipes, each by itself, and compare them in one table",
                                 description="Run recipes one by one, each in processes of its own; keep each report "
                                 "in a folder; what has its report there is not run again. Exit status: 0 all that "
                                 "can run here held, 1 something failed, 2 bad input.")
    matrix.add_argument("recipes", nargs="*", metavar="RECIPE", help="names or files; none: all recipes")
    _add_set(matrix, "change every recipe, such as mesh.tp=2; may be repeated")
    matrix.add_argument("--world", choices=("auto", "fake", "gloo", "nccl"), default="auto", help="as for run")
    matrix.add_argument("--level", choices=("light", "full"), default="light", help="as for run")
    matrix.add_argument("--repeats", type=_count, default=1, metavar="N", help="runs of each, in turn (default 1)")
    matrix.add_argument("--timeout", type=_seconds, default=300.0, metavar="S",
                        help="seconds of one run (default 300)")
    matrix.add_argument("--out", type=Path, default=Path("out/matrix"), metavar="DIR",
                        help="where reports are kept (default: out/matrix)")
    matrix.set_defaults(command=_matrix)

    explain = commands.add_parser("explain", help="the passes that Inductor runs on a recipe's graphs, as observed",
                                  description="Capture a recipe on a fake world and let Inductor run its own passes on "
                                  "its graphs: which, in what order, what each changed, and where torch defines it. "
                                  "Nothing is compiled or run.")
    explain.add_argument("recipe", metavar="RECIPE", help="a name from `workbench recipes`, or a path to a TOML file")
    _add_set(explain, "change the recipe, such as model.n_layers=1; may be repeated")
    explain.add_argument("--config", action="extend", nargs="+", default=[], metavar="OPTION=VALUE",
                         help="an option of Inductor, such as joint_graph_constant_folding=false; may be repeated")
    explain.add_argument("--changed", action="store_true", help="only the passes that changed something")
    explain.add_argument("--json", type=Path, metavar="FILE", help="also write it as JSON")
    explain.set_defaults(command=_explain)

    commands.add_parser("recipes", help="list the recipes").set_defaults(command=_recipes)
    commands.add_parser("passes", help="list the passes with their contracts").set_defaults(command=_passes)
    commands.add_parser("doctor", help="what works on this machine, and what to do about the rest"
                        ).set_defaults(command=_doctor)

    tour = commands.add_parser("tour", help="run the tour's notebook and show its verdicts",
                               description="Run notebooks/00_tour.ipynb from start to end, keep it and its HTML page, "
                               "and print the verdicts.")
    _add_set(tour, "a parameter of the notebook, such as steps=5; may be repeated")
    tour.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where results go (default: out)")
    tour.set_defaults(command=_tour)
    return parser


def _add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _changes(given: Sequence[str], option: str = "--set") -> dict[str, str]:
    """KEY=VALUE arguments as a dictionary; WorkbenchError where one is not of that form."""
    wrong = [item for item in given if "=" not in item or item.startswith("=")]
    if wrong:
        raise WorkbenchError(f"{option} {wrong[0]}: write KEY=VALUE, such as mesh.tp=2")
    return dict(item.split("=", 1) for item in given)


def _run(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe).override(_changes(args.set))
    if args.strict:
        recipe = recipe.model_copy(update={"strict": True})
    _writable(args.json)
    if args.dump is not None and args.dump.exists() and not args.dump.is_dir():
        raise WorkbenchError(f"--dump {args.dump}: is a file: give a folder")
    require_torch()
    from workbench.run_recipe import run

    report = run(recipe, world=args.world, level=args.level, timeout=args.timeout, dump=args.dump,
                 progress=sys.stderr.isatty())
    if not _first_rank():
        return PASSED if report.ok else FAILED
    report = replace(report, command=shlex.join(["workbench", *args.line]))
    print(report.table(color=_colored(sys.stdout)))
    if args.json is not None:
        report.to_json(args.json)
    for name, why in report.idle:
        kind = "error" if recipe.strict else "warning"
        print(f"workbench: {kind}: pass {name!r} had no effect: {why}", file=sys.stderr)
    return PASSED if report.ok else FAILED


def _explain(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe).override(_changes(args.set))
    config = {key: _value(text) for key, text in _changes(args.config, "--config").items()}
    _writable(args.json)
    require_torch()
    from workbench.explain import inductor_passes

    found = inductor_passes(recipe, config=config)
    print(found.table(idle=not args.changed))
    if args.json is not None:
        args.json.write_text(found.to_json(), encoding="utf-8")
    return PASSED


def _value(text: str) -> Any:
    """As TOML has it, and a plain word as it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _writable(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise WorkbenchError(f"--json {path}: the folder {path.parent} does not exist: make it first")


def _matrix(args: argparse.Namespace) -> int:
    from workbench.matrix import run_matrix, table

    if args.out.exists() and not args.out.is_dir():
        raise WorkbenchError(f"--out {args.out}: is a file: give a folder")
    found = run_matrix(args.recipes or recipe_names(), args.out, changes=_changes(args.set), world=args.world,
                       level=args.level, repeats=args.repeats, timeout=args.timeout,
                       tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(table(found))
    return FAILED if any(e.failed for e in found) else PASSED


def _colored(stream: Any) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _recipes(args: argparse.Namespace) -> int:
    for name in recipe_names():
        recipe = load_recipe(name)
        print(name)
        for said in (recipe.about, f"model   {_mesh(recipe)}", f"passes  {', '.join(recipe.pass_names) or 'none'}"):
            print("\n".join(textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent=" " * 10)))
    return PASSED


def _mesh(recipe: Recipe) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in recipe.mesh.axes.items()) or "one rank"
    return f"{recipe.model.family} {recipe.model.flavor} on {axes}"


def _passes(args: argparse.Namespace) -> int:
    for contract in CONTRACTS.values():
        print("\n".join([contract.name, *(f"  {line}" for line in _contract(contract))]))
    return PASSED


def _contract(contract: PassContract) -> list[str]:
    tolerance = f", norm-relative tolerance {contract.tolerance:g}" if contract.tolerance is not None else ""
    facts: Mapping[str, str] = {
        "stage": str(contract.stage), "numerics": f"{contract.numerics}{tolerance}", "changes": contract.changes,
        **{rule: ", ".join(sorted(getattr(contract, rule))) for rule in ("requires", "conflicts", "after", "needs")},
        "options": ", ".join(f"{n}={_default(f)}" for n, f in contract.options.model_fields.items()),
        "source": contract.source,
    }
    lines = []
    for name, value in facts.items():
        if value:
            lines += textwrap.wrap(f"{name:<11}{value}", WIDTH - 2, subsequent_indent=" " * 11, break_on_hyphens=False)
    return lines


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "off"}[value]
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _doctor(args: argparse.Namespace) -> int:
    from workbench.doctor import findings, look, text

    found = findings(look())
    print(text(found, color=_colored(sys.stdout)))
    return FAILED if any(f.mark == "bad" for f in found) else PASSED


def _tour(args: argparse.Namespace) -> int:
    changes = _changes(args.set)
    require_torch()
    from workbench.headless import from_text, run_lesson

    values = from_text("00_tour", changes)
    done = run_lesson("00_tour", values, args.out, progress=True)
    for table in done.tables:
        print(f"\n{table.rstrip()}")
    print(f"\nexecuted notebook: {done.notebook}\nas a page:         {done.page}")
    return PASSED
