"""A cell's result on each rank: once where the ranks agree, side by side where they differ."""

from __future__ import annotations

import dataclasses
import html
import pickle
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import torch

from workbench.notebook.draw.picture import Table
from workbench.world.cells import ADDRESS, Shard, Shown
from workbench.world.diagnosis import ranks_text

MAX_LEAVES = 8
MAX_GROUPS = 8


class RankValues(Sequence[Any]):
    """The value of each rank, in rank order. Its text and its HTML hold each distinct value once."""

    def __init__(self, ranks: Sequence[int], values: Sequence[Any]) -> None:
        self.ranks, self._values = tuple(ranks), list(values)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def agree(self) -> bool:
        """Whether all ranks have the same value: tensors bit by bit."""
        return len(_groups(self.ranks, self._values)) == 1

    def __repr__(self) -> str:
        return "\n".join(str(part) for part in self._parts)

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in self._parts)

    @cached_property
    def _parts(self) -> list[_Once | _SideBySide]:
        return list(self._compared())  # once, for the text and the HTML

    def _compared(self) -> Iterator[_Once | _SideBySide]:
        if self.agree:
            yield _Once(ranks_text(self.ranks), self._values[0])
            return
        leaves = [dict(_leaves(value, "")) for value in self._values]
        paths = list(leaves[0]) if all(own.keys() == leaves[0].keys() for own in leaves) else [""]
        apart = [
            path
            for path in paths
            if path and len(_groups(self.ranks, [own[path] for own in leaves])) > 1
        ]
        if apart:  # none if only the order of the entries or their containers differ
            for path in apart[:MAX_LEAVES]:
                yield _SideBySide(
                    f"{path} differs", _groups(self.ranks, [own[path] for own in leaves])
                )
            hidden, equal = len(apart[MAX_LEAVES:]), len(leaves[0]) - len(apart)
            yield _Once(
                f"{equal} of {len(leaves[0])} entries agree"
                + (f", {hidden} more differ" if hidden else "")
            )
        else:
            yield _SideBySide("the ranks differ", _groups(self.ranks, self._values))


class _Once:
    """A title, and a value under it if there is one."""

    def __init__(self, title: str, *value: Any) -> None:
        self.title, self.text = title, "".join(map(_text, value))

    def __str__(self) -> str:
        if not self.text:
            return self.title
        return f"{self.title}:{chr(10) if chr(10) in self.text else ' '}{self.text}"

    def _repr_html_(self) -> str:
        return f"<div><b>{html.escape(self.title)}</b></div>" + (
            _pre(self.text) if self.text else ""
        )


class _SideBySide:
    """A value that differs between ranks: facts of the tensors, and each distinct value, in columns."""

    def __init__(self, title: str, groups: Sequence[tuple[list[int], Any]]) -> None:
        shown = groups[:MAX_GROUPS]
        self.title, self.names = title, [ranks_text(own) for own, _ in shown]
        self.values = [
            _text(value.local if isinstance(value, Shard) else value) for _, value in shown
        ]
        self.facts: list[tuple[str, ...]] = []
        if all(_tensor(value) is not None for _, value in shown):
            facts = [
                _facts(value, shown[0][1] if index else None)
                for index, (_, value) in enumerate(shown)
            ]
            self.facts = [(name, *(own[name] for own in facts)) for name in facts[0]]
        self.notes = list(_suspicious(groups))
        if groups[MAX_GROUPS:]:
            self.notes.append(f"and {len(groups) - MAX_GROUPS} more values, all different")

    def __str__(self) -> str:
        head = (
            repr(Table(self.title, ("", *self.names), tuple(self.facts)))
            if self.facts
            else self.title
        )
        values = [f"{name}:{chr(10) if chr(10) in text else ' '}{text}"
                  for name, text in zip(self.names, self.values, strict=True)]
        return "\n".join([head, *values, *self.notes])

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            style = "text-align:left;vertical-align:top"
            return (
                "<tr>"
                + "".join(f"<{tag} style='{style}'>{cell}</{tag}>" for cell in cells)
                + "</tr>"
            )

        rows = [row("td", [html.escape(cell) for cell in fact]) for fact in self.facts]
        rows.append(row("td", ["value" if self.facts else "", *map(_pre, self.values)]))
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return (
            f"<b>{html.escape(self.title)}</b><div style='overflow-x:auto'><table><thead>"
            f"{row('th', ['', *self.names])}</thead><tbody>{''.join(rows)}</tbody></table></div>{notes}"
        )


