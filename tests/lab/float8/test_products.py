"""float8_matmul: what is converted, what stays and why, what travels, and each fault that a verdict must catch."""

from __future__ import annotations

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
from on_ranks import calls, full_level, insert, outcomes, small, user_pass

from workbench.authoring.author import author
from workbench.checks.lint import scaled_operands
from workbench.errors import WorkbenchError
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import saved_tensors
from workbench.lab.float8 import Float8Options, transform
from workbench.passes import registry
from workbench.passes.registry import find_pass
from workbench.pipeline.build import build
from workbench.pipeline.proofs.numerics_proof import prove_numerics
from workbench.pipeline.run_passes import run_joint
from workbench.recipe.sections import PassSpec
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])
NAME, BLOCKS, ATEN = "float8_matmul", "transformer_block_bucketing", torch.ops.aten
FSDP2 = {"dp_shard": 2}
BFLOAT16 = {"precision.param": "bfloat16"}


def spec(**options):
    return PassSpec(name=NAME, options={"smallest": 16, **options})


def recipe(mesh=FSDP2, joint=(), passes=(), layers=1, changes=None, **options):
    first = small(mesh, ({"name": NAME, "smallest": 16, **options}, *joint), (), layers)
    return first.override({**BFLOAT16, **(changes or {}), "passes": list(passes)})


@pytest.fixture(scope="module")
def sharded(fake4):
    return author(small({"dp_shard": 4}).override(BFLOAT16), fake4)


def converted(found):
    return found[0][NAME].verdict("effect")


def test_all_but_the_output_layer_by_default(authored, through):
    effect = converted(through(authored, [spec()]))
    assert effect.outcome == "PASS" and effect.evidence["converted"] == 7 * 3
    assert effect.evidence["left"] == {
        "outside modules *layers.*": ["output forward", "output weight_gradient", "output input_gradient"]}


def test_a_reason_for_each_product_that_stays(authored, through):
    some = spec(modules=("*.feed_forward.*", "output"), smallest=128, products=("forward", "input_gradient"))
    with pytest.raises(WorkbenchError, match="no product is left to convert .*size 32 is below smallest, 128"):
        through(authored, [some])
    effect = converted(through(authored, [spec(modules=("*.w1", "*.w3"), products=("forward",))]))
    assert effect.evidence["converted"] == 2 and effect.evidence["products"] == 24
    left = effect.evidence["left"]
    assert len(left["outside modules *.w1, *.w3"]) == 18
    assert left["products leaves out weight_gradient"] == [
        "layers.0.feed_forward.w3 weight_gradient", "layers.0.feed_forward.w1 weight_gradient"]


def test_nothing_left_to_convert_is_an_error(authored, fake4, through):
    with pytest.raises(WorkbenchError, match=r"24: outside modules nothing\.\*, layers"):
        through(authored, [spec(modules=("nothing.*",))])
    sizes = {"model.dim": 24, "model.n_heads": 2, "model.n_kv_heads": 2, "model.ffn_dim": 40}
    with pytest.raises(WorkbenchError, match="no multiple of 16"):
        through(author(authored.recipe.override(sizes), fake4), [spec()])


