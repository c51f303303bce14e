"""`inductor_passes`: the passes that Inductor runs on a recipe's graphs, in order, and what each of them changed."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.partition import PARTS, ForwardBackward
from workbench.passes.full_inductor_compilation import compile_graph
from workbench.pipeline.build import check_buildable
from workbench.pipeline.machine import versions
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import copy_graph, run_joint, run_partitioned
from workbench.pipeline.stages import capture_joint, divide
from workbench.recipe.contracts import CONTRACTS, Stage
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
    and backward as Inductor received them. graphs: the graphs on which Inductor ran.
    """

    recipe: Recipe
    passes: list[InductorPass]
    left_out: tuple[str, ...]
    versions: dict[str, str]
    pair: ForwardBackward = field(repr=False, compare=False)
    _joint: JointGraph = field(repr=False, compare=False)
    graphs: tuple[str, ...] = tuple(TITLES)

    def again(self, config: Mapping[str, Any], graphs: Collection[str] = tuple(TITLES)[1:]) -> Explanation:
        """Run Inductor's passes on the same captured graphs again, with other options of Inductor.

        config: options in addition to those of the recipe's full_inductor_compilation. graphs: any of joint, forward
        and backward. Raises WorkbenchError for an unknown option or graph.
        """
        check_options(config, "explain")
        if unknown := sorted({*graphs} - {*TITLES} | {*graphs} & {"module"}):
            raise WorkbenchError(f"explain: graph {unknown[0]!r} was not captured: take joint, forward or backward")
        wanted = tuple(graph for graph in TITLES if graph in graphs)
        with fake_world(self.recipe.mesh.world_size) as world, configured({**_own(self.recipe), **config}):
            author(self.recipe, world)  # the mesh, whose process groups the graphs know by name
            passes = _on_joint(self._joint) if "joint" in wanted else []
            if {"forward", "backward"} & {*wanted}:
                passes += _on_pair(_pair(self._joint, _before_inductor(self.recipe)[0]), wanted)
        return replace(self, passes=passes, graphs=wanted)

    def to_json(self) -> str:
        """Everything but the graphs, as JSON text."""
        data = {"recipe": self.recipe.to_dict(), "versions": self.versions, "left_out": self.left_out,
                "passes": [{**asdict(p), "changed": p.changed} for p in self.passes]}
        return json_text(data)

    def table(self, *, idle: bool = True) -> str:
        """A line for each pass, with its changes below; without `idle`, only the passes that changed something."""
        lines = [f"{self.recipe.name}, torch {self.versions['torch']}: "
                 f"{len(self.passes)} passes of Inductor ran, {sum(p.changed for p in self.passes)} changed something"]
        if self.left_out:
            lines.append(f"left out, since they leave Inductor no graph: {', '.join(self.left_out)}")
        wide = max((len(p.name) for p in self.passes), default=0)
        for graph, title in ((graph, TITLES[graph]) for graph in self.graphs):
            rows = [(i, p) for i, p in enumerate((p for p in self.passes if p.graph == graph), 1) if idle or p.changed]
            lines += ["", *textwrap.wrap(title, WIDTH), *([] if rows else ["      none changed anything"])]
            for i, p in rows:
                lines.append(f"{i:>4}  {p.name:<{wide}}  {_nodes(p):<14} {p.seconds * 1e3:>6.1f} ms  {_where(p)}")
                for text in _changes(p):
                    lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 10)
        return "\n".join([*lines, "", "places are in torch/_inductor, if they do not say; times are of watched passes, "
                          "which are slower"])

    def __repr__(self) -> str:
        return f"Explanation({self.recipe.name}: {len(self.passes)} passes)"


def _nodes(p: InductorPass) -> str:
    before, after = p.nodes
    return f"{before:,} nodes" if before == after else f"{before:,} to {after:,}"


def _where(p: InductorPass) -> str:
    return p.where.removeprefix("torch/_inductor/")


def _changes(p: InductorPass) -> list[str]:
    def listing(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))

    found = [f"{word} {listing(counts)}" for word, counts in
             (("matched:", p.matched), ("added", p.added), ("removed", p.removed)) if counts]
    return [*found, *(["put nodes into another order"] if p.reordered else [])]


def inductor_passes(
    recipe: Recipe, *, config: Mapping[str, Any] | None = None, progress: Progress = True
) -> Explanation:
    """Capture `recipe` on a fake world, and run Inductor's passes on each of its graphs; nothing is compiled.

    config: options of Inductor in addition to those of the recipe's full_inductor_compilation. progress: as for `run`.

    Raises WorkbenchError for an unknown option, a step in one graph, and where the recipe cannot be built on a fake
    world.
    """
    check_options(config or {}, "explain")
    if recipe.training.step == "whole":
        raise WorkbenchError(f"explain looks at a forward and a backward, and recipe {recipe.name!r} joins them: set "
                             'training.step to "pair", and drop its passes of the step stage')
    reached, left_out = _before_inductor(recipe)
    check_buildable(reached, "fake")
    with (fake_world(recipe.mesh.world_size) as world, configured({**_own(recipe), **(config or {})}),
          telling(progress) as tell):
        tell("author")
        authored = author(reached, world)
        tell("Inductor's passes before the capture")
        passes = pre_grad(authored.module, authored.example_batch())
        tell("capture")
        joint = capture_joint(reached, authored)
        run_joint(joint, reached.joint_passes, progress=tell)
        tell("Inductor's passes on the joint graph")
        passes += _on_joint(joint)
        pair = _pair(joint, reached)
        tell("Inductor's passes on forward and backward")
        passes += _on_pair(pair, TITLES)
    return Explanation(recipe, passes, left_out, versions(), pair, joint)


def _own(recipe: Recipe) -> dict[str, Any]:
    """The options of Inductor in the recipe's full_inductor_compilation."""
    own = next((spec for spec in recipe.passes if spec.name == "full_inductor_compilation"), None)
    return dict(dict(own.options).get("config", {})) if own else {}


def _before_inductor(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the passes before Inductor alone, and the names of the passes that would leave it no graph."""
    names = [spec.name for spec in recipe.passes]
    left_out = tuple(n for n in names if n == "regional_inductor" or
                     (n in CONTRACTS and CONTRACTS[n].stage is Stage.REPLAY))
    kept = [spec for spec in recipe.passes if spec.name not in left_out
            and CONTRACTS[spec.name].stage is Stage.PARTITIONED]
    return recipe.model_copy(update={"passes": tuple(kept)}), left_out


def _pair(joint: JointGraph, recipe: Recipe) -> ForwardBackward:
    """The forward and backward that Inductor receives; `joint` stays open."""
    pair = divide(joint.fork())
    run_partitioned(pair, recipe.passes)
    return pair


def _on_joint(joint: JointGraph) -> list[InductorPass]:
    with joint.context():
        return joint_graph(aot.clone(joint.graph))


def _on_pair(pair: ForwardBackward, wanted: Collection[str]) -> list[InductorPass]:
    """Inductor's passes on copies of the `wanted` graphs of the pair."""
    passes: list[InductorPass] = []
    for which, graph in zip(PARTS, pair.graphs, strict=True):
        if which in wanted:
            with pair.context(which) as inputs:
                passes += post_grad(partial(compile_graph, copy_graph(graph), list(inputs), {}), which)
    return passes
