"""`inductor_passes`: the passes that Inductor runs on a recipe's graphs, in order, and what each of them changed."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.partition import PARTS, ForwardBackward, partition
from workbench.passes.full_inductor_compilation import compile_graph
from workbench.pipeline.build import check_buildable
from workbench.pipeline.machine import versions
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import copy_graph, run_joint, run_partitioned
from workbench.pipeline.stages import capture_joint
from workbench.recipe.contracts import CONTRACTS, Stage
from workbench.recipe.edits import parse_value
from workbench.recipe.files import print_result, writable
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import json_text
from workbench.torch_api import aot
from workbench.torch_api.inductor.lowering import configured
from workbench.torch_api.inductor.passes import InductorPass, joint_graph, post_grad, pre_grad
from workbench.torch_api.inductor.regions import check_options
from workbench.world.fake import fake_world

WIDTH = 100
TITLES = {
    "module": "pre-grad, on the module as Dynamo traces it (from a torch.compile of the same module: the recipe, "
              "which captures a joint graph, runs none of these)",
    "joint": "joint-graph, on the recipe's joint graph (torch.compile runs these before its partition; "
             "the recipe partitions without them)",
    "forward": "post-grad, on the recipe's forward graph",
    "backward": "post-grad, on the recipe's backward graph",
}


@dataclass(frozen=True)
class Explanation:
    """The passes in the order in which they ran.

    left_out: the recipe's own passes that were skipped, since they leave Inductor no graph. pair: the recipe's forward
    and backward as Inductor received them.
    """

    recipe: Recipe
    passes: list[InductorPass]
    left_out: tuple[str, ...]
    versions: dict[str, str]
    pair: ForwardBackward = field(repr=False, compare=False)

    def to_json(self) -> str:
        """Everything but the graphs, as JSON text."""
        passes = [{**asdict(p), "changed": p.changed} for p in self.passes]
        return json_text({"recipe": self.recipe.to_dict(), "versions": self.versions, "left_out": self.left_out,
                          "passes": passes})

    def table(self, *, idle: bool = True) -> str:
        """A line for each pass, with its changes below; without `idle`, only the passes that changed something."""
        lines = [f"{self.recipe.name}, torch {self.versions['torch']}: "
                 f"{len(self.passes)} passes of Inductor ran, {sum(p.changed for p in self.passes)} changed something"]
        if self.left_out:
            lines.append(f"left out, since they leave Inductor no graph: {', '.join(self.left_out)}")
        width = max((len(p.name) for p in self.passes), default=0)
        for graph in TITLES:
            lines += ["", *textwrap.wrap(TITLES[graph], WIDTH)]
            ran = [p for p in self.passes if p.graph == graph]
            shown = [(i, p) for i, p in enumerate(ran, 1) if idle or p.changed]
            if not shown:
                lines.append("      none changed anything")
            for i, p in shown:
                where = p.where.removeprefix("torch/_inductor/")
                lines.append(f"{i:>4}  {p.name:<{width}}  {_nodes(p):<14} {p.seconds * 1e3:>6.1f} ms  {where}")
                for text in _changes(p):
                    lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 10)
        return "\n".join([*lines, "", "places are in torch/_inductor, if they do not say"])

    def __repr__(self) -> str:
        return f"Explanation({self.recipe.name}: {len(self.passes)} passes)"


def _nodes(p: InductorPass) -> str:
    before, after = p.nodes
    return f"{before:,} nodes" if before == after else f"{before:,} to {after:,}"


def _changes(p: InductorPass) -> list[str]:
    changes = [f"matched {p.matched} times"] if p.matched else []
    for word, counts in (("added", p.added), ("removed", p.removed)):
        if counts:
            most = sorted(counts.items(), key=lambda item: -item[1])
            changes.append(f"{word} {', '.join(f'{count} {name}' for name, count in most)}")
    if p.reordered:
        changes.append("put nodes into another order")
    return changes


def command(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench explain`."""
    writable(args.json)
    explanation = inductor_passes(recipe, config={key: parse_value(text) for key, text in args.config})
    print_result(lambda: explanation.table(idle=not args.changed), args.json, explanation.to_json)
    return 0


def inductor_passes(
    recipe: Recipe, *, config: Mapping[str, Any] | None = None, progress: Progress = True
) -> Explanation:
    """Capture `recipe` on a fake world, and run Inductor's passes on each of its graphs; nothing is compiled.

    config: options of Inductor in addition to those of the recipe's full_inductor_compilation. progress: as for `run`.

    Raises WorkbenchError for an unknown option, a step in one graph, and where the recipe cannot be built on a fake
    world.
    """
    check_options(config or {}, "explain")
    if recipe.training.step != "pair":
        raise WorkbenchError(f"explain looks at a forward and a backward, and recipe {recipe.name!r} joins them: set "
                             'training.step to "pair", and drop its passes of the step stage')
    stages = {spec.name: CONTRACTS[spec.name].stage for spec in recipe.passes}
    left_out = tuple(name for name in stages if name == "regional_inductor" or stages[name] is Stage.REPLAY)
    before = [spec for spec in recipe.passes if stages[spec.name] is Stage.PARTITIONED and spec.name not in left_out]
    captured = recipe.model_copy(update={"passes": tuple(before)})
    check_buildable(captured, "fake")
    with (fake_world(recipe.mesh.world_size) as world, configured({**_config(recipe), **(config or {})}),
          telling(progress) as tell):
        tell("author")
        authored = author(captured, world)
        tell("Inductor's passes before the capture")
        passes = pre_grad(authored.module, authored.example_batch())
        tell("capture")
        joint = capture_joint(captured, authored)
        run_joint(joint, captured.joint_passes, progress=tell)
        pair = _pair(joint, captured)
        tell("Inductor's passes on joint graph, forward and backward")
        passes += _observed(joint, pair)
    return Explanation(recipe, passes, left_out, versions(), pair)


def _config(recipe: Recipe) -> dict[str, Any]:
    """The options of Inductor in the recipe's full_inductor_compilation."""
    options = [dict(spec.options) for spec in recipe.passes if spec.name == "full_inductor_compilation"]
    return dict(options[0].get("config", {})) if options else {}


def _pair(joint: JointGraph, recipe: Recipe) -> ForwardBackward:
    """The forward and backward that Inductor receives; `joint` stays open."""
    pair = partition(joint.fork())
    run_partitioned(pair, recipe.passes)
    return pair


def _observed(joint: JointGraph, pair: ForwardBackward) -> list[InductorPass]:
    """Inductor's passes on copies of the graphs."""
    with joint.context():
        passes = joint_graph(aot.clone(joint.graph))
    for which, graph in zip(PARTS, pair.graphs, strict=True):
        with pair.context(which) as inputs:
            passes += post_grad(partial(compile_graph, copy_graph(graph), list(inputs), {}), which)
    return passes
