"""The step that runs an artifact's code on this rank: nothing is captured, and nothing is compiled.

What a replay pass makes cannot be written: it is made here, around the loaded code, and records on this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.authoring.authored import Authored
from workbench.checks.record import PassRecord
from workbench.graph.capture import title
from workbench.graph.facts import GraphFacts, StepFacts, set_facts
from workbench.graph.input_check import InputCheck
from workbench.graph.lower import CompiledStep, PairFunction, bind
from workbench.graph.partition import ForwardBackward
from workbench.graph.step_graph import StepGraph
from workbench.graph.update import Update
from workbench.graph.whole_step import WholeStep
from workbench.passes.registry import find_pass
from workbench.pipeline.run_passes import run_partitioned
from workbench.pipeline.train import optimizer_of, recipe_of
from workbench.recipe.contracts import Stage
from workbench.tools.export.artifact import KERNELS, Manifest, read_code
from workbench.tools.export.code import Code
from workbench.tools.export.groups import find_groups
from workbench.torch_api.inductor.carried import install_kernels
from workbench.torch_api.restoring import shard_of


def load_step(authored: Authored, folder: Path, manifest: Manifest
              ) -> tuple[CompiledStep | WholeStep, list[PassRecord]]:
    """The step of this rank, and the records of its replay passes. Every rank calls it. `manifest` is of `folder`,
    which `read` has checked.

    Runs the artifact's code as Python: only load what you would run.
    """
    program, gpu = manifest.programs[manifest.ranks[authored.world.rank]], authored.world.device.index
    find_groups(program["groups"], authored)
    install_kernels(folder / KERNELS, gpu)
    codes = {folder / "code" / f"{name}.py": read_code(folder, name) for name in program["files"].values()}
    facts = StepFacts(results=next(iter(codes.values())).results)
    parts = [_Part(code, code.function(file, gpu), facts) for file, code in codes.items()]
    step, whole = program["step"], program["step"].get("whole")
    inputs, slots = InputCheck(**step["inputs"]), tuple(parts) * (3 - len(parts))
    run: Any = _function(authored, step, parts) if whole is None else None
    pair = ForwardBackward(slots, authored, step["parameters"], step["buffers"], run, inputs,  # type: ignore[arg-type]
                           writes=parts[0].code.written)
    pair.facts = facts
    if whole is None:
        records, bodies = _replayed(pair, authored, parts)
        bind(pair, bodies)
        return CompiledStep(pair), records
    update = Update(**whole["update"] | {"betas": tuple(whole["update"]["betas"])})
    joined = StepGraph(pair, parts[0].graph, tuple(whole["trained"]), (), {}, update, whole["microbatches"])
    records, (joined.body,) = _replayed(joined, authored, parts)
    return WholeStep(joined, optimizer_of(authored)), records


def _replayed(split: ForwardBackward | StepGraph, authored: Authored, parts: Sequence[_Part]
              ) -> tuple[list[PassRecord], tuple[Any, ...]]:
    """What the recipe's replay passes make of the loaded bodies."""
    split.known.bodies = loaded = tuple(part.body for part in parts)
    specs = [spec for spec in recipe_of(authored).passes if find_pass(spec.name).contract.stage is Stage.REPLAY]
    records, bodies = run_partitioned(split, specs)
    return records, bodies or loaded


class _Part:
    """One graph's code, as a slot of a pair: `graph` has the inputs alone."""

    def __init__(self, code: Code, body: Callable[[list[Any]], Sequence[Any]], facts: StepFacts) -> None:
        self.code, self.body, self.graph = code, body, code.skeleton()
        set_facts(self.graph, GraphFacts(code.part, step=facts))
        self.example_inputs = [node.meta["val"] for node in self.graph.graph.find_nodes(op="placeholder")]

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.body(args)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Replay passes run without a tracing state: nothing is traced."""
        yield


def _function(authored: Authored, step: dict[str, Any], parts: Sequence[_Part]) -> PairFunction:
    forward, backward = (part.code for part in parts)
    names = [*step["parameters"], *step["buffers"]]

    def inputs(given: Sequence[Any]) -> list[Any]:
        held, batch = dict(zip(names, given, strict=False)), iter(given[len(names):])
        return [next(batch) if each.of is None else shard_of(held[each.of]) if each.dtype else held[each.of].device_mesh
                for each in forward.inputs]

    return PairFunction(title(authored), parts, names, forward.written, step["saved_order"],
                        [of or None for _, of in backward.outputs], inputs)
