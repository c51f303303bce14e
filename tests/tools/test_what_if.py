"""`what_if`: exactly what a change affects runs again, and the answer is that of a fresh build, node for node."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict

import cloudpickle
import pytest
import torch
from on_ranks import FSDP_TP, small

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import Groups
from workbench.passes import registry
from workbench.passes.registry import register_pass
from workbench.pipeline.build import build
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.recipe import RecipeError
from workbench.recipe.sections import PassSpec
from workbench.tools import what_if as studies
from workbench.tools.what_if import what_if
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration

cloudpickle.register_pickle_by_value(sys.modules[__name__])
JOINT = ("inductor_decomposition", "activation_checkpointing", "reshard_after_forward")
LATER = ("transformer_block_bucketing", "overlap_collectives")
ALL = ["author", "capture", *JOINT, "partition", *LATER]
BUCKETING = "passes.transformer_block_bucketing.separate_gather_group"


@pytest.fixture(scope="module")
def started(fake4):
    return what_if(small(FSDP_TP, JOINT, LATER), fake4)


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


MODEL = """
class Own(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256, bias={bias})
    def forward(self, tokens, targets):
        return torch.nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())
"""


def fresh(study):
    return build(study.recipe, study.world).step.pair


def again(difference):
    return list(difference.ran)


def test_the_first_answer_runs_all(started, fake4):
    assert again(started) == ALL and started.history == []
    built = build(started.recipe, fake4)
    assert listing(started.pair.graphs) == listing(built.step.pair.graphs)
    assert {r.name: r.outcome for r in started.records} == {r.name: r.outcome for r in built.records}


@pytest.mark.parametrize(("changes", "first"), [
    ({"passes.overlap_collectives.horizon": 2}, "overlap_collectives"),
    pytest.param({BUCKETING: False}, "transformer_block_bucketing", marks=pytest.mark.nightly),
    pytest.param({"passes": ["transformer_block_bucketing"]}, None, marks=pytest.mark.nightly),
    pytest.param({"joint_passes.reshard_after_forward.policy": "never"}, "reshard_after_forward",
                 marks=pytest.mark.nightly),  # quick: test_whole_lists_and_their_order runs from a joint pass on
    pytest.param({"joint_passes.activation_checkpointing.policy": "full"}, "activation_checkpointing",
                 marks=pytest.mark.nightly),
    pytest.param({"joint_passes.inductor_decomposition.at": "capture"}, "capture", marks=pytest.mark.nightly),
    ({"training.lr": 0.1, "strict": True, "about": "x", "training.steps": 3}, None),
], ids=str)
def test_a_change_runs_what_it_affects(study, changes, first):
    found = study.change(changes)
    expected = ALL[ALL.index(first):] if first else []
    assert again(found) == expected
    assert found.kept == [name for name in ALL if name not in expected and name in (*ALL[:6], *study.recipe.pass_names)]
    assert listing(study.pair.graphs) == listing(fresh(study).graphs)
    assert study.now is found.after and study.history == [found]


@pytest.mark.parametrize("changes", [
    pytest.param({"model.n_layers": 2}, marks=pytest.mark.nightly), {"mesh.dp_shard": 4, "mesh.tp": 1}], ids=str)
def test_a_change_of_the_model_authors_anew(study, changes):
    assert again(study.change(changes)) == ALL
    assert listing(study.pair.graphs) == listing(fresh(study).graphs)


def test_what_authoring_reads_is_in_its_key():
    read = small(FSDP_TP).model_dump(exclude=studies._LATER)
    assert {"dim", "attention"} <= set(read["model"]) and "param" in read["precision"]
    assert {"seq_len", "batch_per_rank"} <= set(read["data"]) and {"seed", "deterministic"} <= set(read["training"])


@pytest.mark.nightly
def test_a_model_registered_again_authors_anew_if_its_code_differs(fake4):
    from workbench.authoring import families
    from workbench.recipe.model_sizes import SIZES

    def register(bias):
        space = {"__name__": "__main__", "torch": torch}
        exec(compile(MODEL.format(bias=bias), "cell", "exec"), space)
        families.register_model("own_model", sizes={"vocab_size": 256, "max_seq_len": 32})(space["Own"])

    try:
        register(False)
        study = what_if(small({"dp_shard": 4}).override({"model": {"family": "own_model"}}), fake4)
        register(False)
        assert again(study.change()) == []
        register(True)
        assert again(study.change()) == ["author", "capture", "partition"]
    finally:
        families._FAMILIES.pop("own_model"), SIZES.pop("own_model")


def test_whole_lists_and_their_order(study):
    found = study.change(passes=[*study.recipe.passes[:1], "graph_cleanup"])
    assert again(found) == ["graph_cleanup"]
    assert again(study.change(joint_passes=JOINT[1:])) == ["activation_checkpointing", "reshard_after_forward",
                                                           "partition", "transformer_block_bucketing", "graph_cleanup"]
    assert listing(study.pair.graphs) == listing(fresh(study).graphs)


@pytest.mark.nightly
def test_what_was_asked_before_is_kept_up_to_a_number(study, monkeypatch):
    first = listing(study.pair.graphs)
    shared = study.pair.facts.fork()
    there, back = study.change({BUCKETING: False}), study.change({BUCKETING: None})
    assert again(there) == list(LATER) and again(back) == []
    assert listing(study.pair.graphs) == first and study.pair.facts == shared
    assert facts_of(study.pair.forward).step is facts_of(study.pair.backward).step is study.pair.facts
    monkeypatch.setattr(studies, "_MOST_KEPT", len(ALL) + 1)
    study.change({BUCKETING: False})
    assert again(study.change({BUCKETING: None})) == list(LATER) and len(study._results) == len(ALL) + 1


@pytest.mark.nightly
def test_revert_goes_back_at_once(study):
    first, graphs = study.now, study.pair.graphs
    study.change({"passes.overlap_collectives.horizon": 2})
    study.change({BUCKETING: False})
    found = study.revert()
    assert found.reverted and again(found) == [] and found.title.startswith("reverted: ")
    assert again(study.revert()) == [] and study.now.recipe == first.recipe and study.pair.graphs == graphs
    with pytest.raises(WorkbenchError, match="nothing to revert: no change was made since the start"):
        study.revert()
    assert [d.reverted for d in study.history] == [False, False, True, True]


CELL = """
def step(value):
    return value * {factor}
