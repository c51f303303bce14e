"""Compile once, start on all ranks without capture: a recipe's compiled step as files.

`compile_recipe` and `workbench compile` write the folder, `run_artifact` and `workbench run-artifact` train from it.

    all_ranks  the program of each rank from one process, and training from them
    folder     an artifact's files: written whole, and compared before any of them runs
    program    one rank's step: what is written of it, and how it is loaded
"""

import argparse
from pathlib import Path

from workbench.recipe.arguments import count, seconds
from workbench.recipe.plugins import Command, declare_command
from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"compile_recipe": ".all_ranks", "run_artifact": ".all_ranks"})


def _of_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", choices=("auto", "gloo", "nccl"), default="auto",
                        help="the ranks to come; auto: nccl, for which one GPU compiles, or gloo")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")


def _of_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, metavar="DIR",
                        help="what `workbench compile` wrote: code, so run only what you trust")
    parser.add_argument("--verify", action="store_true",
                        help="each rank captures the recipe too, and compares its graphs")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a report, too; - prints it alone"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, too")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR",
                        help="resume from the newest checkpoint here, and save one at the end")
    parser.add_argument("--save-every", type=count, metavar="N", help="save every N steps too")
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="seconds for all"
    )


declare_command(Command(
    "compile", "write a recipe's compiled step, which all ranks load at once",
    "Capture, transform and lower a recipe as each of its ranks, in one process without any other rank, and write the "
    "code that runs, for `workbench run-artifact DIR`. Nothing is trained.",
    _of_compile, "workbench.lab.artifacts.all_ranks:compile_command",
    recipe="change the recipe, such as mesh.tp=2; may be repeated",
))
declare_command(Command(
    "run-artifact", "train from what `workbench compile` wrote",
    "Train from a compiled step on all of its ranks, without capture or compilation, and report. Also works under "
    "torchrun. Exit status: 0 everything held, 1 something failed, 2 bad input.",
    _of_run, "workbench.lab.artifacts.all_ranks:run_command",
    changes="change training.steps, training.lr, training.read_loss_every or data.path",
))
