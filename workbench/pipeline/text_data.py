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
MOST_BYTES = 4_000_000
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"}


@dataclass(frozen=True, eq=False)
class ByteText:
    """Text as one row of bytes: uint8, shape (bytes,)."""

    data: torch.Tensor

    def batch(
        self, step: int, *, seq_len: int, batch_per_rank: int, dp_rank: int = 0, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets (the tokens one byte later), int64, each (batch_per_rank, seq_len), on the CPU.

        A row depends only on seed, step and its place in the global batch, so two ranks of two rows
        read what one rank of four reads.
        """
        places = self.data.numel() - seq_len
        starts = []
        for row in range(dp_rank * batch_per_rank, (dp_rank + 1) * batch_per_rank):
            digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
            starts.append(int.from_bytes(digest, "big") % places)
        both = torch.stack([self.data[start : start + seq_len + 1] for start in starts]).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def load_text(
    path: str | Path | None = None, *, seq_len: int = 1, vocab_size: int = BYTES
) -> ByteText:
    """Read up to MOST_BYTES of a folder's text files, sorted by path; None reads the standard library's `*.py`.

    A NUL stands between two files: it ends a document. Hidden files and files that hold one are passed over.
    Raises WorkbenchError: a missing, unreadable or empty folder, an unreadable file, less text than one sequence of
    `seq_len` and its target, or a vocabulary smaller than the 256 bytes.
    """
    if vocab_size < BYTES:
        raise WorkbenchError(
            f"model.vocab_size {vocab_size} is less than the {BYTES} bytes of byte-level text: "
            f"set it to {BYTES} or more"
        )
    folder = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    files, size = list[bytes](), 0
    try:
        for file in _files(folder, "*.py" if path is None else "*"):
            with file.open("rb") as stream:
                content = stream.read(MOST_BYTES - size)
            if content and b"\0" not in content:
                files.append(content)
                size += len(content) + 1
            if size >= MOST_BYTES:
                break
    except OSError as error:
        raise WorkbenchError(
            f"data.path {str(folder)!r}: {error.filename} cannot be read ({error.strerror}): give a "
            "folder of text files, or leave it out for the sources of Python's standard library"
        ) from None
    text = b"\0".join(files)
    if len(text) < seq_len + 1:
        raise WorkbenchError(
            f"data.path {str(folder)!r} holds {len(text)} bytes of text, and one sequence with its "
            f"target needs {seq_len + 1}: add text files, or set a shorter data.seq_len"
        )
    return ByteText(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    skipped = _SKIPPED if pattern == "*.py" else set()
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, pattern)
        elif entry.is_file() and entry.match(pattern):
            yield entry
