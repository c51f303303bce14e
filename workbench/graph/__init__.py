"""From a model to FX graphs: capture, partition, lower.

    attributes        what a forward changes in Python
    callables         one direction of a step as a callable
    capture           authored module to joint graph
    facts             what is known of a graph, of its step and of a run
    gather_chains     from a sharded parameter to the whole weight
    input_check       a step's inputs against those of its capture
    list_schedule     an order in which compute hides collectives
    lower             partitioned pair to a step that a training loop calls
    make_nodes        add nodes with their fake values
    model_contract    what a model must be to be captured
    pair_function     a forward and a backward without torch's wrapper as one function
    partition         joint graph to forward and backward
    patterns          find nodes, replace subgraphs
    pieces            parts of a graph as graphs of their own
    read              what a graph holds, moves, costs and keeps
"""
