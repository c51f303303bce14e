"""Passes of another compiler's list under our verdicts, on our capture or inside anybody's trainer.

torchtitan's graph_trainer has passes `(gm, example_inputs) -> gm` on one graph of loss and gradients. No torchtitan is
imported here: the caller brings the list.
"""

from __future__ import annotations

import inspect
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from workbench.checks.agreement import exchange
from workbench.checks.collectives import collectives_of, conserved, hidden_launches, repeated
from workbench.checks.numerics import Comparison
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome
from workbench.errors import UnusableGraph, WorkbenchError, shown_file
from workbench.graph.capture import JointGraph
from workbench.graph.facts import Known, facts_of, set_facts
from workbench.graph.lower import Step
from workbench.graph.read.collectives import keep_axes
from workbench.graph.read.nodes import described
from workbench.lab.graph_passes import bridge
from workbench.passes.registry import RegisteredPass, find_pass, graph_changed
from workbench.pipeline.build import build
from workbench.pipeline.proofs.numerics_proof import (
    compare_graphs,
    compare_on_ranks,
    prove_numerics,
    revealing,
)
from workbench.pipeline.run_passes import Level, apply_pass, copy_graph, run_chosen
from workbench.recipe.contracts import CONTRACTS, Numerics, Options, PassContract, Stage
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import counted, first_line
from workbench.torch_api import aot
from workbench.torch_api.ops import is_symbolic, world_kind
from workbench.world.mesh import World

PROPOSED = "proposed"
"""Source of a contract that was made from what a pass did."""
GraphPass = Callable[..., GraphModule]
_TORCH = str(Path(torch.__file__).parent)


class ForeignPass:
    """`function(gm, example_inputs) -> gm` as the function of a registered pass.

    filled: what the new nodes of the last run came without. convention: how it left its graph to be called.

    Raises WorkbenchError for one that wants more than a graph and its inputs, such as a plan of buckets.
    """

    def __init__(self, name: str, function: GraphPass) -> None:
        self.name, self.function = name, function
        self.filled = bridge.Filled()
        self.convention: Any = None
        try:
            signature = inspect.signature(function)
            signature.bind(None, None)
        except ValueError:  # a builtin tells none
            pass
        except TypeError as error:
            raise WorkbenchError(
                f"pass {name!r} takes {', '.join(signature.parameters)}, and not gm, example_inputs alone: {error}; "
                "functools.partial binds what a pass wants beside"
            ) from error

    def __call__(self, gm: GraphModule, example_inputs: list[Any], *, options: Any) -> Any:
        known = {node.name for node in gm.graph.nodes}
        try:
            result = self.function(gm, example_inputs)
        except WorkbenchError:
            raise
        except Exception as error:
            reason = _reason(error, any(map(is_symbolic, example_inputs)))
            raise WorkbenchError(f"pass {self.name!r} {reason}{_line(error)}") from error
        if isinstance(result, GraphModule):
            self.convention = aot.convention_of(result)
            self.filled = bridge.fill_in(result, known)
        return result


def _reason(error: Exception, symbolic: bool) -> str:
    """What a pass that raised wants and does not have here, as far as its error tells.

    symbolic: whether the graph's inputs have symbolic sizes.
    """
    text = first_line(error)
    words = text.lower()
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    called = frame.f_globals.get(re.split(r"\W", text)[0])  # as a TypeError names it
    torchs = str(getattr(called, "__module__", "")).startswith("torch.")
    absent = isinstance(error, ImportError | AttributeError) and re.search(r"torch\.|'_OpNamespace'", text)
    if absent or (torchs and "unexpected keyword argument" in text):
        return f"wants another torch than {torch.__version__}: {text}"
    if isinstance(error, ImportError):
        return f"wants a module that is not installed: {text}"
    if not torch.cuda.is_available() and ("cuda" in words or "nccl" in words):
        return f"wants CUDA, which this machine does not have: {text}"
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return f"wants sizes that are known before the step: {text}"
    if not symbolic and ("symbolic" in words or "dynamic" in words):
        return f"wants inputs of symbolic sizes, and this graph's are numbers: {text}"
    return f"raised {type(error).__name__}: {text}"


