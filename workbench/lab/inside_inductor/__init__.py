"""What Inductor does below the graph: `inductor_passes` and `workbench explain`; `look_inside`.

    explanation  Inductor's own passes on a recipe's graphs, and what each changed
    function     kernels, buffers and partitions of a function, before anything is compiled
"""

import argparse
from pathlib import Path

from workbench.recipe.arguments import add_pairs
from workbench.recipe.plugins import Command, declare_command
from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {
    "Explanation": ".explanation", "inductor_passes": ".explanation", "look_inside": ".function",
    "watched": ".torch_api",
})


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser, "--config", "an option of Inductor, such as joint_graph_constant_folding=false; may be repeated",
              "OPTION=VALUE, such as joint_graph_constant_folding=false")
    parser.add_argument("--changed", action="store_true", help="only the passes that changed something")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON; - prints it alone")


declare_command(Command(
    "explain", "the passes that Inductor runs on a recipe's graphs, as observed",
    "Capture a recipe on a fake world and let Inductor run its own passes on its graphs: which, in what order, what "
    "each changed, and where torch defines it. Nothing is compiled or run.",
    _arguments, "workbench.lab.inside_inductor.explanation:command",
    recipe="change the recipe, such as model.n_layers=1; may be repeated",
))
