"""What "Capture a joint graph" draws and grades: bytes alive over a step by kind, and names of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.partition import ForwardBackward
from workbench.graph.read.memory import SavedTensor, item_roots, parameter_gathers, roots
from workbench.notebook.draw.colors import INK, PAPER, PINK, SKY, YELLOW
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.torch_api.aot import is_tangent
from workbench.torch_api.ops import own_bytes

# inputs are white in `draw.dataflow`, too; no kind has a colour of its operators
COLORS = {"inputs": PAPER, "activations": YELLOW, "gathered parameters": PINK, "other values": SKY}
KB = 1000


@dataclass(frozen=True)
class StepMemory:
    """Estimated bytes alive at each operator of the forward and then of the backward, by kind.

    Inputs of the step stay alive to its end. Activations are what the forward saves; other values are temporary, or
    results. start: the number of the forward's operators; its last place is the forward's return.
    """

    alive: Mapping[str, tuple[int, ...]]
    start: int

    @property
    def total(self) -> list[int]:
        return [sum(sizes) for sizes in zip(*self.alive.values(), strict=True)]

    @property
    def at_backward(self) -> dict[str, int]:
        """The bytes of each kind after the forward, before the backward's first operator."""
        return {kind: sizes[self.start - 1] for kind, sizes in self.alive.items()}

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind at the first operator where most bytes are alive."""
        at = self.total.index(self.peak)
        return {kind: sizes[at] for kind, sizes in self.alive.items()}

    @property
    def share(self) -> float:
        """The part of the saved bytes that gathered parameters hold."""
        gathered = self.at_backward["gathered parameters"]
        return gathered / max(1, gathered + self.at_backward["activations"])

    @property
    def peak(self) -> int:
        return max(self.total)

    @property
    def forward_peak(self) -> int:
        return max(self.total[: self.start])

    @property
    def backward_peak(self) -> int:
        return max(self.total[self.start :])


def step_memory(pair: ForwardBackward) -> StepMemory:
    """The memory of both halves in one order; the backward finds each saved tensor where the forward left it."""
    forward, backward = pair.graphs
    made = {n.name: n for n in forward.graph.nodes}
    tensor, late_tensor = roots(forward), roots(backward)
    holder, late = item_roots(forward, tensor), item_roots(backward, late_tensor)
    saved = {n: holder[made[n.name]] for n in backward.graph.find_nodes(op="placeholder") if not is_tangent(n)}
    holder |= {n: saved.get(owner, owner) for n, owner in late.items()}
    tensor |= {n: owner for n, owner in late_tensor.items() if n not in saved}
    steps = [n for graph in (forward, backward) for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr")]
    place = {n: i for i, n in enumerate(steps)}
    start = next(i for i, n in enumerate(steps) if n.op == "output") + 1
    gathered = {*parameter_gathers(forward), *parameter_gathers(backward)}
    kept = set(saved.values())
    last: dict[Node, int] = {}
    for node in steps:
        for used in (node, *node.all_input_nodes):
            last[holder[used]] = place[node]
    inputs = {n for n in forward.graph.nodes if n.op in ("placeholder", "get_attr")}
    size = {n: own_bytes(n) for n in {*last, *inputs} if n.op != "output"}
    for node in last:
        if node in size and tensor[node] is not node and tensor[node] in size:  # an item of a tuple counts apart
            size[tensor[node]] -= size[node]
    alive = {kind: [0] * len(steps) for kind in COLORS}
    for node, amount in size.items():
        kind = ("inputs" if node in inputs else "gathered parameters" if tensor[node] in gathered
                else "activations" if node in kept else "other values")
        begin = 0 if node in inputs else place.get(tensor[node], start)
        end = len(steps) - 1 if node in inputs else last[node]
        for i in range(begin, end + 1):
            alive[kind][i] += amount
    return StepMemory({kind: tuple(sizes) for kind, sizes in alive.items()}, start)


def draw_memory(found: Mapping[str, StepMemory]) -> Picture:
    """A panel for each step, with a band for each kind of value; the backward begins at 0.

    Text: the bytes where the backward begins, and both peaks.
    """
    figure, axes = panels(9.2 if len(found) > 1 else 7.6, 3.5, columns=len(found), sharey=True)
    lines = []
    first, last = (max(sizes) for sizes in zip(*((step.start, len(step.total) - step.start) for step in found.values()),
                                               strict=True))
    for ax, (title, step) in zip(axes, found.items(), strict=True):
        xs = range(-step.start, len(step.total) - step.start)
        bands = [[size / KB for size in sizes] for sizes in step.alive.values()]
        drawn = ax.stackplot(xs, *bands, colors=list(COLORS.values()), labels=list(COLORS), step="mid", linewidth=0)
        drawn[0].set(edgecolor=INK, linewidth=0.8)
        ax.plot(xs, [size / KB for size in step.total], color=INK, linewidth=0.8, drawstyle="steps-mid")
        ax.axvline(-0.5, color=INK, linestyle="--", linewidth=1.1)
        ax.annotate("peak", (xs[step.total.index(step.peak)], step.peak / KB), (18, 4), textcoords="offset points",
                    fontsize=9, arrowprops={"arrowstyle": "->", "color": INK})
        for x, word in ((-first, "forward"), (0, "backward")):
            ax.text(x, 1.0, f" {word}", transform=ax.get_xaxis_transform(), fontsize=9, va="bottom", style="italic")
        share = f"{step.share:.0%} of the saved bytes at the dashed line are gathered"
        ax.set_title(f"{title}\n{share}", fontsize=9, pad=16)
        ax.set(xlabel="operators before and after the backward begins", xlim=(-first, last - 1),
               ylim=(0, max(each.peak for each in found.values()) / KB * 1.08))
        lines.append(f"{title}: {sum(step.at_backward.values()):,} bytes alive where the backward begins")
        lines += [f"  {size:,} {kind}" for kind, size in step.at_backward.items()]
        lines.append(f"  {share}")
        lines.append(f"  peak: {step.forward_peak:,} in the forward, {step.backward_peak:,} in the backward")
    axes[0].set_ylabel("kB alive (1 kB = 1,000 bytes)")
    labels = list(COLORS)
    if len(found) == 1:
        labels = [f"{kind}\n{size:,} bytes at the dashed line" for kind, size in step.at_backward.items()]
    figure.legend(drawn[::-1], labels[::-1], loc="outside right center" if len(found) == 1 else "outside lower center",
                  ncols=1 if len(found) == 1 else 4, frameon=False, fontsize=9)
    return finish(figure, "Bytes alive over a step, in bands. " + "; ".join(map(str.strip, lines)) + ".",
                  "\n".join(lines), colors=64)


def gathered_from(gm: GraphModule) -> dict[str, str]:
    """For each all-gather, what it gathers: the descriptor of an input of the graph, or the operator's name."""
    owner = roots(gm)
    found = {n.name: owner[n.args[0]] for n in gm.graph.nodes
             if n.op == "call_function" and "all_gather_into_tensor" in str(n.target)}
    return {name: str(node.meta.get("desc", node.name)) for name, node in found.items()}


