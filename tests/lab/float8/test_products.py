"""float8_matmul: what is converted, what stays and why, what travels, and each fault that a verdict must catch."""

from collections import Counter

import pytest
import torch
from on_ranks import FSDP_TP, build_with, calls, full_level, insert, outcomes, small, user_pass

from workbench import PassSpec, WorkbenchError, author, run, run_joint
from workbench.checks.lint import scaled_operands
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import saved_tensors
from workbench.lab.float8 import Float8Options, transform
from workbench.passes.registry import find_pass
from workbench.torch_api.devices.float8 import scaled_products

pytestmark = pytest.mark.integration
NAME, BLOCKS, ATEN = "float8_matmul", "transformer_block_bucketing", torch.ops.aten
WO, TOKENS = "layers.0.attention.wo", 2 * 16
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


@pytest.fixture(scope="module")
def by_scaling(sharded, through):
    """What `through` returns, without the pass and for each scaling."""
    lists = {"": (), "tensorwise": (spec(),), "rowwise": (spec(scaling="rowwise"),)}
    return {scaling: through(sharded, listed) for scaling, listed in lists.items()}


def test_what_the_options_leave_out_stays_with_that_reason(authored, through):
    effect = through(authored, [spec(products=("forward",))])[0][NAME].verdict("effect")
    assert effect.outcome == "PASS" and effect.evidence["converted"] == 7
    left = effect.evidence["left"]
    assert left["outside modules *layers.*"] == [
        "output forward", "output weight_gradient", "output input_gradient"]
    assert {why: len(names) for why, names in left.items()} == {
        "outside modules *layers.*": 3, "products leaves out weight_gradient": 7,
        "products leaves out input_gradient": 7}


def test_a_gpu_without_float8_is_refused(authored, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    with pytest.raises(WorkbenchError, match=r"an A100 \(sm80\) has no float8 products"):
        transform.require_float8(torch.device("cuda"))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_operands_lie_as_a_gpu_takes_them(authored, through, scaling):
    graph = through(authored, [spec(scaling=scaling, gradients="e5m2")])[2]
    products = calls(graph, "aten._scaled_mm")
    assert scaled_operands(graph) == []
    for node in products:
        left, right, a, b = (n.meta["val"] for n in node.args[:4])
        wanted = ((), ()) if scaling == "tensorwise" else ((left.shape[0], 1), (1, right.shape[1]))
        assert (a.shape, b.shape) == wanted and a.dtype == torch.float32
    left = [node.args[0].meta["val"].dtype for node in products]
    assert left == [torch.float8_e4m3fn] * 7 + [torch.float8_e5m2] * 14
    casts = [n for n in calls(graph, "aten.clone") if n.meta["val"].itemsize == 1]
    # each weight once, each activation once (x of wq, wk, wv; of wo; of w1, w3; of w2), each gradient once
    assert len(casts) == 7 + 4 + 7 or scaling == "rowwise"


def saved_for(pair, rows):
    """(dtypes of the matrices of `rows` rows that WO saves, but for its result; all saved bytes)."""
    saved = saved_tensors(*pair.graphs)
    of_layer = [row for row in saved if row.module == WO and "mm" not in row.name]
    dtypes = {row.dtype for row in of_layer if row.shape[:1] == (rows,)}
    return dtypes, sum(row.held_bytes for row in saved)


def test_both_scalings_save_float8(by_scaling):
    """What their gathers move: tests/lessons/test_fewer_bits.py."""
    size = {}
    for scaling, (records, pair, _) in by_scaling.items():
        activations, size[scaling] = saved_for(pair, TOKENS)
        assert activations == ({"float8_e4m3fn"} if scaling else {"bfloat16"})
        if scaling:
            weights, _ = saved_for(pair, 128)
            assert weights == {"float8_e4m3fn"}  # as the input gradient reads it
            assert records[NAME].verdict("collectives").outcome == "PASS"
    # rowwise saves a scale for each column
    assert size["tensorwise"] < size["rowwise"] < 1.01 * size["tensorwise"] < 0.7 * size[""]


def test_a_weight_that_something_else_reads_is_gathered_as_before(sharded, through):
    found = through(sharded, [spec(products=("forward",))])  # dx reads the weights in bfloat16
    assert "uint8" not in {c.dtype for c in list_collectives(found[2])}
    assert found[0][NAME].verdict("collectives").outcome == "PASS"


# seeded faults: each is the pass itself, with one thing wrong


def variant(function, **options):
    """The pass, and then `function` on its graph."""
    real = find_pass(NAME)

    def both(gm):
        return function(real.function(gm, [], options=Float8Options(smallest=16, **options))) or gm

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


def promised(before, _):
    return transform.promised_collectives(before, Float8Options(smallest=16))


def test_collectives_finds_gathers_that_still_move_bfloat16(sharded, captured_once):
    wide = variant(lambda gm: gm, float8_gathers=False)
    with user_pass("wide", wide, numerics="lossy", tolerance=0.4, promised=promised):
        found = run_joint(captured_once(sharded), ["wide"])[0].verdict("collectives")
    assert found.outcome == "FAIL" and "all_gather dp_shard" in found.message and "promised" in found.message


def doubles_a_scale(gm):
    node = calls(gm, "aten._scaled_mm")[4]
    node.replace_input_with(node.args[2], insert(gm, node.args[2], ATEN.mul.Scalar, node.args[2], 2.0))
    return gm


def with_a_broken_scale(recipe):
    """The verdicts of the pass, and those of one behind it with a fault."""
    name = "doubles_a_scale"
    built = build_with(recipe, name, doubles_a_scale, numerics="lossy", tolerance=0.4)
    return outcomes(built, NAME), outcomes(built, name)


RESHARD = "reshard_after_forward"
COMBINED = {
    "recomputed": (({"name": "activation_checkpointing", "policy": "full"}, RESHARD), (BLOCKS,), {}),
    "bucketed by cost": ((), ("autobucketing_reordering",), {}),
    "traced": ((RESHARD,), (BLOCKS,), {"capture": "traced"}),
    "whole step": ((), (BLOCKS, "fused_clip_adamw"), {"training.step": "whole"}),
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
    ("pool2", {"dp_shard": 2}, "rowwise"),
    pytest.param("pool2", {"tp": 2}, "tensorwise", marks=pytest.mark.nightly),  # as lesson 16 does
    pytest.param("pool4", FSDP_TP, "tensorwise", marks=pytest.mark.nightly)], ids=str, indirect=["pool"])
