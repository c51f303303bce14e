"""What "Two captures" looks up for its reader: wrong modules, and who reads a saved tensor."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from workbench.graph.read.nodes import is_backward, kind_of, provenance


def wrong_modules(gm: GraphModule, found: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """How many backward nodes have another module in `found`, and how many have none; and the first wrong one."""
    truth = {n.name: provenance(n) for n in gm.graph.nodes if n.op == "call_function"}
    back = {name: each.module for name, each in truth.items() if each.backward}
    wrong = [name for name, module in back.items() if found.get(name, module) != module]
    first = f"first wrong node: {wrong[0]}, and the answer says {found[wrong[0]]!r}" if wrong else ""
    return {"nodes with another module": len(wrong), "nodes without an entry": len(back.keys() - found)}, first


def readers(backward: GraphModule, name: str) -> list[str]:
    """The operators of a backward graph that read one of its inputs, through views or not.

    A forward operator that the backward repeats is marked.
    """
    todo, found = [n for n in backward.graph.nodes if n.name == name], dict[str, None]()
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and kind_of(user) == "view":
                todo.append(user)
            else:
                repeats = user.op == "call_function" and not is_backward(user)
                found[f"{user.name}, again" if repeats else user.name] = None
    return list(found)
