"""The collectives around a pass."""

from __future__ import annotations

from workbench.graph.read import collectives
from workbench.notebook.draw.colors import GREY, PINK
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.pipeline.run_passes import PassRecord


def launch_bars(record: PassRecord) -> Picture:
    """The number of collectives before and after a pass, by kind and mesh axis."""
    before, after = (collectives.launches(c for gm in graphs for c in collectives.list_collectives(gm))
                     for graphs in (record.before, record.after))
    keys = sorted(before.keys() | after.keys())
    figure, (axes,) = panels(8, 0.9 + 0.45 * len(keys))
    for shift, counts, color, word in ((-0.2, before, GREY, "before"), (0.2, after, PINK, "after")):
        values = [counts.get(key, 0) for key in keys]
        bars = axes.barh([i + shift for i in range(len(keys))], values, 0.38, color=color, label=word)
        axes.bar_label(bars, padding=3, fontsize=8)
    axes.set_yticks(range(len(keys)), [f"{kind.replace('_', '-')} over {axis}" for kind, axis in keys])
    axes.invert_yaxis()
    axes.set_xlabel("launches")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title(record.name, fontsize=10)
    lines = [f"launches before and after {record.name}"]
    lines += [f"{kind.replace('_', '-')} over {axis}: {before.get((kind, axis), 0)} to {after.get((kind, axis), 0)}"
              for kind, axis in keys]
    return finish(figure, "Bars: " + "; ".join(lines) + ".", "\n".join(lines))
