"""Byte-level text: a folder of the user's, or the sources of Python's standard library, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.errors import WorkbenchError

BYTES = 256
"""Different tokens that byte-level text has."""

_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"}


class DataError(WorkbenchError):
    """No usable text: the message names the folder or file and what to do."""


@dataclass(frozen=True, eq=False)
class ByteText:
    """Text as one row of bytes: uint8, shape (bytes,)."""

    source: str
    files: int
    data: torch.Tensor

    def batch(
        self, step: int, *, seq_len: int, batch_per_rank: int, dp_rank: int = 0, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets (the tokens one byte later), int64, each (batch_per_rank, seq_len), on the CPU.

        A row depends only on seed, step and its place in the global batch, so two ranks of two rows
        read what one rank of four reads.
        """
        places = self.data.numel() - seq_len
        if places < 1:
            raise DataError(
                f"{self.source}: {self.data.numel()} bytes of text are too few for data.seq_len {seq_len}: "
                f"give at least {seq_len + 1}, or a shorter sequence"
            )
        rows = range(dp_rank * batch_per_rank, (dp_rank + 1) * batch_per_rank)
        starts = [_draw(f"{seed}/{step}/{row}") % places for row in rows]
        both = torch.stack([self.data[s : s + seq_len + 1] for s in starts]).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def load_text(
    path: str | Path | None = None,
    *,
    seq_len: int = 1,
    vocab_size: int = BYTES,
    max_bytes: int = 4_000_000,
) -> ByteText:
    """Read up to `max_bytes` of a folder's text files, sorted by path; None reads the standard library's `*.py`.

    A NUL stands between two files: it ends a document. Hidden files and files that hold one are passed over.
    Raises DataError: a missing, unreadable or empty folder, an unreadable file, less text than one sequence of
    `seq_len` and its target, or a vocabulary smaller than the 256 bytes.
    """
    if vocab_size < BYTES:
        raise DataError(
            f"model.vocab_size {vocab_size} is less than the {BYTES} bytes of byte-level text: "
            f"set it to {BYTES} or more"
        )
    folder = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(
            f"data.path {str(folder)!r} {what}: give a folder of text files, or leave it out for the "
            f"sources of Python's standard library"
        )
    text = bytearray()
    files = 0
    for file in _files(folder, "*.py" if path is None else "*"):
        content = _read(file, max_bytes - len(text))
        if b"\0" in content or not content:
            continue
        text += (b"\0" if files else b"") + content
        files += 1
        if len(text) >= max_bytes:
            break
    if not files:
        raise DataError(
            f"data.path {str(folder)!r} holds no text: put text files in it, or leave data.path out"
        )
    if len(text) < seq_len + 1:
        raise DataError(
            f"data.path {str(folder)!r} holds {len(text)} bytes of text, and one sequence with its target "
            f"needs {seq_len + 1}: add text, or set data.seq_len to {len(text) - 1} or less"
        )
    return ByteText(str(folder), files, torch.frombuffer(text[:max_bytes], dtype=torch.uint8))


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    skipped = _SKIPPED if pattern == "*.py" else set()
    try:
        entries = sorted(folder.iterdir())
    except OSError as exc:
        raise DataError(f"{folder}: cannot be read: {exc.strerror}") from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, pattern)
        elif entry.is_file() and entry.match(pattern):
            yield entry


def _read(file: Path, most: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(most)
    except OSError as exc:
        raise DataError(
            f"{file}: cannot be read: {exc.strerror}; make it readable, or move it away"
        ) from None


def _draw(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
