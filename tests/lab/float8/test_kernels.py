"""Which kernels multiply float8 matrices, by names that profiles of GPUs show."""

from __future__ import annotations

from collections import Counter

import pytest

from workbench.torch_api.devices.float8 import scaled_products


@pytest.mark.parametrize(("name", "multiplies"), [
    ("aten::_scaled_mm", True),
    ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", True),
    ("triton_tem_fused__scaled_mm_4", True),
    ("sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_stage3_warpsize2x2x1_tensor16x8x32_kernel", True),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t>>", True),
    ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", False),
    ("triton_red_fused__scaled_mm_abs_amax_0", False),
    ("void at::native::vectorized_elementwise_kernel<4, gemm_like<c10::Float8_e5m2>>", False),
])
def test_products_of_float8_and_no_casts_or_copies_are_counted(name: str, multiplies: bool) -> None:
    assert scaled_products(Counter({name: 3})) == 3 * multiplies
