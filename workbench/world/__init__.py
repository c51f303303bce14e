"""The ranks: a fake or simulated world in one process, or real processes in a pool.

    bounds          how many ranks this machine can start
    cells           cells of a notebook, run in a rank
    diagnosis       RankError: what went wrong, cause first
    divergence      the first collective on which ranks differ
    exchange        one call to the ranks, and their answers or failures
    fake            a world of any size, with shapes and no values
    mesh            World and device meshes
    pickling        functions and tensors between parent and ranks
    pool            RankPool: calls to running ranks
    rank_output     the ranks' output, shown with its rank
    rank_processes  the processes behind a pool
    ranks           `ranks(n)`: open a pool
    registered      send the user's passes and models to the ranks
    simulated       every rank's values in one process
    worker          the process of one rank
"""
