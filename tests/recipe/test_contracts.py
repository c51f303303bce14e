"""The rules of pass lists, word for word."""

import pytest

from workbench.recipe.contracts import CONTRACTS, Numerics, PassContract, Stage, check_passes

TOUR = ["inductor_decomposition", "activation_checkpointing", "reshard_after_forward"]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, PassContract]:
    """A copy of the contracts that the test may add to."""
    copy = dict(CONTRACTS)
    monkeypatch.setattr("workbench.recipe.contracts.CONTRACTS", copy)
    return copy


LISTS: list[tuple[list[str], list[str], list[str]]] = [
    ([], [], []), (TOUR, ["transformer_block_bucketing"], []), (["a_users_own"], ["another"], []),
    (["inductor_decomposition"], ["autobucketing_reordering", "full_inductor_compilation"], []),
    (["own"], ["own"], ["pass 'own' is listed twice: list it once"]),
    ([], ["reshard_after_forward"], [
        "pass 'reshard_after_forward' runs on the joint stage: move it from passes to joint_passes"]),
    (["transformer_block_bucketing"], [], [
        "pass 'transformer_block_bucketing' runs on the partitioned stage: move it from joint_passes to passes"]),
    ([], ["full_inductor_compilation"], [
        "pass 'full_inductor_compilation' requires 'inductor_decomposition': add it to joint_passes, before it"]),
    ([], ["transformer_block_bucketing", "autobucketing_reordering"], [
        "passes 'transformer_block_bucketing' and 'autobucketing_reordering' conflict: keep one of them"]),
    (["reshard_after_forward", "activation_checkpointing"], [], [
        "pass 'activation_checkpointing' must come before 'reshard_after_forward': swap them"]),
    (TOUR[:1], ["full_inductor_compilation", "autobucketing_reordering"], [
        "pass 'autobucketing_reordering' (partitioned) must come before 'full_inductor_compilation' (lowering): swap "
        "them"]),
]


def test_good_lists_and_broken_rules_word_for_word() -> None:
    for joint, passes, problems in LISTS:
        assert check_passes(joint, passes) == problems, (joint, passes)


def test_a_conflict_holds_whichever_side_states_it(table: dict[str, PassContract]) -> None:
    table["shy"] = PassContract("shy", Stage.PARTITIONED, Numerics.EXACT, "nothing")
    table["loud"] = PassContract("loud", Stage.PARTITIONED, Numerics.EXACT, "nothing", conflicts=frozenset({"shy"}))
    assert check_passes([], ["shy", "loud"]) == ["passes 'shy' and 'loud' conflict: keep one of them"]
    assert check_passes([], ["loud", "shy"]) == ["passes 'loud' and 'shy' conflict: keep one of them"]


def test_one_lowering_and_replay_last(table: dict[str, PassContract]) -> None:
    table["other"] = PassContract("other", Stage.LOWERING, Numerics.EXACT, "nothing")
    table["replay"] = PassContract("replay", Stage.REPLAY, Numerics.EXACT, "nothing")
    assert check_passes(TOUR[:1], ["full_inductor_compilation", "other"]) == [
        "passes 'full_inductor_compilation' and 'other' both lower the graph: keep one of them"]
    assert check_passes([], ["replay", "other"]) == [
        "pass 'other' (lowering) must come before 'replay' (replay): swap them"]


def test_a_lossy_pass_and_no_other_states_its_tolerance() -> None:
    for numerics, tolerance in ((Numerics.LOSSY, None), (Numerics.EXACT, 1e-3)):
        with pytest.raises(ValueError, match="pass 'x': a LOSSY pass states a tolerance, and only a LOSSY pass does"):
            PassContract("x", Stage.JOINT, numerics, "nothing", tolerance=tolerance)


def test_the_table_is_consistent() -> None:
    for name, contract in CONTRACTS.items():
        assert contract.name == name
        assert contract.changes
        assert contract.needs <= {"fsdp", "cuda", "compiler", "static_shapes", "pair", "partitioner"}
        for field in ("requires", "conflicts", "after"):
            assert getattr(contract, field) <= set(CONTRACTS), f"{name}.{field} names no pass"
    listed = {where: [name for name, contract in CONTRACTS.items() if (contract.stage is Stage.JOINT) == (
        where == "joint_passes")] for where in ("joint_passes", "passes")}
    assert {problem.rpartition(":")[2] for problem in check_passes(**listed)} <= {" keep one of them"}  # in order
