"""`what_if`, `workbench what-if`: change one thing in a recipe, and see what it does to verdicts, memory and time.

    fingerprint  fingerprints of code and data
    study        change a recipe, run again what changes
    variant      one variant in figures and verdicts
"""

import argparse

from workbench.recipe.hooks import declare_hook
from workbench.recipe.plugins import Command, declare_command

declare_hook("draw.difference", "workbench.lab.what_if.variant:Difference.pictured")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="h100", metavar="NAME",
        help="the GPU of the simulated times, or a file of `workbench calibrate`",
    )


declare_command(Command(
    "what-if", "what a change of a recipe does to verdicts, memory and time",
    "Build a recipe and the changed one without ranks, and print the difference in verdicts, "
    "launches, bytes, estimated memory and simulated time. Exit status: 0, 1 if a verdict of the "
    "changed recipe fails, 2 bad input.",
    _arguments, "workbench.lab.what_if.study:command",
    recipe="the change, such as mesh.tp=2 or passes.PASS.OPTION=3; may be repeated",
))
