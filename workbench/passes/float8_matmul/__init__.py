"""float8_matmul: the products of chosen linear layers multiply float8, in the forward and in the backward.

Each operand is divided by its largest magnitude and cast, once for all products that read it:

    >>> example("float8_matmul", lambda x, weight: x @ weight.t(), width=16, smallest=16)
"""

from typing import Literal

from pydantic import Field

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage

Which = Literal["forward", "input_gradient", "weight_gradient"]
ALL: tuple[Which, ...] = ("forward", "input_gradient", "weight_gradient")


class Float8Options(Options):
    """scaling: one scale a tensor, or one for each row and column along the contracted dimension. modules: globs of
    module paths; the default leaves out the output layer. smallest: of a product's three sizes. products: of a layer's
    three. gradients: the type of output gradients. fast_sums: products that sum in fewer bits on tensor cores.
    float8_gathers: sharded weights travel in float8 (tensorwise only: a rowwise scale follows the contracted dimension,
    which differs between forward and backward).
    """

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    modules: tuple[str, ...] = Field(("*layers.*",), min_length=1)
    smallest: int = Field(1024, ge=16)
    products: tuple[Which, ...] = Field(ALL, min_length=1)
    gradients: Literal["e4m3", "e5m2"] = "e4m3"
    fast_sums: tuple[Which, ...] = ("forward",)
    float8_gathers: bool = True


CONTRACT = PassContract(
    "float8_matmul", Stage.JOINT, Numerics.LOSSY,
    "products of linear layers multiply float8; with one scale a tensor, saved activations and gathers are float8, too",
    Float8Options, tolerance=0.4, after=frozenset({"inductor_decomposition"}),
    source="arXiv:2209.05433 (FP8 formats)",
)
__getattr__ = loads_on_use(__name__)