def _text(value: Any) -> str:
    return ADDRESS.sub("", repr(value))


def _pre(text: str) -> str:
    return f"<pre style='margin:0 0 0.6em 0;background:none'>{html.escape(text)}</pre>"


def _facts(value: Any, first: Any) -> dict[str, str]:
    tensor = _tensor(value)
    assert tensor is not None
    facts = {"shape": str(list(tensor.shape)), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if isinstance(value, Shard):
        axes = zip(value.axes, value.placements, strict=True)
        facts |= {
            "of": str(list(value.shape)),
            "placement": ", ".join(f"{axis}: {placed}" for axis, placed in axes),
        }
    return facts | {"differs": "" if first is None else _where(_tensor(first), tensor)}


def _where(a: Any, b: Any) -> str:
    """Where tensor `b` differs from `a`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return "in shape" if a.shape != b.shape else "in dtype"
    if a.is_meta or b.is_meta:
        return "in strides" if a.is_meta and b.is_meta else "one has no values"
    apart = ~((a == b) | ((a != a) & (b != b)))
    count = int(apart.sum())
    if not count:
        return "in bits only: signed zeros or NaNs"
    at = apart.nonzero()[0].tolist()
    values = "" if a.is_complex() else f": {b[tuple(at)].item():g}, not {a[tuple(at)].item():g}"
    return f"in {count:,} of {a.numel():,}, first at {at}{values}"


def _suspicious(groups: Sequence[tuple[list[int], Any]]) -> Iterator[str]:
    values = [value for _, value in groups]
    if all(isinstance(value, Shard) and set(value.placements) == {"R"} for value in values):
        yield "Replicated on every mesh axis, and yet not equal: the ranks have parted."


def _tensor(value: Any) -> Any:
    value = value.local if isinstance(value, Shard) else value
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested dictionaries, lists, tuples, dataclasses and modules' parameters."""
    if isinstance(value, dict) and value:
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, torch.nn.Module):
        items = [
            (f"{path}.{name}", own)
            for name, own in [*value.named_parameters(), *value.named_buffers()]
        ]
        items.append((path or "its text", repr(value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, Shard, Shown)):
        items = [
            (f"{path}.{own.name}", getattr(value, own.name)) for own in dataclasses.fields(value)
        ]
    else:
        yield path, value
        return
    for name, item in items:
        yield from _leaves(item, name)


def _groups(ranks: Sequence[int], values: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """The distinct values, each with the ranks that have it, in order of their first rank."""
    groups: dict[Any, tuple[list[int], Any]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(_identity(value), ([], value))[0].append(rank)
    return list(groups.values())


def _identity(value: Any) -> Any:
    """A key that is equal for equal values: tensors by their bits, others by text and, if possible, pickle."""
    if isinstance(value, Shard):
        return "shard", value.shape, value.placements, _identity(value.local)
    if (tensor := _tensor(value)) is not None:
        if tensor.is_meta:
            return "meta", tuple(tensor.shape), tensor.stride(), tensor.dtype
        whole = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
        data = whole.reshape(-1).view(torch.uint8)
        return "tensor", tuple(tensor.shape), tensor.dtype, data.numpy().tobytes()
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(_identity, value))
    leaves = list(_leaves(value, ""))
    if [path for path, _ in leaves] != [""]:
        return type(value).__name__, tuple((path, _identity(leaf)) for path, leaf in leaves)
    text = repr(value)
    if (told := ADDRESS.sub("", text)) != text:
        return type(value).__name__, told
    try:
        return type(value).__name__, told, pickle.dumps(value)
    except Exception:
        return type(value).__name__, told
