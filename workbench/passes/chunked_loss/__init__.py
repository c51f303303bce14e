"""chunked_loss: the output layer and the cross entropy in pieces of the tokens, so the whole logits never exist.
"""

from pydantic import Field

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class ChunkedLossOptions(Options):
    """chunks: number of pieces that the tokens of a microbatch on one rank are cut into; it must divide them."""

    chunks: int = Field(8, ge=2)


CONTRACT = PassContract(
    "chunked_loss", Stage.JOINT, Numerics.LOSSY,
    "logits exist for one piece of the tokens at a time",
    ChunkedLossOptions, tolerance=5e-6, requires=frozenset({"inductor_decomposition"}), after=frozenset({"inductor_decomposition"}),
)
__getattr__ = loads_on_use(__name__)
