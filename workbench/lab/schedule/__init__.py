"""`compare_schedules`, `workbench schedule`: whether all ranks of a mesh would launch the same collectives in order.

    compare  captures ranks one by one on fake worlds, and compares their collectives
"""

import argparse

from workbench.recipe.plugins import Command, declare_command
from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"compare_schedules": ".compare"})


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", default="roles", metavar="roles|all|0,3",
        help="roles: one rank for each set of local shapes, and the last rank (default); all: "
        "every rank, for your own model or pass that asks for its rank; or a list of ranks")


declare_command(Command(
    "schedule", "whether all ranks of a mesh would launch the same collectives",
    "Capture a recipe as several ranks of its mesh on a fake world, and compare their collectives "
    "in order. Nothing is run. Exit status: 0 they agree, or it is not known, 1 they do not, 2 bad "
    "input.",
    _arguments, "workbench.lab.schedule.compare:command",
    recipe="change the recipe, such as mesh.dp_shard=64; may be repeated",
))