@register_pass("own", stage="{stage}", numerics="lossy", tolerance=1e9, effect=lambda before, after, options: effect)
def own(gm, example_inputs, *, options):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[:1]:
        node.meta["marked"] = step(1)
    {more}
    return gm
"""


def define(factor=1, stage="partitioned", more="pass", happened=True):
    """A notebook's cell that registers the pass `own`."""
    from workbench.passes.effect import Effect

    space = {"__name__": "__main__", "register_pass": register_pass, "torch": torch,
             "effect": Effect(happened, "" if happened else "so it is")}
    exec(compile(CELL.format(factor=factor, stage=stage, more=more), "cell", "exec"), space)


@pytest.fixture
def own():
    yield define
    CONTRACTS.pop("own", None), registry._PASSES.pop("own", None)


def marks(study):
    graphs = [r.after[0] for r in study.records if r.name == "own"]
    return [n.meta["marked"] for n in graphs[0].graph.nodes if "marked" in n.meta]


def test_a_pass_registered_again_runs_again_if_its_code_differs(study, own):
    own(factor=2)
    assert again(study.change(passes=["transformer_block_bucketing", "own", "overlap_collectives"])) == [
        "own", "overlap_collectives"]
    assert marks(study) == [2]
    own(factor=2)
    assert again(study.change()) == []
    own(factor=3)  # a function that the pass calls, and not the pass itself
    found = study.change()
    assert again(found) == ["own", "overlap_collectives"] and marks(study) == [3]
    assert found.title == "what if: nothing but code differs"
    own(factor=3, happened=False)  # what its effect says
    assert again(study.change()) == ["own", "overlap_collectives"]
    assert study.now.named()["own: effect"].outcome == "NO_EFFECT"
    assert "after, own: effect: NO_EFFECT, so it is" in repr(study.history[-1])


