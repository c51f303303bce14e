"""Byte-level text: deterministic, the same for every way of sharing out a batch, clear about what is missing."""

from pathlib import Path

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.pipeline.text_data import load_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("second " * 20)
    (tmp_path / "a.txt").write_text("first " * 20)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("third " * 20)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("hidden")
    return tmp_path


def test_a_folder_is_read_in_order(folder: Path) -> None:
    text = load_text(folder)
    whole = bytes(text.data.tolist()).decode()
    assert whole == "\0".join(("first " * 20, "second " * 20, "third " * 20))  # NUL ends a document
    assert text.data.dtype == torch.uint8


def test_the_global_batch_does_not_depend_on_how_it_is_shared(folder: Path) -> None:
    text = load_text(folder)
    tokens, targets = text.batch(3, seq_len=16, batch_per_rank=4)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(text.batch(3, seq_len=16, batch_per_rank=4)[0], tokens)
    assert not torch.equal(text.batch(4, seq_len=16, batch_per_rank=4)[0], tokens)
    assert not torch.equal(text.batch(3, seq_len=16, batch_per_rank=4, seed=1)[0], tokens)
    one = text.batch(5, seq_len=8, batch_per_rank=4)[1]
    two = torch.cat([text.batch(5, seq_len=8, batch_per_rank=2, dp_rank=r)[1] for r in range(2)])
    assert torch.equal(one, two)
    assert not torch.equal(two[:2], two[2:])


def test_bad_input(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("short")
    for path, why in (("/no/such/folder", r"/no/such/folder cannot be read \(No such file or directory\): give"),
                      (tmp_path / "empty", "holds 0 bytes of text"), (tmp_path / "short", "needs 9: add text files")):
        with pytest.raises(WorkbenchError, match=why):
            load_text(path, seq_len=8)
    last = load_text(tmp_path / "short", seq_len=4).batch(0, seq_len=4, batch_per_rank=1)[1]
    assert bytes(last[0].tolist()) == b"hort"  # the last place is used
    with pytest.raises(WorkbenchError, match="model.vocab_size 100 is less than the 256 bytes"):
        load_text(vocab_size=100)

    def refuse(self: Path, *args: object) -> None:  # as root, too
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(WorkbenchError, match=r"a.txt cannot be read \(Permission denied\)"):
        load_text(folder)
