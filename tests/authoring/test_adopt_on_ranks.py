"""Adopted models on 2 and 4 real ranks: five steps, bit for bit those of FSDP2 in eager mode."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp2_models import BF16, BF16_LOGITS, Case, differing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from workbench.authoring.adopt import adopt
from workbench.authoring.plans import AuthoringError

pytestmark = [pytest.mark.ranks, pytest.mark.compat]

IGNORED = Case({"dp": 2}, {"adapted": True}, ignored=("scale", "b"))


def of_case(case: Case, fault: str = "") -> tuple[list[str], dict[str, int]]:
    names, authored = differing(case, fault)
    return names, authored.axes


# tied, bfloat16 and HSDP are in tests/lab/test_fsdp2_methods.py
@pytest.mark.parametrize(("pool", "case", "axes"), [
    ("pool2", Case({"dp": 2}, {"layers": 2}, tail=True, columns=True, microbatches=2), {"dp_shard": 2}),
    ("pool2", IGNORED, {"dp_shard": 2}),
    ("pool4", Case({"data": 2, "model": 2}), {"dp_shard": 2, "tp": 2}),
], ids=["a unit of two, columns", "ignored", "tp"], indirect=["pool"])
def test_five_steps_are_bitwise_those_of_fsdp2(pool, case, axes):
    for different, found in pool.run(of_case, case):
        assert different == [] and found == axes


@pytest.mark.parametrize(("fault", "case"), [
    ("gradients are summed", IGNORED),
    ("outputs are not cast", Case({"dp": 2}, {}, BF16, BF16_LOGITS)),
    ("each read gathers", Case({"dp": 2}, {"tied": True})),
])
def test_a_fault_would_be_noticed(pool2, fault, case):
    for different, _ in pool2.run(of_case, case, fault):
        assert different


def across(folder: str) -> list[str]:
    """A checkpoint of model and optimizer, from FSDP2 to an adopted model and back: what differs a step later."""
    case = Case({"dp": 2}, {"tied": True})
    different = []
    for adopts_source in (False, True):
        models = [case.build()[0] for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        adopt(models[0 if adopts_source else 1])

        def step(place: int, models: Any = models, optimizers: Any = optimizers) -> None:
            optimizers[place].zero_grad()
            models[place](torch.arange(8).reshape(1, 8)).sum().backward()
            optimizers[place].step()

        step(0)
        path = f"{folder}/{adopts_source}"
        dcp.save(dict(zip("mo", get_state_dict(models[0], optimizers[0]), strict=True)), checkpoint_id=path)
        loaded = dict(zip("mo", get_state_dict(models[1], optimizers[1]), strict=True))
        dcp.load(loaded, checkpoint_id=path)
        set_state_dict(models[1], optimizers[1], model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
        step(0)
        step(1)
        saved, other = (dict(model.named_parameters()) for model in models)
        different += [name for name in saved if not torch.equal(saved[name].to_local(), other[name].to_local())]
    return different


def test_checkpoints_go_from_fsdp2_to_an_adopted_model_and_back(pool2, tmp_path):
    assert pool2.run(across, str(tmp_path)) == [[], []]


def refused_by_one() -> tuple[str, bool]:
    """Rank 1 has compiled a block: what adopt says, and whether the model is FSDP2's as before."""
    model, _ = Case({"dp": 2}).build()
    if torch.distributed.get_rank() == 1:
        model.layers[0].compile()
    with pytest.raises(AuthoringError) as refusal:
        adopt(model)
    model.layers[0]._compiled_call_impl = None
    finite = model(torch.arange(8).reshape(1, 8)).isfinite().all()
    return str(refusal.value), isinstance(model, FSDPModule) and bool(finite)


def test_a_refusal_on_one_rank_is_a_refusal_on_all(pool2):
    assert pool2.run(refused_by_one) == 2 * [(
        "adopt: rank 1: module layers.0 is compiled on its own: leave that out, and call torch.compile on the model "
        "after adopt; the model is as it was", True)]
