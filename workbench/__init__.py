"""A workbench for PyTorch's distributed compiler stack: author, capture, transform, partition, compile, train.

Names load on first use, so that reading a recipe imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.backend import as_backend
    from workbench.bisect_recipe import bisect
    from workbench.built import Built, build
    from workbench.compiled_step import CompiledStep, compile_step
    from workbench.contracts import Numerics, Options, Stage
    from workbench.display import show
    from workbench.errors import WorkbenchError
    from workbench.explain import Explanation, inductor_passes
    from workbench.export import export_script
    from workbench.figures import Figures, on_gpus
    from workbench.forward_backward import ForwardBackward, partition
    from workbench.graph_pass import as_graph_pass
    from workbench.joint_graph import JointGraph, capture
    from workbench.lesson import Lesson, load_lesson, parameters
    from workbench.models.causal_lm import CausalLM
    from workbench.parallel.author import Authored, author, author_module
    from workbench.parallel.families import register_model
    from workbench.parallel.plans import ParallelPlan
    from workbench.passes.patterns import Replaced, find_nodes, replace_pattern
    from workbench.passes.registry import register_pass
    from workbench.pipeline import PassRecord, run_joint, run_partitioned
    from workbench.propose import propose_contract
    from workbench.recipe import Recipe, diff_recipes, load_recipe
    from workbench.report import Report
    from workbench.run_recipe import run
    from workbench.schedules import compare_schedules
    from workbench.study import Study, what_if
    from workbench.torch_api.regions import region
    from workbench.training import train
    from workbench.verify.bisect import Bisection
    from workbench.verify.verdicts import Outcome, Verdict
    from workbench.world.fake import fake_world
    from workbench.world.mesh import World, current_world
    from workbench.world.ranks import RankError, ranks
    from workbench.world.simulated import simulated_world

_HOMES = {
    "backend": ("as_backend",),
    "bisect_recipe": ("bisect",),
    "built": ("Built", "build"),
    "graph_pass": ("as_graph_pass",),
    "joint_graph": ("JointGraph", "capture"),
    "compiled_step": ("CompiledStep", "compile_step"),
    "contracts": ("Numerics", "Options", "Stage"),
    "errors": ("WorkbenchError",),
    "export": ("export_script",),
    "explain": ("Explanation", "inductor_passes"),
    "lesson": ("Lesson", "load_lesson", "parameters"),
    "models.causal_lm": ("CausalLM",),
    "parallel.families": ("register_model",),
    "parallel.plans": ("ParallelPlan",),
    "parallel.author": ("Authored", "author", "author_module"),
    "figures": ("Figures", "on_gpus"),
    "forward_backward": ("ForwardBackward", "partition"),
    "passes.patterns": ("Replaced", "find_nodes", "replace_pattern"),
    "passes.registry": ("register_pass",),
    "pipeline": ("PassRecord", "run_joint", "run_partitioned"),
    "propose": ("propose_contract",),
    "recipe": ("Recipe", "diff_recipes", "load_recipe"),
    "report": ("Report",),
    "run_recipe": ("run",),
    "schedules": ("compare_schedules",),
    "study": ("Study", "what_if"),
    "display": ("show",),
    "torch_api.regions": ("region",),
    "training": ("train",),
    "verify.bisect": ("Bisection",),
    "verify.verdicts": ("Outcome", "Verdict"),
    "world.fake": ("fake_world",),
    "world.mesh": ("World", "current_world"),
    "world.ranks": ("RankError", "ranks"),
    "world.simulated": ("simulated_world",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no name {name!r}")
    return getattr(import_module(f"workbench.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext workbench`: the magics `%%ranks` and `%ranks`, and ranks that start at once when they are wanted."""
    import_module("workbench.world.local").prepare()  # before this process imports torch, too
    import_module("workbench.magics").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext workbench`: the ranks end."""
    import_module("workbench.magics").unload(shell)
