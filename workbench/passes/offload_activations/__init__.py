"""offload_activations: saved tensors go to pinned host memory, and come back before the backward reads them.
"""

from typing import Literal

from pydantic import NonNegativeInt

from workbench.passes import loads_on_use
from workbench.recipe.contracts import EstimateOptions, Numerics, PassContract, Stage


class OffloadOptions(EstimateOptions):
    """choose: "hidden" for the tensors whose copies end before the forward does, as estimated, or "all".

    modules: paths of modules, `*` for one component; a saved tensor of another module stays. min_bytes: a smaller one
    stays, too. fused: as where a compiler follows, which fuses pointwise operators.
    """

    choose: Literal["hidden", "all"] = "hidden"
    modules: tuple[str, ...] = ()
    min_bytes: NonNegativeInt = 1 << 20
    fused: bool = True


CONTRACT = PassContract(
    "offload_activations", Stage.PARTITIONED, Numerics.EXACT,
    "saved tensors are on the host between forward and backward",
    OffloadOptions, after=frozenset({"async_tensor_parallel", "autobucketing_reordering", "graph_cleanup",
                                     "overlap_collectives", "transformer_block_bucketing"}),
)
__getattr__ = loads_on_use(__name__)
