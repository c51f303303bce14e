"""Strict reading of users' TOML: all problems at once, each with its file and key.

No torch here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import WorkbenchError
from workbench.recipe.files import regular


class Declared(BaseModel):
    """Base of all declarations: unknown keys are errors, types are not coerced, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Problem(NamedTuple):
    """One error to fix: a dotted key ("" for the whole file) and a sentence."""

    key: str
    message: str


class DeclarationError(WorkbenchError):
    """All problems of one file, one on each line, as `file: key: message`."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(": ".join(filter(None, (source, *p))) for p in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.problems)


M = TypeVar("M", bound=BaseModel)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a known name is close, else the known names."""
    known = list(known)
    begin = [candidate for candidate in known if candidate.startswith(name)]
    close = begin if len(begin) == 1 else get_close_matches(name, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def files_in(folder: Path, pattern: str, error: type[DeclarationError], missing: str) -> list[Path]:
    """A folder's files of a pattern, in order. Without the folder, `error` with the sentence `missing`."""
    if not folder.is_dir():
        raise error(str(folder), [Problem("", missing)])
    return sorted(folder.glob(pattern))


def find_file(
    name_or_path: str | os.PathLike[str], noun: str, file_of: Callable[[str], Path],
    names: Callable[[], list[str]], error: type[DeclarationError],
) -> Path:
    """The file of a `noun`: a path (anything with a "/" or ".toml"), or `file_of` one of the `names`."""
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text or isinstance(name_or_path, Path):
        return Path(text).expanduser()
    if text not in names():
        raise error(
            f"{noun} {text!r}", [Problem("", f"no {noun} of this name" + suggestion(text, names()))]
        )
    return file_of(text)


def read_toml(path: Path, error: type[DeclarationError]) -> dict[str, Any]:
    """The tables of a TOML file, lists as tuples; raises `error` where it cannot be read."""
    try:
        text = regular(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        return freeze(tomllib.loads(text))
    except FileNotFoundError:
        message = "no such file"
    except UnicodeDecodeError:
        message = "not UTF-8 text"
    except OSError as exc:
        message = f"cannot be read: {exc.strerror}"
    except (ValueError, RecursionError) as exc:  # tomllib's own, of thousands of digits or brackets
        message = f"not valid TOML: {exc}"
    raise error(str(path), [Problem("", message)])


def freeze(value: Any) -> Any:
    """The same value with lists as tuples, which strict models require."""
    if isinstance(value, Mapping):
        return {k: freeze(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return value


def check(model: type[M], data: Any, prefix: str = "") -> tuple[M | None, list[Problem]]:
    """Validate strictly: the instance, or None and every problem with its dotted key under `prefix`.

    Problems that the model itself raises as a DeclarationError are returned as well.
    """
    try:
        return model.model_validate(data, strict=True), []
    except DeclarationError as exc:
        return None, list(exc.problems)
    except ValidationError as exc:
        messages_at: dict[str, list[str]] = {}
        for err in exc.errors(include_url=False):
            key = _key(data, err)
            messages = messages_at.setdefault(".".join(filter(None, (prefix, key))), [])
            message = _sentence(err, model, key)
            if message not in messages:
                messages.append(message)
        return None, [Problem(key, " or ".join(messages)) for key, messages in messages_at.items()]


def annotation_at(model: type[BaseModel], key: str) -> Any:
    """The type declared at a dotted key, or None where there is no such key."""
    annotation: Any = model
    for part in key.split("."):
        inner = _model_in(annotation)
        if inner is None or part not in inner.model_fields:
            return None
        annotation = inner.model_fields[part].annotation
    return annotation


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model itself, or the one inside a union, a tuple or the values of a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


def _key(data: Any, err: Mapping[str, Any]) -> str:
    """The dotted key of pydantic's error: its location in the data, without the tags of a union's members."""
    key, value = "", data
    for part in err["loc"]:
        if isinstance(part, int):
            key, value = f"{key}[{part}]", value[part]
        elif isinstance(value, Mapping) and (part in value or err["type"] == "missing"):
            key, value = f"{key}.{part}" if key else part, value.get(part)
    return key


def shown(value: Any) -> str:
    """A value in the words of TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"text {value!r}"
    if isinstance(value, Mapping):
        return "a table"
    return str(list(value)) if isinstance(value, (tuple, list)) else str(value)


def _sentence(err: Mapping[str, Any], model: type[BaseModel], key: str) -> str:
    """pydantic's message with what was given; of an unknown key the nearest known one."""
    kind = err["type"]
    if kind == "extra_forbidden":
        table, _, name = re.sub(r"\[\d+\]", "", key).rpartition(".")
        inside = _model_in(annotation_at(model, table) if table else model)
        return "unknown key" + suggestion(name, inside.model_fields if inside else ())
    if kind == "value_error":
        return str(err["ctx"]["error"])
    message: str = err["msg"]
    return message if kind == "missing" else f"{message}, got {shown(err.get('input'))}"
