"""cudagraph: each direction of the step is recorded once, and replayed with one launch.

Its result is no graph, so the example prints what is known of the recording before the first step:

    >>> example("cudagraph", lambda x, weight: (x @ weight).sigmoid())
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
    after:
      forward: 1 input static (64 bytes), 1 input copied (64 bytes); not recorded yet; 3 operators before, ...

    recording  Replayed: a body that records itself
"""

from pydantic import PositiveInt

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class CudagraphOptions(Options):
    """warmup: calls before the recording. debug: check in each replay that what is read in place has not moved."""

    warmup: PositiveInt = 2
    debug: bool = False


CONTRACT = PassContract(
    "cudagraph", Stage.REPLAY, Numerics.EXACT,
    "each direction of the step is recorded once and replayed with one launch",
    CudagraphOptions, needs=frozenset({"cuda", "static_shapes"}), source="torch.cuda.CUDAGraph",
)
__getattr__ = loads_on_use(__name__)
