"""The verdicts: what a pass changed, what it had to change, and what it had to keep.

    captures       two captures of one step, node by node
    collectives    bytes conserved, one order on all ranks
    effect         whether the pass had its intended effect
    joining        the join of forward, backward and optimizer
    lineage        a node through every pass
    lint           whether the next stage can run the graph
    metadata       whether meta['val'] fits the operator's result
    numerics       whether the values stay within the contract
    order          whether compute still hides the collectives at later stages
    recomputation  what the backward of a traced step computes again
    record         PassRecord: what one pass did, and the table of checks
    verdicts       Verdict and its outcomes
"""
