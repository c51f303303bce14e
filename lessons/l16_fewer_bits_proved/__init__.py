"""What "Fewer bits, proved" alone uses.

    fewer_bits  errors of float8, recorded steps; graders
    pictures    a tensor above the numbers of float8; the time of layers; errors of gradients
"""
