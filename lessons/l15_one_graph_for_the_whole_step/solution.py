"""Answers to the checkpoints of 15_one_graph_for_the_whole_step; kept apart from the notebook."""

from collections.abc import Callable


def repair() -> Callable:
    """The writers of what a node reads bound its way down, as its readers do."""
    from workbench.graph.read.memory import roots
    from workbench.graph.read.nodes import lists_of_update, updates_of

    def sink(gm, example_inputs, *, options):
        owner, updates = roots(gm), updates_of(gm)
        for node in reversed(list(gm.graph.nodes)):
            if node.op == "call_function" and node.users:
                reads = {owner.get(taken) for taken in node.all_input_nodes}
                writers = [u for u in updates if node < u and reads & set(lists_of_update(u)[0])]
                min([*node.users, *writers]).prepend(node)
        return gm

    return sink


def late() -> Callable:
    """Each name stands for the input whose memory it shows."""

    def late_reads(rows):
        memory, updated, found = {}, set(), {}
        for name, kind, reads in rows:
            memory[name] = memory[reads[0]] if kind == "view" else name
            if kind in ("compute", "update"):
                for read in reads:
                    if memory[read] in updated:
                        found.setdefault(memory[read], name)
            if kind == "update":
                updated.add(memory[reads[0]])
        return found

    return late_reads
