"""Progress: a line that ticks on a terminal and in a notebook, a line a stage elsewhere, or nothing."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench import Recipe, current_world
from workbench.cli import main
from workbench.pipeline import progress
from workbench.pipeline.progress import PROGRESS, Post, Ticking, telling
from workbench.pipeline.recipe_ranks import on_ranks
from workbench.world.ranks import RankPool


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user: the tests themselves show no progress."""
    monkeypatch.delenv(PROGRESS)
    monkeypatch.delenv("RANK", raising=False)


def walk(post: Post) -> None:
    post.stage("author")
    post.stage("train")
    post.step(0, 5.5)


def walk_on_rank(recipe: Recipe, post: Post) -> None:
    post.stage(f"author on rank {current_world().rank}")
    walk(post)


@pytest.mark.ranks
def test_the_stages_of_rank_0_of_a_pool_are_told(pool2: RankPool) -> None:
    recipe, heard = Recipe.model_validate({"name": "two", "mesh": {"dp_shard": 2}}), list[str]()
    on_ranks(recipe, pool2, walk_on_rank, timeout=60, progress=heard.append)
    assert heard == ["start 2 ranks", "author on rank 0", "author", "train"]
    assert pool2.run(os.environ.get, PROGRESS) == ["0", "0"]


def test_a_line_ticks_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.005)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)  # no second passes, however slow the machine is
    drawn: list[str] = []
    line = Ticking(drawn.append)
    line.close()
    assert drawn == []  # nothing was told
    line = Ticking(drawn.append)
    walk(Post(line.hear, steps=3))
    while drawn.count("train, step 1 of 3, loss 5.500  0 s") < 3:
        time.sleep(0.005)
    line.close()
    assert list(dict.fromkeys(drawn)) == ["author  0 s", "train  0 s", "train, step 1 of 3, loss 5.500  0 s", ""]
    count = len(drawn)
    time.sleep(0.05)
    assert len(drawn) == count


@pytest.mark.usefixtures("shown")
def test_without_a_terminal_each_stage_is_a_line_unless_nothing_is_wanted(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with telling() as tell:
        walk(Post(tell.hear, steps=3))
        tell.of("rank 3")("capture")
    assert capsys.readouterr() == ("", "workbench: author\nworkbench: train\nworkbench: rank 3: capture\n")
    for name, value, wanted in (("RANK", "1", None), (PROGRESS, "0", None), ("RANK", "0", False)):
        monkeypatch.setenv(name, value)
        with telling(wanted) as tell:
            walk(Post(tell.hear))
        monkeypatch.delenv(name)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("shown")
def test_a_terminal_shows_what_takes_long_and_keeps_none_of_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    file = tmp_path / "own_slow.py"
    file.write_text("")
    assert main(["run", "nope", "--import", str(file)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("\rimport own_slow.py  0 s\033[K\r\r\033[K\rworkbench: error: recipe 'nope'")


def test_a_kernel_gets_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=True))
    assert isinstance(progress._teller()._draw, progress.InNotebook)
