"""The placement of a parameter: which rank holds which slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle
from torch.distributed.tensor import DTensor, Placement, Shard

from workbench.authoring.layout import part_bounds
from workbench.notebook.draw.colors import INK, PAPER, RANK_COLORS
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.notebook.views.placement import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STACK = 0.16  # how far the sheets of a part that several ranks hold are apart in all, of its height and width
Slice = tuple[tuple[int, int], ...]


def slices(tensor: DTensor, placements: Sequence[Placement] | None = None) -> dict[int, Slice]:
    """Rank to (start, length) on each dim of the whole tensor, under its own or the given placements.

    Ranks count from 0 on the tensor's mesh.
    """
    mesh, placed = tensor.device_mesh, placements or tensor.placements
    order = sorted(range(mesh.ndim), key=lambda i: _factor(placed[i]) > 1)
    found: dict[int, Slice] = {}
    for rank, place in enumerate(product(*map(range, mesh.shape))):
        bounds = [(0, size) for size in tensor.shape]
        for axis in order:  # a strided shard is cut after the axes to its right
            dim = _dim(placed[axis])
            if dim is not None:
                start, length = bounds[dim]
                inner, part = part_bounds(length, mesh.size(axis), place[axis])
                bounds[dim] = (start + inner, part)
        found[rank] = tuple(bounds)
    return found


def _dim(placement: Placement) -> int | None:
    return (
        None
        if placement.is_replicate() or placement.is_partial()
        else int(getattr(placement, "dim", 0))
    )


def _factor(placement: Placement) -> int:
    return 1 if type(placement) is Shard else int(getattr(placement, "split_factor", 1))


def placements(tensor: DTensor, name: str = "parameter") -> Picture:
    """Left, the whole tensor (1 or 2 dims) with the ranks that hold each part; right, the ranks on their mesh.

    ValueError for a tensor that is not distributed.
    """
    if not isinstance(tensor, DTensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, whole on every rank: there is nothing to place"
        )
    return side_by_side({name: tensor})


def side_by_side(tensors: Mapping[str, DTensor]) -> Picture:
    """`placements` of several tensors on one mesh, by their names, and the ranks on it."""
    figure = new_figure(3.2 + 5 * len(tensors) ** 0.5, 3)
    *wholes, ranks = figure.subplots(1, 1 + len(tensors), width_ratios=(*[1.6] * len(tensors), 1))
    lines = []
    for axes, (name, tensor) in zip(wholes, tensors.items(), strict=True):
        held = draw_parts(axes, tensor, tensor.placements)
        axes.set_title(f"{name}  {list(tensor.shape)}", fontsize=10)
        lines += [f"{name} {list(tensor.shape)}: {words(tensor)}", *holdings(held)]
    _mesh(ranks, next(iter(tensors.values())))
    text = "\n".join(lines)
    return finish(figure, "Which rank holds which part. " + "; ".join(lines) + ".", text)


def draw_parts(
    axes: Axes, tensor: DTensor, placements: Sequence[Placement]
) -> dict[Slice, list[int]]:
    """Draw the first 2 dims of the whole tensor, divided into the ranks' parts; returns the ranks of each part.

    A part that several ranks hold is a stack of sheets, one for each: equal ("= rank 1"), or summands ("+ rank 1").
    """
    sign = "+" if any(placed.is_partial() for placed in placements) else "="
    held: dict[Slice, list[int]] = {}
    for rank, bounds in slices(tensor, placements).items():
        held.setdefault(bounds, []).append(rank)
    for bounds, who in held.items():
        (top, rows), (left, columns) = (*bounds, (0, 1), (0, 1))[:2]
        if rows and columns:
            apart = STACK / (len(who) - 1) if len(who) > 1 else 0.0
            size = 1 - apart * (len(who) - 1)
            for i, rank in enumerate(reversed(who)):  # the first one in front
                right, down = (len(who) - 1 - i) * apart, i * apart
                axes.add_patch(Rectangle((left + right * columns, top + down * rows), size * columns, size * rows,
                                         linewidth=0.8, edgecolor=PAPER, facecolor=RANK_COLORS[rank % 8]))
                front = rank == who[0]
                across = right + (size if front else 2 * size - apart) / 2  # behind, only the right edge is seen
                axes.text(left + across * columns, top + (down + size / 2) * rows,
                          f"rank {rank}" if front else f"{sign} rank {rank}", ha="center", va="center", color=INK,
                          fontsize=9, rotation=0 if front else 90,
                          bbox={"facecolor": PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 1.5})
            axes.add_patch(
                Rectangle((left, top), columns, rows, fill=False, edgecolor=PAPER, linewidth=2)
            )
    shape = tuple(tensor.shape)
    high, wide = (*shape, 1, 1)[:2]
    axes.set(xlim=(0, wide), ylim=(high, 0), ylabel="dim 0" if shape else "")
    axes.set_yticks(sorted({start for bounds in held for start, n in bounds[:1] if n} | {high}))
    axes.set_xticks(sorted({b[1][0] for b in held} | {wide}) if len(shape) > 1 else [])
    axes.set_xlabel("dim 1" if len(shape) > 1 else "")
    return held


def holdings(held: dict[Slice, list[int]]) -> list[str]:
    """A line for each part: the ranks that hold it, and its bounds on each dim."""
    return [
        f"{_ranks(who)}: "
        + (", ".join(f"dim {d} {_span(*b)}" for d, b in enumerate(bounds)) or "the number")
        for bounds, who in held.items()
    ]


def _mesh(axes: Axes, tensor: DTensor) -> None:
    mesh = tensor.device_mesh
    names = list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
    columns = mesh.shape[-1]
    for rank in range(mesh.size()):
        row, column = divmod(rank, columns)
        axes.add_patch(Rectangle((column, row), 0.94, 0.94, facecolor=RANK_COLORS[rank % 8]))
        axes.text(column + 0.47, row + 0.47, str(rank), ha="center", va="center", fontsize=11, color=INK,
                  bbox={"facecolor": PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 1.5})
    axes.set(
        xlim=(0, columns), ylim=(mesh.size() / columns, 0), aspect="equal", xticks=[], yticks=[]
    )
    axes.set_xticks([i + 0.47 for i in range(columns)], map(str, range(columns)))
    if mesh.ndim == 2:
        axes.set_yticks([i + 0.47 for i in range(mesh.shape[0])], map(str, range(mesh.shape[0])))
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel(f"{names[-1]} →", fontsize=9)
    axes.set_ylabel(f"← {' x '.join(names[:-1])}" if len(names) > 1 else "", fontsize=9)
    axes.set_title("ranks on the mesh", fontsize=10)
    axes.spines[:].set_visible(False)


def _ranks(who: list[int]) -> str:
    return f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"


def _span(start: int, length: int) -> str:
    return f"[{start}:{start + length}]" if length else "nothing"
