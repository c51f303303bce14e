"""Split the region of the loss, and hold later stages to it: no value of the logits' size, and one pass over them."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.lab.chunked_loss import ChunkedLossOptions
from workbench.lab.chunked_loss.piece import PIECE
from workbench.lab.chunked_loss.pieces import split
from workbench.lab.chunked_loss.region import find_loss
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass


def chunked(before: Graphs, after: Graphs, options: ChunkedLossOptions) -> Effect:
    """No value has the size of the whole logits, and every piece computes its own."""
    region = find_loss(before[0])
    whole = {n.name for n in region.wide}
    left = [n for n in after[0].graph.nodes if n.name in whole]
    pieces = {n.meta[PIECE] for n in after[0].graph.nodes if PIECE in n.meta}
    evidence = {"tokens": region.tokens, "vocabulary": region.vocabulary, "chunks": len(pieces),
                "logits_bytes": [region.bytes, region.bytes // max(len(pieces), 1)]}
    reason = f"{left[0].name} still computes whole logits" if left else ""
    if len(pieces) != options.chunks:
        reason = f"{len(pieces)} pieces are computed, and {options.chunks} were asked for"
    return Effect(not reason, reason, evidence)


def computed_once(graphs: Graphs, options: ChunkedLossOptions) -> Effect:
    """The partitioner left the pieces in the forward: the backward computes no logits again."""
    again = [n for n in graphs[1].graph.nodes if PIECE in n.meta and n.op == "call_function"]
    reason = f"the backward computes {again[0].name} and {len(again) - 1} more of the pieces again" if again else ""
    return Effect(not again, reason, {"computed_again": len(again)})


@register_pass("chunked_loss", effect=chunked, partition_effect=computed_once)
def chunked_loss(gm: GraphModule, example_inputs: list[Any], *, options: ChunkedLossOptions) -> GraphModule:
    """Raises WorkbenchError where the graph has no loss of this form, or `chunks` does not divide its tokens."""
    try:
        region = find_loss(gm)
        if region.tokens % options.chunks:
            fits = [n for n in range(2, 65) if region.tokens % n == 0]
            raise WorkbenchError(f"{options.chunks} chunks do not divide the {region.tokens} tokens of a microbatch: "
                                 f"take one of {', '.join(map(str, fits)) or 'none up to 64'}")
        split(gm, region, options.chunks)
    except WorkbenchError as error:
        raise WorkbenchError(f"pass 'chunked_loss': {error}") from None
    return gm
