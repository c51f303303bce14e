"""What "Decompose" alone uses.

    claims    a rewrite of silu under one claim or another; figures of an answer
    gate      silu(x) * y in three ways: bytes, and times on a GPU
    losses    what the loss of a llama3 saves
    pictures  what kernels read and write, and how values are rounded
"""
