"""Reading a graph: what it holds, moves, costs and keeps. Nothing here changes a graph.

    collectives     collectives in node order: bytes, mesh axis
    composites      operators that a CPU captures in parts and a GPU runs as one kernel
    cost            FLOP and estimated time of a node
    fused_cost      what fused kernels read, write and cost
    kernels         which kernel computes which nodes
    memory          owners of storage, saved tensors
    nodes           kinds of nodes, and where each came from
    order           what stands between a collective's start and its wait
    peak            bytes alive in node order, and the predicted peak of a step
    program         a graph as a program, a line a node
    replay          what a CUDA graph holds and saves
    simulated_run   a simulated step: compute, communication, exposure
    timeline        when each node would run, from estimates
"""
