"""A compiled step's arguments are those of its capture, or the call is refused in one sentence."""

import pickle
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from workbench import CompiledStep, WorkbenchError, World, author_module, capture, compile_step, partition
from workbench.graph.input_check import InputCheck

TOKENS, WEIGHTS = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8)
OPTIONS = {"mask": None, "weights": WEIGHTS}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, tokens: Tensor, options: dict[str, Tensor | None], flip: bool) -> Tensor:
        y = tokens * self.scale * options["weights"]
        if options["mask"] is not None:
            y = y * options["mask"]
        return -y.sum() if flip else y.sum()


BATCH = (TOKENS, OPTIONS, False)
OTHERS = [
    ((TOKENS, OPTIONS), r"the length of its arguments \(tokens, options, flip\): 3 at the capture, and 2 now"),
    ((TOKENS.int(), OPTIONS, False), "the dtype of tokens: int64 at the capture, and int32 now"),
    ((TOKENS[:1], OPTIONS, False), r"the shape of tokens: \[2, 8\] at the capture, and \[1, 8\] now"),
    ((TOKENS.t().contiguous().t(), OPTIONS, False), r"the stride of tokens: \[8, 1\] .* and \[1, 2\] now"),
    ((TOKENS.to("meta"), OPTIONS, False), "the device of tokens: cpu at the capture, and meta now"),
    ((TOKENS, OPTIONS | {"mask": WEIGHTS}, False), r"the type of options\['mask'\]: NoneType .* and Tensor now"),
    ((TOKENS, dict(reversed(OPTIONS.items())), False), r"the keys of options: \['mask', 'weights'\] .* now"),
    ((TOKENS, OPTIONS | {"weights": WEIGHTS.clone().requires_grad_()}, False), "the requires_grad of options"),
    # generated code read the memory, which has the other sign
    ((TOKENS, OPTIONS | {"weights": torch._neg_view(WEIGHTS)}, False), "the is_neg of options.*False .* and True now"),
    ((TOKENS, OPTIONS, True), "the value of flip: False at the capture, and True now"),
    ((TOKENS, OPTIONS, 0), "the type of flip: bool at the capture, and int now"),
]


def test_other_arguments_are_refused_also_after_a_trip_through_a_file():
    check = pickle.loads(pickle.dumps(InputCheck.of(BATCH, Model().forward)))
    check.require("small", (TOKENS + 1, {"mask": None, "weights": WEIGHTS * 2}, False))
    for batch, sentence in OTHERS:
        with pytest.raises(WorkbenchError, match=f"^the compiled step of small: {sentence}"):
            check.require("small", batch)
    arrays = InputCheck.of((numpy.ones(2),), Model().forward)  # which the traced capture takes
    arrays.require("small", (numpy.ones(2),))
    with pytest.raises(WorkbenchError, match=r"the value of tokens: .*\[1.0, 1.0\]\] at .*, and .*\[0.0, 0.0\]\] now"):
        arrays.require("small", (numpy.zeros(2),))


def step_of(module: nn.Module, batch: tuple[Any, ...]) -> CompiledStep:
    world = World("gloo", 1, 0, torch.device("cpu"))
    return compile_step(partition(capture(author_module(module, world, None, batch=lambda: batch))))


@pytest.mark.integration
def test_a_compiled_step_checks_each_call():
    """It read float64 as float32, and ignored the flag, the mask and the order of a dictionary."""
    step = step_of(Model(), BATCH)
    changed = (TOKENS + 3, {"mask": None, "weights": WEIGHTS * 2}, False)
    assert torch.equal(step(*changed), step.module(*changed))
    with pytest.raises(WorkbenchError, match="the value of flip"):
        step(TOKENS, OPTIONS, True)


class Doubles(nn.Module):
    """Writes into its first argument, and reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (self.scale * y).sum()


@pytest.mark.integration
def test_views_of_one_memory_are_refused_where_the_captured_forward_writes():
    """The graph read the second view as it was before the write."""
    step = step_of(Doubles(), (torch.ones(4), torch.ones(4)))
    whole = torch.ones(4)
    with pytest.raises(WorkbenchError, match="the memory of y: the memory of y .*, and the memory of x now"):
        step(whole, whole.view(4))


def test_a_capture_on_fake_tensors_takes_real_ones(fake4):
    with fake4.fake_mode:
        fake = torch.zeros(4)
    InputCheck.of((fake,), Model().forward, writes=True).require("small", (torch.zeros(4),))


def test_one_tensor_for_two_counts_and_views_of_one_memory_where_the_forward_writes():
    def forward(*batch: Tensor) -> None:
        """Of any number of arguments."""

    apart = torch.zeros(4), torch.zeros(4)
    shared = (apart[0], apart[0].view(4))
    twice = (apart[0], apart[0])
    InputCheck.of(apart, forward).require("small", shared)
    InputCheck.of(shared, forward).require("small", apart)  # tokens and targets of one sequence are such views
    InputCheck.of(shared, forward, writes=True).require("small", shared)
    one_of_two = "the memory of input 2: the memory of input 1 at the capture, and the memory of input 2 now"
    with pytest.raises(WorkbenchError, match=one_of_two):
        InputCheck.of(twice, forward).require("small", apart)
    with pytest.raises(WorkbenchError, match="and the memory of input 1 now"):
        InputCheck.of(apart, forward, writes=True).require("small", shared)
