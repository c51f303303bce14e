"""The graphs of a build as files to read and to run: one Python module for each rank, stage and graph."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.callables import graph_of
from workbench.graph.facts import facts_of
from workbench.graph.partition import PARTS
from workbench.graph.whole_step import WholeStep
from workbench.pipeline.build import Built
from workbench.recipe.contracts import Stage
from workbench.recipe.files import write_whole
from workbench.torch_api import aot

Input = tuple[str, str, tuple[int, ...], tuple[int, ...]]
_WRITTEN_OUT = 64
"""Constants up to this many elements stand in the file; larger ones become zeros."""


def dump_graphs(built: Built, folder: Path) -> list[Path]:
    """Write this rank's graphs to `folder`/rankN, a file for each stage and graph; returns the paths in order.

    Files of an earlier dump there are replaced. Raises WorkbenchError where the folder cannot be written.
    """
    world = built.authored.world
    here = folder / f"rank{world.rank}"
    paths = []
    try:
        here.mkdir(parents=True, exist_ok=True)
        for old in here.glob("[0-9][0-9]_*.py"):
            old.unlink()
        for number, (name, graphs) in enumerate(stages(built)):
            first = graphs[0]
            kinds = PARTS if len(graphs) == 2 else (facts_of(first).part if isinstance(first, GraphModule) else "step",)
            for kind, graph in zip(kinds, graphs, strict=True):
                path = here / f"{number:02d}_{name}_{kind}.py"
                title = f"{built.authored.recipe.name if built.authored.recipe else 'module'}: {kind} graph, {name}"
                who = f"rank {world.rank} of {world.size} ({world.kind})"
                write_whole(path, module_text(graph, f"{title}, {who}", world.size, world.rank))
                paths.append(path)
    except OSError as error:
        raise WorkbenchError(f"{here}: the graphs cannot be written: {error.strerror}") from None
    return paths


def stages(built: Built) -> Iterator[tuple[str, Sequence[Any]]]:
    """(name, graphs) of each stage: one joint graph, the forward and the backward, or the whole step."""
    joint = [r for r in built.records if r.stage is Stage.JOINT]
    later = [r for r in built.records if r.stage is not Stage.JOINT]
    if built.captured is not None:
        yield "captured", (built.captured,)
    for record in joint:
        yield record.name, record.after
    pair = [r for r in later if len(r.before) == 2]
    yield "partitioned", pair[0].before if pair else built.step.pair.graphs
    for record in pair:
        yield record.name, record.after
    if isinstance(built.step, WholeStep):
        whole = later[len(pair) :]
        yield "joined", tuple(graph_of(given) for given in whole[0].before) if whole else built.step.joined.graphs
        for record in whole:
            yield record.name, record.after


def module_text(graph: Any, title: str, size: int, rank: int) -> str:
    """One graph as a Python module that runs by itself; a compiled callable as a module that says so."""
    if not isinstance(graph, GraphModule):
        return (f'"""{title}."""\n\nprint("a compiled callable ({type(graph).__name__}), and no graph to run: '
                f'see TORCH_LOGS=output_code")\n')
    flat = aot.clone(graph)
    flat.graph.set_codegen(torch.fx.graph.CodeGen())  # one argument a placeholder, whatever the caller's convention
    flat.recompile()
    body = re.sub(r"(?m)^class \w+\(", "class Graph(", flat.print_readable(print_output=False), count=1)
    inputs = "".join(f"    {item!r},\n" for item in map(_input, flat.graph.find_nodes(op="placeholder")))
    constants = "".join(f"    {name!r}: {text},\n" for name, text in _constants(flat))
    groups = facts_of(flat).group_sizes
    return f'''"""{title}.

Read it, change it, run it: `python FILE` calls it with random inputs, on a process group that only pretends.
"""

import torch
from torch import device, inf, nan  # noqa: F401

GROUPS = {groups!r}
"""Process group names and sizes."""
INPUTS = [  # name, dtype, shape, stride; meshes and numbers have no dtype
{inputs}]
CONSTANTS = {{
{constants}}}


{body.rstrip()}


if __name__ == "__main__":
    from workbench.pipeline.graph_files import play

    play(Graph, INPUTS, CONSTANTS, GROUPS, size={size}, rank={rank})
'''


def _input(node: torch.fx.Node) -> Input:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return (node.name, "", (), ())
    shape, stride = (tuple(map(int, part)) for part in (value.shape, value.stride()))
    return (node.name, str(value.dtype).removeprefix("torch."), shape, stride)


def _constants(graph: GraphModule) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(str(n.target) for n in graph.graph.find_nodes(op="get_attr")):
        value = getattr(graph, name, None)
        if not isinstance(value, torch.Tensor):
            continue
        dtype, shape = str(value.dtype), list(value.shape)
        known = value.numel() <= _WRITTEN_OUT and type(value) in (torch.Tensor, torch.nn.Parameter)
        text = f"torch.tensor({value.tolist()!r}, dtype={dtype})" if known else f"torch.zeros({shape}, dtype={dtype})"
        yield name, text


def random_input(item: Input) -> torch.Tensor | None:
    """A tensor of that dtype, shape and stride: small numbers for floats, 0 and 1 for integers; None for no tensor."""
    _, name, shape, stride = item
    if not name:
        return None
    dtype = getattr(torch, name)
    storage = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.rand(storage).mul(0.1).to(dtype)
    else:
        flat = torch.randint(0, 2, (storage,)).to(dtype)
    return flat.as_strided(shape, stride)


def play(
    graph: type[torch.nn.Module],
    inputs: Sequence[Input],
    constants: dict[str, torch.Tensor],
    groups: dict[str, int],
    *,
    size: int,
    rank: int,
) -> None:
    """Call a dumped graph once as rank `rank` of `size` ranks that do not exist, and print its outputs' shapes."""
    from workbench.torch_api.distributed.named_groups import name_groups
    from workbench.world.fake import fake_world

    module = graph()
    for name, value in constants.items():
        setattr(module, name, value)
    torch.manual_seed(0)
    with fake_world(size, rank), torch.no_grad():
        name_groups(groups)
        outputs = module(*map(random_input, inputs))
    shown = [f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in outputs if isinstance(v, torch.Tensor)]
    print(f"{len(inputs)} inputs, {len(outputs)} outputs: {', '.join(shown)}")
