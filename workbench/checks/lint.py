"""Whether the next stage can run the graph after a pass: form, boundary, waits and visible effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from workbench.checks.metadata import wrong_results
from workbench.checks.snapshot import Snapshot, snapshot
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import facts_of, reading
from workbench.graph.read.collectives import readers_of
from workbench.graph.read.memory import item_roots, roots
from workbench.recipe.wording import differing, first_line
from workbench.torch_api import aot
from workbench.torch_api.ops import (
    aliased_inputs,
    argument,
    calls_of,
    group_ranks,
    host_copy,
    is_async_launch,
    op_name,
    waits,
    writes,
    written_inputs,
)

MALFORMED = "the graph is malformed"
NODE_KINDS = ("placeholder", "get_attr", "call_function", "output")


def form(gm: torch.fx.GraphModule) -> list[str]:
    """What makes a graph malformed, one sentence each."""
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        return [f"{MALFORMED}: {first_line(error)}"]
    nodes = list(gm.graph.nodes)
    if not nodes or nodes[-1].op != "output":
        return [f"{MALFORMED}: it has no output node at its end"]
    if not nodes[-1].args:
        return [f"{MALFORMED}: its output node has no arguments"]
    return [f"node {n.name} is a {n.op}: the next stage accepts {', '.join(NODE_KINDS)}"
            for n in nodes if n.op not in NODE_KINDS]


def _boundary(before: Snapshot, after: Snapshot) -> tuple[list[str], list[str]]:
    """(differences of the inputs and outputs that no caller can handle, other differences)."""
    unusable, problems = [], []
    was, now = dict(before.placeholders), dict(after.placeholders)
    if list(was) != list(now):
        unusable.append(
            f"placeholders changed{differing(list(was), list(now)) or ': they are in another order'}"
        )
    for name in was:
        if now.get(name, was[name]) != was[name]:
            problems.append(f"placeholder {name} was {was[name]} and is {now[name]}")
    if len(before.outputs) != len(after.outputs):
        lost = differing(*([name for name, _ in side.outputs] for side in (before, after)))
        unusable.append(f"{len(before.outputs)} outputs before, {len(after.outputs)} after{lost}: return as many, in "
                        "the same order")
    for i, ((_, old), (name, new)) in enumerate(zip(before.outputs, after.outputs, strict=False)):
        if old != new and len(before.outputs) == len(after.outputs):
            # a caller can cast a value, and no more; a node may lack meta['val']
            unknown = new == "NoneType" and name != "None"
            usable = unknown or _without_dtype(old) == _without_dtype(new)
            sentences = problems if usable else unusable
            sentences.append(f"output {i} ({name}) was {old} and is {new}")
    return unusable, problems


def _without_dtype(face: str) -> str:
    """Shape and device of a value on the boundary; the type of what is no tensor."""
    return face[face.find("["):] if "[" in face else face


def _unknown_groups(gm: torch.fx.GraphModule, before: Snapshot, after: Snapshot) -> list[str]:
    """Collectives of process groups that no one knows: the graph before, the facts, and this process."""
    groups = {*facts_of(gm).group_sizes, *(collective.group for collective in before.collectives)}
    return [
        f"{c.node} is of process group {c.group!r}, which does not exist: take one of facts_of(gm).groups"
        for c in after.collectives
        if c.group not in groups and group_ranks(c.group) is None
    ]


def _without_values(gm: torch.fx.GraphModule) -> list[str]:
    """Whether used nodes of a joint graph lack meta["val"], which torch's partitioner needs."""
    # not assertions, which nothing uses
    nodes = [n for n in gm.graph.nodes if n.op in ("placeholder", "call_function") and n.users]
    missing = [n.name for n in nodes if "val" not in n.meta]
    if not missing or facts_of(gm).part != "joint":
        return []
    return [f"{len(missing)} of {len(nodes)} nodes have no meta['val'], {missing[0]} first, and the partitioner needs "
            "it: copy node.meta, or set meta['val'] on each new node"]


def unwaited(gm: torch.fx.GraphModule) -> list[str]:
    """One sentence for each collective or host copy that is read without a wait, or whose memory is used before it."""
    problems = []
    ends: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for start in calls_of(gm.graph, is_async_launch):
        readers = readers_of(start)
        ends_it = [node for node in readers if node.op == "call_function" and waits(node.target)]
        early = [node for node in readers if node not in ends_it]
        if early:
            problems.append(f"{_called(start)} is read by {early[0].name} without a wait")
        elif not ends_it:
            problems.append(f"{_called(start)} has no wait")
        else:
            ends.setdefault(min(ends_it), []).append(start)
    return problems + _races(gm, ends)


