"""A placement lab: put mesh axes on the dimensions of two factors, and see what their product costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, cast

import torch
import traitlets
from ipywidgets import Checkbox, Dropdown, IntSlider
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from workbench.errors import WorkbenchError
from workbench.notebook.draw.picture import Picture
from workbench.torch_api.distributed.dtensor import local_shape
from workbench.world.fake import fake_world
from workbench_lessons.course.grading import Graded, targets
from workbench_lessons.course.moment import Moment
from workbench_lessons.l01_author_with_dtensor.redistribution import CollectiveLog, Move, no_warnings, redistribution
from workbench_lessons.l01_author_with_dtensor.slices import side_by_side

CHOICES: dict[str, Placement] = {"replicate": Replicate(), "rows": Shard(0), "columns": Shard(1)}
Pair = tuple[str, str]
Key = tuple[str, str, str, str]


class PlacementLab(Moment):
    """`x @ w` on a mesh of two axes. Each axis replicates a factor, or cuts its rows or its columns.

    `x_0` and `x_1` place x over the first and the second axis, `w_0` and `w_1` place w; `rank`: whose shards are
    marked. `figures`: the cost in bytes, and how many collectives DTensor adds because the placements do not fit. The
    factors start at `given`; DTensor is asked for every change of placement, and for every product.
    """

    x_0, x_1, w_0, w_1 = (traitlets.Enum(list(CHOICES), "replicate").tag(sync=True) for _ in range(4))
    rank = traitlets.Int().tag(sync=True)
    reveal = traitlets.Bool().tag(sync=True)

    def __init__(self, x: Sequence[int] = (256, 128), w: Sequence[int] = (128, 512), *,
                 mesh: Mapping[str, int] | None = None, given: tuple[Pair, Pair] = (("rows", "columns"),
                                                                                   ("rows", "columns"))):
        mesh = dict(mesh or {"dp_shard": 2, "tp": 2})
        if len(mesh) != 2 or x[1] != w[0]:
            raise WorkbenchError(f"x {list(x)} @ w {list(w)} on {mesh}: the lab takes two axes, and as many columns of "
                                 "x as w has rows")
        self.table = _enumerated(x, w, mesh, given)
        best = min(each["bytes"] for each in self.table.values() if not each["added"])
        self.best = best
        super().__init__("placement", "x @ w", {
            "axes": list(mesh.items()), "shapes": {"x": list(x), "w": list(w)}, "given": given, "best": best,
            "table": {" ".join(key): value for key, value in self.table.items()}},
            x_0=given[0][0], x_1=given[0][1], w_0=given[1][0], w_1=given[1][1], rank=1)
        self._mesh, self._shapes, self._given = mesh, (tuple(x), tuple(w)), given
        self.add(self.link("rank", IntSlider(max=_size(mesh) - 1, description="rank")),
                 self.link("reveal", Checkbox(description="reveal the least", indent=False)))
        self.add(*(self.link(f"{name}_{i}", Dropdown(options=list(CHOICES), description=f"{name}: {axis}"))
                   for name in "xw" for i, axis in enumerate(mesh)))

    @traitlets.observe("x_0", "x_1", "w_0", "w_1")
    def _placed(self, _: Any) -> None:
        now = self.table[self.x_0, self.x_1, self.w_0, self.w_1]
        self.figures = {"cost in bytes": now["bytes"], "collectives DTensor adds": len(now["added"])}

    def picture(self) -> Picture:
        """Both factors as they are at first, and the ranks on the mesh."""
        with fake_world(_size(self._mesh)) as world:
            axes = world.mesh_of(self._mesh)
            assert axes is not None
            factors = zip(("x", "w"), self._shapes, self._given, strict=True)
            return side_by_side({f"{name} at the start": _sharded(axes, shape, pair) for name, shape, pair in factors})


def _size(mesh: Mapping[str, int]) -> int:
    first, second = mesh.values()
    return first * second


def _sharded(axes: DeviceMesh, shape: Sequence[int], places: Sequence[str]) -> DTensor:
    """A factor of that shape, as rank 0 holds it."""
    wanted = [CHOICES[each] for each in places]
    local = torch.empty(local_shape(shape, axes.shape, [0, 0], wanted))
    return DTensor.from_local(local, axes, wanted, run_check=False)


def _enumerated(x: Sequence[int], w: Sequence[int], mesh: dict[str, int], given: tuple[Pair, Pair]) -> dict[Key, Any]:
    """By the placements of x and w: what moves them there, what DTensor adds, and what sums partial results."""
    found: dict[Key, Any] = {}
    with fake_world(_size(mesh)) as world, no_warnings():
        axes = world.mesh_of(mesh)
        assert axes is not None
        names = {axes.get_group(i).group_name: axis for i, axis in enumerate(mesh)}
        pairs = [(first, second) for first in CHOICES for second in CHOICES]
        xs, ws = ({pair: _sharded(axes, shape, pair) for pair in pairs} for shape in (x, w))
        moves = [{pair: redistribution(made[start], [CHOICES[each] for each in pair]) for pair in pairs}
                 for made, start in zip((xs, ws), given, strict=True)]
        for one, other in product(pairs, pairs):
            with CollectiveLog() as log:
                result = cast(DTensor, xs[one] @ ws[other])
            added = [Move(kind, names.get(group, group), a, b) for kind, group, a, b in log.seen]
            summed = redistribution(result, [Replicate() if each.is_partial() else each for each in result.placements])
            every = [*moves[0][one], *moves[1][other], *added, *summed]
            found[(*one, *other)] = {
                "x": list(map(str, moves[0][one])), "w": list(map(str, moves[1][other])),
                "added": list(map(str, added)), "summed": list(map(str, summed)),
                "result": list(map(str, result.placements)),
                "bytes": sum(move.counted for move in every)}
    return found


SUMS = {("columns", "rows"), ("columns", "replicate"), ("replicate", "rows")}  # of x and w, which leave a sum


def placed(answer: Any, *, lab: PlacementLab) -> Graded:
    """Placements of both factors (x_0, x_1, w_0, w_1) with nothing added by DTensor, and the least bytes of all."""
    names = ("x_0", "x_1", "w_0", "w_1")
    if isinstance(answer, PlacementLab):
        answer = {name: getattr(answer, name) for name in names}
    if not isinstance(answer, Mapping) or sorted(answer) != sorted(names):
        return 0.0, f"give the board, or a placement for each of {', '.join(names)}"
    if wrong := [name for name in names if not isinstance(answer[name], str) or answer[name] not in CHOICES]:
        return 0.0, f"{wrong[0]}: {answer[wrong[0]]!r} is none of {', '.join(CHOICES)}"
    now = lab.table[tuple(answer[name] for name in names)]  # type: ignore[index]
    if now["added"]:
        pairs = {(answer["x_0"], answer["w_0"]), (answer["x_1"], answer["w_1"])}
        why = "both axes leave a sum" if pairs <= SUMS else "the placements do not fit"
        return 0.0, f"{why}: DTensor adds {', '.join(now['added'])}"
    return targets({"cost in bytes": now["bytes"]}, at_most={"cost in bytes": lab.best})
