"""Users' files are written whole, or stay as they were."""

import os

import pytest
from full_disk import files_of_at_most

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.recipe.files import json_of, reading, write_whole
from workbench_lessons.course.scores import SCORES, keep_score, load_scores


def test_a_file_is_replaced_with_its_mode_and_through_its_link(tmp_path):
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    write_whole(file, "old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "new")
    assert file.read_text() == "new" and link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "link.json"]


def test_a_full_disk_leaves_the_old_file_and_no_part(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"old")
    with files_of_at_most(4), pytest.raises(WorkbenchError, match="a.json: cannot be written: File too large"):
        write_whole(file, "new text")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_a_full_disk_loses_no_earlier_score_and_stops_no_cell(tmp_path, monkeypatch):
    file = tmp_path / "scores.json"
    file.write_bytes(b'{"00_tour": {"a": {"score": 0.5}}}')
    monkeypatch.setenv(SCORES, str(file))
    with files_of_at_most(4), pytest.warns(UserWarning, match="scores.json: cannot be written.*the score is not kept"):
        keep_score("00_tour", "a", 1.0)
    assert load_scores() == {"00_tour": {"a": {"score": 0.5}}}


def test_a_device_is_written_directly_and_its_error_is_a_sentence():
    write_whole("/dev/null", "text")
    with pytest.raises(WorkbenchError, match="^/dev/full: cannot be written: No space left on device$"):
        write_whole("/dev/full", "text")


def test_what_may_never_end_is_not_read(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for command, path in (("run", "/dev/zero"), ("order", str(tmp_path / "pipe"))):
        assert main([command, path]) == 2
        assert "a device or a pipe, and no regular file" in capsys.readouterr().err
    with pytest.raises(WorkbenchError, match="not a table .a device or a pipe, and no regular file.: remove it"), \
            reading(tmp_path / "pipe", "a table", "remove it"):
        (tmp_path / "pipe").read_bytes()


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    path = tmp_path / "x.json"
    for text, why in ((b"{}", "it has no 'a'"), (b"[]", "its values have other types"),
                      (b"[" * 99_999, "nested too deeply")):
        path.write_bytes(text)
        with pytest.raises(WorkbenchError, match=f"x.json: not a table .{why}.: remove it"), \
                reading(path, "a table", "remove it"):
            json_of(path.read_bytes())["a"]
