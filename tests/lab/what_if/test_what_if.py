"""`what_if`: exactly what a change affects runs again, and the answer is that of a fresh build, node for node."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
from on_ranks import FSDP4, FSDP_TP, small

from workbench import PassSpec, WorkbenchError, build, current_world, facts_of, register_model, register_pass, what_if
from workbench.graph.read.collectives import Groups
from workbench.lab.what_if import study as studies
from workbench.passes.effect import Effect
from workbench.recipe.recipe import RecipeError

pytestmark = pytest.mark.integration

JOINT = ("inductor_decomposition", "activation_checkpointing", "reshard_after_forward")
LATER = ("transformer_block_bucketing", "overlap_collectives")
ALL = ["author", "capture", *JOINT, "partition", *LATER]
BUCKETING = "passes.transformer_block_bucketing.separate_gather_group"


@pytest.fixture(scope="module")
def started(fake4):
    return what_if(small(FSDP4, JOINT, LATER), fake4)


@pytest.fixture
def study(started):
    """A study of its own that shares what the first has made."""
    own = copy.copy(started)
    own.history, own._results, own._undo = [], OrderedDict(started._results), []
    return own


def listing(graphs):
    """Everything of the graphs that a pass or a check may read, but for what torch numbers anew in each process group,
    module and capture."""
    found, numbers = [], {}
    for graph in graphs:
        groups, axes = Groups(facts_of(graph)), {n: axis for axis, n in facts_of(graph).groups.items()}

        def name(m, groups=groups, axes=axes):  # DTensor hands groups of an equal mesh of before to a new one
            return f"'{axes.get(m[1]) or groups.axis(m[1]) or m[1]}'"

        def text(value, name=name):
            return re.sub(r"'(\d+|[0-9a-f]{40})'", name, re.sub(r"'\d{9,}'| at 0x\w+", "", str(value)))

        for n in graph.graph.nodes:
            meta = {k: text(v) for k, v in n.meta.items() if k not in ("val", "tensor_meta", "from_node", "seq_nr")}
            if "seq_nr" in n.meta:  # torch counts on from capture to capture
                meta["seq_nr"] = numbers.setdefault(n.meta["seq_nr"], len(numbers))
            value = n.meta.get("val")
            shape = (tuple(value.shape), value.stride(), value.dtype) if hasattr(value, "stride") else type(value)
            found.append((n.op, n.name, str(n.target), text(n.args), text(n.kwargs), shape, meta))
    return found


def fresh(study):
    return build(study.recipe, study.world).step.pair


def again(difference):
    return list(difference.ran)


def test_the_first_answer_runs_all(started, fake4):
    assert again(started) == ALL and started.history == []
    built = build(started.recipe, fake4)
    assert listing(started.pair.graphs) == listing(built.step.pair.graphs)
    assert {r.name: r.outcome for r in started.records} == {r.name: r.outcome for r in built.records}


CHANGES = [
    ({"training.lr": 0.1, "strict": True, "about": "x", "training.steps": 3}, []),
    ({"passes.overlap_collectives.horizon": 2}, ["overlap_collectives"]),
    ({"passes": [LATER[0], "graph_cleanup"]}, ["graph_cleanup"]),
    ({"passes": [LATER[0]]}, []),
    ({"joint_passes": JOINT[1:]}, [*JOINT[1:], "partition", LATER[0]]),
]


def test_a_change_runs_what_it_affects(study):
    for changes, ran in CHANGES:
        found = study.change(changes)
        assert again(found) == ran and study.now is found.after and study.history[-1] is found
    assert listing(study.pair.graphs) == listing(fresh(study).graphs)


@pytest.mark.parametrize(("changes", "first"), [
    ({"mesh.dp_shard": 2, "mesh.dp_replicate": 2}, "author"),
    pytest.param({"joint_passes.inductor_decomposition.at": "capture"}, "capture", marks=pytest.mark.nightly)])
def test_a_change_before_the_passes(study, changes, first):
    assert again(study.change(changes)) == ALL[ALL.index(first):]
    assert listing(study.pair.graphs) == listing(fresh(study).graphs)


def test_what_authoring_reads_is_in_its_key():
    read = small(FSDP_TP).model_dump(exclude=studies._LATER)
    assert {"dim", "attention"} <= set(read["model"]) and "param" in read["precision"]
    assert {"seq_len", "batch_per_rank"} <= set(read["data"]) and {"seed", "deterministic"} <= set(read["training"])


class Own(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256, bias=bias)

    def forward(self, tokens, targets):
        logits = self.head(self.embed(tokens)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten())


@pytest.mark.nightly  # what a fingerprint sees of code is in test_fingerprint
def test_a_model_registered_again_authors_anew_if_its_code_differs(fake4):
    def register(bias):
        sizes = {"vocab_size": 256, "max_seq_len": 32}
        register_model("own_model", sizes=sizes)(lambda _: Own(bias))

    register(False)
    study = what_if(small({"dp_shard": 4}).override({"model": {"family": "own_model"}}), fake4)
    register(True)
    assert again(study.change()) == ["author", "capture", "partition"]


@pytest.mark.nightly
def test_what_was_asked_before_is_kept_up_to_a_number_and_revert_goes_back_at_once(study, monkeypatch):
    first, graphs, shared = study.now, study.pair.graphs, study.pair.facts.fork()
    there, back = study.change({BUCKETING: False}), study.change({BUCKETING: None})
    assert again(there) == list(LATER) and again(back) == []
    assert study.pair.graphs == graphs and study.pair.facts == shared
    found = study.revert()
    assert found.reverted and again(found) == [] and found.title.startswith("reverted: ")
    assert again(study.revert()) == [] and study.now.recipe == first.recipe and study.pair.graphs == graphs
    with pytest.raises(WorkbenchError, match="nothing to revert: no change was made since the start"):
        study.revert()
    monkeypatch.setattr(studies, "_MOST_KEPT", len(ALL) + 1)
    study.change({"passes.overlap_collectives.horizon": 2})
    study.change({BUCKETING: False})
    assert len(study._results) == len(ALL) + 1


def define(factor=1, happened=True, error=""):
    """Registers the pass `own`, as a notebook's cell would."""
    effect = Effect(happened, "" if happened else "so it is")

    def step(value):
        if error:
            raise ValueError(error)
        return value * factor

    contract = {"stage": "partitioned", "numerics": "lossy", "tolerance": 1e9}

    @register_pass("own", **contract, effect=lambda *_: effect)
    def own(gm, example_inputs, *, options):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[:1]:
            node.meta["marked"] = step(1)
        return gm


