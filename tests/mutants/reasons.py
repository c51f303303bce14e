"""Why mutants that no verdict fails give the same bits on four inputs, or on those of numerics alone."""

from typing import Any

SAME = "what is read instead gives the same bits, as a view or a copy does"
ORDER = "the order of independent nodes is no value"
REASONS = {
    **dict.fromkeys(("move_in_bounds", "move_collective", "wait_early"), ORDER),
    "wait_twice": "a second wait for a collective that has ended does nothing",
    "duplicate_node": "a copy of an operator gives the same value",
    "double_collective": "a collective that runs twice gives the same value",
    "restride_value": "the same elements lie in another order in memory",
    **dict.fromkeys(("meta_stride", "meta_lost", "meta_dtype", "meta_shape"), "no run reads a node's metadata"),
    **dict.fromkeys(("older_output", "replace_output", "alias_output", "swap_outputs", "replace_saved", "drop_node",
                     "rewire_argument", "rewire_to_older", "rewire_across_shapes", "replace_by_stranger",
                     "drop_transpose", "drop_and_leave_readers"), SAME),
    "write_in_place": "nothing reads the overwritten input afterwards",
    "another_group": "the other group has the same ranks",
    "another_group_size": "the operator goes by the size of its output, not by the argument",
    "leave_unfilled": "the constant is for ignored targets, and no batch has one",
    "flip_flag": "a view behind the sum restores the shape that keepdim changes",
    "permute_sizes": "a second view behind the first restores the shape",
    **dict.fromkeys(("cast_to_another_dtype", "cast_value"), "the value is exact in both dtypes"),
    "drop_argument": "the default does the same here",
    "shift_integer": "a slice ends behind the last element, or the integer marks ignored targets, and no batch has one",
    "shift_slice": "a gather sends what stands in a part of its own result, and then writes all of it",
    "drop_from_list": "the readers bring the shape back",
    "retarget_twin": "`x ** 1` equals `x * 1`, and ranking groups by mean or by sum gives the same order",
    "swap_in_list": "a sum of integers has no order",
    "swap_arguments": "the operator multiplies the two",
    "steal_memory": "the memory gets the value that it holds",
    "scale_output": "the backward reads only which elements are above 0",
    "apply_twice": "the operator gives its own result back, as a copy does",
}
DEFAULT = "the same bits on four inputs, and no reason known"
FLOAT8 = dict.fromkeys(("nudge_constant", "scale_constant", "negate_constant"), (
    "the floor under a scale lies below every scale, and a scale times 2 or -1 cancels: values are divided by it, and "
    "products multiplied"))
SURVIVED = {
    "nudge_constant": "the change is smaller than a rounding of most values",
    "retarget_twin": "both operators agree but for one token, which a small batch lacks",
    "swap_in_list": "the mean over tokens has no order but for its rounding, and no target is ignored",
}
SURVIVED_FLOAT8 = {
    "retarget_unary": "the scale comes from almost the same maximum: the few values above it are cut off, by less than "
                      "float8's stated error",
    "retarget_twin": "one rank's maximum is too small, and the other rank's, which is the larger or nearly so, takes "
                     "its place in the all-reduce",
}


def reason(row: dict[str, Any]) -> str:
    """The reason of an equivalent mutant, by its operator."""
    return _of(row, FLOAT8, REASONS)


def why_survived(row: dict[str, Any]) -> str:
    """The reason of a mutant with other values that every verdict passes."""
    return _of(row, SURVIVED_FLOAT8, SURVIVED)


def _of(row: dict[str, Any], of_float8: dict[str, str], others: dict[str, str]) -> str:
    special = of_float8 if row["subject"] == "llama3_float8" else {}
    return special.get(row["operator"]) or others.get(row["operator"], DEFAULT)
