"""Weights from a folder of safetensors: bitwise the tensors there, read in slices, computing what transformers does."""

from __future__ import annotations

import json
import os
import sys

import cloudpickle
import pytest
import torch
from on_ranks import small
from safetensors.torch import load_file, save_file

from workbench import Recipe, WorkbenchError, save_weights
from workbench.authoring import hugging_face
from workbench.authoring import read_weights as weights
from workbench.authoring.author import author
from workbench.authoring.read_weights import CONFIG, INDEX
from workbench.authoring.write_weights import ALONE
from workbench.recipe.recipe import RecipeError
from workbench.torch_api.restoring import shard_of
from workbench.world.fake import fake_world
from workbench.world.mesh import World, current_world
from workbench.world.simulated import shards, simulated_world

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ALONE_HERE = World("gloo", 1, 0, torch.device("cpu"))
SIZES = {"n_layers": 2, "vocab_size": 256, "dim": 32, "ffn_dim": 48}


def llama(mesh, folder=None, **changes):
    return small(mesh).override({**{f"model.{key}": value for key, value in SIZES.items()}, "model.n_heads": 4,
                                 "model.n_kv_heads": 2, **({"model.weights": str(folder)} if folder else {}),
                                 **changes})


def deepseek(mesh, folder=None, **changes):
    given = {"family": "deepseek_v3", **SIZES, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_dim": 8,
             "expert_dim": 16, "dispatch": "dropless"}
    found = Recipe(name="small", mesh=mesh, model=given, data={"seq_len": 16})
    return found.override({**({"model.weights": str(folder)} if folder else {}), **changes})


RECIPES = {"llama3": llama, "deepseek_v3": deepseek}


def written(recipe, folder, file_bytes=10**9):
    """Write a model whose router biases are not zero."""
    authored = author(recipe, ALONE_HERE)
    with torch.no_grad():
        for name, buffer in authored.module.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(torch.arange(len(buffer)) / 100)
    save_weights(authored, folder, file_bytes=file_bytes)
    return authored


def theirs(folder, family):
    """The model that transformers reads from a folder."""
    transformers = pytest.importorskip("transformers")
    kind = {"llama3": transformers.LlamaForCausalLM, "deepseek_v3": transformers.DeepseekV3ForCausalLM}[family]
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("family", RECIPES)
def test_transformers_computes_the_same_loss_from_what_we_write(tmp_path, family):
    authored = written(RECIPES[family]({}), tmp_path)
    tokens, targets = authored.example_batch()
    with torch.no_grad():
        ours = authored.module(tokens, targets)
        logits = theirs(tmp_path, family)(tokens).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", RECIPES)
def test_what_transformers_writes_gives_its_loss_here(tmp_path, family):
    written(RECIPES[family]({}), tmp_path / "first")
    model = theirs(tmp_path / "first", family)
    with torch.no_grad():  # other values than ours, large enough that the order of rows matters
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "second")
    authored = author(RECIPES[family]({}, tmp_path / "second"), ALONE_HERE)
    tokens, targets = authored.example_batch()
    with torch.no_grad():
        ours, logits = authored.module(tokens, targets), model(tokens).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=0)


def test_rows_in_the_other_order_change_the_loss(tmp_path, monkeypatch):
    """The fault that the two tests above must see."""
    authored = written(deepseek({}), tmp_path)
    monkeypatch.setattr(hugging_face, "_order", lambda *_: None)
    with torch.no_grad():
        for parameter in authored.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_weights(authored, tmp_path / "wrong")
    tokens, targets = authored.example_batch()
    with torch.no_grad():
        ours, logits = authored.module(tokens, targets), theirs(tmp_path / "wrong", "deepseek_v3")(tokens).logits
    wrong = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    assert not torch.isclose(ours, wrong, rtol=1e-5, atol=0)


def loaded(recipe, whole):
    """(names whose shard is not bitwise the part of the whole, numbers read, numbers held)."""
    read, amounts = weights._read, []

    def counting(piece, bounds):
        found = read(piece, bounds)
        amounts.append(found.numel())
        return found

    weights._read = counting
    try:
        authored = author(recipe, current_world())
    finally:
        weights._read = read
    mine = authored.module.state_dict()
    odd = [n for n, v in mine.items()
           if not torch.equal(v.full_tensor() if hasattr(v, "full_tensor") else v, whole[n])]
    return odd, sum(amounts), sum(shard_of(v).numel() for v in mine.values())


