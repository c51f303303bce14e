"""Seeded faults, each in a pass of a user's own: the pass is found, and the node, in both graphs."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from bad_passes import JOINT, PARTING, PARTITIONED, RECIPE, find_all, find_where_ranks_part, reread
from faults import GATHER, SCATTER, without_metadata
from graphs_by_hand import group_name, named
from on_ranks import calls, insert, key_biased, user_pass
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import Numerics, PassContract, PassRecord, Stage, capture, run_joint
from workbench.cli import main
from workbench.graph.read.nodes import module_path
from workbench.lab.bisect import Bisection, bisect, search
from workbench.lab.bisect.nodes import Matching, trace
from workbench.passes.registry import RegisteredPass, graph_changed
from workbench.torch_api.aot import clone

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(pool2):
    """All faults, one after the other on one pair of ranks: what each rank found of each."""
    return pool2.run(find_all)


# graph, operator before and after ("": what torch returns for a gradient), module, source file
FAULTS = {
    "drops_an_add": ("joint", "aten.pow.Tensor_Scalar", "aten.pow.Tensor_Scalar", "layers.0.ffn_norm", "layers.py"),
    "decomposes_and_errs": ("joint", "aten.silu", "aten.div.Tensor", "layers.0.feed_forward", "layers.py"),
    "sums_gradients": ("joint", SCATTER, SCATTER, "layers.0.feed_forward.w3", "layers.py"),
    "returns_gradients_swapped": ("joint", "", "", "layers.0.attention.wv", "llama3.py"),
    "errs_on_rank_1": ("joint", "aten.silu", "aten.mul.Scalar", "layers.0.feed_forward", "layers.py"),
    "negates_in_backward": ("backward", "aten.mul.Scalar", "aten.mul.Scalar", "norm", "layers.py"),
    # the weight's first reader; on torch 2.15 the next one, since the right value still lies in the bucket, unread
    "buckets_and_mixes": ("forward", "aten.", "aten.", "layers.0.attention.wv", "llama3.py"),
    "saves_another_tensor": ("backward", "placeholder", "placeholder", "tok_embeddings", "decoder.py"),
}


@pytest.mark.nightly
@pytest.mark.ranks
def test_the_pass_and_the_node_are_found(found):
    assert {f.__name__ for f in (*JOINT, *PARTITIONED)} == {*FAULTS, "does_nothing", "multiplies_what_does_not_fit"}
    for name, (part, was, now, module, file) in FAULTS.items():
        here = found[0][name]
        assert here == found[1][name] and here.record == name  # every rank says the same, and not the sound pass
        assert was in here.before.operator and now in here.after.operator, name
        assert here.before.graph == here.after.graph == part, name
        assert here.after.module == module and file in here.after.source, name
        assert here.before.text != here.after.text or name == "buckets_and_mixes"
        assert here.ranks == ((1,) if name == "errs_on_rank_1" else (0, 1)), name
        assert here.difference, name


@pytest.mark.nightly
@pytest.mark.ranks
def test_sound_passes_are_not_blamed_and_an_idle_one_is(found):
    assert [found[0][name] for name in ("joint", "partitioned", "may be idle")] == [None] * 3
    assert found[0]["does_nothing"].record == "does_nothing"
    assert found[0]["does_nothing"].problem == "NO_EFFECT: every node is as it was before the pass"
    assert found[0]["multiplies_what_does_not_fit"].problem.startswith("lint FAIL: ")  # and so it is not run
    assert re.match(r"output \d: 64 of 64 elements differ", found[0]["returns_gradients_swapped"].difference)


@pytest.mark.ranks
def test_where_the_ranks_part_the_pass_and_the_rank_are_found(pool2):
    """The build stops there; each rank has the same answer, also the one whose graph is sound."""
    found, other = pool2.run(find_where_ranks_part)
    assert found == other and list(found) == [fault.__name__ for fault in PARTING]
    for first in found.values():
        assert first.record == "bad" and first.ranks == (1,), first
    problem = found["drops_on_rank_1"].problem
    assert problem.startswith("collectives FAIL: rank 1 would run _c10d_functional.all_gather"), problem
    assert "where rank 0 runs" in problem and "the ranks would hang" in problem
    assert found["loses_an_output_on_rank_1"].problem.startswith("lint FAIL: ")


def half(gm):
    gather = calls(gm, GATHER)[0]
    gather.meta["val"] = gather.meta["val"][: gather.meta["val"].shape[0] // 2]
    return gm


def test_without_ranks_every_light_verdict_counts():
    for fault, problem in ((without_metadata, "lint FAIL: "), (half, "FAIL: ")):
        with user_pass("bad", fault) as name:
            recipe = RECIPE.override({"joint_passes": ["reshard_after_forward", name]})
            found = bisect(recipe, world="fake", progress=False)
        assert not found.ok and found.found.record == "bad" and problem in found.found.problem
        assert repr(found).splitlines()[-1] == "covered: lint, effect, collectives"


def test_what_holds_and_what_cannot_be_looked_for(capsys):
    sound = bisect(RECIPE.override({"joint_passes": ["reshard_after_forward"]}), world="fake", progress=False)
    assert sound.ok and "nothing found: no verdict fails, and every pass had its effect" in repr(sound)
    assert main(["bisect", "llama3", "--set", "mesh.tp=2"]) == 2
    assert "recipe 'llama3' has no passes, so there is none to find" in capsys.readouterr().err


# A run kept node by node, and which nodes of two runs are the same.

X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


def bitwise(a, b):
    return None


def record(before, after):
    item = RegisteredPass(PassContract("mine", Stage.JOINT, Numerics.EXACT, ""), print, graph_changed)
    return PassRecord(item, None, (before,), (after,), 0.0, 0.0)


def run(gm, *inputs):
    return trace(record(gm, gm), [gm], list(inputs) or [X, Y], [])


def resharded():
    """What a rank keeps of DTensor's all-to-all: its two of four columns, of the rows of both ranks."""
    rank = dist.get_rank()
    mine = torch.arange(8.0).reshape(2, 4)[rank:rank + 1]
    gm = make_fx(lambda x: [torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group_name())])(mine)
    return [v.tensors[0].tolist() for key, v in run(gm, mine).values.items() if "alltoall" in key[1]]


