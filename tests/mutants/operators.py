"""All mutation operators: each plants one fault in the graph that a pass made.

    of_nodes        arguments and constants; random numbers, writes and unfilled memory; nodes and their operators
    of_ranks        waits, collectives and process groups
    of_values       dtypes, strides, metadata, outputs and what is saved for the backward
"""

from mutants import of_nodes, of_ranks, of_values
from mutants.edits import OPERATORS

__all__ = ["OPERATORS", "of_nodes", "of_ranks", "of_values"]