MESHES = {
    "llama3 dp_shard 2": ("llama3", {"dp_shard": 2}, 1.0),
    "llama3 tp 2": ("llama3", {"tp": 2}, 1.0),
    "deepseek_v3 ep 2": ("deepseek_v3", {"dp_shard": 2, "ep": 2}, 1.01),
    "deepseek_v3 tp 2": ("deepseek_v3", {"tp": 2}, 1.01),
}


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.nightly if case == "deepseek_v3 tp 2" else ()) for case in MESHES])
def test_two_ranks_read_only_what_they_hold(pool2, tmp_path, case):
    family, mesh, most = MESHES[case]
    recipe = RECIPES[family](mesh)
    whole = dict(written(RECIPES[family]({}), tmp_path, file_bytes=20_000).module.state_dict())
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for odd, read, held in pool2.run(loaded, recipe.override({"model.weights": str(tmp_path)}), whole):
        assert odd == [] and held <= read <= most * held


@pytest.mark.nightly
@pytest.mark.parametrize("family", RECIPES)
def test_four_ranks_read_strided_shards(pool4, tmp_path, family):
    whole = dict(written(RECIPES[family]({}), tmp_path).module.state_dict())
    more = {"ep": 2} if family == "deepseek_v3" else {}
    for odd, read, held in pool4.run(loaded, RECIPES[family]({"dp_shard": 2, "tp": 2, **more}, tmp_path), whole):
        assert odd == [] and held <= read <= 1.01 * held


def saved_again(recipe, folder):
    save_weights(author(recipe, current_world()), folder, file_bytes=20_000)


@pytest.mark.parametrize("family", RECIPES)
def test_what_ranks_write_is_bitwise_what_they_read(pool2, tmp_path, family):
    written(RECIPES[family]({}), tmp_path / "one")
    pool2.run(saved_again, RECIPES[family]({"dp_shard": 2}, tmp_path / "one"), tmp_path / "two")
    again = {}
    for file in (tmp_path / "two").glob("*.safetensors"):
        again |= load_file(file)
    before = load_file(tmp_path / "one" / ALONE)
    assert again.keys() == before.keys() and all(torch.equal(before[name], again[name]) for name in before)
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in before.values())


def test_a_fake_world_reads_no_parameter_and_still_checks_the_names(tmp_path, monkeypatch):
    written(llama({}), tmp_path)
    monkeypatch.setattr(weights, "_read", None)
    with fake_world(8) as world:
        author(llama({"dp_shard": 8}, tmp_path), world)
        with pytest.raises(WorkbenchError, match="set model.n_layers to 2"):
            author(llama({"dp_shard": 8}, tmp_path, **{"model.n_layers": 1}), world)


def test_a_simulated_world_holds_each_rank_s_part(tmp_path):
    whole = dict(written(llama({}), tmp_path).module.named_parameters())
    with simulated_world(2) as world:
        authored = author(llama({"dp_shard": 2}, tmp_path), world)
        for name, parameter in authored.module.named_parameters():
            assert torch.equal(torch.cat(list(shards(parameter).values())), whole[name])


@pytest.fixture
def folder(tmp_path):
    """Weights in several files, without config.json."""
    written(llama({}), tmp_path, file_bytes=20_000)
    (tmp_path / CONFIG).unlink()
    return tmp_path


def refused(folder, **changes):
    with pytest.raises(WorkbenchError) as told:
        author(llama({}, folder, **changes), ALONE_HERE)
    return str(told.value)


def edit(file, change):
    held = load_file(file)
    change(held)
    save_file(held, file)


Q = "model.layers.0.self_attn.q_proj.weight"


def holder(folder, name=Q):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def test_a_missing_tensor_is_named(folder):
    file = holder(folder)
    edit(file, lambda held: held.pop(Q))
    assert refused(folder) == (f"weights {folder / INDEX}: it names {file.name} for tensor {Q!r}, which is not in this "
                               "file: take both from the same source")
    (folder / INDEX).unlink()
    assert refused(folder) == (
        f"weights {folder}: tensor {Q!r} is missing, which 'layers.0.attention.wq.weight' of llama3 needs: take the "
        "weights of this model, or another flavor")