def test_a_gpu_without_float8_is_refused(authored, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    with pytest.raises(WorkbenchError, match=r"an A100 \(sm80\) has no float8 products"):
        transform.require_float8(torch.device("cuda"))


def test_operands_lie_as_a_gpu_takes_them(authored, through):
    for scaling in ("tensorwise", "rowwise"):
        graph = through(authored, [spec(scaling=scaling)])[2]
        assert scaled_operands(graph) == []
        for node in calls(graph, "aten._scaled_mm"):
            left, right, a, b = (n.meta["val"] for n in node.args[:4])
            assert left.dtype == right.dtype == torch.float8_e4m3fn
            wanted = ((), ()) if scaling == "tensorwise" else ((left.shape[0], 1), (1, right.shape[1]))
            assert (a.shape, b.shape) == wanted and a.dtype == torch.float32


def test_one_cast_of_a_tensor_for_all_products_that_read_it(authored, through):
    graph = through(authored, [spec()])[2]
    readers = {}
    for node in calls(graph, "aten._scaled_mm")[:3]:  # wq, wk, wv
        readers.setdefault(node.args[0], []).append(node)
    assert [len(nodes) for nodes in readers.values()] == [3]
    copies = [n for n in calls(graph, "aten.clone") if n.meta["val"].dtype == torch.float8_e4m3fn]
    # each weight once, each activation once (x of wq, wk, wv; of wo; of w1, w3; of w2), each gradient once
    assert len(copies) == 7 + 4 + 7


def test_gradients_may_have_the_wider_range(authored, through):
    graph = through(authored, [spec(gradients="e5m2")])[2]
    left = [n.args[0].meta["val"].dtype for n in calls(graph, "aten._scaled_mm")]
    assert left == [torch.float8_e4m3fn] * 7 + [torch.float8_e5m2] * 14


def test_saved_activations_and_gathered_weights_are_float8(sharded, through):
    plain, float8 = (through(sharded, joint) for joint in ((), (spec(),)))
    moved = [{c.dtype: c.payload for c in list_collectives(found[2]) if c.kind == kind} for found in (plain, float8)
             for kind in ("all_gather", "all_reduce")]
    assert set(moved[0]) == {"bfloat16"} and set(moved[2]) == {"bfloat16", "uint8"}
    reduced = [c for c in list_collectives(float8[2]) if c.kind == "all_reduce"]
    assert [(c.reduce_op, c.shape) for c in reduced] == [("max", (7,))]  # one for all weights
    saved = [sum(row.held_bytes for row in saved_tensors(*found[1].graphs)) for found in (plain, float8)]
    assert saved[1] < saved[0]
    weights = [row for row in saved_tensors(*float8[1].graphs) if row.gathered and "layers" in row.module]
    assert {row.dtype for row in weights if len(row.shape) == 2} == {"float8_e4m3fn"}


def test_a_weight_that_something_else_reads_is_gathered_as_before(sharded, through):
    found = through(sharded, [spec(products=("forward",))])  # dx reads the weights in bfloat16
    assert "uint8" not in {c.dtype for c in list_collectives(found[2])}
    assert found[0][NAME].verdict("collectives").outcome == "PASS"


# seeded faults: each is the pass itself, with one thing wrong


def variant(function):
    """The pass, and then `function` on its graph."""
    real = find_pass(NAME)

    def both(gm):
        return function(real.function(gm, [], options=Float8Options(smallest=16))) or gm

    return both


def row_major(gm):
    node = calls(gm, "aten._scaled_mm")[0]
    node.replace_input_with(node.args[1], insert(gm, node.args[1], ATEN.clone.default, node.args[1]))
    copied = node.args[1]
    copied.kwargs, copied.meta["val"] = {"memory_format": torch.contiguous_format}, copied.meta["val"].contiguous()


def test_lint_finds_an_operand_that_a_gpu_refuses(authored, captured_once):
    with user_pass("row_major", variant(row_major), numerics="lossy", tolerance=0.4):
        found = run_joint(captured_once(authored), ["row_major"])[0].verdict("lint")
    assert found.outcome == "FAIL"
    assert "the right column-major and of multiples of 16, and these have shapes" in found.message


def gathers_bfloat16(gm):
    """One shard is widened before its gather, and cast behind it."""
    gather = next(c for c in calls(gm, "_c10d_functional.all_gather_into_tensor")
                  if c.meta["val"].dtype == torch.uint8)
    given = gather.args[0]
    wide = insert(gm, given, torch.ops.prims.convert_element_type.default, given, torch.bfloat16)
    gather.replace_input_with(given, wide)
    wait = next(iter(gather.users))
    for node in (gather, wait):
        node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    narrow = insert(gm, wait, torch.ops.prims.convert_element_type.default, wait, torch.uint8)
    wait.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)


def test_collectives_finds_a_gather_that_still_moves_bfloat16(sharded, captured_once):
    graph = captured_once(sharded)
    real = find_pass(NAME)
    with user_pass("wide_gather", variant(gathers_bfloat16), numerics="lossy", tolerance=0.4) as name:
        promising = replace(find_pass(name), promised=lambda before, _: real.promised(before, Float8Options(
            smallest=16)))
        registry._PASSES[name] = promising
        found = run_joint(graph, [name])[0].verdict("collectives")
    assert found.outcome == "FAIL" and "all_gather dp_shard" in found.message and "promised" in found.message


