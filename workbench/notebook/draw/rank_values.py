"""A cell's result on each rank: once where the ranks agree, one after the other where they differ."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from workbench.notebook.draw.picture import Table
from workbench.world.cells import ADDRESS, Shard, Shown
from workbench.world.diagnosis import ranks_text

MOST = 8
"""The most entries, and the most values of one, that are shown."""
Groups = list[tuple[list[int], Any]]
"""The distinct values, each with the ranks that have it."""


class RankValues(Sequence[Any]):
    """The value of each rank, in rank order. Its text holds each distinct value once."""

    def __init__(self, ranks: Sequence[int], values: Sequence[Any]) -> None:
        self.ranks, self._values = tuple(ranks), list(values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def agree(self) -> bool:
        """Whether all ranks have the same value: tensors bit by bit."""
        return len(_groups(self.ranks, self._values)) == 1

    def __repr__(self) -> str:
        if self._repr_html_():
            return _titled(ranks_text(self.ranks), self._values[0])
        return "\n".join(_lines(self.ranks, self._values))

    def _repr_html_(self) -> str | None:
        """What every rank would show, such as a report, whose seconds differ and are not shown. Or None."""
        if not all(hasattr(value, "_repr_html_") for value in self._values):
            return None
        pages = {value._repr_html_() for value in self._values}
        return pages.pop() if len(pages) == 1 else None


def _lines(ranks: Sequence[int], values: Sequence[Any]) -> Iterator[str]:
    groups = _groups(ranks, values)
    if len(groups) == 1:
        yield _titled(ranks_text(ranks), values[0])
        return
    entries = [dict(_leaves(value, "")) for value in values]
    first, apart = entries[0], {}
    if all(rank.keys() == first.keys() for rank in entries):
        for path in filter(None, first):
            by_value = _groups(ranks, [rank[path] for rank in entries])
            if len(by_value) > 1:
                apart[path] = by_value
    if not apart:  # the structure differs, or the order of entries
        yield from _one_by_one("the ranks differ", groups)
        return
    for path in list(apart)[:MOST]:
        yield from _one_by_one(f"{path} differs", apart[path])
    hidden = f", {len(apart) - MOST} more differ" if len(apart) > MOST else ""
    yield f"{len(first) - len(apart)} of {len(first)} entries agree{hidden}"


def _one_by_one(title: str, groups: Groups) -> Iterator[str]:
    """What is known of the tensors, in columns, and then each distinct value."""
    shown = groups[:MOST]
    if all(_tensor(value) is not None for _, value in shown):
        facts = [_facts(value, shown[0][1]) for _, value in shown]
        rows = [(name, *(column[name] for column in facts)) for name in facts[0]]
        yield repr(Table(title, ("", *(ranks_text(ranks) for ranks, _ in shown)), tuple(rows)))
    else:
        yield title
    for ranks, value in shown:
        yield _titled(ranks_text(ranks), value.local if isinstance(value, Shard) else value)
    if all(isinstance(value, Shard) and set(value.placements) == {"R"} for _, value in groups):
        yield "Replicated on every mesh axis, and yet not equal: the ranks have parted."
    if groups[MOST:]:
        yield f"and {len(groups) - MOST} more values, all different"


def _titled(title: str, value: Any) -> str:
    text = ADDRESS.sub("", repr(value))
    return f"{title}:\n{text}" if "\n" in text else f"{title}: {text}"


def _facts(value: Any, first: Any) -> dict[str, str]:
    tensor = _tensor(value)
    facts = {"shape": str(list(tensor.shape)), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if isinstance(value, Shard):
        pairs = zip(value.axes, value.placements, strict=True)
        placement = ", ".join(f"{axis}: {placed}" for axis, placed in pairs)
        facts |= {"of": str(list(value.shape)), "placement": placement}
    return facts | {"differs": "" if value is first else _where(_tensor(first), tensor)}


def _where(a: torch.Tensor, b: torch.Tensor) -> str:
    """Where tensor `b` differs from `a`."""
    if a.shape != b.shape:
        return "in shape"
    if a.dtype != b.dtype:
        return "in dtype"
    apart = ~((a == b) | ((a != a) & (b != b)))
    places = apart.nonzero().tolist()
    if not places:
        return "in bits only: signed zeros or NaNs"
    at = tuple(places[0])
    values = f"{b[at].item():g}, not {a[at].item():g}"
    return f"in {len(places):,} of {a.numel():,}, first at {list(at)}: {values}"


def _tensor(value: Any) -> Any:
    """The values that a rank holds, if they are those of a dense tensor."""
    value = value.local if isinstance(value, Shard) else value
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    return value if dense else None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested dictionaries, lists, tuples, dataclasses and modules."""
    entries: dict[str, Any] = {}
    if isinstance(value, dict):
        entries = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        entries = {f"[{index}]": item for index, item in enumerate(value)}
    elif isinstance(value, torch.nn.Module):
        tensors = dict(value.named_parameters()) | dict(value.named_buffers())
        entries = {f".{name}": tensor for name, tensor in tensors.items()}
        entries[" as text"] = repr(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | Shard | Shown):
        names = [field.name for field in dataclasses.fields(value)]
        entries = {f".{name}": getattr(value, name) for name in names}
    if not entries:
        yield path, value
    for name, item in entries.items():
        yield from _leaves(item, path + name)


def _groups(ranks: Sequence[int], values: Sequence[Any]) -> Groups:
    """The distinct values, in order of their first rank."""
    groups: dict[Any, tuple[list[int], Any]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(_identity(value), ([], value))[0].append(rank)
    return list(groups.values())


def _identity(value: Any) -> Any:
    """A key that is equal for equal values: tensors by their bits, others by text and, if possible, pickle."""
    kind = type(value).__name__
    if isinstance(value, Shard):
        return kind, value.shape, value.placements, _identity(value.local)
    if (tensor := _tensor(value)) is not None:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu()
        data = plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return tuple(plain.shape), plain.dtype, data.numpy().tobytes()
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(_identity, value))
    leaves = list(_leaves(value, ""))
    if leaves[0][0]:
        return kind, tuple((path, _identity(leaf)) for path, leaf in leaves)
    text = repr(value)
    plain_text = ADDRESS.sub("", text)
    if plain_text != text:  # a pickle may hold the address, too
        return kind, plain_text
    try:
        return kind, text, pickle.dumps(value)
    except Exception:
        return kind, text
