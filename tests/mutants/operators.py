"""All mutation operators: each plants one fault in the graph that a pass made.

An operator is a function (graph, rng) with one line that says what it does. It changes the graph in place where `rng`
chooses, and returns the nodes that it touched, or None where the graph has no place for it.

    of_nodes        nodes and their operators
    of_arguments    tensors, lists and constants that an operator is given
    of_values       dtypes, strides, metadata, outputs and what is saved for the backward
    of_ranks        waits, collectives and process groups
    of_effects      random numbers, writes, and memory that nothing has filled
"""

from mutants import of_arguments, of_effects, of_nodes, of_ranks, of_values
from mutants.edits import OPERATORS, Mutation

__all__ = ["OPERATORS", "Mutation", "of_arguments", "of_effects", "of_nodes", "of_ranks", "of_values"]
