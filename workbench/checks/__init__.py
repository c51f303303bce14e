"""The verdicts: what a pass changed, what had to change, and what must not have.

    bisect       the first pass and node that leave their contract
    collectives  bytes conserved, one order on all ranks
    effect       did the pass have its effect
    lineage      a node through every pass
    lint         can the next stage run the graph
    matching     match nodes of two runs by value
    memory       estimated peak and saved bytes
    metadata     does meta['val'] fit what the operator gives
    numerics     values kept, as far as the contract says
    record       PassRecord: what one pass did and proved
    static       level light: every check that needs no values
    values       every value of a run, node by node
    verdicts     Verdict and its outcomes
"""