def test_a_tensor_too_many_is_named(folder):
    (folder / INDEX).unlink()
    save_file({"model.layers.2.norm.weight": torch.zeros(3)}, folder / "more.safetensors")
    assert refused(folder) == (f"weights {folder}/more.safetensors: tensor 'model.layers.2.norm.weight' has no place "
                               "in llama3 of 2 layers: take the weights of this model, or another flavor")


def test_a_tensor_that_is_there_twice_is_named(folder):
    file = holder(folder)
    (folder / INDEX).unlink()
    save_file({Q: torch.zeros(3)}, folder / "zzz.safetensors")
    assert refused(folder) == (
        f"weights {folder}/zzz.safetensors: tensor {Q!r} is in {file.name}, too: keep one "
        "of them")


def test_another_shape_is_named(folder):
    name = "model.layers.0.mlp.gate_proj.weight"
    assert refused(folder, **{"model.ffn_dim": 64}) == (
        f"weights {holder(folder, name)}: tensor {name!r} has shape [48, 32], and 'layers.0.feed_forward.w1.weight' of "
        "llama3 takes [64, 32]: set the sizes in model, or take other weights")


def test_another_dtype_is_named(folder):
    edit(holder(folder), lambda held: held.update({Q: held[Q].to(torch.float8_e4m3fn)}))
    assert refused(folder) == f"weights {holder(folder)}: tensor {Q!r} is of dtype F8_E4M3: convert it to BF16 first"


def test_a_truncated_file_is_named(folder):
    file = holder(folder)
    os.truncate(file, file.stat().st_size - 5)
    told = refused(folder)
    assert told.startswith(f"weights {file}: it is truncated, or no safetensors file (")
    assert told.endswith("): take it from its source again")


def test_an_index_that_names_a_missing_file(folder):
    file, name = holder(folder), min(load_file(holder(folder)), key=list(json.loads(
        (folder / INDEX).read_text())["weight_map"]).index)
    file.unlink()
    assert refused(folder) == (f"weights {folder / INDEX}: it names {file.name} for tensor {name!r}, and this file is "
                               "missing: take it from the same source")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none(folder, text):
    (folder / INDEX).write_text(text)
    assert refused(folder).startswith(f"weights {folder / INDEX}: it is no index of safetensors (")


@pytest.mark.parametrize(("config", "said"), [
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, and the recipe's model.norm_eps is 1e-05: set model.norm_eps to "
                             "1e-06"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 10000.0, and the recipe's model.rope_theta is 500000.0: "
                                               "set model.rope_theta to 10000.0"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "it scales rotary positions (llama3), which llama3 here does not do: "
                                                "take other weights"),
])
def test_a_config_of_another_computation_is_refused(folder, config, said):
    (folder / CONFIG).write_text(json.dumps(config))
    assert refused(folder) == f"weights {folder / CONFIG}: {said}"


def test_no_folder_is_named(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        assert refused(place) == (f"weights {place}: no such folder, or no .safetensors file in it: set model.weights "
                                  "to a folder of Hugging Face safetensors")
    with pytest.raises(RecipeError, match="model.weights"):
        llama({}, **{"model.weights": ""})


def test_a_folder_with_something_in_it_is_not_written_to(folder):
    with pytest.raises(WorkbenchError) as told:
        save_weights(author(llama({}), ALONE_HERE), folder)
    assert str(told.value) == (f"save_weights {folder}: there is something already: give a new or an empty folder")


def test_a_second_prediction_head_is_left_out_and_half_of_one_is_not(tmp_path):
    written(deepseek({}), tmp_path)
    edit(tmp_path / ALONE, lambda held: held.update({"model.layers.2.eh_proj.weight": torch.zeros(2),
                                                     "model.layers.2.enorm.weight": torch.zeros(2)}))
    (tmp_path / INDEX).unlink()
    author(deepseek({}, tmp_path), ALONE_HERE)
    edit(tmp_path / ALONE, lambda held: held.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(WorkbenchError, match=r"tensor 'model.layers.2.enorm.weight' has no place"):
        author(deepseek({}, tmp_path), ALONE_HERE)