def _called(start: torch.fx.Node) -> str:
    return f"{'host copy' if host_copy(start.target) else 'collective'} {start.name}"


def _views(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and bool(aliased_inputs(node)) and not written_inputs(node)


def _races(gm: torch.fx.GraphModule, ends: dict[torch.fx.Node, list[torch.fx.Node]]) -> list[str]:
    """Reads and writes of memory that a collective fills, and writes of memory that it reads, before its wait."""
    if not ends or not calls_of(gm.graph, writes):
        return []
    problems: dict[torch.fx.Node, str] = {}
    owner = item_roots(gm, roots(gm))
    pending = {start for starts in ends.values() for start in starts}
    busy: dict[torch.fx.Node, list[tuple[torch.fx.Node, torch.fx.Node, bool]]] = {}
    for node in gm.graph.nodes:
        for start in ends.get(node, ()):
            for read in start.all_input_nodes:
                busy[owner[read]] = [entry for entry in busy[owner[read]] if entry[0] is not start]
        if any(busy.get(owner[n]) for n in node.all_input_nodes) and not _views(node):
            written = written_inputs(node)
            for touched in node.all_input_nodes:
                for start, memory, filled in busy.get(owner[touched], ()):
                    if (filled or touched in written) and _overlap(touched, memory):
                        how = "written" if touched in written else "read"
                        side = "output" if filled else "input"
                        problems.setdefault(
                            start,
                            f"the {side} of {_called(start)} is {how} by {node.name} "
                            "without a wait",
                        )
        if node in pending:
            written = written_inputs(node)
            for memory in node.all_input_nodes:
                busy.setdefault(owner[memory], []).append((node, memory, memory in written))
    return list(problems.values())


def _overlap(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether two values of one storage share bytes; True where values or sizes are unknown."""
    extents = []
    for value in (one.meta.get("val"), other.meta.get("val")):
        if not isinstance(value, torch.Tensor):
            return True
        first, strides, size = value.storage_offset(), value.stride(), value.dtype.itemsize
        if not all(isinstance(n, int) for n in (first, *strides, *value.shape)):
            return True
        if not value.numel():
            return False
        reach = sum((n - 1) * stride for n, stride in zip(value.shape, strides, strict=True))
        extents.append((first * size, (first + reach + 1) * size))
    (a, b), (c, d) = extents
    return a < d and c < b


Late = Iterator[tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node]]


def _late_reads(
    gm: torch.fx.GraphModule, ends: Callable[[torch.fx.Node], list[torch.fx.Node]]
) -> Late:
    """(owner of memory, node that reads it, earlier node that ended its values), by the nodes whose values each node
    `ends`. A view reads nothing.
    """
    if not any(map(ends, gm.graph.nodes)):
        return
    owner = item_roots(gm, roots(gm))
    ended: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        for root in (owner[read] for read in node.all_input_nodes):
            if root in ended and not _views(node):
                yield root, node, ended[root]
        for value in ends(node):
            ended.setdefault(owner[value], node)


def stale_reads(gm: torch.fx.GraphModule) -> list[str]:
    """Reads of a parameter or a state behind the update that writes it, in the graph of a whole step."""
    problems: dict[torch.fx.Node, str] = {}
    for root, reader, update in _late_reads(gm, written_inputs):
        # the update reads the count that it has just advanced
        if root.op == "placeholder" and root.name != "step" and reader.op == "call_function":
            name = aot.parameter_of(root) or root.name
            text = f"{name} is read by {reader.name} after {update.name} has updated it"
            problems.setdefault(root, text)
    return list(problems.values())


def freed_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The input whose storage this node frees, as the wait of torch's offloading does."""
    source = argument(node, "keepalive") if op_name(node.target) == "ao.wait_tensor" else None
    return [source] if isinstance(source, torch.fx.Node) else []


def _freed_reads(gm: torch.fx.GraphModule) -> list[str]:
    """Reads of a value behind the wait of torch's offloading that frees it."""
    problems: dict[torch.fx.Node, str] = {}
    for root, reader, wait in _late_reads(gm, freed_inputs):
        problems.setdefault(root, f"{root.name} is read by {reader.name} after {wait.name} has freed it")
    return list(problems.values())


def scaled_operands(gm: torch.fx.GraphModule) -> list[str]:
    """One sentence for each scaled product whose operands a GPU of sm90 refuses. A CPU takes any layout."""
    problems = []
    for node in calls_of(gm.graph, lambda target: target is torch.ops.aten._scaled_mm.default):
        left, right = (n.meta.get("val") for n in node.all_input_nodes[:2])
        if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
            continue
        fits = left.dim() == right.dim() == 2 and left.stride(1) == right.stride(0) == 1
        if not fits or any(size % 16 for size in right.shape):
            problems.append(f"{node.name}: a GPU takes matrices, the left row-major, the right column-major and of "
                            f"multiples of 16, and these have shapes {list(left.shape)}, {list(right.shape)} and "
                            f"strides {left.stride()}, {right.stride()}")
    return problems


def problems_of(before: torch.fx.GraphModule, after: object) -> tuple[list[str], list[str]]:
    """What is wrong with one graph after a pass, one sentence each: what no later stage can take, and the rest."""
    if not isinstance(after, torch.fx.GraphModule):
        return [f"the pass returned {type(after).__name__}, not a GraphModule"], []
    if unusable := form(after):
        return unusable, []
    old, new = reading(snapshot, before), reading(snapshot, after)
    unusable, problems = _boundary(old, new)
    unusable += _without_values(after) + _unknown_groups(after, old, new)
    unusable += _freed_reads(after)
    taken, takes = aot.called_with(before), aot.called_with(after)
    if taken != takes:
        unusable.append(f"it is called with {takes}, and was with {taken}: put gm.graph._codegen back, and recompile")
    problems += unwaited(after) + wrong_results(before, after) + scaled_operands(after)
    if facts_of(after).part == "step":
        problems += stale_reads(after)
    for name in dict.fromkeys((*old.effects, *new.effects)):
        was, now = old.effects.get(name, ()), new.effects.get(name, ())
        if len(was) != len(now):
            how = "dropped" if len(was) > len(now) else "added"
            problems.append(f"the effect '{name}' was {how}{differing(was, now)}")
    # fewer draws may be inside a compiled region
    for kind, was, now in (("unread wait", old.unused_waits, new.unused_waits),
                           ("draw of random numbers", old.draws, new.draws)):
        if len(now) > len(was):
            problems.append(f"{len(now) - len(was)} {kind} more than before{differing(was, now)}")
    if not unusable and not problems:
        problems = _lost_metadata(before, after)
    return unusable, problems


def lint(before: Sequence[torch.fx.GraphModule], after: Sequence[object]) -> Verdict:
    """PASS if `after` is well-formed, keeps its inputs, outputs and visible effects, and waits for each collective.

    One joint graph each, or forward and backward. A joint graph must also keep tags and stack traces.
    """
    unusable: list[str] = []
    problems: list[str] = []
    for a, b in zip(before, after, strict=True):
        part = f"{facts_of(a).part}: " if len(after) > 1 else ""
        for sentences, all_graphs in zip(problems_of(a, b), (unusable, problems), strict=True):
            all_graphs += [part + sentence for sentence in sentences]
    if problems := unusable + problems:
        malformed = any(MALFORMED in problem for problem in problems)
        return Verdict("lint", Outcome.FAIL, "; ".join(problems[:3]),
                       {"problems": problems, "malformed": malformed, "unusable": bool(unusable)})
    nodes = [len(g.graph.nodes) for g in after if isinstance(g, torch.fx.GraphModule)]
    return Verdict("lint", Outcome.PASS, "", {"nodes": nodes})


_MAY_LOSE = 0.1


def _lost_metadata(before: torch.fx.GraphModule, after: torch.fx.GraphModule) -> list[str]:
    """Whether a joint pass lost tags and stack traces, as a retrace does: the partitioner and passes need them.

    Code without a source file (`python -c`, a prompt) has no stack traces. A pass that replaces such a node by several
    has as many nodes with a trace as before, and has lost none.
    """
    (tags, traces, count), (has_tags, has_traces, now) = map(_with_metadata, (before, after))
    if facts_of(after).part != "joint" or not count or not now:
        return []
    lost_tags = has_tags / now < tags / count - _MAY_LOSE
    lost_traces = has_traces < traces and has_traces / now < traces / count - _MAY_LOSE
    if not lost_tags and not lost_traces:
        return []
    return [f"{now - has_traces} of {now} nodes lost their metadata (before: {count - traces} of {count} had none): "
            "the partitioner would recompute the whole forward, and passes that go by module would match nothing; "
            "copy node.meta"]


def _with_metadata(graph: torch.fx.GraphModule) -> tuple[int, int, int]:
    """(operator nodes with a partitioner tag, those of them with a stack trace, all operator nodes)."""
    metas = [n.meta for n in graph.graph.nodes if n.op == "call_function"]
    tagged = [meta for meta in metas if "partitioner_tag" in meta]
    return len(tagged), sum(bool(meta.get("stack_trace")) for meta in tagged), len(metas)
