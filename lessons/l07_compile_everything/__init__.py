"""What "Compile everything" alone uses.

    kernel_calls  a grader: the kernel calls that compute some nodes
    launches      launches by kind, strips of calls, and recorded steps
    pictures      kernels with their nodes, as bars and as a table
"""
