"""Progress bars: what rank 0 writes is drawn, once, and nothing stays behind."""

from __future__ import annotations

import pytest

from workbench.pipeline.progress import PROGRESS, Post, bars_from_file, local_bars


def walk(post: Post) -> None:
    post.stage("author")
    post.stage("capture")
    post.step(0, 5.5)
    post.step(1, 4.25)


def test_what_a_rank_posts_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with bars_from_file(2, 2, True) as path:
        assert path is not None
        walk(Post(path=path))
    drawn = capsys.readouterr().err
    assert "author                       0/2" in drawn
    assert "train                        0/2" in drawn
    assert not path.parent.exists()


def test_bars_end_before_the_next_and_leave_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    with local_bars(2, 2, True) as post:
        walk(post)
    out, err = capsys.readouterr()
    assert out == "" and "\n" not in err and err.endswith("\r")
    assert err.index("capture                      1/2") < err.index("train  ")


def test_no_bars_where_none_are_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with bars_from_file(2, 2, False) as path:
        assert path is None
        walk(Post(path=path))
    monkeypatch.setenv(PROGRESS, "0")
    with local_bars(2, 2, True) as post:
        walk(post)
    assert capsys.readouterr() == ("", "")
