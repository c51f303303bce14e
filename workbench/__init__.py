"""A workbench for PyTorch's distributed compiler stack: author, capture, transform, partition, compile, train.

Names load on first use, so that reading a recipe imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.authoring.author import Authored, author, author_module
    from workbench.authoring.families import register_model
    from workbench.authoring.models.causal_lm import CausalLM
    from workbench.authoring.plans import ParallelPlan
    from workbench.authoring.write_weights import save_weights
    from workbench.checks.bisect import Bisection
    from workbench.checks.verdicts import Outcome, Verdict
    from workbench.errors import WorkbenchError
    from workbench.graph.capture import JointGraph, capture
    from workbench.graph.facts import facts_of
    from workbench.graph.lower import CompiledStep, compile_step
    from workbench.graph.partition import ForwardBackward, partition
    from workbench.graph.patterns import Replaced, find_nodes, replace_pattern
    from workbench.graph.read.cost import device_spec
    from workbench.graph.read.launch_bound import paced
    from workbench.graph.read.nodes import provenance
    from workbench.graph.read.redistribution import redistribution
    from workbench.graph.replay_rehearsal import rehearse
    from workbench.graph.saving.recomputation import cut
    from workbench.graph.step_graph import StepGraph, join
    from workbench.graph.update import Update
    from workbench.graph.whole_step import WholeStep
    from workbench.notebook import draw
    from workbench.notebook.lessons.lesson import Lesson, load_lesson, parameters
    from workbench.notebook.moments.collective_order import CollectiveOrder
    from workbench.notebook.moments.list_race import ListRace
    from workbench.notebook.moments.order_pass import order_pass
    from workbench.notebook.moments.partitioner import Partitioner
    from workbench.notebook.moments.pass_chips import PassChips
    from workbench.notebook.moments.placement_lab import PlacementLab
    from workbench.notebook.moments.program_counters import ProgramCounters
    from workbench.notebook.recorded_figures import Figures, on_gpus
    from workbench.notebook.show import show
    from workbench.passes.effect import Effect
    from workbench.passes.registry import register_pass
    from workbench.pipeline.build import Built, build
    from workbench.pipeline.proofs.captures_proof import ComparedCaptures, compare_captures
    from workbench.pipeline.proofs.numerics_proof import prove_numerics
    from workbench.pipeline.report import Report
    from workbench.pipeline.run import run
    from workbench.pipeline.run_passes import PassRecord, prove_replay, run_joint, run_partitioned
    from workbench.pipeline.train import train
    from workbench.recipe.contracts import Numerics, Options, Stage
    from workbench.recipe.recipe import Recipe, diff_recipes, load_recipe
    from workbench.tools.as_backend import as_backend
    from workbench.tools.as_graph_pass import as_graph_pass
    from workbench.tools.bisect import bisect
    from workbench.tools.export.compiled import compile_recipe
    from workbench.tools.export.run_artifact import run_artifact
    from workbench.tools.export.script import export_script
    from workbench.tools.inductor_passes import Explanation, inductor_passes
    from workbench.tools.propose import propose_contract
    from workbench.tools.schedule import compare_schedules
    from workbench.tools.timing.memory_plan import memory_plan
    from workbench.tools.timing.order import read_order
    from workbench.tools.what_if import Study, what_if
    from workbench.torch_api.inductor.regions import region
    from workbench.world.fake import fake_world
    from workbench.world.mesh import World, current_world
    from workbench.world.ranks import RankError, ranks
    from workbench.world.simulated import shards, simulated_world

_HOMES = {
    "tools.as_backend": ("as_backend",),
    "tools.bisect": ("bisect",),
    "pipeline.build": ("Built", "build"),
    "tools.as_graph_pass": ("as_graph_pass",),
    "graph.capture": ("JointGraph", "capture"),
    "graph.facts": ("facts_of",),
    "graph.lower": ("CompiledStep", "compile_step"),
    "recipe.contracts": ("Numerics", "Options", "Stage"),
    "errors": ("WorkbenchError",),
    "tools.export.compiled": ("compile_recipe",),
    "tools.export.run_artifact": ("run_artifact",),
    "tools.export.script": ("export_script",),
    "tools.inductor_passes": ("Explanation", "inductor_passes"),
    "notebook.lessons.lesson": ("Lesson", "load_lesson", "parameters"),
    "notebook.moments.collective_order": ("CollectiveOrder",),
    "notebook.moments.partitioner": ("Partitioner",),
    "notebook.moments.list_race": ("ListRace",),
    "notebook.moments.pass_chips": ("PassChips",),
    "notebook.moments.placement_lab": ("PlacementLab",),
    "notebook.moments.program_counters": ("ProgramCounters",),
    "authoring.models.causal_lm": ("CausalLM",),
    "authoring.families": ("register_model",),
    "authoring.plans": ("ParallelPlan",),
    "authoring.write_weights": ("save_weights",),
    "authoring.author": ("Authored", "author", "author_module"),
    "notebook.recorded_figures": ("Figures", "on_gpus"),
    "graph.partition": ("ForwardBackward", "partition"),
    "graph.read.cost": ("device_spec",),
    "graph.read.launch_bound": ("paced",),
    "graph.replay_rehearsal": ("rehearse",),
    "graph.step_graph": ("StepGraph", "join"),
    "graph.update": ("Update",),
    "graph.whole_step": ("WholeStep",),
    "graph.patterns": ("Replaced", "find_nodes", "replace_pattern"),
    "graph.read.nodes": ("provenance",),
    "passes.effect": ("Effect",),
    "graph.read.redistribution": ("redistribution",),
    "graph.saving.recomputation": ("cut",),
    "passes.registry": ("register_pass",),
    "pipeline.proofs.captures_proof": ("ComparedCaptures", "compare_captures"),
    "pipeline.proofs.numerics_proof": ("prove_numerics",),
    "pipeline.run_passes": ("PassRecord", "prove_replay", "run_joint", "run_partitioned"),
    "notebook.moments.order_pass": ("order_pass",),
    "tools.timing.memory_plan": ("memory_plan",),
    "tools.propose": ("propose_contract",),
    "recipe.recipe": ("Recipe", "diff_recipes", "load_recipe"),
    "pipeline.report": ("Report",),
    "pipeline.run": ("run",),
    "tools.schedule": ("compare_schedules",),
    "tools.timing.order": ("read_order",),
    "tools.what_if": ("Study", "what_if"),
    "notebook.show": ("show",),
    "torch_api.inductor.regions": ("region",),
    "pipeline.train": ("train",),
    "checks.bisect": ("Bisection",),
    "checks.verdicts": ("Outcome", "Verdict"),
    "world.fake": ("fake_world",),
    "world.mesh": ("World", "current_world"),
    "world.ranks": ("RankError", "ranks"),
    "world.simulated": ("shards", "simulated_world"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME, "draw"])


def __getattr__(name: str) -> Any:
    if name == "draw":  # a folder of functions, public as a whole
        return import_module("workbench.notebook.draw")
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no name {name!r}")
    return getattr(import_module(f"workbench.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _MovedNames:
    """Asked last for a module that is not there: where a path of the first, flat layout has gone."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("workbench.") and not name.startswith("workbench.tools."):
            import_module("workbench.tools.moved_names").refuse(name)


sys.meta_path.append(_MovedNames)  # type: ignore[arg-type]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext workbench`: the magics `%%ranks` and `%ranks`, and ranks that start at once when they are wanted."""
    import_module("workbench.world.local").prepare()  # before this process imports torch, too
    import_module("workbench.notebook.magics").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext workbench`: the ranks end."""
    import_module("workbench.notebook.magics").unload(shell)