def names(answer: Any, *, owner: Mapping[str, str], kinds: Mapping[str, str],
          ignored: Collection[str] = (), gathers: Collection[str] = ()) -> tuple[float, str]:
    """Grades names of tensors: a share for each right one, less one for each wrong one.

    owner: the root of each name's memory. kinds: the wanted roots, each with its kind; the message names the kind of
    the last missing one. ignored: names that count neither way. gathers: the roots that are gathered weights; the
    message tells when the only wrong name is one.
    """
    if isinstance(answer, str):
        answer = answer.replace(",", " ").split()
    given = list(answer) if isinstance(answer, list | tuple | set | dict) else [answer]
    unknown = [name for name in given if not isinstance(name, str) or name not in owner]
    if unknown:
        return 0.0, f"no tensor of this program is called {unknown[0]!r}"
    named = {owner[name] for name in given} - set(ignored)
    missing, extra = [name for name in kinds if name not in named], named - kinds.keys()
    wrong = ("1 gathered weight that the backward does not read" if len(extra) == 1 and extra <= {*gathers}
             else f"{len(extra)} not read by the backward")
    told = [f"{len(missing)} missing"] * bool(missing) + [wrong] * bool(extra)
    if len(missing) == 1:
        told[0] += f", {kinds[missing[0]]}"
    return max(0, len(kinds) - len(missing) - len(extra)) / len(kinds), "; ".join(told) or "right"


def finds_gathered(answer: Any, *, saved: Mapping[str, Sequence[SavedTensor]],
                   gathers: Mapping[str, Mapping[str, str]]) -> tuple[float, str]:
    """Grades a function of a row and its graph's gathers, which is to be true where a gathered parameter is kept.

    saved, gathers: by the name of the graph. The function gets rows without the field `gathered`, which is the answer.
    The score is the share of hits among all that is wanted or found.
    """
    if not callable(answer):
        return 0.0, f"not a function: {answer!r}"
    hits, total, told = 0, 0, []
    for graph, rows in saved.items():
        try:
            found = {row.name for row in rows if answer(_without_gathered(row), gathers[graph])}
        except Exception as error:
            if isinstance(error, AttributeError) and error.name == "gathered":
                return 0.0, "the rows of this check have no field `gathered`"
            return 0.0, f"{graph}: the function raised {type(error).__name__}: {error}"
        wanted = {row.name: row.gathered is not None for row in rows}
        missed = [name for name, kept in wanted.items() if kept and name not in found]
        alarms = [name for name, kept in wanted.items() if not kept and name in found]
        hits += sum(wanted.values()) - len(missed)
        total += sum(wanted.values()) + len(alarms)
        told += [f"{graph}: missed {len(missed)} of {sum(wanted.values())}, such as {missed[0]}"] if missed else []
        told += [f"{graph}: false alarms {len(alarms)}, such as {alarms[0]}"] if alarms else []
    return hits / total, "; ".join(told) or "right"


def _without_gathered(row: SavedTensor) -> SimpleNamespace:
    return SimpleNamespace(**{name: value for name, value in vars(row).items() if name != "gathered"})


def fall(answer: Any, *, low: float, high: float) -> tuple[float, str]:
    """Grades a fall in percent that must lie between two limits: 1 or 0."""
    if not isinstance(answer, int | float) or not abs(answer) <= 100:
        return 0.0, f"not a percentage: {answer!r}"
    said = f"the peak falls by {answer:.1f} %, wanted {low:g} to {high:g} %"
    return float(low <= answer <= high), said + (": too much" if answer > high else ": too little" if answer < low
                                                 else "")
