"""The pipeline catches a bad pass: each seeded fault is registered as a user would, and must be seen."""

import re

import faults
import on_ranks
import pytest
import torch
from on_ranks import FSDP4, calls, small, user_pass

from workbench import Effect, Options, Outcome, PassSpec, author, capture, facts_of, partition
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.lower import bind
from workbench.passes.registry import find_pass
from workbench.passes.reshard_after_forward import ReshardOptions, gathered_weights_freed, tags_differ
from workbench.pipeline.run_passes import each_no_effect, run_joint, run_partitioned

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def captured(fake4):
    """One authored model on a fake mesh of 4, and its joint graph, which no test may use up."""
    return capture(author(small(FSDP4), fake4))


@pytest.fixture
def joint(captured):
    """The captured graph, put back afterwards."""
    kept = captured.graph
    yield captured
    captured.graph = kept


def run_one(joint, function, **contract):
    with user_pass("bad", function, **contract) as name:
        return run_joint(joint, [name])[0]


def test_a_pass_that_does_nothing_is_told_apart(joint):
    record = run_one(joint, lambda gm: gm)
    assert record.outcome is Outcome.NO_EFFECT and record.verdict("lint").outcome is Outcome.PASS
    assert list(each_no_effect([record])) == [("bad", "every node is as it was before the pass")]


def test_a_pass_that_breaks_leaves_the_graph_before_it(joint):
    before, nodes, groups = joint.graph, len(joint.graph.graph.nodes), dict(facts_of(joint.graph).groups)
    code = faults.edited_then_raises.__code__
    for function, said in [
        (lambda gm: None, "returned NoneType: return the GraphModule, also where it was changed in place"),
        (faults.edited_then_raises, f"raised ValueError: no bucket fits ({code.co_filename}, line "
                                    f"{code.co_firstlineno + 3}, in edited_then_raises: "
                                    "raise ValueError(\"no bucket fits\"))"),
        (lambda gm: torch.ones(2) @ torch.ones(3), r"in <lambda>: (lambda gm: torch.ones(2) @ torch.ones(3)"),
        (lambda gm: torch.fx.GraphModule.__new__(torch.fx.GraphModule), "returned GraphModuleImpl without a graph: "),
        (lambda gm: find_pass("nope"), f"({__file__}, line "),
    ]:
        with pytest.raises(WorkbenchError, match=f"^pass 'bad' on the joint graph.*{re.escape(said)}"):
            run_one(joint, function)
        assert joint.graph is before and len(before.graph.nodes) == nodes
        assert facts_of(before).groups == groups
    before.graph.lint()
    run_one(joint, lambda gm: gm)  # and it can be worked on


def test_an_interrupt_inside_a_pass_stays_one_and_notes_the_pass_and_the_line(joint):
    def stops(gm):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_one(joint, stops)
    line = stops.__code__.co_firstlineno + 1
    place = f"({__file__}, line {line}, in stops: raise KeyboardInterrupt)"
    assert caught.value.__notes__ == [f"in pass 'bad' on the joint graph {place}"]


def test_a_graph_keeps_its_calling_convention(joint):
    def flattened(gm):
        gm.graph.set_codegen(torch.fx.graph.CodeGen())  # as graph_trainer's passes leave it
        gm.recompile()
        return gm

    before = joint.graph.graph._codegen
    assert run_one(joint, flattened).verdict("lint").outcome is Outcome.PASS
    assert type(joint.graph.graph._codegen) is type(before) is not torch.fx.graph.CodeGen


class Wanted(Options):
    factor: float


def test_options_are_checked(joint):
    with user_pass("bad", lambda gm: gm, options=Wanted), pytest.raises(WorkbenchError) as caught:
        run_joint(joint, [PassSpec(name="bad", options={"factro": 2})])
    assert str(caught.value) == "pass 'bad': factor: Field required; factro: Extra inputs are not permitted"


def test_a_pass_of_another_stage_is_refused_before_anything_runs(joint):
    with pytest.raises(WorkbenchError) as caught:
        run_joint(joint, ["reshard_after_forward", "transformer_block_bucketing"])
    assert str(caught.value) == ("pass 'transformer_block_bucketing' runs on the partitioned stage, and run_joint runs "
                                 "joint passes: list it there, or drop it")
    assert not any("recompute" in n.meta for n in joint.graph.graph.nodes)


@pytest.fixture
def pair(captured):
    return partition(captured.fork())


def test_a_partitioned_pass_that_breaks_on_the_backward_leaves_both(pair):
    before = pair.graphs

    def second(gm):
        if facts_of(gm).part == "backward":
            raise KeyError("x")
        gm.graph.erase_node(gm.graph.output_node())
        return gm

    with (user_pass("bad", second, stage="partitioned") as name,
          pytest.raises(WorkbenchError, match="on the backward graph raised KeyError")):
        run_partitioned(pair, [name])
    assert pair.graphs == before


