"""Why mutants that no verdict fails give the same bits on four inputs, or on those of numerics alone."""

from typing import Any

SAME = "what is read instead gives the same bits, as a view or a copy does"
ORDER = "the order of independent nodes is no value"
REASONS = {
    **dict.fromkeys(("move_in_bounds", "move_collective", "wait_early"), ORDER),
    "wait_twice": "a second wait for a collective that has ended does nothing",
    "duplicate_node": "a copy of an operator gives the same value",
    "restride_value": "the same elements lie in another order in memory",
    **dict.fromkeys(("meta_stride", "meta_lost"), "no run reads a node's metadata"),
    **dict.fromkeys(("older_output", "replace_output", "replace_saved", "rewire_argument", "rewire_to_older",
                     "replace_by_stranger"), SAME),
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
    "retarget_twin": "`x ** 1` equals `x * 1`, and ranking groups by mean or by sum gives the same order",
    "swap_arguments": "the operator multiplies the two",
    "steal_memory": "the memory gets the value that it holds",
    "apply_twice": "the operator gives its own result back, as a copy does",
}
DEFAULT = "the same bits on four inputs, and no reason known"
FLOAT8 = {"scale_constant": "a scale times 2 cancels: values are divided by it, and products multiplied"}
SURVIVED = {"nudge_constant": "the change is smaller than a rounding of most values"}


def reason(row: dict[str, Any]) -> str:
    """The reason of an equivalent mutant, by its operator."""
    reasons = FLOAT8 | REASONS if row["subject"] == "llama3_float8" else REASONS
    return reasons.get(row["operator"], DEFAULT)


def why_survived(row: dict[str, Any]) -> str:
    """The reason of a mutant with other values that every verdict passes."""
    return SURVIVED.get(row["operator"], DEFAULT)
