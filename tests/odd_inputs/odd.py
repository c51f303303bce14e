"""What all tests of odd inputs share: how sound data are made odd. All are nightly.

The examples are new ones each time, and a failure prints the line that repeats it.
"""

import copy
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = 20.0
"""The limit of one example: none may hang."""


def holds(examples: int, check: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> None:
    """Run `check` on so many examples of the strategies."""
    limits = settings(max_examples=examples, database=None, deadline=SECONDS * 1e3, print_blob=True,
                      suppress_health_check=list(HealthCheck))
    limits(given(*strategies)(check))()


LETTERS = string.ascii_letters + string.digits + " _-.:,;=\"'[]{}#\\/\n\t\0é中\u202e"
JARGON = ("Traceback", "pydantic", "NoneType")
# hypothesis takes texts from the project's own files: a message may repeat what was given
words = st.text(LETTERS, max_size=12).filter(lambda word: not any(each in word for each in JARGON))
numbers = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30]),
    st.floats(), st.sampled_from([0.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")]))
scalars = st.one_of(st.booleans(), numbers, words)
json_values = st.recursive(st.one_of(st.none(), scalars), lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)), max_leaves=5)
toml_values = st.recursive(scalars, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)), max_leaves=5)
python_values = st.one_of(json_values, st.tuples(scalars), st.sets(st.integers(0, 3)), st.binary(max_size=4),
                          st.complex_numbers(), st.just(print), st.just(int), st.dates())


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside `data`."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*at, key)
        yield from places(value, (*at, key))


def edits(values: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[list[tuple[int, str, str, Any]]]:
    """Up to `most` edits for `edited`: where, what, a key and a value."""
    return st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["value", "value", "drop", "add", "twice"]), words,
                              values), min_size=1, max_size=most)


def edited(data: Any, changes: list[tuple[int, str, str, Any]]) -> Any:
    """`data` with values replaced, dropped, added or doubled."""
    data = copy.deepcopy(data)
    for where, what, key, value in changes:
        found = list(places(data))
        if not found:
            return data
        *way, last = found[where % len(found)]
        holder = data
        for step in way:
            holder = holder[step]
        if what == "drop":
            del holder[last]
        elif what == "value":
            holder[last] = value
        elif isinstance(holder, list):
            holder.append(holder[last] if what == "twice" else value)
        else:
            holder[key] = holder[last] if what == "twice" else value
    return data


def damaged(text: bytes) -> st.SearchStrategy[bytes]:
    """The bytes, cut, with some of them lost, replaced or doubled."""
    def damage(seed: int, kinds: list[str], more: bytes) -> bytes:
        rng, found = random.Random(seed), text
        for kind in kinds:
            a = rng.randrange(len(found) + 1)
            b = min(len(found), a + rng.randrange(40))
            found = {"cut": found[:a], "lose": found[:a] + found[b:], "other": found[:a] + more + found[b:],
                     "twice": found[:b] + found[a:]}[kind]
        return found

    return st.builds(damage, st.integers(0, 2**32), st.lists(st.sampled_from(["cut", "lose", "other", "twice"]),
                                                             min_size=1, max_size=3), st.binary(max_size=6))


def is_a_sentence(message: str, *named: str) -> None:
    """A message for a reader: it says what is wrong, names file or key, and shows nothing of how it was found."""
    assert message.strip() and all(name in message for name in named), (message, named)
    assert not [word for word in JARGON if word in message], message
