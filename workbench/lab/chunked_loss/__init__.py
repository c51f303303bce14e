"""chunked_loss: the output layer and the cross entropy in pieces of the tokens, so that whole logits never exist.

Of each piece the logits, the loss and at once the gradients are computed, before the next one's. Here each of two
pieces has two tokens, and the weight's gradient is the sum of two products:

    >>> example("chunked_loss", lambda x, weight: torch.nn.functional.cross_entropy(x @ weight, x.argmax(1)), chunks=2)
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      ...
    after:
      ...
      mm_default: float32 [2, 4] = aten.mm(slice_tensor, primals_1)  # layers.0
      ...
      mm_default_1: float32 [4, 4] = aten.mm(slice_tensor_4, sub_tensor_2)  # layers.0
      slice_tensor_5: float32 [2, 4] = aten.slice.Tensor(primals_2, 0, 2, 4)
      mm_default_2: float32 [2, 4] = aten.mm(slice_tensor_5, primals_1)  # layers.0
      ...
      addmm_default: float32 [4, 4] = aten.addmm(mm_default_1, slice_tensor_9, sub_tensor_5)  # layers.0
      ...
      return (sum_4, addmm_default)

The forward does not know the gradient of the loss, which is a factor of all others: the pieces take 1 for it, and the
backward multiplies by it. So no logits are computed again, and the backward reads neither logits nor the weight. The
weight's gradient is summed in the order of the pieces, in its own dtype. In float32 the stated tolerance holds; in
bfloat16 each piece adds a rounding, and a gradient of the loss that is no power of two one more.

    piece   one piece, by a rule for each kind of operator
    pieces  the region once for each piece, and what the rest of the graph reads
    region  the output layer and the cross entropy in a joint graph
"""

from pydantic import Field

from workbench.recipe.contracts import Numerics, Options, PassContract, Stage, declare


class ChunkedLossOptions(Options):
    """chunks: number of pieces that the tokens of a microbatch on one rank are cut into; it must divide them."""

    chunks: int = Field(8, ge=2)


declare(PassContract(
    "chunked_loss", Stage.JOINT, Numerics.LOSSY,
    "logits exist for one piece of the tokens at a time",
    ChunkedLossOptions, tolerance=5e-6, requires=frozenset({"inductor_decomposition"}),
    after=frozenset({"inductor_decomposition"}), code="workbench.lab.chunked_loss.transform",
))
