"""A compiled step's inputs are those of its capture, or the call is refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.graph.input_check import InputCheck

TOKENS = torch.zeros(2, 8, dtype=torch.int64)
CHECK = InputCheck.of((TOKENS, None, 3))


@pytest.mark.parametrize(("batch", "told"), [
    ((TOKENS, None), "takes 3 inputs, as at the capture, and got 2"),
    ((TOKENS.int(), None, 3), "the dtype of input 1 was int64 at the capture and is int32"),
    ((TOKENS[:1], None, 3), r"the shape of input 1 was \[2, 8\] at the capture and is \[1, 8\]"),
    ((TOKENS.t().contiguous().t(), None, 3), r"the stride of input 1 was \[8, 1\] at the capture and is \[1, 2\]"),
    ((TOKENS.to("meta"), None, 3), "the device of input 1 was cpu at the capture and is meta"),
    ((TOKENS, TOKENS, 3), "the type of input 2 was NoneType at the capture and is Tensor"),
    ((TOKENS, None, 4), "the value of input 3 was 3 at the capture and is 4"),
])
def test_other_inputs_are_refused(batch, told):
    with pytest.raises(WorkbenchError, match=f"^the compiled step of small:? .*{told}"):
        CHECK.require("small", batch)


def test_the_same_kind_of_inputs_passes_also_after_a_trip_through_json():
    InputCheck(**json.loads(json.dumps(asdict(CHECK)))).require("small", (TOKENS + 1, None, 3))


def test_a_capture_on_fake_tensors_takes_real_ones(fake4):
    with fake4.fake_mode:
        fake = torch.zeros(4)
    InputCheck.of((fake,), writes=True).require("small", (torch.zeros(4),))


def test_shared_memory_counts_where_the_forward_writes_into_an_input():
    apart = torch.zeros(4), torch.zeros(4)
    shared = (apart[0], apart[0].view(4))
    InputCheck.of(apart).require("small", shared)
    with pytest.raises(WorkbenchError, match="other inputs than at the capture share memory"):
        InputCheck.of(apart, writes=True).require("small", shared)
    InputCheck.of(shared, writes=True).require("small", shared)
