"""Private names of Inductor.

    bucketing       Inductor's bucketing and overlap schedulers
    carried         kernels that were built in another process, for this process's GPU
    joined_buffers  nothing writes over a concatenation whose parts are read later
    kept_order      Inductor calls kernels in the order of the graph
    kernels         which kernel computes which nodes
    lowering        decomposition table and compiler entry point
    passes          which passes Inductor runs
    regions         named regions: annotate, cut out, compile
    saved_values    what a whole step's forward saves is computed once
    written_code    a graph's code, or Inductor's, taken from one process to another
"""
