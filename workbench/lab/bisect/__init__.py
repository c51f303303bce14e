"""`bisect`, `workbench bisect`: the first pass that fails a check, and the first node in its graphs that does.

    nodes   the first wrong node of a pass, by the values of all nodes
    search  each pass against the graph that it received, and what was found
"""

import argparse
from pathlib import Path

from workbench.recipe.arguments import seconds
from workbench.recipe.plugins import Command, declare_command
from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"Bisection": ".search", "bisect": ".search"})


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", choices=("auto", "fake", "gloo", "nccl"), default="auto",
                        help="as for run; a fake world has no values, and so no numerics")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON; - prints it alone")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S",
                        help="seconds for all ranks (default 600)")


declare_command(Command(
    "bisect", "the first pass that does not hold, and the first node in it",
    "Build a recipe on its ranks, and run each pass's graph and the graph it received on the same inputs. Show the "
    "first pass that breaks its numerics contract or another verdict, and the first node that does, in both graphs "
    "with its source line. Exit status: 0 nothing found, 1 something found, 2 bad input.",
    _arguments, "workbench.lab.bisect.search:command",
    recipe="change the recipe, such as model.n_layers=1; may be repeated",
))
