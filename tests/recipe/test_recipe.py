"""Recipes: strict, all problems at once, exact round trips, and no torch to read one."""

import json
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.recipe.recipe import RecipeError, diff_recipes, load_recipe, parse_recipe, recipe_names

ROOT = Path(__file__).parents[2]
BLOCKS = {"name": "r", "mesh": {"dp_shard": 2}, "passes": ["transformer_block_bucketing"]}


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """What a call is refused with, or nothing."""
    try:
        call(*args)
    except RecipeError as error:
        return str(error)
    return ""


def test_every_recipe_reads_and_round_trips() -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name and parse_recipe(tomllib.loads(recipe.to_toml()), "again") == recipe


def test_round_trip_of_every_kind_of_value(tmp_path: Path) -> None:
    text = """
name = "all"
strict = true
joint_passes = [{name = "activation_checkpointing", save = ["aten.mm.default"], every_nth_matmul = 3}]
passes = [{name = "transformer_block_bucketing", buckets = ["a", ["b", "c"]]}, "my_own_pass"]
model = {flavor = "1b", n_layers = 3, rope_theta = 1e4}
mesh = {dp_replicate = 2, dp_shard = 2, tp = 2}
data = {path = "/some where/\\"x\\"", seq_len = 128}
precision = {param = "bfloat16"}
training = {lr = 1e-5, clip = "off"}
expect = {no_effect = ["my_own_pass"]}
"""
    path = tmp_path / "all.toml"
    path.write_text(text)
    recipe = load_recipe(path)
    assert recipe.training.clip is None
    assert recipe.training.lr == 1e-5
    assert recipe.passes[0].options == {"buckets": ("a", ("b", "c"))} and recipe.pass_names[-1] == "my_own_pass"
    path.write_text(recipe.to_toml())
    again = load_recipe(path)
    assert again == recipe
    assert again.to_toml() == recipe.to_toml()
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_reading_lessons_and_a_recipe_of_declared_passes_imports_no_torch() -> None:
    code = ("import sys, workbench.recipe.recipe as r, workbench_lessons.course.lesson as l\n"
            "[l.load_lesson(n) for n in l.lesson_names()]\n"
            "r.load_recipe('llama3').override({'joint_passes': ['float8_matmul']})\n"
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_all_problems_at_once_word_for_word(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("""
nam = "x"
model = 3
passes = ["transformer_block_bucketng", {name = "overlap_collectives", horizon = -1, horizont = 2}]
mesh = {dp_shrad = 2, ep = "2"}
[training]
steps = 0
lr = "1e-3"
optimizer = "sgd"
deterministic = 1
""")
    assert error_of(load_recipe, path).splitlines() == [f"{path}: {line}" for line in (
        "name: Field required",
        "model: Input should be a valid dictionary or instance of ModelSpec, got 3",
        "mesh.ep: Input should be a valid integer, got text '2'",
        "mesh.dp_shrad: unknown key; did you mean 'dp_shard'?",
        "training.steps: Input should be greater than 0, got 0",
        "training.optimizer: Input should be 'adamw', got text 'sgd'",
        "training.lr: Input should be a valid number, got text '1e-3'",
        "training.deterministic: Input should be a valid boolean, got 1",
        "nam: unknown key; did you mean 'name'?",
        "passes[0]: unknown pass 'transformer_block_bucketng'; did you mean 'transformer_block_bucketing'?",
        "passes[1].horizon: Input should be greater than 0, got -1",
        "passes[1].horizont: unknown key; did you mean 'horizon'?",
    )]


def test_a_free_order_is_free_beside_another_mistake() -> None:
    swapped = ["graph_cleanup", "transformer_block_bucketing"]
    data = {"name": "x", "mesh": {"dp_shard": 2}, "passes": swapped, "training": {"lr": "x"}}
    assert len(error_of(parse_recipe, data, "r").splitlines()) == 2
    assert error_of(parse_recipe, {**data, "free_order": True}, "r").startswith("r: training.lr: ")


EXPERTS = {"family": "deepseek_v3"}
BAD: list[tuple[dict, list[str]]] = [
    ({"model": EXPERTS | {"n_groups": 3}, "mesh": {"dp_shard": 6, "ep": 3}}, [
        "mesh.ep: model.n_experts 8 does not divide by mesh.ep 3: change one of them",
        "model.n_groups: model.n_experts 8 does not divide by model.n_groups 3: change one of them"]),
    ({"model": EXPERTS, "mesh": {"dp_shard": 2, "tp": 2, "ep": 4}}, [
        "mesh.ep: dp_shard 2 does not divide by mesh.ep 4: change one of them"]),
    ({"model": EXPERTS, "mesh": {"dp_shard": 2, "tp": 2, "ep": 8, "ep_over": "dp_shard x tp"}}, [
        "mesh.ep: dp_shard x tp 4 does not divide by mesh.ep 8: change one of them"]),
    ({"model": EXPERTS | {"n_dense_layers": 3}, "mesh": {"dp_shard": 2, "ep": 2}}, [
        "mesh.ep: the model has no experts to place on 2 ranks: set it to 1"]),
    ({"model": EXPERTS | {"top_k": 5}}, [
        "model.top_k: 5 experts a token, and 2 of 4 groups hold 4: lower it, or raise model.top_groups"]),
    ({"model": EXPERTS | {"top_groups": 5, "qk_rope_dim": 15, "capacity_factor": 0.5, "n_dense_layers": 4}}, [
        "model.top_groups: 5 of 4 groups cannot be chosen: at most 4",
        "model.qk_rope_dim: 15 is odd, and rotary embeddings rotate pairs: make it even",
        "model.capacity_factor: 0.5 leaves too few rows even where the load is balanced: make it 1 or more",
        "model.n_dense_layers: 4 of 3 layers: lower it"]),
    ({"model": EXPERTS | {"n_kv_heads": 2}}, ["model: deepseek_v3 has no n_kv_heads: leave it out"]),
    ({"mesh": {}}, ["passes[0]: pass 'transformer_block_bucketing' needs FSDP, and the mesh has dp_shard 1 and "
                    "dp_replicate 1: set mesh.dp_shard to 2 or more, or drop the pass"]),
    ({"mesh": {"dp_shard": 2, "tp": 3}}, [
        "mesh.tp: model.n_heads 8 does not divide by mesh.tp 3: change one of them",
        "mesh.tp: model.n_kv_heads 4 does not divide by mesh.tp 3: change one of them",
        "data.seq_len: data.seq_len 64 does not divide by mesh.tp 3 (the sequence is split over the tp axis): "
        "change one of them"]),
    ({"model": {"n_heads": 6, "dim": 100}}, [
        "model.dim: model.dim 100 does not divide by model.n_heads 6: change one of them",
        "model.n_kv_heads: model.n_heads 6 does not divide by model.n_kv_heads 4: change one of them"]),
    ({"model": {"dim": 24}}, ["model.dim: a head has 3 channels (24 / 8), and rotary embeddings rotate pairs: "
                              "make it even"]),
    ({"model": {"flavor": "2b"}}, ["model.flavor: unknown flavor '2b': one of debug, 1b, 8b"]),
    ({"model": {"family": "gpt"}}, ["model.family: unknown family 'gpt': one of llama3, deepseek_v3, or register "
                                    "it with @register_model first"]),
    ({"data": {"seq_len": 4096}}, ["data.seq_len: 4096 is more than model.max_seq_len 2048: make it smaller, or that "
                                   "larger"]),
    ({"training": {"lr": float("nan")}}, ["training.lr: Input should be a finite number, got nan"]),
    ({"expect": {"no_effect": ["cse"]}}, ["expect.no_effect: pass 'cse' is not in the recipe: list it, or drop it "
                                          "here"]),
    ({"passes": "transformer_block_bucketing"}, ["passes: Input should be a valid tuple, got text "
                                                  "'transformer_block_bucketing'"]),
    ({"passes": [{"name": "transformer_block_bucketing", "buckets": [["a", 2]]}]},
     ["passes[0].buckets[0]: Input should be a valid string, got ['a', 2]",
      "passes[0].buckets[0][1]: Input should be a valid string, got 2"]),
    ({"joint_passes": ["chunked_loss"]}, [
        "joint_passes[0]: unknown pass 'chunked_loss'; did you mean "
        "'model.loss = \"workbench.lab.chunked_loss.loss:in_pieces:8\"'?"]),
    ({"format_version": 2}, ["format_version: this workbench reads version 1, and the file is version 2: update the "
                             "workbench"]),
    ({"data": {"path": ""}}, ["data.path: String should have at least 1 character, got text ''"]),
]


def test_bad_input_word_for_word() -> None:
    for change, lines in BAD:
        assert error_of(parse_recipe, BLOCKS | change, "f").splitlines() == [f"f: {line}" for line in lines], change


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    for content, message in ((b"name = \n", "not valid TOML: Invalid value (at line 1, column 8)"),
                             (b"name = '\xff'\n", "not UTF-8 text"), (b"\xef\xbb\xbfname = 'a'\n", "")):
        path.write_bytes(content)
        assert error_of(load_recipe, path) == (message and f"{path}: {message}"), content
    assert error_of(load_recipe, tmp_path / "none.toml") == f"{tmp_path}/none.toml: no such file"
    assert error_of(load_recipe, str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"


def test_names_that_are_not_there() -> None:
    assert error_of(load_recipe, "lama3") == "recipe 'lama3': no recipe of this name; did you mean 'llama3'?"
    assert error_of(load_recipe, "zzz").endswith(f"; known: {', '.join(recipe_names())}")


def test_override_reads_toml_values() -> None:
    recipe = parse_recipe(BLOCKS | {"mesh": {"dp_shard": 2, "tp": 4}}, "f")
    changed = recipe.override({
        "mesh.tp": "2", "training.lr": "1e-2", "training.deterministic": "false", "training.clip": None,
        "model.flavor": "1b", "data.path": "123", "name": "007", "about": "1\nx = 2", "data.seq_len": 32,
        "passes.transformer_block_bucketing.separate_gather_group": "false",
    })
    assert (changed.mesh.tp, changed.training.lr, changed.training.deterministic) == (2, 0.01, False)
    assert (changed.training.clip, changed.model.flavor, changed.data.path, changed.name) == (None, "1b", "123", "007")
    assert changed.about == "1\nx = 2"
    assert changed.passes[0].options == {"separate_gather_group": False}
    assert recipe.mesh.tp == 4, "the first recipe must not change"
    assert changed.override({"training.clip": "0.5"}).training.clip == 0.5
    assert changed.override({"passes": '["autobucketing_reordering"]'}).pass_names == ("autobucketing_reordering",)
    assert changed.override({"data.path": None}).data.path is None
    assert recipe.override({"about": '{"a": 1}'}).about == '{"a": 1}'  # text that reads as JSON stays text


REFUSED: list[tuple[dict, str]] = [
    ({"lr": 2}, "lr=2: lr: unknown key; did you mean 'training.lr'?"),
    ({"mesh.tp": "two"}, "mesh.tp=two: mesh.tp: Input should be a valid integer, got text 'two'"),
    ({"passes.autobucketing.x": 1}, "passes.autobucketing.x=1: passes.autobucketing.x: no pass "
                                    "'autobucketing' in passes; known: transformer_block_bucketing"),
    ({"passes.transformer_block_bucketing.bucket": 1},
     "passes.transformer_block_bucketing.bucket=1: passes.transformer_block_bucketing.bucket: pass "
     "'transformer_block_bucketing' has no option 'bucket'; did you mean 'buckets'?"),
    ({"passes.transformer_block_bucketing": 1},
     "passes.transformer_block_bucketing=1: passes.transformer_block_bucketing: name one option of the "
     "pass: passes.transformer_block_bucketing.OPTION"),
    ({"passes.transformer_block_bucketing.buckets": '{"a b": [1.5, true, "x\\ty"], "c": null}'},
     "passes.transformer_block_bucketing.buckets={\"a b\": [1.5, true, \"x\\ty\"], \"c\": null}: "
     "passes.transformer_block_bucketing.buckets: this value is JSON, and values are TOML: write "
     '{"a b" = [1.5, true, "x\\ty"]}'),
]


def test_override_refuses_word_for_word() -> None:
    for changes, message in REFUSED:
        assert error_of(parse_recipe(BLOCKS, "f").override, changes) == f"recipe 'r' with {message}", changes


def test_diff() -> None:
    a = parse_recipe(BLOCKS, "f")
    b = a.override({"mesh.dp_shard": 4, "data.path": "/x", "passes.transformer_block_bucketing.buckets": ["layers.0"]})
    assert diff_recipes(a, a) == []
    assert diff_recipes(a, b) == [
        ("mesh.dp_shard", 2, 4),
        ("data.path", None, "/x"),
        ("passes.transformer_block_bucketing.buckets", None, ("layers.0",)),
    ]


@pytest.mark.integration
def test_committed_schemas_are_current(tmp_path: Path) -> None:
    code = ("import sys, pathlib; from workbench_lessons.course.schemas import write_schemas; "
            "write_schemas(pathlib.Path(sys.argv[1]))")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    for path in tmp_path.iterdir():
        kept = (ROOT / "lessons" / path.name).read_text()
        assert kept == path.read_text(), f"lessons/{path.name} is stale: run `make schemas`"


@pytest.mark.integration
def test_the_schema_takes_the_recipes_and_no_others() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "lessons" / "recipe.schema.json").read_text())
    for path in (ROOT / "lessons" / "recipes").glob("*.toml"):
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    for bad in ({"name": "x", "mehs": {}}, {"name": "x", "passes": [{"name": "cudagraph_x", "x": 1}, 3]},
                {"name": "x", "passes": [{"name": "autobucketing_reordering", "foo": 2}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
