"""Arguments that commands share: numbers, and options of KEY=VALUE pairs."""

from __future__ import annotations

import argparse
from typing import Any


def seconds(text: str) -> float:
    """An argument's type: seconds, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def count(text: str) -> int:
    """An argument's type: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text!r}")
    return int(text)


class _Pairs(argparse.Action):
    """Collects KEY=VALUE options as pairs. Each key may be given once: of two values, one would be silently lost."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        pairs = list(getattr(namespace, self.dest))
        for key, value in values:
            if key in dict(pairs):
                raise argparse.ArgumentError(
                    self, f"{key} is given twice, as {dict(pairs)[key]!r} and {value!r}: keep one"
                )
            pairs.append((key, value))
        setattr(namespace, self.dest, pairs)


def add_pairs(parser: argparse.ArgumentParser, option: str, help: str, form: str) -> None:
    """Add an option of KEY=VALUE arguments, which may be repeated. form: how to write them, for help and errors."""
    def pair(text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise argparse.ArgumentTypeError(
                f"{text}: write {form}; put an argument without = before this option"
            )
        return key, value

    parser.add_argument(option, action=_Pairs, nargs="+", default=[], metavar=form.partition(",")[0], type=pair,
                        help=help)
