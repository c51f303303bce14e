"""Strict reading of what users declare in TOML: every problem at once, each with its file and key.

No torch here.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import WorkbenchError


class Declared(BaseModel):
    """Base of everything declared: unknown keys are errors, types are not coerced, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Problem(NamedTuple):
    """One thing to mend: a dotted key ("" for the whole file) and a sentence."""

    key: str
    message: str


class DeclarationError(WorkbenchError):
    """All problems of one file, one a line, as `file: key: message`."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(": ".join(filter(None, (source, *p))) for p in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.problems)


M = TypeVar("M", bound=BaseModel)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a known name is close, else the known names."""
    known = list(known)
    begin = [each for each in known if each.startswith(name)]
    close = begin if len(begin) == 1 else get_close_matches(name, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def read_toml(path: Path, error: type[DeclarationError]) -> dict[str, Any]:
    """The tables of a TOML file, lists as tuples; raises `error` where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        return freeze(tomllib.loads(text))
    except FileNotFoundError:
        message = "no such file"
    except UnicodeDecodeError:
        message = "not UTF-8 text"
    except OSError as exc:
        message = f"cannot be read: {exc.strerror}"
    except tomllib.TOMLDecodeError as exc:
        raise error(str(path), [_twice(text, str(exc)) or Problem("", f"not valid TOML: {exc}")]) from None
    raise error(str(path), [Problem("", message)])


_TWICE = re.compile(r"(Cannot overwrite a value|Cannot declare|Duplicate inline table key) ?(.*?)(?: twice)? "
                    r"\(at line (\d+),.*\)")
_ASSIGNED = re.compile(r"\s*([\w.\"'-]+(?:\s*\.\s*[\w.\"'-]+)*)\s*=")


def _twice(text: str, message: str) -> Problem | None:
    """Of a key that stands twice tomllib tells the position, where its value ends, and not always the name."""
    found = _TWICE.fullmatch(message)
    if found is None:
        return None
    what, name, line = found[1], ".".join(re.findall(r"'([^']*)'", found[2])), int(found[3])
    if what != "Cannot declare":
        lines = text.splitlines()[:line]
        line, key = next((i, m[1]) for i in range(line, 0, -1) if (m := _ASSIGNED.match(lines[i - 1])))
        table = next((m[1] for each in reversed(lines[:line]) if (m := re.match(r"\s*\[+([^\]]+)\]", each))), "")
        name = ".".join(filter(None, (table.strip(), key, name)))
    return Problem(name, f"stands there twice, the second time in line {line}: keep one")


def freeze(value: Any) -> Any:
    """The same value with lists as tuples, which is what strict models take."""
    if isinstance(value, Mapping):
        return {k: freeze(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return value


def check(model: type[M], data: Any, prefix: str = "") -> tuple[M | None, list[Problem]]:
    """Validate strictly: the instance, or None and every problem with its dotted key under `prefix`."""
    try:
        return model.model_validate(data, strict=True), []
    except ValidationError as exc:
        found: dict[str, list[str]] = {}
        for err in exc.errors(include_url=False):
            key, fields = _walk(model, err["loc"])
            messages = found.setdefault(".".join(filter(None, (prefix, key))), [])
            message = _sentence(err, fields)
            if message not in messages:
                messages.append(message)
        return None, [Problem(key, _either(messages)) for key, messages in found.items()]


def _either(messages: list[str]) -> str:
    """One sentence for the members of a union: "expected text or a list, got 1"."""
    parts = [m.removeprefix("expected ").rpartition(", got ") for m in messages]
    if len({got for *_, got in parts}) == 1 and all(m.startswith("expected ") for m in messages):
        return f"expected {' or '.join(what for what, *_ in parts)}, got {parts[0][2]}"
    return " or ".join(messages)


def fields_of(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def annotation_at(model: type[BaseModel], key: str) -> Any:
    """The type declared at a dotted key, or None where there is no such key."""
    here: Any = model
    for part in key.split("."):
        model_here = _model_in(here)
        if model_here is None or part not in model_here.model_fields:
            return None
        here = model_here.model_fields[part].annotation
    return here


def members(annotation: Any) -> list[Any]:
    """The alternatives of a union without None; the type itself where it is none."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [a for a in get_args(annotation) if a is not type(None)]
    return [annotation]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    return next((a for a in members(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _walk(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """The dotted key of a pydantic location, without its union tags, and the keys known beside it."""
    here: Any = model
    key, known = "", []
    for part in loc:
        if len(members(here)) > 1:  # the part is the tag of a union's member
            here = next((a for a in members(here) if _tag(a) == part), None)
        elif isinstance(part, int):
            key += f"[{part}]"
            here = (get_args(here) or (None,))[0]
        else:
            key += ("." if key else "") + part
            inner = _model_in(here)
            known = fields_of(inner) if inner else []
            here = inner.model_fields[part].annotation if inner and part in inner.model_fields else None
        if here is not None and len(members(here)) == 1:
            here = members(here)[0]
    return key, known


def _tag(annotation: Any) -> str:
    return str(annotation) if get_args(annotation) else getattr(annotation, "__name__", str(annotation))


_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "string_type": "text",
    "bool_type": "true or false", "tuple_type": "a list", "list_type": "a list", "dict_type": "a table",
    "model_type": "a table", "model_attributes_type": "a table", "finite_number": "a finite number",
}


def shown(value: Any) -> str:
    """A value as its TOML author knows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"text {value!r}"
    if isinstance(value, Mapping):
        return "a table"
    return str(list(value)) if isinstance(value, (tuple, list)) else str(value)


def _sentence(err: Mapping[str, Any], known: list[str]) -> str:
    kind, got, ctx = err["type"], err.get("input"), err.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + suggestion(str(err["loc"][-1]), known)
    if kind == "missing":
        return "this key is required"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {shown(got)}"
    if kind == "literal_error":
        return f"expected {ctx['expected']}, got {shown(got)}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    bounds = {"greater_than": "more than", "greater_than_equal": "at least",
              "less_than": "less than", "less_than_equal": "at most"}
    if kind in bounds:
        return f"must be {bounds[kind]} {next(iter(ctx.values()))}, got {got}"
    if kind == "value_error":
        return str(ctx["error"])
    return str(err["msg"])