def test_a_collective_that_blocks_has_its_value_at_once(pool2):
    assert pool2.run(resharded) == [[[[0.0, 1.0], [4.0, 5.0]]], [[[2.0, 3.0], [6.0, 7.0]]]]


def test_values_are_found_under_other_names_and_a_lost_value_is_not():
    before = make_fx(lambda x, y: [x.exp() + y, x.exp().sin()])(X, Y)
    after = clone(before)
    for i, node in enumerate(n for n in after.graph.nodes if n.op == "call_function"):
        node._rename(f"other_{i}")
    same = Matching(run(before), run(after), bitwise)
    assert len(same.same) == 4 and same.suspects() == [] and same.wrong_outputs() == []
    named(after, "aten.sin")[0].target = torch.ops.aten.cos.default
    wrong = Matching(run(before), run(after), bitwise)
    assert wrong.suspects() == [("joint", "other_3")] and wrong.first() is None  # another operator, and no source line
    for gm, name in ((before, "aten.sin"), (after, "aten.cos")):
        named(gm, name)[0].meta["stack_trace"] = 'File "model.py", line 7, in forward\n    return x.exp().sin()'
    wrong = Matching(run(before), run(after), bitwise)
    assert wrong.first() == (("joint", "other_3"), ("joint", "sin"))


def test_nodes_that_a_retrace_numbered_otherwise_are_paired_by_operator_and_inputs():
    before = make_fx(lambda x, y: [x * 2, y * 2])(X, Y)
    after = make_fx(lambda x, y: [y * 2, x * 3][::-1])(X, Y)
    wrong = Matching(run(before), run(after), bitwise)
    assert wrong.first() == (("joint", "mul_1"), ("joint", "mul"))


def off_by_a_hundredth(gm):
    weight = next(n for n in calls(gm, "aten.mm") if module_path(n) == "up")
    reread(weight, insert(gm, weight, torch.ops.aten.mul.Scalar, weight, 1.01))
    return gm


def test_rounding_of_a_zero_gradient_is_passed_over_and_the_fault_behind_it_is_reached():
    joint = capture(key_biased())
    inputs = search.inputs_of(joint)
    with user_pass("off", off_by_a_hundredth, numerics="lossy", tolerance=5e-6):
        first, _ = search.first_wrong(run_joint(joint, ["inductor_decomposition", "off"]), inputs)
    assert first.record == "off" and first.before.operator == "aten.mm" and first.after.operator == "aten.mul.Scalar"
    assert first.before.module == first.after.module == "up"


def test_a_graph_that_raises_is_found_at_its_node_and_a_compiled_one_is_named_alone(monkeypatch):
    gm = make_fx(lambda primals, tangents: [primals[0] @ primals[1]])([X, Y.t()], [])
    after = clone(gm)
    named(after, "aten.mm")[0].args = tuple(after.graph.find_nodes(op="placeholder"))[::-1]
    monkeypatch.setattr(search, "_light_problem", lambda record, expected: "")  # lint finds it, too
    inputs = search.Inputs([X, torch.ones(3, 3)], [], 1)
    raises = search.first_wrong([record(gm, after)], inputs)[0]
    assert "; its graph raises RuntimeError: " in raises.problem and raises.after.name == "mm"
    assert "mat1 and mat2 shapes cannot be multiplied" in raises.difference
    whole = Bisection("r", "1 gloo ranks", ("mine",), raises, {}, ("lint",))
    data = json.loads(json.dumps(whole.to_dict()))
    assert not data["ok"] and data["found"]["ranks"] == [0]
    compiled = search.first_wrong([record(gm, lambda primals, tangents: [primals[0] @ primals[1] + 1])], inputs)[0]
    text = repr(Bisection("r", "1 gloo ranks", ("mine",), compiled, {"other": "done while tracing"}, ("lint",)))
    assert text.splitlines() == ["bisect: r on 1 gloo ranks; passes mine",
                                 f"first pass: 'mine', 1 of 1: {compiled.problem}",
                                 "covered: lint", "not checked: pass 'other': done while tracing"]
