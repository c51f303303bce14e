"""activation_checkpointing: which forward values are saved for the backward, and which it computes again.

The pass tags nodes of the joint graph, and the partitioner reads the tags. Here the backward computes `mm` and
`sigmoid` again, and gets the forward's inputs instead of their results:

    >>> example("activation_checkpointing", lambda x, weight: (x @ weight).sigmoid(), graph="backward", policy="full")
    before:
      detach_1: float32 [4, 4]  # input
      t: float32 [4, 4]  # input
      ...
      sigmoid_backward: float32 [4, 4] = aten.sigmoid_backward(expand, detach_1)  # layers.0
      ...
    after:
      primals_1: float32 [4, 4]  # layers.0.weight
      primals_2: float32 [4, 4]  # input
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import PositiveInt
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import block_of, blocks_of, is_backward, may_differ, unknown_operator
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.recipe.wording import few
from workbench.torch_api.ops import short_name


class RecomputeOptions(Options):
    """recomputable: operators of other libraries than torch that draw no random numbers, such as "mylib.rotate"."""

    recomputable: tuple[str, ...] = ()


class CheckpointOptions(RecomputeOptions):
    """policy none: no tags. full: everything in a layer is recomputed. selective: attention, reduce-scatters, the
    operators named in `save` and every `every_nth_matmul`-th matrix product are saved, the rest is recomputed. Random
    numbers are always saved, and operators of other libraries than torch unless `recomputable` names them.
    """

    policy: Literal["none", "selective", "full"] = "selective"
    save: tuple[str, ...] = ()
    every_nth_matmul: PositiveInt = 2


_MATMULS = frozenset({"mm", "bmm", "addmm", "_grouped_mm"})
_COSTLY = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention",
    "flex_attention", "reduce_scatter_tensor", "all_to_all_single", "shard_dim_alltoall",
})
_RECOMPUTE = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
Rule = Callable[[Node], bool | None]


def tagged_for_recompute(before: Graphs, after: Graphs, options: Options) -> Effect:
    """Some forward node of a layer has a tag that it did not have before: to be saved, or to be recomputed."""
    tagged = [n for n in after[0].graph.nodes if isinstance(n.meta.get("recompute"), CheckpointPolicy)]
    tags = Counter(n.meta["recompute"].name for n in tagged)
    old = {n.name: n.meta.get("recompute") for n in before[0].graph.nodes}
    changed = any(n.meta["recompute"] != old.get(n.name) for n in tagged)
    layers = {block_of(n) for n in (tagged if changed else after[0].graph.nodes)} - {""}
    if changed:
        reason = ""
    elif getattr(options, "policy", "") == "none":
        reason = "the policy is none"
    else:
        reason = (
            "every node was tagged before" if layers else "no module path has a number, as blocks.0"
        )
    return Effect(changed, reason, {"layers": len(layers), "tags": dict(tags)})


def recomputed_in_backward(graphs: Graphs, options: Options) -> Effect:
    """The backward holds copies of tagged forward operators; the partitioner repeats cheap ones without a tag."""
    forward, backward = graphs
    names = {n.name for n in forward.graph.nodes if n.op == "call_function"}
    again = [n for n in backward.graph.nodes if n.op == "call_function" and n.name in names]
    repeated = [n for n in again if n.meta.get("recompute") in _RECOMPUTE]
    matmuls = sum(short_name(n) in _MATMULS for n in repeated)
    reason = "the partitioner recomputes no tagged value: none is tagged, or all are free or inputs already"
    evidence = {"recomputed_nodes": len(repeated), "recomputed_matmuls": matmuls}
    reasons = ["" if repeated else reason, saved_unknown(forward)]
    return Effect(bool(repeated), "; ".join(filter(None, reasons)), evidence)


def saved_unknown(gm: GraphModule) -> str:
    """Which unknown operators are tagged to be saved, in one sentence; "" where none is."""
    saved = [node for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    names = sorted({name for name in map(unknown_operator, saved) if name})
    if not names:
        return ""
    return f"{few(names, 3)} may draw random numbers, so the results are saved: list in recomputable what draws none"


def checkpoint_rule(name: str) -> Callable[[Rule], Rule]:
    """Register your own rule as a joint pass: list `name` in `joint_passes` instead of activation_checkpointing.

        @checkpoint_rule("keep_norms")
        def keep_norms(node):       # a forward node of a layer
            return True if "norm" in module_path(node) else None

    The rule says True (save), False (recompute) or None (the partitioner decides; a traced capture saves). What may
    draw random numbers is saved all the same; the pass has the option `recomputable`.
    """

    def register(rule: Rule) -> Rule:
        def tag(gm: GraphModule, example_inputs: list[Any], *, options: RecomputeOptions) -> GraphModule:
            for node, layer in _forward_nodes(gm):
                answer = rule(node)
                if answer is not None:
                    _tag(node, layer, bool(answer), options)
            return gm

        changes = (rule.__doc__ or "forward values are saved or recomputed as the rule says").strip()
        register_pass(
            name, stage="joint", numerics="exact", changes=changes.splitlines()[0], options=RecomputeOptions,
            conflicts={"activation_checkpointing"}, after={"inductor_decomposition"},
            effect=tagged_for_recompute, partition_effect=recomputed_in_backward,
        )(tag)
        return rule

    return register


def _forward_nodes(gm: GraphModule) -> Iterator[tuple[Node, int]]:
    """The forward nodes of blocks, and the number of each one's block in the order of the graph."""
    blocks = blocks_of(gm)
    for node in gm.graph.nodes:
        block = block_of(node)
        if node.op == "call_function" and block and not is_backward(node):
            yield node, blocks.index(block)


def _tag(node: Node, layer: int, save: bool, options: RecomputeOptions) -> None:
    save = save or may_differ(node, options.recomputable)
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = layer


@register_pass(
    "activation_checkpointing",
    stage="joint", numerics="exact", changes="tagged activations are recomputed in the backward and not saved",
    options=CheckpointOptions, after={"inductor_decomposition"},
    effect=tagged_for_recompute, partition_effect=recomputed_in_backward,
    source="torch.utils.checkpoint.CheckpointPolicy, read by min_cut_rematerialization_partition",
)
def activation_checkpointing(
    gm: GraphModule, example_inputs: list[Any], *, options: CheckpointOptions
) -> GraphModule:
    """Tag the forward nodes of each layer: an outermost module with a number, such as `layers.0` or `model.h.3`.

    Raises WorkbenchError where `save` names an operator that the layers do not hold.
    """
    if options.policy == "none":
        return gm
    selective = options.policy == "selective"
    keep = (_COSTLY | set(options.save)) if selective else frozenset()
    seen: set[str] = set()
    matmuls: Counter[int] = Counter()
    for node, layer in _forward_nodes(gm):
        name = short_name(node)
        seen.add(name)
        save = name in keep
        if name in ("wait_tensor", "getitem"):  # the value itself: its producer returns a handle or a tuple
            save = short_name(node.args[0]) in keep  # type: ignore[arg-type]
        if selective and name in _MATMULS:
            matmuls[layer] += 1
            save = save or matmuls[layer] % options.every_nth_matmul == 0
        _tag(node, layer, save, options)
    missing = set(options.save) - seen
    if missing and selective:
        raise WorkbenchError(
            f"activation_checkpointing: save names {sorted(missing)}, which no layer holds; "
            f"a layer has {', '.join(sorted(seen))}"
        )
    return gm