def test_a_pass_registered_again_runs_again_if_its_code_differs(study):
    define(factor=2)
    listed, both = [LATER[0], "own", LATER[1]], ["own", LATER[1]]
    assert again(study.change(passes=listed)) == both
    define(factor=2)
    assert again(study.change()) == []
    define(factor=3)  # a function that the pass calls, and not the pass itself
    found = study.change()
    assert again(found) == both and found.title == "what if: nothing but code differs"
    define(factor=3, happened=False)  # what its effect says
    assert again(study.change()) == both
    assert study.now.named()["own: effect"].outcome == "NO_EFFECT"
    assert "after, own: effect: NO_EFFECT, so it is" in repr(study.history[-1])


@pytest.mark.nightly
def test_an_error_leaves_the_study_as_it_was(study):
    before, graphs = study.now, study.pair.graphs
    define(error="no")
    with pytest.raises(WorkbenchError, match="pass 'own' on the forward graph raised ValueError: no"):
        study.change(passes=["transformer_block_bucketing", "own"])
    with pytest.raises(RecipeError, match="no pass 'overlap' in passes"):
        study.change({"passes.overlap.horizon": 2})
    assert study.now is before and study.pair.graphs == graphs and study.history == []


def test_a_key_that_ignores_something_is_caught(study, monkeypatch):
    """By the comparison with a fresh build: here the key of a pass leaves its options out."""
    monkeypatch.setattr(studies, "_reads", lambda spec: ())
    study.change({})
    assert again(study.change({BUCKETING: False})) == []
    assert listing(study.pair.graphs) != listing(fresh(study).graphs)


def test_options_go_by_what_their_file_holds(tmp_path):
    def reads(device):
        return studies._reads(PassSpec(name="overlap_collectives", options={"device": device}))[0]

    file = tmp_path / "times.json"
    file.write_text("{}")
    before = reads(str(file))
    file.write_text('{"a": 1}')
    assert reads(str(file)) != before
    assert "x" * 5000 in reads("x" * 5000)  # too long for a path


def test_a_difference_says_everything(study):
    found = study.change({"joint_passes.reshard_after_forward.policy": "never"})
    title, ran, kept, *_ = repr(found).splitlines()
    assert title == "what if: joint_passes.reshard_after_forward.policy: not set -> never"
    assert ran.startswith("ran again: reshard_after_forward ") and " s, partition " in ran
    assert kept == "kept: author, capture, inductor_decomposition, activation_checkpointing"
    rows = {row[0]: row[1:] for row in found.rows()}
    before, after, change = rows["launches: all_gather dp_shard"]
    assert int(after) - int(before) == int(change) < 0
    assert rows["reshard_after_forward: effect"] == ("PASS", "PASS", "")
    assert rows["estimated saved, bytes"][2].startswith("+")
    assert {"step on h100, simulated ms, not calibrated", "bytes: all_gather dp_shard",
            "estimated peak of the backward, bytes", "ranks agree"} < set(rows)


def on_a_rank(recipe, changes):
    found = what_if(recipe, current_world())
    difference = found.change(changes)
    return again(difference), str(difference.after.schedule.outcome), listing(found.pair.graphs) == listing(
        fresh(found).graphs)


def test_inside_real_ranks(pool2):
    for stages, agree, same in pool2.run(on_a_rank, small({"dp_shard": 2}, JOINT[-1:], LATER), {BUCKETING: False}):
        assert stages == list(LATER) and agree == "PASS" and same
