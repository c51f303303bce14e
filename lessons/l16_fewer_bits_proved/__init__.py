"""What "Fewer bits, proved" alone uses.

    fewer_bits  errors and casts of float8; graders
    pictures    a tensor above the numbers of float8
"""
