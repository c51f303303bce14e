"""One colour has one role: what a caller names never looks like compute, communication, a collective or the rest."""

from __future__ import annotations

from workbench.notebook.draw.colors import BLUE, GREY, NAMES, ORANGE, RANK_COLORS, RED
from workbench.notebook.draw.graphs import LANES
from workbench.notebook.draw.timeline import lane_colors
from workbench_lessons.l02_capture_a_joint_graph.step_memory import COLORS

ROLES = {BLUE, ORANGE, RED, GREY}


def test_the_roles_are_those_of_the_pictures() -> None:
    lanes = lane_colors(["compute", "dp_shard"])
    assert {LANES["matmul"], LANES["collective"], LANES["view"], *lanes.values()} == ROLES


def test_names_differ_and_the_first_five_have_no_role() -> None:
    assert len({*NAMES}) == len(NAMES) and not ROLES & {*NAMES[:5]}
    assert ROLES & {*RANK_COLORS[:5]}  # a picture of ranks has nothing else


def test_bytes_have_no_colour_of_their_operators() -> None:
    kinds = {LANES[kind] for kind in ("collective", "matmul", "pointwise", "reduction", "view")}
    assert not kinds & {*COLORS.values()} and len({*COLORS.values()}) == len(COLORS)