def on_rank_with(name, function, described):
    """The verdicts of a pass with a fault, on this rank."""
    with user_pass(name, variant(function), numerics="lossy", tolerance=0.4):
        return outcomes(build(described.override({"joint_passes": [name]}), current_world(), level="full"), name)


def doubles_a_scale(gm):
    node = calls(gm, "aten._scaled_mm")[4]
    node.replace_input_with(node.args[2], insert(gm, node.args[2], ATEN.mul.Scalar, node.args[2], 2.0))


def agrees_on_no_group(gm):
    """Each rank keeps its own largest magnitudes: the shards of one weight have two scales."""
    wait = next(n for n in calls(gm, "_c10d_functional.wait_tensor") if n.args[0].target is
                torch.ops._c10d_functional.all_reduce.default)
    start = wait.args[0]
    wait.replace_all_uses_with(start.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)


@pytest.mark.ranks
def test_numerics_finds_a_broken_scale(pool2):
    plain = small(FSDP2).override(BFLOAT16)
    for found in pool2.run(on_rank_with, "doubles_a_scale", doubles_a_scale, plain):
        assert found["lint"][0] == "PASS" and found["numerics"][0] == "FAIL" and "break 'lossy'" in found["numerics"][1]


def with_larger_shards(function, described):
    """The numerics verdict of the pass with a fault, where rank 1's shards are a hundred times as large."""
    with user_pass("own_scales", variant(function), numerics="lossy", tolerance=0.4):
        world = current_world()
        built = build(described.override({"joint_passes": ["own_scales"]}), world)
        with torch.no_grad():
            for name, parameter in built.authored.module.named_parameters():
                if world.rank == 1 and name.endswith("w2.weight"):
                    parameter.to_local().mul_(100.0)
        prove_numerics(built.records, built.step)
        return str(built.records[0].verdict("numerics").outcome)


@pytest.mark.ranks
def test_numerics_finds_scales_that_the_ranks_do_not_share(pool2):
    plain = small(FSDP2).override(BFLOAT16)
    assert pool2.run(with_larger_shards, agrees_on_no_group, plain) == ["FAIL", "FAIL"]
    assert pool2.run(with_larger_shards, lambda gm: gm, plain) == ["PASS", "PASS"]  # the larger shards alone


COMBINED = {
    "resharded": ((RESHARD := "reshard_after_forward",), (BLOCKS,), {}),
    "recomputed": (({"name": "activation_checkpointing", "policy": "full"}, RESHARD), (BLOCKS,), {}),
    "bucketed by cost": ((), ("autobucketing_reordering",), {}),
    "traced": ((RESHARD,), (BLOCKS,), {"capture": "traced"}),
    "whole step": ((), (BLOCKS, "fused_clip_adamw"), {"training.step": "whole"}),
    "microbatches": ((), (BLOCKS,), {"training.accumulate": 2}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMBINED)
def test_other_passes_take_the_result(pool2, name):
    joint, passes, changes = COMBINED[name]
    verdicts, whole = pool2.run(full_level, recipe(joint=joint, passes=passes, layers=2, changes=changes))[0]
    assert set(whole) == {"PASS"}
    assert {(key, check): outcome for key, by_check in verdicts.items() for check, (outcome, _) in by_check.items()
            if outcome != "PASS"} == {}


@pytest.mark.parametrize(("pool", "mesh", "scaling"), [
    ("pool2", {"dp_shard": 2}, "rowwise"), ("pool2", {"tp": 2}, "tensorwise"),
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
        ("pool2", {"dp_shard": 2}, "tensorwise"), ("pool4", {"dp_shard": 2, "tp": 2}, "tensorwise"),
        ("pool4", {"dp_replicate": 2, "dp_shard": 2}, "tensorwise")))], ids=str, indirect=["pool"])
def test_the_verdicts_on_ranks(pool, mesh, scaling):
    float8 = recipe(mesh, passes=(BLOCKS,) if "dp_shard" in mesh else (), scaling=scaling)
    verdicts, whole = pool.run(full_level, float8)[0]
    assert whole == ["PASS"] and {check: found[0] for check, found in verdicts[NAME].items()} == dict.fromkeys(
        ("lint", "effect", "collectives", "numerics"), "PASS")