def test_the_verdicts_on_ranks(pool, mesh, scaling):
    for right, broken in pool.run(with_a_broken_scale, recipe(mesh, scaling=scaling)):
        assert {check: outcome for check, (outcome, _) in right.items()} == dict.fromkeys(
            ("lint", "effect", "collectives", "numerics"), "PASS")
        outcome, message = broken["numerics"]
        assert broken["lint"][0] == "PASS" and outcome == "FAIL" and "break 'lossy'" in message


def test_products_of_float8_are_counted_by_their_kernels_and_casts_are_not():
    products = ["nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", "triton_tem_fused__scaled_mm_4",
                "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_stage3_kernel",
                "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t>>"]
    others = ["nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "triton_red_fused__scaled_mm_abs_amax_0",
              "void at::native::vectorized_elementwise_kernel<4, gemm_like<c10::Float8_e5m2>>"]
    assert scaled_products(Counter(products + others)) == len(products)
    assert transform.scaled_products_ran({"converted": 4}, Counter(products)).happened


def lowered_back(gm):
    """The first product multiplies bfloat16 again, without its scales."""
    node = calls(gm, "aten._scaled_mm")[0]
    convert, dtype = torch.ops.prims.convert_element_type.default, node.meta["val"].dtype
    wide = [insert(gm, operand, convert, operand, dtype) for operand in node.args[:2]]
    node.replace_all_uses_with(insert(gm, node, ATEN.mm.default, *wide))
    gm.graph.erase_node(node)
    return gm


def test_a_product_that_is_lowered_back_is_told(pool2):
    with user_pass("lowered_back", lowered_back, numerics="lossy", tolerance=0.4):
        once = recipe(joint=("lowered_back",), changes={"training.steps": 1})
        report = run(once, world=pool2, progress=False)
    effect = next(v for v in report.passes[0].verdicts if v.check == "effect")
    assert effect.outcome == "NO_EFFECT"
    assert effect.message == "20 scaled products ran in a step, for 21 converted ones"
