"""A grader: the kernel calls that compute some nodes."""

from __future__ import annotations

from typing import Any


def calls_of(answer: Any, *, graph: Any, nodes: set[str]) -> tuple[float, str]:
    """Asks for the kernel calls of a graph that compute any of the nodes, and for no other. graph: its `Kernels`.

    The message names a kind of call that the answer lacks altogether.
    """
    numbers = {k.number for k in graph.kernels}
    try:
        chosen = {getattr(k, "number", k) for k in answer}
    except TypeError:
        chosen = {None}
    if not chosen <= numbers:
        return 0.0, f"give calls of the {graph.graph} graph, or their numbers"
    wanted = {k.number for k in graph.kernels if nodes & {*k.nodes}}
    other, missing = len(chosen - wanted), len(wanted - chosen)
    stray = f"{other} of your {len(chosen)} calls are not of it"
    kinds = {k.number: k.kind for k in graph.kernels}
    lacks = {kinds[n] for n in wanted} - {kinds[n] for n in chosen & wanted}
    none_of = (
        f", among them every {' and every '.join(sorted(lacks))} call"
        if lacks and chosen & wanted
        else ""
    )
    parts = [
        text for count, text in ((other, stray), (missing, f"{missing} missing{none_of}")) if count
    ]
    return len(chosen & wanted) / max(1, len(chosen | wanted)), "; ".join(parts) or "right"
