"""What "Two captures" looks up in a graph."""

import torch
from blocks import Summed

from workbench import author_module, capture, fake_world, find_nodes, partition, provenance
from workbench.authoring.models.layers import FeedForward
from workbench.graph.capture import JointGraph
from workbench.pipeline.run_passes import copy_graph
from workbench_lessons.l17_two_captures.kept import kept_bytes
from workbench_lessons.l17_two_captures.two_captures import wrong_modules


def captured(by: str) -> JointGraph:
    with fake_world(1) as world:
        model = Summed(FeedForward(4, 8))
        return capture(author_module(model, world, None, batch=lambda: (torch.empty(2, 4),)), by=by)


def test_a_wrong_module_and_a_missing_one_are_counted_apart() -> None:
    gm = captured("traced").graph
    right = {n.name: provenance(n).module for n in gm.graph.nodes if n.op == "call_function" and provenance(n).backward}
    none = {"nodes with another module": 0, "nodes without an entry": 0}
    assert wrong_modules(gm, right) == (none, "")
    first = next(name for name, module in right.items() if module)
    assert wrong_modules(gm, right | {first: "elsewhere"}) == (
        none | {"nodes with another module": 1}, f"first wrong node: {first}, and the answer says 'elsewhere'")
    assert wrong_modules(gm, {name: right[name] for name in right if name != first})[0] == (
        none | {"nodes without an entry": 1})


def kept_with_a_second_silu(graph: JointGraph, direction: str | None) -> int:
    """Bytes kept for the backward, where the backward reads a copy of silu; direction: of the copy, if another."""
    changed = graph.fork()
    changed.graph = copy_graph(graph.graph)
    (silu,) = find_nodes(changed.graph, op="silu")
    late = [user for user in silu.users if provenance(user).backward]
    with changed.graph.graph.inserting_before(late[0]):
        again = changed.graph.graph.node_copy(silu)
    again.meta = dict(silu.meta) | ({"partitioner_tag": direction} if direction else {})
    silu.replace_all_uses_with(again, delete_user_cb=lambda user: user in late)
    return sum(kept_bytes(partition(changed)).values())


def test_a_copied_node_of_a_trace_is_kept_until_it_has_the_direction_of_the_backward() -> None:
    kept = {by: captured(by) for by in ("joint", "traced")}
    before = {by: sum(kept_bytes(partition(graph.fork())).values()) for by, graph in kept.items()}
    assert before["traced"] > before["joint"]
    assert kept_with_a_second_silu(kept["traced"], None) == before["traced"]
    assert kept_with_a_second_silu(kept["traced"], "is_backward") == before["joint"]
    assert kept_with_a_second_silu(kept["joint"], None) == before["joint"]
