"""graph_cleanup: leave out views that change nothing, transposes that undo each other, and dead code.

Each of them costs microseconds on the host where a graph runs node by node.

    >>> example("graph_cleanup", lambda x, weight: x.t().t() @ weight)
    before:
      ...
      t: float32 [4, 4] = aten.t(primals_2)  # layers.0
      t_1: float32 [4, 4] = aten.t(t)  # layers.0
      mm: float32 [4, 4] = aten.mm(t_1, primals_1)  # layers.0
      ...
    after:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      ...
"""

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, PassContract, Stage

CONTRACT = PassContract(
    "graph_cleanup", Stage.PARTITIONED, Numerics.EXACT,
    "no view that changes nothing, no transposes that undo each other, no dead code",
    after=frozenset({"autobucketing_reordering", "transformer_block_bucketing", "overlap_collectives"}),
)
__getattr__ = loads_on_use(__name__)
