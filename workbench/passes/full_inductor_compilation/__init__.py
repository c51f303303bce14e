"""full_inductor_compilation: each partitioned graph becomes one compiled callable.

Its result is no graph, so the example prints the kernels that Inductor wrote for a CPU, each with its nodes:

    >>> example("full_inductor_compilation", lambda x, weight: (x @ weight).sigmoid())
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      sum_1: float32 [] = aten.sum(sigmoid)
      ...
    after:
      extern_kernels.mm: mm
      cpp_fused_sigmoid_sum_0: sigmoid, sum_1
"""

from pydantic import Field

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class InductorOptions(Options):
    """keep_order: calls follow the graph, where passes have put the collectives; only fused kernels can move past
    matmuls. Else calls follow the order that Inductor chooses for peak memory. config: Inductor's own options.
    """

    keep_order: bool = True
    config: dict[str, bool | int | float | str] = Field({})


CONTRACT = PassContract(
    "full_inductor_compilation", Stage.LOWERING, Numerics.LOSSY,
    "each graph becomes one compiled callable",
    InductorOptions, tolerance=1e-5, requires=frozenset({"inductor_decomposition"}),
    needs=frozenset({"compiler", "static_shapes"}), source="torch._inductor.compile_fx.compile_fx_inner",
)
__getattr__ = loads_on_use(__name__)
