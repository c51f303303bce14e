"""Progress bars: what rank 0 posts is drawn, once, and nothing where none are wanted."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import cloudpickle
import pytest

from workbench.pipeline.progress import PROGRESS, Post, bars
from workbench.pipeline.recipe_ranks import on_ranks
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import current_world
from workbench.world.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def walk(post: Post) -> None:
    post.stage("author")
    post.stage("capture")
    post.step(0, 5.5)
    post.step(1, 4.25)


def walk_on_rank(recipe: Recipe, post: Post) -> None:
    post.stage(f"author on rank {current_world().rank}")
    walk(post)


@pytest.mark.ranks
def test_what_rank_0_of_a_pool_posts_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.model_validate({"name": "two", "mesh": {"dp_shard": 2}})
    with ranks(2, backend="gloo") as pool:
        for shown in (True, False):
            on_ranks(recipe, pool, walk_on_rank, stages=2, steps=2, timeout=60, progress=shown)
            out, err = capsys.readouterr()
            drawn = [text in err for text in ("author on rank 0             0/2", "capture                      2/2",
                                              "train                        0/2", "author on rank 1")]
            assert out == "" and drawn == [shown, shown, shown, False] and (shown or err == "")


def test_bars_end_before_the_next_and_leave_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    with bars(2, 2, True) as draw:
        walk(Post(draw))
    out, err = capsys.readouterr()
    assert out == "" and "\n" not in err and err.endswith("\r")
    assert err.index("capture                      1/2") < err.index("train  ")


def test_a_notebook_shows_one_line_and_nothing_at_the_end(capsys: pytest.CaptureFixture[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, an empty pink bar would stay above a report."""
    sent: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            sent.append(data)

    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: Handle())
    with bars(2, 2, True) as draw:
        walk(Post(draw))
    lines = [data["text/plain"] for data in sent]
    assert capsys.readouterr() == ("", "") and lines[-1] == ""
    assert any(line.startswith("capture                      1/2") for line in lines)


def test_no_bars_where_none_are_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with bars(2, 2, False) as draw:
        assert draw is None
        walk(Post(draw))
    monkeypatch.setenv(PROGRESS, "0")
    with bars(2, 2, True) as draw:
        walk(Post(draw))
    assert capsys.readouterr() == ("", "")
