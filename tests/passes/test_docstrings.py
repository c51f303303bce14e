"""The graphs in the docstrings of the passes are what comes out: each `example(...)` is run, as doctest runs it."""

import doctest
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from workbench import author_module, capture, fake_world, partition, region, run_joint, run_partitioned
from workbench.authoring.plans import ParallelPlan
from workbench.graph.read.kernels import find_kernels
from workbench.graph.read.program import program
from workbench.passes.cudagraph import CUDAGraphRunner
from workbench.recipe.contracts import Stage, package_contracts
from workbench.recipe.sections import PassSpec

Block = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, block: Block, width: int):
        super().__init__()
        self.block, self.weight = block, nn.Parameter(torch.empty(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with region("layer"):
            return self.block(x, self.weight)


class Model(nn.Module):
    """`layers` blocks, each with one square weight; the loss is the sum of what the last one gives."""

    def __init__(self, block: Block, layers: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(block, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def gather(x: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, one after another, as a block of a tensor-parallel model asks for them."""
    return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def made(name: str, block: Block, layers: int, width: int, ranks: int, axis: str, options: dict[str, Any] | None,
         clip: float | None, start: str) -> tuple[list[str], ...]:
    """What the pass makes of forward and backward, or of the whole step, without values; the graphs without it where
    options is None.
    """
    contract = package_contracts()[name]
    listed = [] if options is None else [PassSpec(name=name, options=options)]
    joint_passes = [*sorted(contract.requires), *(listed if contract.stage is Stage.JOINT else [])]
    with fake_world(ranks) as world:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,)) if ranks > 1 else None
        with torch.device("meta"):
            model = Model(block, layers, width)
        with world.fake_mode:
            batch = (torch.empty(width, width),)
        joint = capture(author_module(model, world, mesh, ParallelPlan(units=("layers.*",)), batch=lambda: batch))
        run_joint(joint, joint_passes)
        if start:
            from workbench.lab.pipeline.cut import cut_into_stages

            pair = cut_into_stages(joint, [start]).stages[-1].pair
        else:
            pair = partition(joint)
        if contract.stage is Stage.STEP:
            from workbench.lab.whole_step.join import Update, join

            whole = join(pair, Update(clip))
            run_partitioned(whole, listed)
            return (program(whole.graph).splitlines(),)
        bodies = run_partitioned(pair, [] if contract.stage is Stage.JOINT else listed)[1]
        return tuple(map(shown, bodies or pair.graphs, pair.graphs))


def shown(result: Any, graph: GraphModule) -> list[str]:
    """A graph as a program; of a callable that Inductor made of it the kernels, and of a recorded one a summary."""
    if isinstance(result, GraphModule):
        return program(result).splitlines()
    if isinstance(result, CUDAGraphRunner):
        return [result.facts.summary()]
    kernels = find_kernels(result, graph)
    assert kernels is not None
    return [f"{kernel.name}: {', '.join(kernel.nodes)}" for kernel in kernels.kernels]


def example(name: str, block: Block, *, layers: int = 1, width: int = 4, ranks: int = 1, graph: str = "forward",
            axis: str = "dp_shard", clip: float | None = 1.0, start: str = "", **options: Any) -> None:
    """Print one graph of the model before and after the pass `name` with these options; clip: of the whole step; start:
    of the last of two stages of a pipeline.
    """
    for title, given in (("before", None), ("after", options)):
        lines = made(name, block, layers, width, ranks, axis, given, clip, start)[graph == "backward"]
        print(f"{title}:", *lines, sep="\n  ")


def differences(name: str, text: str) -> str:
    """What doctest says where an example in `text` prints something else; "" where none does."""
    names = {"example": example, "gather": gather, "torch": torch}
    shows = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert shows.examples and f'example("{name}"' in shows.examples[0].source, f"{name} shows no graph"
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF)
    runner.run(shows, out=said.append)
    return "".join(said)


@pytest.mark.integration
@pytest.mark.parametrize("name", package_contracts())
def test_a_docstring_shows_what_the_pass_does(name: str) -> None:
    assert differences(name, import_module(package_contracts()[name].home).__doc__ or "") == ""


@pytest.mark.integration
def test_a_docstring_that_shows_something_else_is_told() -> None:
    text = import_module("workbench.passes.graph_cleanup").__doc__ or ""
    assert "t_1: float32 [4, 4] = aten.t(t)" in differences("graph_cleanup", text.replace("aten.t(t)", "aten.t(u)"))
