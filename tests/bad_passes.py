"""Passes with a seeded fault each, for `bisect` to find, and what runs them inside each rank."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from faults import lost_output
from mutants.edits import are_twins
from on_ranks import calls, insert, reread, scale, small, user_pass
from torch.fx import GraphModule, Node

from workbench import JointGraph, author, capture, current_world, facts_of
from workbench.graph.partition import partition
from workbench.graph.read.nodes import module_path
from workbench.lab.bisect.nodes import Found
from workbench.lab.bisect.search import Inputs, first_wrong, inputs_of, on_rank
from workbench.passes.inductor_decomposition import DecompositionOptions
from workbench.passes.registry import find_pass
from workbench.passes.transformer_block_bucketing import BlockBucketingOptions
from workbench.pipeline.progress import Post
from workbench.pipeline.run_passes import run_joint, run_partitioned

ATEN = torch.ops.aten
TINY = {"model.dim": 16, "model.n_heads": 2, "model.n_kv_heads": 1, "model.ffn_dim": 32}
RECIPE = small({"dp_shard": 2}).override(TINY)


def gather_of(gm: GraphModule, parameter: str) -> Node:
    """The all-gather of a parameter's shard."""
    for start in calls(gm, "_c10d_functional.all_gather_into_tensor"):
        node = start
        while node.op != "placeholder":
            node = node.all_input_nodes[0]
        if parameter in str(node.meta["desc"]):
            return start
    raise AssertionError(f"no gather of {parameter}")


def drops_an_add(gm: GraphModule) -> GraphModule:
    residual = calls(gm, "aten.add")[1]
    assert residual.name == "add_1"
    residual.replace_all_uses_with(residual.args[0])
    gm.graph.erase_node(residual)
    return gm


def decomposes_and_errs(gm: GraphModule) -> GraphModule:
    """One operator becomes many, as it should, and one of these is wrong."""
    gm = find_pass("inductor_decomposition").function(gm, [], options=DecompositionOptions())
    next(n for n in calls(gm, "aten.exp") if module_path(n) == "layers.0.feed_forward").target = ATEN.exp2.default
    return gm


def sums_gradients(gm: GraphModule) -> GraphModule:
    start = calls(gm, "_c10d_functional.reduce_scatter_tensor")[3]
    assert start.args[1] == "avg"
    start.args = (start.args[0], "sum", *start.args[2:])
    return gm


def returns_gradients_swapped(gm: GraphModule) -> GraphModule:
    output = gm.graph.output_node()
    outputs = list(output.args[0])
    descs = [str(d) for d in output.meta["desc"]]
    wk, wv = (next(i for i, d in enumerate(descs) if f"{w}.weight" in d) for w in ("wk", "wv"))
    outputs[wk], outputs[wv] = outputs[wv], outputs[wk]
    output.args = (outputs,)
    return gm


def negates_in_backward(gm: GraphModule) -> GraphModule:
    if facts_of(gm).part == "backward":
        node = next(n for n in calls(gm, "aten.mul") if n.target is ATEN.mul.Scalar and n.args[1] == -0.5)
        node.args = (node.args[0], 0.5)
    return gm


def saves_another_tensor(gm: GraphModule) -> GraphModule:
    if facts_of(gm).part == "forward":
        output = gm.graph.output_node()
        saved = [n for n in output.args[0][1:] if isinstance(n, Node) and n.op == "call_function"]
        one, other = next(pair for pair in combinations(saved, 2) if are_twins(*pair))
        output.replace_input_with(one, other)
    return gm


def buckets_and_mixes(gm: GraphModule) -> GraphModule:
    """The package's bucketing, but one weight of a bucket is read for another."""
    forward = facts_of(gm).part == "forward"
    names = [next(iter(next(iter(gather_of(gm, w).users)).users)).name for w in ("wk", "wv")] if forward else []
    gm = find_pass("transformer_block_bucketing").function(gm, [], options=BlockBucketingOptions())
    if forward:
        first, second = (n for n in gm.graph.nodes if n.name in names)
        second.replace_input_with(second.args[0], first.args[0])
    return gm


def errs_on_rank_1(gm: GraphModule) -> GraphModule:
    return scale(gm, calls(gm, "aten.silu")[0], 1.5) if dist.get_rank() == 1 else gm


def drops_on_rank_1(gm: GraphModule) -> GraphModule:
    """Instead of a gather rank 1 repeats its shard."""
    if dist.get_rank() == 1:
        start = gather_of(gm, "wq")
        (wait,) = start.users
        shard = start.all_input_nodes[0]
        reread(wait, insert(gm, start, ATEN.repeat.default, shard, [2, 1]))
        gm.graph.erase_node(wait)
        gm.graph.erase_node(start)
    return gm


def loses_an_output_on_rank_1(gm: GraphModule) -> GraphModule:
    return lost_output(gm) if dist.get_rank() == 1 else gm


def multiplies_what_does_not_fit(gm: GraphModule) -> GraphModule:
    node = calls(gm, "aten.mm")[1]
    node.args = node.args[::-1]
    return gm


def does_nothing(gm: GraphModule) -> GraphModule:
    return gm


JOINT = (drops_an_add, decomposes_and_errs, sums_gradients, returns_gradients_swapped, errs_on_rank_1,
         multiplies_what_does_not_fit, does_nothing)
PARTITIONED = (negates_in_backward, saves_another_tensor, buckets_and_mixes)
PARTING = (drops_on_rank_1, loses_an_output_on_rank_1)


def find_all() -> dict[str, Found | None]:
    """What is found of each fault, on a fork of one capture, between sound passes."""
    joint = capture(author(RECIPE, current_world()))
    inputs = inputs_of(joint)
    faults = [*JOINT, *PARTITIONED]
    found = {fault.__name__: found_of(joint.fork(), fault, inputs) for fault in faults}
    with user_pass("may_be_idle", does_nothing):
        found["may be idle"] = first_wrong(run_joint(joint, ["may_be_idle"]), expected=["may_be_idle"])[0]
    found["joint"] = first_wrong(run_joint(joint, ["inductor_decomposition"]), inputs)[0]
    passes = ["transformer_block_bucketing", "overlap_collectives", "graph_cleanup"]
    sound = run_partitioned(partition(joint), passes)[0]
    return found | {"partitioned": first_wrong(sound, inputs, expected=["overlap_collectives"])[0]}


def found_of(joint: JointGraph, fault: Callable[..., Any], inputs: Inputs) -> Found | None:
    name, stage = fault.__name__, "partitioned" if fault in PARTITIONED else "joint"
    contract = {"numerics": "lossy", "tolerance": 5e-6} if fault is decomposes_and_errs else {}
    names = ["sound", name, "sound"]
    with (user_pass("sound", does_nothing, stage=stage),
          user_pass(name, fault, stage=stage, **contract)):
        if stage == "joint":
            return first_wrong(run_joint(joint, names), inputs, expected=["sound"])[0]
        records, _ = run_partitioned(partition(joint), names)
        return first_wrong(records, inputs, expected=["sound"])[0]


def find_where_ranks_part() -> dict[str, Found | None]:
    """The same of passes that leave the ranks other collectives, or one rank no usable graph."""
    found = {}
    for fault in PARTING:
        with user_pass("sound", does_nothing), user_pass("bad", fault):
            # block bucketing would wait for the other rank, to make a group
            later = ["transformer_block_bucketing"] if fault is loses_an_output_on_rank_1 else []
            recipe = RECIPE.override({"joint_passes": ["sound", "bad"], "passes": later})
            found[fault.__name__] = on_rank(recipe, Post(None, 1)).found
    return found
