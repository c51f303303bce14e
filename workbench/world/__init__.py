"""Who the ranks are: a fake or simulated world in one process, or real processes in a pool.

    bounds          how many ranks this machine can start
    cells           cells of a notebook, run in a rank
    diagnosis       RankError: what went wrong, cause first
    divergence      the first collective on which ranks differ
    exchange        one call to the ranks and their answers
    fake            a world of any size, shapes without values
    greetings       authenticate callers side by side
    local           ranks on this machine
    mesh            World and device meshes
    pickling        functions and tensors between parent and ranks
    pool            RankPool: calls to warm ranks
    rank_output     the ranks' output, shown with its rank
    rank_processes  the processes behind a pool
    ranks           `ranks(n)`: open a pool
    registered      what users registered here, sent to the ranks
    remote          ranks on other machines, started by torchrun
    simulated       every rank's values in one process
    template        ranks forked from a process that has imported torch
    worker          the process of one rank
"""
