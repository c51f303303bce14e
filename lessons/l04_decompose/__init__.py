"""What "Decompose" alone uses.

    pictures  what kernels read and write, and how values are rounded
"""
