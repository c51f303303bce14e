"""The verdicts: what a pass changed, what it had to change, and what it had to keep.

    agreement      whether all ranks run the same collectives, and compute alike what they send
    authoring      whether the model was put on its mesh rightly
    collectives    bytes conserved
    effect         whether the pass had its intended effect
    lint           whether the next stage can run the graph
    metadata       whether meta['val'] fits the operator's result
    numerics       whether the values stay within the contract
    operands       what a collective sends, by how it is computed
    order          whether compute still hides the collectives at later stages
    record         PassRecord: what one pass did, and the table of checks
    snapshot       a graph's boundary, collectives and visible effects
    verdicts       Verdict and its outcomes
"""
