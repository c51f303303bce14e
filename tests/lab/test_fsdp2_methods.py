"""FSDP2's methods on adopted models: accumulation without communication, hints, and refusals."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp2_models import BF16, BF16_LOGITS, Case, differing
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from workbench import Outcome, Precision, as_backend, fake_world
from workbench.authoring.adopt import UNIT, adopt
from workbench.authoring.plans import AuthoringError
from workbench.graph.read.collectives import list_collectives
from workbench.lab.fsdp2_methods import accumulation

pytestmark = pytest.mark.compat


def locally(case: Case, fault: bool = False) -> list[str]:
    """What differs of five steps whose microbatches but the last are not synchronised."""
    low = Precision(torch.bfloat16, torch.bfloat16)
    with mock.patch.object(accumulation, "Precision", lambda *_: low) if fault else contextlib.nullcontext():
        return differing(case)[0]


@pytest.mark.ranks
def test_local_microbatches_are_bitwise_those_of_fsdp2(pool2):
    case = Case({"dp": 2}, {"tied": True, "adapted": True}, BF16, BF16_LOGITS, microbatches=2, local=True)
    assert pool2.run(locally, case) == [[], []]
    assert all(pool2.run(locally, case, True))


@pytest.mark.ranks
def test_local_microbatches_of_hsdp_are_too(pool4):
    assert pool4.run(locally, Case({"outer": 2, "inner": 2}, microbatches=3, local=True)) == 4 * [[]]


def compiled_whole() -> None:
    backends: list[Any] = []

    def compiled(model: Any, authored: Any) -> Any:
        torch._dynamo.reset()
        backends.append(as_backend(["transformer_block_bucketing"], authored=authored))
        return torch.compile(model, backend=backends[0], fullgraph=True)

    assert differing(Case({"dp": 2}, tail=True), compiled=compiled)[0] == []
    (graph,) = backends[0].graphs
    assert [record.outcome for record in graph.records] == [Outcome.PASS]
    gathers = [[c.kind for c in list_collectives(part)].count("all_gather") for part in graph.pair.graphs]
    assert gathers == [3, 2]  # the outer unit, which has the embedding, keeps what it has gathered


@pytest.mark.ranks
def test_compiled_whole_it_is_bitwise_and_its_units_are_the_buckets(pool2):
    pool2.run(compiled_whole)


@pytest.fixture
def model():
    with fake_world(2):
        yield adopt(Case({"dp": 2}).build()[0])


def test_every_method_of_fsdp2_is_there(model):
    names = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert "set_requires_gradient_sync" in names
    assert [name for name in names if not callable(getattr(model, name, None))] == []


def test_hints_do_nothing_and_a_parameter_is_whole_wherever_it_is_read(model):
    assert isinstance(model.unshard(async_op=True), UnshardHandle) and model.unshard() is None
    model.reshard()
    model.set_reshard_after_backward(False)
    model.set_modules_to_forward_prefetch([model.layers[0]])
    assert model.layers[0].attention.q.weight.shape == (24, 24)
    assert dict(model.named_parameters())["layers.0.attention.q.weight"].to_local().shape == (12, 24)


def test_what_would_change_values_is_refused(model):
    with pytest.raises(AuthoringError, match="set_gradient_divide_factor would change what an adopted model computes: "
                                             "call it on the FSDP2 model, before adopt"):
        model.set_gradient_divide_factor(1.0)


def test_reshard_after_forward_is_set_for_one_unit_or_for_all_inside(model):
    outer, inner = vars(model)[UNIT], vars(model.layers[0])[UNIT]
    assert (outer.reshard, inner.reshard) == (False, True)
    model.set_reshard_after_forward(True, recurse=False)
    model.layers[0].set_reshard_after_forward(False)
    assert (outer.reshard, inner.reshard) == (True, False)


def test_parameters_that_changed_since_the_start_of_local_microbatches_are_refused(model):
    model.set_requires_gradient_sync(False)
    with torch.no_grad():
        dict(model.named_parameters())["layers.0.scale"].mul_(2)
    with pytest.raises(AuthoringError, match=r"parameter layers.0.scale has changed since set_requires_gradient_sync\("
                                             r"False\), .*: call that after optimizer.step\(\)"):
        model.set_requires_gradient_sync(True)
