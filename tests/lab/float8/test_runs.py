"""Runs of recipes with float8_matmul: the products that a step ran are counted, and a broken scale is found."""

from __future__ import annotations

import sys
from collections import Counter

import cloudpickle
import pytest
import torch
from on_ranks import calls, insert, small, user_pass

from workbench import run
from workbench.torch_api.devices.float8 import scaled_products

pytestmark = [pytest.mark.integration, pytest.mark.ranks]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FLOAT8 = {"name": "float8_matmul", "smallest": 16}
ATEN = torch.ops.aten


def recipe(*joint):
    return small({"dp_shard": 2}, joint).override({"precision.param": "bfloat16"})


def effect_of(report):
    return next(v for v in report.passes[0].verdicts if v.check == "effect")


def test_a_run_counts_the_products_that_a_step_ran(pool2):
    effect = effect_of(run(recipe(FLOAT8), world=pool2, progress=False))
    assert effect.outcome == "PASS" and effect.evidence["ran"] == effect.evidence["converted"] == 21
    assert effect.message.startswith("21 scaled products ran in a step, for 21 converted ones")
    assert effect.evidence["emulated"] and effect.message.endswith("and so nothing is said of time")


def test_products_of_float8_are_counted_by_their_kernels_and_casts_are_not():
    products = ["nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", "triton_tem_fused__scaled_mm_4",
                "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_stage3_kernel",
                "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t>>"]
    others = ["nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "triton_red_fused__scaled_mm_abs_amax_0",
              "void at::native::vectorized_elementwise_kernel<4, gemm_like<c10::Float8_e5m2>>"]
    assert scaled_products(Counter(products + others)) == len(products)


def lowered_back(gm):
    """The first product is converted, and multiplies bfloat16 again."""
    node = calls(gm, "aten._scaled_mm")[0]
    wide = [insert(gm, arg, torch.ops.prims.convert_element_type.default, arg, torch.float32) for arg in node.args[:2]]
    product = insert(gm, node, ATEN.mm.default, *wide)
    product = insert(gm, product, ATEN.mul.Tensor, product, node.args[2])
    product = insert(gm, product, ATEN.mul.Tensor, product, node.args[3])
    product = insert(gm, product, torch.ops.prims.convert_element_type.default, product, node.meta["val"].dtype)
    node.replace_all_uses_with(product)
    gm.graph.erase_node(node)
    return gm


def test_a_product_that_is_lowered_back_is_told(pool2):
    with user_pass("lowered_back", lowered_back, numerics="lossy", tolerance=0.4):
        effect = effect_of(run(recipe(FLOAT8, "lowered_back"), world=pool2, progress=False))
    assert effect.outcome == "NO_EFFECT"
    assert effect.message == "20 scaled products ran in a step, for 21 converted ones"
