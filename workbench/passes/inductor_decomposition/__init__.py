"""inductor_decomposition: operators become the primitives that Inductor lowers.

    >>> example("inductor_decomposition", lambda x, weight: torch.nn.functional.silu(x @ weight))
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      silu: float32 [4, 4] = aten.silu(mm)  # layers.0
      ...
    after:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      neg: float32 [4, 4] = aten.neg(mm)  # layers.0
      exp: float32 [4, 4] = aten.exp(neg)  # layers.0
      add: float32 [4, 4] = aten.add.Tensor(exp, 1)  # layers.0
      div: float32 [4, 4] = aten.div.Tensor(mm, add)  # layers.0
      ...

    decomposer  a graph with each such operator replaced by its body
"""

from typing import Literal

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class DecompositionOptions(Options):
    """at: replace the operators in this pass, or already at the capture, which this pass then checks."""

    at: Literal["pass", "capture"] = "pass"

    @property
    def at_capture(self) -> bool:
        return self.at == "capture"


CONTRACT = PassContract(
    "inductor_decomposition", Stage.JOINT, Numerics.LOSSY,
    "operators become the primitives that Inductor lowers; every node keeps its metadata",
    DecompositionOptions, tolerance=5e-6, source="torch._inductor.decomposition.select_decomp_table",
)
__getattr__ = loads_on_use(__name__)
