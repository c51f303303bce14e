"""What a step keeps for its backward, from both captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.fx import GraphModule

from workbench import author, capture, draw, fake_world, find_nodes, load_recipe, partition, provenance, run_joint
from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.colors import INK
from workbench.notebook.draw.picture import Picture, Table


def what_a_pass_finds(graphs: dict[str, GraphModule]) -> Table:
    """Operators of each graph, and how many of them know their module, or that they are of the backward."""
    rows = []
    for name, graph in graphs.items():
        places = [provenance(node) for node in find_nodes(graph)]
        rows.append((name, len(places), sum(bool(p.module) for p in places), sum(p.backward for p in places)))
    return draw.table("what a pass finds", ("capture", "operators", "in a module", "in the backward"), rows)


def by_sequence_number(step: JointGraph) -> Picture:
    """The operators of a step, coloured by autograd's sequence number where another box has it, too."""
    boxes = Counter(node.meta["seq_nr"] for node in find_nodes(step.graph) if kind_of(node) not in ("view", "wait"))
    return draw.dataflow(
        step.graph, "the traced step, coloured by sequence number", views=False, rest="number not shared", narrow=True,
        name_of=lambda node: f"number {node.meta['seq_nr']}" if boxes[node.meta["seq_nr"]] > 1 else "")


def kept_picture(step: JointGraph) -> Picture:
    """The operators of a step, with those whose memory is kept for the backward."""
    kept = set(kept_bytes(partition(step.fork())))
    return draw.dataflow(
        step.graph, "what the trace keeps", views=False, rest="not kept", narrow=True,
        name_of=lambda node: "kept for the backward" if node.name in kept else "",
        palette={"kept for the backward": INK})


def kept_bytes(pair: ForwardBackward) -> dict[str, int]:
    """Bytes by the tensor that owns the memory; inputs of the graph are there in any case, and are left out."""
    total = Counter[str]()
    for row in saved_tensors(*pair.graphs):
        total[row.root] += row.held_bytes
    return dict(+total)


def kept_table(**pairs: ForwardBackward) -> Table:
    """Bytes that each tensor keeps, in a column for each pair, and their sum."""
    columns = [kept_bytes(pair) for pair in pairs.values()]
    names = dict.fromkeys(name for column in reversed(columns) for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    total = ("all", *(sum(column.values()) for column in columns))
    return draw.table("bytes that each tensor keeps", ("owner of the memory", *pairs), [*rows, total])


def kept_by_llama3(policies: Sequence[str]) -> Table:
    """Bytes that a llama3 of one layer keeps, under FSDP on two ranks, by policy of activation checkpointing."""
    recipe = load_recipe("llama3").override({"mesh": {"dp_shard": 2}, "model.n_layers": 1})
    sums: dict[str, list[int]] = {policy: [] for policy in policies}
    for by in ("joint", "traced"):
        with fake_world(2) as world:
            graph = capture(author(recipe, world), by=by)
        run_joint(graph, ["inductor_decomposition"])
        for policy in policies:
            tagged = graph.fork()
            run_joint(tagged, [{"name": "activation_checkpointing", "policy": policy}])
            sums[policy].append(sum(kept_bytes(partition(tagged)).values()))
    rows = [(policy, joint, traced, f"{traced / joint - 1:.0%}") for policy, (joint, traced) in sums.items()]
    return draw.table("bytes kept by a small llama3", ("checkpointing", "joint", "traced", "traced keeps more"), rows)
