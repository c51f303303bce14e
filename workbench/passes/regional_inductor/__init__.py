"""regional_inductor: Inductor compiles the named regions of the model; the rest of the graph stays as it is.

In this model each layer is in `with region("layer"):`, and its part of the graph becomes one call:

    >>> example("regional_inductor", lambda x, weight: (x @ weight).sigmoid())
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
    after:
      ...
      region_layer_layers_0: float32 [4, 4], ... = regions.region_layer_layers_0(primals_2, primals_1)
      getitem: float32 [4, 4] = operator.getitem(region_layer_layers_0, 0)  # layers.0
      ...
      sum_1: float32 [] = aten.sum(getitem)
      ...
"""

from pydantic import Field

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class RegionalOptions(Options):
    """regions: names of regions, by default all. config: Inductor's options, and region_config those of one region.
    fallback: operators that stay outside.
    """

    regions: tuple[str, ...] = ()
    config: dict[str, bool | int | float | str] = Field({})
    region_config: dict[str, dict[str, bool | int | float | str]] = Field({})
    fallback: tuple[str, ...] = ()


CONTRACT = PassContract(
    "regional_inductor", Stage.PARTITIONED, Numerics.LOSSY,
    "each named region of the model is one call of a compiled function",
    RegionalOptions, tolerance=5e-6, conflicts=frozenset({"full_inductor_compilation"}),
    after=frozenset({"autobucketing_reordering", "transformer_block_bucketing", "overlap_collectives",
                     "graph_cleanup"}), needs=frozenset({"compiler"}),
    source="torch._inductor.standalone_compile, as torch.fx.passes.regional_inductor does",
)
__getattr__ = loads_on_use(__name__)
