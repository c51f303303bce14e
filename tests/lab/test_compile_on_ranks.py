"""`workbench.compile` of adopted models on two ranks: FSDP2's losses and parameters, bit for bit."""

import warnings
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp2_models import Case, differing

import workbench
from workbench import WorkbenchError, adopt

pytestmark = pytest.mark.ranks

TOKENS = torch.arange(24).reshape(3, 8)


def five_steps(case: Case) -> None:
    steps: list[Any] = []

    def compiled(model: Any, _: Any) -> Any:
        steps.append(workbench.compile(
            model, example=TOKENS, joint_passes=["activation_checkpointing"], passes=["transformer_block_bucketing"],
            progress=False))
        return steps[0]

    assert differing(case, compiled=compiled)[0] == []
    (step,) = steps
    rows = [line.split()[0] for line in str(step.report).splitlines() if "PASS  " in line]
    assert step.report.ok and rows == ["activation_checkpointing", "transformer_block_bucketing", "whole"]
    launches = step.records[1].verdict("effect").evidence
    assert sum(launches["after"].values()) < sum(launches["before"].values())


def test_an_adopted_model_trains_as_under_fsdp2_with_its_units_in_buckets(pool2):
    pool2.run(five_steps, Case({"dp": 2}))


def unequal_batches() -> tuple[list[str], str, str]:
    """Rank 1 has a shorter batch, then another dtype, and then compiles for arguments that do not fit."""
    torch.manual_seed(0)
    model, _ = Case({"dp": 2}).build()
    step = workbench.compile(adopt(model), example=TOKENS, level="light", progress=False)
    rank = torch.distributed.get_rank()
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for _ in range(2):
            step(TOKENS[:2] if rank else TOKENS).sum().backward()
    with pytest.raises(WorkbenchError) as dtype:
        step(TOKENS.int() if rank else TOKENS)
    with pytest.raises(WorkbenchError) as example:
        workbench.compile(model, example=(TOKENS, TOKENS) if rank else TOKENS, progress=False)
    return [str(warning.message) for warning in log], str(dtype.value), str(example.value)


def test_what_one_rank_does_instead_all_do(pool2):
    where = "workbench.compile of Tiny"
    first, second = pool2.run(unequal_batches)
    unfit = f"{where}: example= does not fit forward(tokens): too many positional arguments"
    assert first == ([f"{where}: another rank does not run the captured step: the model itself runs"],
                     f"{where}: another rank refuses its arguments", f"rank 1: {unfit}")
    assert second == (
        [f"{where}: the shape of tokens is [2, 8] now, and was [3, 8] at the capture: the model itself runs"],
        "the compiled step of Tiny: the dtype of tokens: int64 at the capture, and int32 now: capture again with such "
        "inputs, or convert it", unfit)


def examples_that_are_the_same() -> None:
    """Without the builds: what is said of the example comes before."""
    module = import_module("workbench.lab.user_step.compile")
    own = TOKENS + torch.distributed.get_rank()
    told = "workbench.compile of Tiny: every rank has the same example, and so the same gradients: "
    for example, level, warned in ((TOKENS, "full", True), (own, "full", False), (TOKENS, "light", False)):
        model, _ = Case({"dp": 2}).build()
        with (mock.patch.object(module, "build_authored", side_effect=WorkbenchError("as far as this")),
              warnings.catch_warnings(record=True) as log, pytest.raises(WorkbenchError, match="as far as this")):
            warnings.simplefilter("always")
            workbench.compile(adopt(model), example=example, level=level, progress=False)  # type: ignore[arg-type]
        assert any(str(warning.message).startswith(told) for warning in log) is warned


def test_one_example_for_all_ranks_hides_a_missing_reduction(pool2):
    pool2.run(examples_that_are_the_same)
