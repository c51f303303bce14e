"""The bytes of an exchange, graded as slots of each expert."""

import math

from workbench_lessons.l09_route_tokens_to_experts.expert_slots import slot_bytes

EXCHANGE = {"rows": 192, "size": 192 * 512}


def test_a_wrong_number_of_bytes_is_told_as_slots_of_each_expert() -> None:
    for answer, said in (("98,304", "right"), (8 * 12 * 512, "that is 6 slots for each of the 16 experts: too few"),
                         (16 * 23 * 512, "that is 23 slots for each of the 16 experts: too many"),
                         ("92,160", "that is 11.25 slots for each of the 16 experts: not a whole number"),
                         (math.inf, "too high"), ("many", "not 'many'")):
        assert slot_bytes(answer, experts=16, **EXCHANGE) == (float(said == "right"), said)
