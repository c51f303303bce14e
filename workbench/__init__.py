"""A workbench for PyTorch's distributed compiler stack: author, capture, transform, partition, compile, train.

Names load on first use, so that reading a recipe imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.recipe.exports import exported

if TYPE_CHECKING:
    from workbench.authoring.author import Authored, author, author_module
    from workbench.authoring.families import register_model
    from workbench.authoring.models.causal_lm import CausalLM
    from workbench.authoring.plans import ParallelPlan
    from workbench.authoring.simple_fsdp import Precision
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
    from workbench.notebook.recorded_figures import Figures, on_gpus
    from workbench.notebook.show import show
    from workbench.passes.effect import Effect
    from workbench.passes.registry import register_pass
    from workbench.pipeline.build import Built, build
    from workbench.pipeline.proofs.captures_proof import ComparedCaptures, compare_captures
    from workbench.pipeline.proofs.numerics_proof import prove_numerics
    from workbench.pipeline.report import Report
    from workbench.pipeline.run import run
    from workbench.pipeline.run_passes import PassRecord, prove_partition, prove_replay, run_joint, run_partitioned
    from workbench.pipeline.train import Batches, train
    from workbench.recipe.contracts import Numerics, Options, PassContract, Stage
    from workbench.recipe.recipe import Recipe, diff_recipes, load_recipe
    from workbench.recipe.sections import PassSpec
    from workbench.tools.as_backend import as_backend
    from workbench.tools.as_graph_pass import as_graph_pass
    from workbench.tools.bisect import bisect
    from workbench.tools.export.compiled import compile_recipe
    from workbench.tools.export.run_artifact import run_artifact
    from workbench.tools.inductor_passes import Explanation, inductor_passes
    from workbench.tools.look_inside import look_inside
    from workbench.tools.schedule import compare_schedules
    from workbench.tools.timing.memory_plan import memory_plan
    from workbench.tools.timing.order import read_order
    from workbench.tools.what_if import Study, what_if
    from workbench.torch_api.inductor.regions import region
    from workbench.world.fake import fake_world
    from workbench.world.mesh import World, current_world
    from workbench.world.ranks import RankError, ranks
    from workbench.world.simulated import shards, simulated_world

__all__, __getattr__, __dir__ = exported(__name__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext workbench`: the magics `%%ranks` and `%ranks`."""
    import_module("workbench.notebook.magics").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext workbench`: the ranks end."""
    import_module("workbench.notebook.magics").unload(shell)
