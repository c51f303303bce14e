"""What "Fewer bits, proved" alone uses.

    fewer_bits  errors and bytes of float8, recorded steps; graders
    pictures    a tensor above the numbers of float8; the time of layers
"""