def test_a_gathered_weight_kept_alive_through_views_is_seen(captured):
    def freed(graphs, _):
        return gathered_weights_freed(graphs, ReshardOptions())

    joint = captured.fork()
    with user_pass("bad", faults.only_the_wait_is_tagged, partition_effect=freed, effect=tags_differ) as name:
        (record,) = run_joint(joint, [name])
        assert record.verdict("effect").outcome is Outcome.UNKNOWN  # it only tags
        partition(joint)
    found = record.verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT
    assert found.message.endswith("saved tensors still alias gathered parameters")
    kept = found.evidence["saved_gathered_parameters"]
    assert kept and not all(n.startswith("wait_tensor") for n in kept)  # views, and not the wait alone


@pytest.mark.ranks
def test_collectives_swapped_on_one_rank_are_refused_before_any_runs(pool2):
    for said, ran, later in pool2.run(faults.started_collectives, small({"dp_shard": 2})):
        assert said.startswith("pass 'swap' left a graph on rank 1 that the next stage cannot use: rank 1 would run ")
        assert said.endswith("the ranks would hang, fail or compute wrong values")
        assert "all_gather_into_tensor" in said and ran == [] and later > 50


UNUSABLE = [(faults.without_metadata, r"nodes have no meta\['val'\], \w+ first"),
            (faults.empty_graph, "it has no output node at its end"),
            (faults.output_without_arguments, "its output node has no arguments"),
            (faults.outputs_reversed, r"output 0 \(\w+\) was float32\[\] on cpu and is NoneType"),
            (faults.none_for_an_output, r"output \d+ \(None\) was .+ and is NoneType"),
            (faults.unknown_group, "is of process group 'nope', which does not exist: take one of facts_of")]


@pytest.mark.parametrize(("fault", "said"), UNUSABLE)
def test_a_graph_that_no_stage_can_take_stops_there_and_names_the_pass(captured, fault, said):
    at = rf" \(defined at {on_ranks.__file__}, line \d+\)$"
    named = rf"^pass 'bad' left a graph that the next stage cannot use: .*{said}.*{at}"
    with captured.fork() as joint, user_pass("bad", fault) as name:
        assert run_joint(joint, [name])[0].verdict("lint").outcome is Outcome.FAIL
        for go_on in (lambda: run_joint(joint, [name]), lambda: partition(joint), joint.fork):
            with pytest.raises(UnusableGraph, match=named):
                go_on()
    if fault is faults.without_metadata:  # only the partitioner asks for values
        return
    with user_pass("bad", fault, stage="partitioned") as name:
        pair = partition(captured.fork())
        run_partitioned(pair, [name])
        for go_on in (lambda: run_partitioned(pair, [name]), lambda: bind(pair)):
            with pytest.raises(UnusableGraph, match="^pass 'bad' left a graph"):
                go_on()


def test_an_error_in_a_users_effect_names_the_file_and_line(joint):
    records = list(joint.known.records)

    def broken_predicate(before, after, options):
        return before[0].nothing

    line = broken_predicate.__code__.co_firstlineno + 1
    place = re.escape(f"({__file__}, line {line}, in broken_predicate: return before[0].nothing)")
    with pytest.raises(WorkbenchError, match=f"^the effect of pass 'bad' raised AttributeError: .*{place}$"):
        run_one(joint, lambda gm: gm, effect=broken_predicate)
    assert joint.known.records == records  # it leaves none


def test_a_predicate_is_not_believed_where_nothing_changed(joint):
    def always(before, after, options):
        return Effect(True)

    record = run_one(joint, lambda gm: gm, effect=always)
    assert record.outcome is Outcome.NO_EFFECT
    assert record.verdict("effect").message.startswith("its predicate claims an effect, and no node, argument")

    def tags(gm):
        calls(gm, "aten.mm")[0].meta["custom"] = {"mine": 1}
        return gm

    def adds_to_tags(gm):
        calls(gm, "aten.mm")[0].meta["custom"]["other"] = 2
        return gm

    def adds_a_bucket(gm):
        facts_of(gm).buckets.append("mine")
        return gm

    for changes in (tags, adds_to_tags, adds_a_bucket):
        assert run_one(joint, changes, effect=always).verdict("effect").outcome is Outcome.PASS


def test_a_contract_names_only_what_exists():
    for rule, name, known in ("after", "graph_clean", "graph_cleanup"), ("needs", "fsdpp", "fsdp"):
        with (pytest.raises(WorkbenchError, match=f"pass 'mine': {rule} names '{name}', which is none of .*{known}"),
              user_pass("mine", lambda gm: gm, **{rule: {name}})):
            pass
