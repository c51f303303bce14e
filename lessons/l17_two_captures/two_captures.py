"""What "Two captures" looks up for its reader: wrong modules, who refused a forward, and who reads a saved tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import is_backward, kind_of, provenance


def wrong_modules(gm: GraphModule, found: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """How many backward nodes have another module in `found`, and how many have none; and the first wrong one."""
    truth = {n.name: provenance(n) for n in gm.graph.nodes if n.op == "call_function"}
    back = {name: each.module for name, each in truth.items() if each.backward}
    wrong = [name for name, module in back.items() if found.get(name, module) != module]
    first = f"first wrong node: {wrong[0]}, and the answer says {found[wrong[0]]!r}" if wrong else ""
    return {"nodes with another module": len(wrong), "nodes without an entry": len(back.keys() - found)}, first


def refused_by(error: WorkbenchError, by: str) -> tuple[str, str]:
    """Who refused to capture a module, and why, without the advice and the cell's line.

    The workbench's own refusals have no cause; Dynamo's and make_fx's are the cause of its error.
    """
    torchs = {"joint": "Dynamo", "traced": "make_fx"}[by]
    why = str(error).partition(": ")[2].partition(", or ")[0].split("Unsupported: ")[-1]
    why = re.sub(r" at [\w.]+\.py:\d+", "", why).rsplit(": ", 1)[0]
    return "the workbench" if error.__cause__ is None else torchs, why


def count_kept(answer: Sequence[float], *, of_graph: Sequence[float] | None, refused: Mapping[str, str],
               wanted: Sequence[float]) -> tuple[float, str]:
    """Grades a forward that counts its calls: a third for each capture that takes it, and for the graph's losses.

    answer: eager PyTorch's losses, without which nothing counts. of_graph: None where there is no graph. refused: why
    each capture refuses it, or "".
    """
    def wrong(losses: Sequence[float]) -> int:
        try:
            return sum(not abs(loss - right) <= 1e-4 for loss, right in zip(losses, wanted, strict=True))
        except (TypeError, ValueError, OverflowError):  # no such list of numbers
            return len(wanted)

    said = [f"the {by} capture refuses it: {why}" for by, why in refused.items() if why]
    score = float(len(refused) - len(said))
    if of_graph is None:
        said.append("so no traced graph was run")
    elif count := wrong(of_graph):
        said.append(f"wrong losses of the traced graph: {count}")
    else:
        score += 1
    if count := wrong(answer):
        said.append(f"wrong losses in eager PyTorch: {count}")
    return 0.0 if count else score / (len(refused) + 1), "; ".join(said) or "right"


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
