"""`read_order`, `workbench order`: what a traced job of any kind communicates, and what hides it or does not.

    order       what is exposed in each step, what hides it, and what keeps it from hiding
    trace_file  torch.profiler's files
"""

import argparse
from pathlib import Path

from workbench.recipe.plugins import Command, declare_command
from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"read_order": ".order"})


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="files of export_chrome_trace, or .gz"
    )
    parser.add_argument(
        "--step", metavar="N", help="one step, by its number in the trace (default: all)"
    )
    parser.add_argument(
        "--device", type=int, metavar="N", help="the GPU, where a trace holds several"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result as JSON; - prints it alone"
    )


declare_command(Command(
    "order", "what a traced job communicates, and what hides it or does not",
    "Read a trace that torch.profiler made of any job, or one of each rank. Show for each step how much communication "
    "is exposed, how long the GPU is idle, and the collectives that cost most, each with what keeps it from being "
    "hidden.",
    _arguments, "workbench.lab.traces.order:command",
))