def _line(error: Exception) -> str:
    """` (FILE, line N, in FUNCTION: SOURCE)`: where in the pass, and not in what it called of torch."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    for frame in reversed(frames):
        if not frame.filename.startswith((_TORCH, "<frozen ")):
            return f" ({shown_file(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line})"
    return ""


def _items(passes: Any, stage: Stage, where: str) -> list[tuple[RegisteredPass, Options]]:
    """The passes with the contracts registered under their names, or with one to be proposed."""
    listed = isinstance(passes, list | tuple) and passes
    if not listed or not all(map(callable, passes)):
        raise WorkbenchError(
            f"{where} takes a list of passes, each a function of (gm, example_inputs), and got {passes!r}"
        )
    names: Counter[str] = Counter()
    items = []
    for function in passes:
        inner = function
        while hasattr(inner, "func"):
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__)
        names[name] += 1
        title = f"{name}#{names[name]}" if names[name] > 1 else name
        if name in CONTRACTS:
            item = find_pass(name)
            contract = replace(item.contract, name=title, stage=stage)
        else:
            text = f"{PROPOSED}: it has not run"
            contract = PassContract(title, stage, Numerics.EXACT, text, source=PROPOSED)
            item = RegisteredPass(contract, graph_changed, graph_changed)
        item = replace(item, contract=contract, function=ForeignPass(title, function))
        items.append((item, contract.options()))
    return items


def propose(record: PassRecord) -> None:
    """Give a pass that has no contract the narrowest one that what it did keeps to, and say so in its `changes`.

    Bytes may be sent again, or less often, only where the same value goes over the same ranks.
    """
    contract = record.item.contract
    if contract.source != PROPOSED or record.malformed:
        return
    was, now = collectives_of(record.before), collectives_of(record.after)
    nodes = " to ".join(f"{len(graph.graph.nodes):,}" for graph in (*record.before, *record.after))
    changes = [f"nodes {nodes}", f"launches {len(was):,} to {len(now):,}"]
    repeats = fewer = False
    if not hidden_launches(record.after) and not _conserved(was, now):
        again = repeated(record.before, record.after)
        once = repeated(record.after, record.before)
        repeats = _conserved(was, [c for c in now if c not in again])
        fewer = _conserved([c for c in was if c not in once], now)
        changes += [f"{len(again)} of them sent again"] * repeats
        changes += [f"{len(once)} not sent again"] * fewer
    if filled := str(record.item.function.filled):  # type: ignore[attr-defined]
        changes.append(filled)
    text = f"{PROPOSED} from what it did, {contract.numerics}: {'; '.join(changes)}"
    record.judge_by(replace(contract, changes=text, repeats=repeats, fewer_bytes=fewer))


def _conserved(was: Sequence[Any], now: Sequence[Any]) -> bool:
    return conserved(was, now).outcome is Outcome.PASS


def _loosened(records: Sequence[PassRecord]) -> list[PassRecord]:
    """Those whose proposed contract, broken by rounding, is for sums in another order from now on."""
    broken = []
    for record in records:
        verdict = record.verdict("numerics")
        finite = all(math.isfinite(comparison.worst) for comparison in record.compared or ())
        proposed = record.item.contract.source == PROPOSED
        if proposed and finite and verdict is not None and verdict.outcome is Outcome.FAIL:
            record.judge_by(replace(record.item.contract, numerics=Numerics.REDUCTION_ORDER))
            propose(record)
            broken.append(record)
    return broken


def judge_graph_passes(
    passes: Sequence[GraphPass], recipe: Recipe, world: World, level: Level = "full", *,
    renames: Mapping[str, str] | None = None,
) -> tuple[list[PassRecord], Step]:
    """Run the passes in order on the recipe's traced joint graph, and build its step: records of all passes, the step.

    They run before the recipe's own joint passes. renames: parts of our module paths, and what the passes call them,
    such as {"output": "lm_head"}. A pass whose name has a registered contract is held to it; for another one a contract
    is proposed. Every rank calls it with the same list. Level "full" compares values on real ranks.

    Raises WorkbenchError for what is no list of such passes, with its reason and line for a pass that raises, and
    UnusableGraph where a pass left a graph that nothing can run.
    """
    items = _items(passes, Stage.JOINT, "judge_graph_passes")

    def run(joint: JointGraph) -> None:
        bridge.write_out(joint.graph, renames)
        for record in run_chosen(joint, items, lambda _: None):
            propose(record)

    traced = recipe.override({"capture": "traced", "strict": False})
    built = build(traced, world, level=level, captured=run)
    if level == "full" and (again := _loosened(built.records)):
        prove_numerics(again, built.step)
    return built.records, built.step


def judged(
    gm: GraphModule, inputs: Sequence[Any], passes: Sequence[GraphPass],
    values: Sequence[Any] | None = None,
) -> tuple[GraphModule, list[PassRecord]]:
    """Run the passes in order on a graph that make_fx traced, of loss and gradients; the last one's graph, the records.

    inputs: what the passes get beside the graph, a value for each placeholder, fake or real. values: real ones of a
    step, on which each pass's graph is compared with the one before; every rank must call it then. `gm` stays as it is.

    Raises WorkbenchError as `judge_graph_passes`, and where number, shapes or dtypes of `inputs` or `values` are not
    those of the graph. In graph_trainer's, a DTensor is two inputs: its shard and its DeviceMesh.
    """
    items = _items(passes, Stage.STEP, "judged")
    _require_inputs(gm, "inputs", inputs)
    if values is not None:
        _require_inputs(gm, "values", values)
    known, example_inputs = Known(), list(inputs)
    gm = copy_graph(gm)
    if facts_of(gm).part != "step":
        set_facts(gm, bridge.facts_outside(gm, "step"))
    bridge.read_in(gm)
    broken: UnusableGraph | None = None
    for item, options in items:
        if broken is not None:
            raise broken
        started = time.perf_counter()
        result = apply_pass(item, copy_graph(gm), example_inputs, options)
        record = PassRecord(item, options, (gm,), (result,), time.perf_counter() - started, 0.0, known)
        aot.set_convention(result, item.function.convention)  # type: ignore[attr-defined]
        keep_axes(gm, result)
        known.records.append(record)
        propose(record)
        gm, broken = result, record.broken
    if values is None or world_kind() == "fake":
        known.no_values = "a fake world has no values" if values else "no values were given: pass those of a step"
    else:
        _compare([record for record in known.records if record.broken is None], list(values))
    return gm, known.records


def _require_inputs(gm: GraphModule, name: str, side: Sequence[Any]) -> None:
    """Refuse another number of inputs than the graph's, and tensors of other shapes or dtypes."""
    places = gm.graph.find_nodes(op="placeholder")
    if len(side) != len(places):
        raise WorkbenchError(f"judged: the graph has {counted(len(places), 'input')}, and {name} has {len(side)}")
    for node, value in zip(places, side, strict=True):
        wanted = node.meta.get("val")
        expected, got = described(wanted), described(value)
        if isinstance(wanted, torch.Tensor) and not is_symbolic(wanted) and expected != got:
            raise WorkbenchError(f"judged: {node.name} is {expected}, and in {name} {got}")


def _compare(records: Sequence[PassRecord], values: list[Any]) -> None:
    """Run each pass's graph and the one before on the values, on every rank; a second time where rounding shows."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    for record in records:
        agreement = exchange(record.after)
        if agreement.outcome is Outcome.FAIL and not agreement.evidence["runs"]:
            raise UnusableGraph(record.name, agreement.message, "collectives")
    with torch.no_grad(), revealing(values, []):
        for record in records:
            record.compared = _on_ranks(record, values, size)
        for record in _loosened(records):
            record.compared = _on_ranks(record, values, size)


def _on_ranks(record: PassRecord, values: list[Any], size: int) -> list[Comparison]:
    flat = replace(record, before=tuple(map(_flat, record.before)), after=tuple(map(_flat, record.after)))
    return compare_on_ranks(flat, values, [], size, compare_graphs(flat, values, [], size))


def _flat(graph: GraphModule) -> GraphModule:
    """A copy that is called with an argument for each input."""
    copy = aot.clone(graph)
    aot.set_convention(copy, CodeGen())
    return copy
