"""Answers to the checkpoints of 15_one_graph_for_the_whole_step; kept apart from the notebook."""

from collections.abc import Callable


def all_inputs(forward, llama) -> int:
    """The forward's inputs, two states for each parameter, the step count and the learning rate."""
    return len(forward.graph.find_nodes(op="placeholder")) + 2 * len(llama.trained) + 2


def saved_bytes(authored) -> int:
    """One read of each gradient is gone; the scaled gradient is still written."""
    return sum(p.numel() * p.element_size() for p in authored.module.parameters())


def tips(size, tail) -> float:
    """The GPU's time follows the parameters, the CPU's does not."""
    return size * tail.cpu_ms / tail.gpu_ms


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
