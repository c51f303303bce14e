"""Reading a graph: what it holds, moves, costs and keeps. Nothing here changes a graph.

    collectives     collectives in node order: bytes, mesh axis
    composites      operators that a CPU captures in parts and a GPU runs as one kernel
    cost            FLOP and estimated time of a node
    diff            nodes added, removed, moved, rewired
    fused_cost      what fused kernels read, write and cost
    kernels         which kernel computes which nodes
    launch_bound    does the CPU or the device set the pace
    measured_costs  matmuls and attention timed once, kept in a file
    memory          owners of storage, saved tensors, peak
    node_facts      all that a graph knows of one node
    nodes           kinds of nodes, and where each came from
    order           what stands between a collective's start and its wait
    placement       placements that a graph implies
    program         a graph as a program, a line a node
    redistribution  collectives of a change of placements
    replay          what a CUDA graph holds and saves
    simulated_run   a simulated step: compute, communication, exposure
    snapshot        what the checks read of a graph
    timeline        when each node would run, from estimates
"""
