"""Users' files are written whole, or stay as they were."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook.lessons.scores import SCORES, keep_score, load_scores
from workbench.recipe.files import json_of, reading, write_whole


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is written by half, and then the disk is full."""
    def write_text(self: Path, text: str, encoding: str | None = None) -> int:
        self.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_a_file_is_replaced_with_its_mode_and_through_its_link(tmp_path: Path) -> None:
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    write_whole(file, "old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "new")
    assert file.read_text() == "new" and link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "link.json"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"old")
    with pytest.raises(WorkbenchError, match="a.json: cannot be written: No space left"):
        write_whole(file, "new text")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_loses_no_earlier_score_and_stops_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scores.json"
    file.write_bytes(b'{"00_tour": {"a": {"score": 0.5}}}')
    monkeypatch.setenv(SCORES, str(file))
    with pytest.warns(UserWarning, match="scores.json: cannot be written.*the score is not kept"):
        keep_score("00_tour", "a", 1.0)
    assert load_scores() == {"00_tour": {"a": {"score": 0.5}}}


@pytest.mark.parametrize(("text", "why"), [
    (b"{}", "it has no 'a'"), (b"[]", "its values have other types"), (b"[" * 99_999, "nested too deeply")])
def test_what_cannot_be_read_is_one_sentence(text: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match=f"x.json: not a table .{why}.: remove it"), \
            reading(tmp_path / "x.json", "a table", "remove it"):
        json_of(text)["a"]
