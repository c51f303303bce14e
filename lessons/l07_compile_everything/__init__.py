"""What "Compile everything" alone uses.

    pictures  a table of kernels with their nodes
"""
