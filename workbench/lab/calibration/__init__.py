"""`workbench calibrate`: measure this machine once, for simulated timelines of it on any other.

    measure  matmuls, attention, memory, collectives and launches
"""

import argparse
from pathlib import Path

from workbench.recipe.arguments import count, seconds
from workbench.recipe.plugins import Command, declare_command


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FILE.json", help="where to write the profile")
    parser.add_argument("--ranks", type=count, default=1, metavar="N",
                        help="ranks, one for each GPU; collectives are measured from 2 on (default 1)")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S",
                        help="seconds for all of it (default 600)")


declare_command(Command(
    "calibrate", "measure this machine, for simulated timelines of it",
    "Measure matmuls, attention, memory bandwidth, collectives, what they cost each other, and launches, and write "
    "them to a file. A recipe's or a view's device may be such a file.",
    _arguments, "workbench.lab.calibration.measure:command",
))
