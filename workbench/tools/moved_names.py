"""The new paths of modules of the first, flat layout: an import of an old path fails with the new one."""

from __future__ import annotations

from pathlib import Path

_RENAMED = {
    "backend": "tools.as_backend", "bisect_recipe": "tools.bisect", "built": "pipeline.build",
    "commands": "tools.command_line", "compiled_step": "graph.lower", "course_commands": "notebook.lessons.commands",
    "data": "pipeline.text_data", "declare": "recipe.strict_toml", "display": "notebook.show",
    "dump": "pipeline.graph_files", "explain": "tools.inductor_passes", "export": "tools.export.script",
    "export_script": "tools.export.script",
    "figures": "notebook.recorded_figures", "own": "world.registered", "forward_backward": "graph.partition",
    "graph_pass": "tools.as_graph_pass", "inside_inductor": "tools.look_inside", "joint_graph": "graph.capture",
    "recipe_edit": "recipe.edits", "recipe_parts": "recipe.sections",
    "recipe_rules": "recipe.rules", "run_recipe": "pipeline.run", "schedules": "tools.schedule",
    "sizes": "recipe.model_sizes", "study": "tools.what_if", "training": "pipeline.train", "words": "recipe.wording",
    "analysis.census": "graph.read.nodes", "analysis.effect": "passes.effect",
    "analysis.estimates": "graph.read.measured_costs", "analysis.pace": "graph.read.launch_bound",
    "analysis.redistribute": "graph.read.redistribution", "analysis.spans": "graph.read.simulated_run",
    "draw.pace": "notebook.draw.timeline", "draw.show": "notebook.draw.picture",
    "passes.body": "graph.callables", "passes.chains": "graph.gather_chains",
    "passes.rehearsal": "graph.replay_rehearsal", "verify.light": "checks.static",
    "world.diagnose": "world.diagnosis", "world.echo": "world.rank_output", "world.gang": "world.rank_processes",
    "world.greetings": "world.handshakes", "world.payload": "world.pickling",
}
_FOLDERS = {"passes.bucketing": "passes.transformer_block_bucketing", "passes.cleanup": "passes.graph_cleanup",
            "passes.decomposition": "passes.inductor_decomposition",
            "passes.full_inductor": "passes.full_inductor_compilation",
            "passes.overlap": "passes.overlap_collectives", "passes.reshard": "passes.reshard_after_forward",
            "analysis": "graph.read", "draw": "notebook.draw", "models": "authoring.models", "parallel": "authoring",
            "stamp": "graph.stamping", "verify": "checks", "widgets": "notebook.views"}
_PACKAGE = Path(__file__).parents[1]


def new_home(old: str) -> str | None:
    """The present path of the module `workbench.OLD`, without `workbench.`; None if there was no such module."""
    folder, _, leaf = old.rpartition(".")
    if old in _FOLDERS:  # Python imports a folder before the modules in it
        return _FOLDERS[old]
    if named := [new for name, new in _RENAMED.items() if old == name or leaf == name.rpartition(".")[2]]:
        return named[0]
    found = sorted((_PACKAGE / folder.replace(".", "/")).rglob(f"{leaf}.py"))
    return ".".join(found[0].relative_to(_PACKAGE).with_suffix("").parts) if found else None


def refuse(name: str) -> None:
    """Raise ModuleNotFoundError with the new path of the module `name`, if it was one of this package's."""
    home = new_home(name.removeprefix("workbench."))
    if home is not None and f"workbench.{home}" != name:
        raise ModuleNotFoundError(f"{name} is workbench.{home} now; public names are in `workbench` itself", name=name)
