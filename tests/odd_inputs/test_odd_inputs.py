"""Odd recipes, overrides, machine files and traces: each is used, or refused by name in a sentence.

The examples are new ones each time, and a failure prints the line that repeats it.
"""

import copy
import functools
import gzip
import json
import operator
import string
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench import WorkbenchError, build, fake_world
from workbench.cli import main
from workbench.lab.traces import read_order
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.edits import all_keys
from workbench.recipe.recipe import Recipe, diff_recipes, load_recipe, parse_recipe, recipe_names, recipes_dir
from workbench.torch_api.devices.profile import MACHINES, load_profile, measured_spec

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def holds(examples: int, check: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> None:
    """Run `check` on so many examples of the strategies; none may take 20 s."""
    limits = settings(max_examples=examples, database=None, deadline=20_000, print_blob=True,
                      suppress_health_check=list(HealthCheck))
    limits(given(*strategies)(check))()


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3)
                        | st.dictionaries(words, inner, max_size=3), max_leaves=5)


LETTERS = string.ascii_letters + string.digits + " _-.:,;=\"'[]{}#\\/\n\t\0é中\u202e"
JARGON = ("Traceback", "pydantic", "NoneType")
# hypothesis takes texts from the project's own files: a message may repeat what was given
words = st.text(LETTERS, max_size=12).filter(lambda word: not any(each in word for each in JARGON))
numbers = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30]),
    st.floats(), st.sampled_from([0.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")]))
scalars = st.one_of(st.booleans(), numbers, words)
toml_values = nested(scalars)
json_values = nested(st.none() | scalars)
python_values = st.one_of(json_values, st.tuples(scalars), st.sets(st.integers(0, 3)), st.binary(max_size=4),
                          st.complex_numbers(), st.just(print), st.just(int), st.dates())


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside `data`."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*at, key)
        yield from places(value, (*at, key))


def edited(data: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`data` with up to three values of it replaced, dropped or added."""
    def edit(changes: list[tuple[int, str, str, Any]]) -> Any:
        found = copy.deepcopy(data)
        for where, what, key, value in changes:
            ways = list(places(found))
            if not ways:
                break
            *way, last = ways[where % len(ways)]
            holder = functools.reduce(operator.getitem, way, found)
            if what == "drop":
                del holder[last]
            elif what == "value":
                holder[last] = value
            elif isinstance(holder, list):
                holder.append(value)
            else:
                holder[key] = value
        return found

    kinds = st.sampled_from(["value", "value", "drop", "add"])
    changes = st.tuples(st.integers(0, 10**6), kinds, words, values)
    return st.lists(changes, min_size=1, max_size=3).map(edit)


def damaged(text: bytes) -> st.SearchStrategy[bytes]:
    """The bytes, cut at a place, or with some of them lost, replaced or doubled there."""
    lost = st.integers(-40, 40) | st.just(len(text))
    return st.builds(lambda at, size, more: text[:at] + more + text[max(0, at + size):],
                     st.integers(0, len(text)), lost, st.binary(max_size=6))


def odd_json(data: Any) -> st.SearchStrategy[bytes]:
    """JSON text of `data` with odd values in it, or damaged."""
    return st.one_of(edited(data, json_values).map(lambda value: json.dumps(value).encode()),
                     damaged(json.dumps(data, indent=1).encode()), st.sampled_from(LARGE_JSON))


def is_a_sentence(message: str, *named: str) -> None:
    """A message for a reader: it says what is wrong, names file or key, and shows nothing of how it was found."""
    assert message.strip() and all(name in message for name in named), (message, named)
    assert not [word for word in JARGON if word in message], message


def refused(act: Callable[[], Any], *named: str) -> Any:
    """What `act` gives; None where it refuses."""
    try:
        return act()
    except WorkbenchError as error:
        is_a_sentence(str(error), *named)
        return None


FILES = {name: (recipes_dir() / f"{name}.toml").read_bytes() for name in recipe_names()}
names = st.sampled_from(sorted(FILES))
OPTIONS = [f"{where}.{name}.{option}" for where in ("passes", "joint_passes")
           for name, contract in CONTRACTS.items() for option in contract.options.model_fields]
keys = st.one_of(st.sampled_from(all_keys(Recipe)), st.sampled_from(OPTIONS), words,
                 st.sampled_from(["", ".", "model", "model.", ".dim", "model.dim.x", "passes", "passes.", "mesh.tp.0"]))
LARGE_TOML = [b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000, b"a." * 5000 + b"b = 1",
              b'name = "' + b"x" * 10**6 + b'"']
LARGE_JSON = [b"[" * 99_999, b'{"a":' * 99_999, b"9" * 5000, b"", b"null", b"3", b"\xff\xfe", b"[]", b"{}"]


def same_again(recipe: Recipe) -> None:
    again = parse_recipe(tomllib.loads(recipe.to_toml()), "again")
    assert again == recipe and diff_recipes(again, recipe) == []


def test_a_recipe_with_odd_values_or_damages_is_read_and_can_be_written_again_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"

    def check(text: bytes) -> None:
        path.write_bytes(text)
        recipe = refused(lambda: load_recipe(path), str(path))
        if recipe is not None:
            same_again(recipe)

    tables = {name: tomllib.loads(text.decode()) for name, text in FILES.items()}
    odd = names.flatmap(lambda name: edited(tables[name], toml_values))
    holds(5000, check, st.one_of(odd.map(lambda table: tomli_w.dumps(table).encode()), st.binary(max_size=60),
                                 names.flatmap(lambda name: damaged(FILES[name]))))
    for text in LARGE_TOML:
        check(text)


def test_an_override_is_taken_or_refused_with_its_key() -> None:
    def check(name: str, changes: dict[str, Any]) -> None:
        recipe = refused(lambda: load_recipe(name).override(changes), name)
        if recipe is not None:
            same_again(recipe)

    holds(5000, check, names, st.dictionaries(keys, words | python_values, min_size=1, max_size=3))


def test_a_calibration_is_a_device_or_is_refused(tmp_path: Path) -> None:
    """Whatever the file says, times are positive numbers."""
    data, path = json.loads((MACHINES / "h200x2.json").read_text()), tmp_path / "machine.json"
    few = {**data, "matmuls": data["matmuls"][:9], "attentions": data["attentions"][:4], "moves": data["moves"][:3],
           "collectives": data["collectives"][:4]}  # so that an edit of the other fields is as likely

    def check(text: bytes) -> None:
        path.write_bytes(text)
        device = refused(lambda: measured_spec("machine", load_profile(path)), "machine")
        if device is not None:
            times = [device.product_ms(2e9, 1024, 1000, torch.bfloat16), device.moving_ms(12_345.0),
                     device.attention_ms(1e9, 512, 64, True, torch.bfloat16),
                     device.sending_ms("all_gather", 2, 9)]
            assert all(0 < ms < float("inf") for ms in times) and device.trust

    holds(5000, check, odd_json(few))


def test_a_valid_recipe_with_odd_sizes_builds_or_is_refused() -> None:
    def made(name: str, changes: dict[str, int]) -> None:
        recipe = load_recipe(name).override({"model.n_layers": 1, "data.batch_per_rank": 1, **changes})
        with fake_world(recipe.mesh.world_size) as world:
            build(recipe, world)

    sizes = ("model.dim", "model.n_heads", "model.n_kv_heads", "model.vocab_size", "model.ffn_dim", "data.seq_len",
             "model.max_seq_len", "mesh.dp_shard", "mesh.dp_replicate", "mesh.tp", "training.steps")
    holds(150, lambda name, changes: refused(lambda: made(name, changes)),
          st.sampled_from(["llama3", "llama3_fsdp", "llama3_tp", "llama3_block_bucketing", "tour"]),
          st.dictionaries(st.sampled_from(sizes), st.integers(1, 9)))


def _trace() -> dict[str, Any]:
    parts = [("kernel", "gemm", 0, 50, {"device": 0, "stream": 7, "correlation": 1}),
             ("cuda_runtime", "cudaLaunchKernel", -9, 2, {"correlation": 1}),
             ("kernel", "ncclDevKernel_AllGather", 40, 30, {
                 "device": 0, "stream": 20, "correlation": 2, "Collective name": "all_gather", "In msg nelems": 64,
                 "dtype": "Float", "Group size": 2}),
             ("cuda_runtime", "cudaGraphLaunch", -5, 2, {"correlation": 2}),
             ("gpu_memcpy", "Memcpy PtoP", 80, 9, {"device": 0, "stream": 21, "correlation": 3}),
             ("user_annotation", "ProfilerStep#1", -10, 60, {}), ("user_annotation", "ProfilerStep#2", 51, 60, {})]
    return {"traceEvents": [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 1, "args": a}
                            for cat, name, ts, dur, a in parts],
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "distributedInfo": {"rank": 0, "world_size": 2}}


def test_an_odd_trace_is_read_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "order.json"

    def check(text: bytes, name: str, options: list[str]) -> None:
        out.unlink(missing_ok=True)
        file = tmp_path / name
        file.write_bytes(text)
        capsys.readouterr()
        status = main(["order", str(file), "--json", str(out), *options])
        printed, said = capsys.readouterr()
        assert status in (0, 2) and out.exists() == (status == 0)
        if status:
            is_a_sentence(said, str(file))
        else:
            steps = json.loads(out.read_text())["steps"]
            assert steps and "traced on" in printed
            order = read_order([file], *options[1:])
            assert all(order.timeline(i).spans is not None for i in range(len(steps)))

    text = odd_json(_trace())
    packed = st.one_of(text.map(gzip.compress), damaged(gzip.compress(json.dumps(_trace()).encode())), text)
    options = st.sampled_from([[], [], ["--step", "1"], ["--step", "x"]])
    holds(5000, check, text, st.just("trace.json"), options)
    holds(5000, check, packed, st.just("trace.json.gz"), options)