@pytest.mark.nightly
def test_an_error_leaves_the_study_as_it_was(study, own):
    before, graphs = study.now, study.pair.graphs
    own(more="raise ValueError('no')")
    with pytest.raises(WorkbenchError, match="pass 'own' on the forward graph raised ValueError: no"):
        study.change(passes=["transformer_block_bucketing", "own"])
    with pytest.raises(RecipeError, match="no pass 'overlap' in passes"):
        study.change({"passes.overlap.horizon": 2})
    with pytest.raises(WorkbenchError, match="4"):
        study.change({"mesh.dp_shard": 4})  # 8 ranks on a world of 4
    assert study.now is before and study.pair.graphs == graphs and study.history == []
    own()
    assert again(study.change(passes=["transformer_block_bucketing", "own"])) == ["own"]


@pytest.mark.parametrize(("name", "fault", "changes"), [
    ("_reads", lambda spec: (), {BUCKETING: False}),
    pytest.param("_LATER", {**studies._LATER, "model": True}, {"model.n_layers": 2}, marks=pytest.mark.nightly),
], ids=["_reads", "_LATER"])
def test_a_key_that_ignores_something_is_caught(fake4, monkeypatch, name, fault, changes):
    monkeypatch.setattr(studies, name, fault)
    broken = what_if(small(FSDP_TP, (), LATER[:1]), fake4)
    assert again(broken.change(changes)) == []
    assert listing(broken.pair.graphs) != listing(fresh(broken).graphs)


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
    text = repr(found).splitlines()
    assert text[0] == "what if: joint_passes.reshard_after_forward.policy: not set -> never"
    assert text[1].startswith("ran again: reshard_after_forward ") and " s, partition " in text[1]
    assert text[2] == "kept: author, capture, inductor_decomposition, activation_checkpointing"
    assert text[3].startswith("answered in ") and text[4].split() == ["before", "after", "change"]
    rows = {row[0]: row[1:] for row in found.rows()}
    before, after, change = rows["launches: all_gather dp_shard"]
    assert int(after) - int(before) == int(change) < 0
    assert rows["reshard_after_forward: effect"] == ("PASS", "PASS", "")
    assert rows["estimated saved, bytes"][2].startswith("+")
    assert {*(f"{what} on h100, simulated ms, not calibrated" for what in ("step", "exposed")),
            "estimated peak of the backward, bytes",
            "bytes: all_gather dp_shard", "ranks agree"} < set(rows)
    assert "ranks agree" in repr(found) and repr(study).splitlines()[-1].startswith(text[0])


def test_figures_are_those_of_the_graphs(study):
    from workbench.graph.read.collectives import list_collectives
    from workbench.graph.read.simulated_run import simulated
    from workbench.pipeline.run_passes import saved_bytes

    figures = study.now.figures
    run = simulated(study.pair.by_part, "h100")
    assert (figures.step_ms, figures.exposed_ms) == (run.total_ms, run.exposed_ms)
    assert figures.saved == saved_bytes(study.pair)
    assert sum(figures.launches.values()) == sum(len(list_collectives(g)) for g in study.pair.graphs)


def on_a_rank(recipe, changes):
    found = what_if(recipe, current_world())
    difference = found.change(changes)
    return again(difference), str(difference.after.schedule.outcome), listing(found.pair.graphs) == listing(
        fresh(found).graphs)


def test_inside_real_ranks(pool2):
    for stages, agree, same in pool2.run(on_a_rank, small({"dp_shard": 2}, JOINT[-1:], LATER), {BUCKETING: False}):
        assert stages == list(LATER) and agree == "PASS" and same
