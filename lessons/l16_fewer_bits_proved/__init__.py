"""What "Fewer bits, proved" alone uses.

    fewer_bits  errors and casts of float8; graders
"""
