"""A workbench for PyTorch's distributed compiler stack: author, capture, transform, partition, compile, train.

Names load on first use, so that help and listings are quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES_BY_MODULE = {
    "authoring.adopt": "adopt adopted",
    "authoring.author": "author author_module",
    "authoring.authored": "Authored",
    "authoring.families": "register_model",
    "authoring.models.causal_lm": "CausalLM",
    "authoring.plans": "ParallelPlan",
    "authoring.simple_fsdp": "Precision",
    "checks.verdicts": "Outcome Verdict",
    "errors": "WorkbenchError",
    "graph.capture": "JointGraph capture",
    "graph.facts": "facts_of",
    "graph.lower": "CompiledStep compile_step",
    "graph.partition": "ForwardBackward partition",
    "graph.patterns": "Replaced find_nodes replace_pattern",
    "graph.read.cost": "device_spec",
    "graph.read.nodes": "provenance",
    "lab.compile_backend.backend": "as_backend",
    "lab.graph_passes.graph_pass": "as_graph_pass",
    "lab.graph_passes.judge": "judge_graph_passes judged",
    "lab.schedule.compare": "compare_schedules",
    "lab.user_step.compile": "compile",
    "lab.what_if.study": "Study what_if",
    "notebook": "draw",
    "notebook.show": "show",
    "passes.effect": "Effect",
    "passes.registry": "register_pass",
    "pipeline.build": "Built build",
    "pipeline.proofs.numerics_proof": "prove_numerics",
    "pipeline.report": "Report",
    "pipeline.run": "run",
    "pipeline.run_passes": "PassRecord run_joint run_partitioned",
    "pipeline.train": "Batches train",
    "recipe.contracts": "Numerics Options PassContract Stage",
    "recipe.recipe": "Recipe diff_recipes load_recipe",
    "recipe.sections": "PassSpec",
    "torch_api.inductor.regions": "region",
    "world.fake": "fake_world",
    "world.mesh": "World current_world",
    "world.ranks": "RankError ranks",
    "world.simulated": "shards simulated_world",
}
_BY_HOOK = {
    "Figures": "course.Figures",
    "Lesson": "course.Lesson",
    "load_lesson": "course.load_lesson",
    "on_gpus": "course.on_gpus",
    "parameters": "course.parameters",
    "rehearse": "course.rehearse",
    "save_weights": "weights.save",
}
"""Names whose code a plugin declares."""
_HOMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted([*_HOMES, *_BY_HOOK])
_GONE = {
    "Bisection": "import it from workbench.lab.bisect",
    "Explanation": "import it from workbench.lab.inside_inductor",
    "bisect": "import it from workbench.lab.bisect",
    "inductor_passes": "import it from workbench.lab.inside_inductor",
    "look_inside": "import it from workbench.lab.inside_inductor",
    "compile_recipe": "import it from workbench.lab.artifacts",
    "ComparedCaptures": "import it from workbench_lessons.l17_two_captures.compare",
    "StepGraph": "import it from workbench.lab.whole_step.join",
    "Update": "import it from workbench.lab.whole_step.join",
    "WholeStep": "import it from workbench.lab.whole_step.step",
    "compare_captures": "import it from workbench_lessons.l17_two_captures.compare",
    "cut": "import it from workbench.lab.traced_capture.cut",
    "join": "import it from workbench.lab.whole_step.join",
    "memory_plan": "import it from workbench.lab.memory_budget.plan_table",
    "run_artifact": "import it from workbench.lab.artifacts",
    "paced": "import it from workbench_lessons.l08_replay_with_cudagraphs.launch_bound",
    "prove_partition": "a record's verdicts know of the partition by themselves",
    "prove_replay": "a record's verdicts know of the replays by themselves",
    "read_order": "import it from workbench.lab.traces",
    "redistribution": "import it from workbench_lessons.l01_author_with_dtensor.redistribution",
}
"""Names of the last release, and what stands in their place."""


def __getattr__(name: str) -> Any:
    if name in _GONE:
        raise AttributeError(f"workbench.{name} is gone: {_GONE[name]}")
    if name in _BY_HOOK:
        return import_module("workbench.recipe.hooks").hook(_BY_HOOK[name], name)
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no name {name!r}")
    # which imports `draw`, a package, as well
    home = __import__(f"workbench.{_HOMES[name]}", fromlist=[name])
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext workbench`: the magics `%%ranks` and `%ranks`."""
    import_module("workbench.notebook.magics").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext workbench`: the ranks end."""
    import_module("workbench.notebook.magics").unload(shell)
