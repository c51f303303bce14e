"""Byte-level text: deterministic, the same for every way of sharing out a batch, clear about what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.pipeline.text_data import ByteText, DataError, load_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("second " * 20)
    (tmp_path / "a.txt").write_text("first " * 20)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("third " * 20)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("hidden")
    return tmp_path


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_a_folder_is_read_in_order(folder: Path) -> None:
    text = load_text(folder)
    whole = bytes(text.data.tolist()).decode()
    assert whole == "\0".join(("first " * 20, "second " * 20, "third " * 20))  # NUL ends a document
    assert (text.files, text.data.dtype) == (3, torch.uint8)


def test_batches(folder: Path) -> None:
    text = load_text(folder)
    tokens, targets = text.batch(3, seq_len=16, batch_per_rank=4)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(text.batch(3, seq_len=16, batch_per_rank=4)[0], tokens)
    assert not torch.equal(text.batch(4, seq_len=16, batch_per_rank=4)[0], tokens)
    assert not torch.equal(text.batch(3, seq_len=16, batch_per_rank=4, seed=1)[0], tokens)


def test_the_global_batch_does_not_depend_on_how_it_is_shared(folder: Path) -> None:
    text = load_text(folder)
    one = text.batch(5, seq_len=8, batch_per_rank=4)[1]
    two = torch.cat([text.batch(5, seq_len=8, batch_per_rank=2, dp_rank=r)[1] for r in range(2)])
    assert torch.equal(one, two)
    assert not torch.equal(two[:2], two[2:])


def test_the_last_place_is_used() -> None:
    text = ByteText("x", 1, torch.arange(9, dtype=torch.uint8))
    assert text.batch(0, seq_len=8, batch_per_rank=1)[1].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert error_of(text.batch, 0, seq_len=9, batch_per_rank=1) == (
        "x: 9 bytes of text are too few for data.seq_len 9: give at least 10, or a shorter sequence")


def test_bad_input_word_for_word(tmp_path: Path) -> None:
    assert error_of(load_text, "/no/such/folder") == (
        "data.path '/no/such/folder' does not exist: give a folder of text files, or leave it out for the sources of "
        "Python's standard library")
    assert error_of(load_text, tmp_path) == (
        f"data.path '{tmp_path}' holds no text: put text files in it, or leave data.path out")
    (tmp_path / "a.txt").write_text("short")
    assert error_of(load_text, tmp_path, seq_len=8) == (
        f"data.path '{tmp_path}' holds 5 bytes of text, and one sequence with its target needs 9: add text, or set "
        f"data.seq_len to 4 or less")
    assert load_text(tmp_path, seq_len=4).data.numel() == 5
    assert error_of(load_text, tmp_path / "a.txt") == (
        f"data.path '{tmp_path}/a.txt' is a file: give a folder of text files, or leave it out for the sources of "
        f"Python's standard library")
    assert error_of(load_text, vocab_size=100) == (
        "model.vocab_size 100 is less than the 256 bytes of byte-level text: set it to 256 or more")


def test_unreadable_as_root_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert error_of(load_text, folder) == (
        f"{folder}/a.txt: cannot be read: Permission denied; make it readable, or move it away")
