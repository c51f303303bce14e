"""float8_matmul: the products of chosen linear layers multiply float8, in the forward and in the backward.

Each operand is scaled by its largest magnitude and cast, once for all products that read it. The product is multiplied
by both inverse scales, `mul_scalar` and `mul_scalar_1`. The casts of the weight look like those of the input:

    >>> example("float8_matmul", lambda x, weight: x @ weight.t(), width=16, smallest=16)
    before:
      ...
      mm: float32 [16, 16] = aten.mm(primals_2, t)  # layers.0
      ...
    after:
      ...
      abs_default: float32 [16, 16] = aten.abs(primals_2)  # layers.0
      amax_default: float32 [16] = aten.amax(abs_default, [-1])  # layers.0
      amax_default_1: float32 [] = aten.amax(amax_default, [-1])  # layers.0
      clamp_min_default: float32 [] = aten.clamp_min(amax_default_1, 1e-12)  # layers.0
      mul_scalar: float32 [] = aten.mul.Scalar(clamp_min_default, 0.002232142857142857)  # layers.0
      reciprocal_default: float32 [] = aten.reciprocal(mul_scalar)  # layers.0
      mul_tensor: float32 [16, 16] = aten.mul.Tensor(primals_2, reciprocal_default)  # layers.0
      convert_element_type_default: float8_e4m3fn [16, 16] = prims.convert_element_type(mul_tensor, ...
      ...
      _scaled_mm_default: float32 [16, 16] = aten._scaled_mm(convert_element_type_default, permute_default, ...
      ...

    linear           which of a graph's products belong to linear layers
    scaled_products  those as scaled products of float8
    weight_gathers   weights gathered in float8, with scales that all ranks agree on
"""

from typing import Literal

from pydantic import Field

from workbench.recipe.contracts import Numerics, Options, PassContract, Stage, declare

Which = Literal["forward", "input_gradient", "weight_gradient"]
ALL: tuple[Which, ...] = ("forward", "input_gradient", "weight_gradient")


class Float8Options(Options):
    """scaling: one scale a tensor, or one for each row of the left and each column of the right operand. modules: globs
    of module paths; the default leaves out the output layer. smallest: of a product's three sizes. products: of a
    layer's three. gradients: the type of output gradients. The forward's products may sum in fewer bits.
    float8_gathers: sharded weights travel in float8, tensorwise. Rowwise weights are gathered in their own type, since
    forward and backward sum over different dimensions and so need casts with different scales. Both scalings save the
    casts that the backward reads, which are smaller than what they were made of.
    """

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    modules: tuple[str, ...] = Field(("*layers.*",), min_length=1)
    smallest: int = Field(1024, ge=16)
    products: tuple[Which, ...] = Field(ALL, min_length=1)
    gradients: Literal["e4m3", "e5m2"] = "e4m3"
    float8_gathers: bool = True


declare(PassContract(
    "float8_matmul", Stage.JOINT, Numerics.LOSSY,
    "products of linear layers multiply float8, and save float8; with one scale a tensor, gathers are float8, too",
    Float8Options, tolerance=0.4, after=frozenset({"inductor_decomposition"}),
    source="arXiv:2209.05433 (FP8 formats)", code="workbench.lab.float8.transform",
))
