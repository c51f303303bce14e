"""The load of experts as a picture: its text holds the table, and `show` finds it."""

from __future__ import annotations

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook import draw
from workbench.notebook.show import outputs
from workbench.pipeline.expert_load import ExpertLoad
from workbench.pipeline.train import Training


def load(layers: int = 1, steps: int = 3, ranks: int = 2, experts: int = 4) -> ExpertLoad:
    """Expert 0 is ahead by less and less, and the more so the later the layer."""
    found = ExpertLoad([f"layers.{i}.moe" for i in range(layers)])
    for step in range(steps):
        found.tokens.append([[[4 + (layer + 1) * (steps - 1 - step) * (e == 0) for e in range(experts)]
                              for _ in range(ranks)] for layer in range(layers)])
        found.dropped.append([[steps - 1 - step] * ranks for _ in range(layers)])
    return found


def test_the_text_holds_the_table_and_who_sent_what():
    made = load()
    lines = draw.expert_load(made).text.splitlines()
    assert lines[0] == ("experts' load of 3 steps on 2 ranks: fullest expert over the mean 1.33 to 1.00, "
                        "dropped 4 to 0 of 32 copies a step")
    assert lines[1:5] == made.table().splitlines()
    assert lines[5:] == ["sent in step 2, by rank", "layers.0.moe, rank 0: 4 4 4 4, 0 dropped",
                         "layers.0.moe, rank 1: 4 4 4 4, 0 dropped"]


def test_the_most_uneven_layers_are_drawn_and_all_are_told():
    made = load(layers=6)
    made.tokens[-1][0][0][0] = 99  # the first layer is now the most uneven of the last step
    made.tokens[-1][5][0][0] = 50
    picture = draw.expert_load(made)
    assert "layers.0.moe" in picture.alt and "layers.5.moe" in picture.alt and picture.alt.count("first step") == 4
    assert all(f"layers.{i}.moe" in picture.text for i in range(6))
    assert picture.text.endswith("drawn: the 4 most uneven of 6 layers")


def test_nothing_noted_is_refused():
    for empty in (ExpertLoad(["layers.0.moe"]), ExpertLoad([])):
        with pytest.raises(WorkbenchError, match="no step has recorded the experts' load"):
            draw.expert_load(empty)


def test_show_draws_a_load_and_a_training_that_has_one():
    picture = draw.expert_load(load())
    with_experts, without = (Training([1.0], [1.0], [1.0], 1, None, each) for each in (load(), None))
    assert outputs(load()) == [picture] == outputs(with_experts)
    assert outputs(without) == []
