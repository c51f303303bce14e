"""Changes a recipe's plain data by dotted key, and flattens it for comparisons. No torch here."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from workbench.errors import WorkbenchError
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.files import json_of
from workbench.recipe.strict_toml import Problem, annotation_at, shown, suggestion


def parse_value(text: str) -> Any:
    """Reads text as a TOML value (`1e-3`, `true`, `["a"]`); other text stays text. WorkbenchError for JSON."""
    if "\n" in text:
        return text
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        _refuse_json(text)
        return text
    return table["value"] if set(table) == {"value"} else text


def _refuse_json(text: str) -> None:
    try:
        value = json_of(text)
    except ValueError:
        return
    if isinstance(value, list | dict):
        raise WorkbenchError(f"this value is JSON, and values are TOML: write {_toml(value)}")


def _toml(value: Any) -> str:
    """A JSON value as one line of TOML, without its nulls, which TOML does not have."""
    if isinstance(value, dict):
        keys = {
            k if re.fullmatch(r"[\w-]+", k, re.ASCII) else json.dumps(k): v
            for k, v in value.items()
        }
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in keys.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    return json.dumps(value)


def apply_overrides(
    model: type[BaseModel], data: dict[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """A copy of `data` with the changes applied, and a problem for each key that does not exist."""
    data = copy.deepcopy(data)
    problems: list[Problem] = []
    for key, value in changes.items():
        head, *rest = key.split(".")
        try:
            if head in ("joint_passes", "passes") and rest:
                problem = _set_pass_option(data, head, rest, value)
            else:
                problem = _set_key(model, data, key, value)
        except WorkbenchError as error:
            problem = str(error)
        if problem:
            problems.append(Problem(key, problem))
    return data, problems


def _set_key(model: type[BaseModel], data: dict[str, Any], key: str, value: Any) -> str:
    annotation = annotation_at(model, key)
    if annotation is None:
        known = all_keys(model)
        same = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        return "unknown key" + (f"; did you mean {same[0]!r}?" if same else suggestion(key, known))
    alternatives = (
        get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    )
    takes_text = any(a is str or get_origin(a) is Literal for a in alternatives)
    if isinstance(value, str) and (not takes_text or value.lstrip().startswith(("'", '"'))):
        value = parse_value(value)
    *tables, last = key.split(".")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            return f"{table} is set to {shown(data)}, which has no keys: set one of the two"
    if value is None and key == "training.clip":
        value = "off"
    if value is None:
        data.pop(last, None)
    elif isinstance(value, Mapping) and isinstance(data.get(last), dict):
        data[last] = dict(value)
    else:
        data[last] = value
    return ""


def _set_pass_option(data: dict[str, Any], where: str, rest: list[str], value: Any) -> str:
    name, *option = rest
    current = data.get(where, [])
    if not isinstance(current, list | tuple):
        return f"{where} is set to {shown(current)}, and not to a list of passes"
    listed = data[where] = list(current)
    names = [str(p.get("name")) if isinstance(p, Mapping) else str(p) for p in listed]
    if name not in names:
        return f"no pass {name!r} in {where}" + suggestion(name, names)
    if len(option) != 1:
        return f"name one option of the pass: {where}.{name}.OPTION"
    contract = CONTRACTS.get(name)
    if contract is not None and option[0] not in contract.options.model_fields:
        return f"pass {name!r} has no option {option[0]!r}" + suggestion(
            option[0], contract.options.model_fields
        )
    i = names.index(name)
    table = dict(listed[i]) if isinstance(listed[i], Mapping) else {"name": name}
    if value is None:
        table.pop(option[0], None)
    else:
        table[option[0]] = parse_value(value) if isinstance(value, str) else value
    listed[i] = table
    return ""


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a model that holds a value."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += all_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value; a list of passes becomes their names, and `passes.NAME.OPTION` for each option."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if key in ("joint_passes", "passes") and not prefix:
            flat[dotted] = [p if isinstance(p, str) else p["name"] for p in value]
            for p in value:
                if not isinstance(p, str):
                    flat.update(
                        {f"{dotted}.{p['name']}.{k}": v for k, v in p.items() if k != "name"}
                    )
        elif isinstance(value, Mapping):
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat
