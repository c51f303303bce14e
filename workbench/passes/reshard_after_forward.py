"""reshard_after_forward: keep gathered parameters for the backward, or gather them again there.

The pass tags nodes of the joint graph, and the partitioner reads the tags. Before, the backward gets the gathered
weight `t_1`, of all 4 rows; after, it gets this rank's 2 rows and gathers the rest:

    >>> example("reshard_after_forward", lambda x, weight: x @ weight, graph="backward", layers=2, ranks=2)
    before:
      ...
      t_1: float32 [4, 4]  # input
      ...
      mm_3: float32 [4, 4] = aten.mm(expand, t_1)  # layers.1
      ...
    after:
      ...
      primals_3: float32 [2, 4]  # layers.1.weight
      ...
      all_gather_into_tensor_1: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_4, 2, '0')  # layers.1
      wait_tensor_1: float32 [4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)  # layers.1
      view_5: float32 [4, 4] = aten.view(wait_tensor_1, [4, 4])  # layers.1
      t_1: float32 [4, 4] = aten.t(view_5)  # layers.1
      mm_3: float32 [4, 4] = aten.mm(expand, t_1)  # layers.1
      ...
"""

from __future__ import annotations

from typing import Any, Literal

from torch.fx import GraphModule

from workbench.graph.gather_chains import gather_chains
from workbench.graph.read.memory import gathered_parameters_kept
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.recipe.wording import counted
from workbench.torch_api.partitioning import tag_gather


class ReshardOptions(Options):
    """always: the backward gathers the parameters again. never: the forward saves them for it."""

    policy: Literal["always", "never"] = "always"


def tags_differ(before: Graphs, after: Graphs, options: ReshardOptions) -> Effect:
    """The tag of some node differs from before."""

    def tags(graphs: Graphs) -> dict[str, Any]:
        return {n.name: n.meta.get("recompute") for n in graphs[0].graph.nodes}

    was, now = tags(before), tags(after)
    changed = [name for name, tag in now.items() if tag != was.get(name)]
    gathers = sum(1 for _ in gather_chains(after[0]))
    reason = "" if changed else ("no parameter is gathered in this graph" if not gathers
                                else "every gather chain already had this tag")
    return Effect(
        bool(changed), reason, {"gathered_parameters": gathers, "tagged_nodes": len(changed)}
    )


def gathered_weights_freed(graphs: Graphs, options: ReshardOptions) -> Effect:
    """always: nothing that is saved aliases a gathered parameter; never: the backward repeats no gather."""
    forward, backward = graphs
    kept = gathered_parameters_kept(forward, backward)
    repeated = sum(1 for _ in gather_chains(backward))
    evidence = {"saved_gathered_parameters": [row.name for row in kept], "gathers_in_backward": repeated}
    if options.policy == "always":
        alias = "still aliases a gathered parameter" if len(kept) == 1 else "still alias gathered parameters"
        return Effect(
            not kept, f"{counted(len(kept), 'saved tensor')} {alias}" if kept else "", evidence
        )
    reason = f"{repeated} parameters are gathered again in the backward" if repeated else ""
    return Effect(not repeated, reason, evidence)


@register_pass(
    "reshard_after_forward", stage="joint", numerics="exact",
    changes="always: no saved tensor aliases a gathered parameter; never: no gather is repeated",
    options=ReshardOptions, after={"inductor_decomposition", "activation_checkpointing"}, needs={"fsdp"},
    effect=tags_differ, partition_effect=gathered_weights_freed, source="arXiv:2411.00284 (SimpleFSDP)",
)
def reshard_after_forward(gm: GraphModule, example_inputs: list[Any], *, options: ReshardOptions) -> GraphModule:
    """Tag whole gather chains, views of the gathered weight included, for recomputation (always) or saving (never)."""
    for _, chain in gather_chains(gm):
        for node in chain:
            tag_gather(node, options.policy == "always")
    return gm
