"""What "Capture a joint graph" draws and grades: bytes alive over a step, what is saved, and names of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward, partition
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import SavedTensor, item_roots, parameter_gathers, roots, saved_tensors
from workbench.notebook.draw.colors import INK, PAPER, PINK, SKY, YELLOW
from workbench.notebook.draw.picture import Picture, Table, finish, panels, table
from workbench.torch_api.aot import is_tangent
from workbench.torch_api.ops import own_bytes

# inputs are white in `draw.dataflow`, too; no kind has a colour of its operators
COLORS = {"inputs": PAPER, "activations": YELLOW, "gathered parameters": PINK, "other values": SKY}
LABELS = {"activations": "saved activations", "other values": "other values, recomputed ones included"}  # of a legend
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
    highest = max(step.peak for step in found.values())
    unit, name = KB, "kB (1 kB = 1,000 bytes)"
    if highest > 10_000 * KB:
        unit, name = 1000 * KB, "MB (1 MB = 1,000,000 bytes)"
    first, last = (max(sizes) for sizes in zip(*((step.start, len(step.total) - step.start) for step in found.values()),
                                               strict=True))
    for ax, (title, step) in zip(axes, found.items(), strict=True):
        xs = range(-step.start, len(step.total) - step.start)
        bands = [[size / unit for size in sizes] for sizes in step.alive.values()]
        drawn = ax.stackplot(xs, *bands, colors=list(COLORS.values()), labels=list(COLORS), step="mid", linewidth=0)
        drawn[0].set(edgecolor=INK, linewidth=0.8)
        ax.plot(xs, [size / unit for size in step.total], color=INK, linewidth=0.8, drawstyle="steps-mid")
        ax.axvline(-0.5, color=INK, linestyle="--", linewidth=1.1)
        ax.annotate("peak", (xs[step.total.index(step.peak)], step.peak / unit), (18, 4), textcoords="offset points",
                    fontsize=9, arrowprops={"arrowstyle": "->", "color": INK})
        for x, word in ((-first, "forward"), (0, "backward")):
            ax.text(x, 1.0, f" {word}", transform=ax.get_xaxis_transform(), fontsize=9, va="bottom", style="italic")
        gathered = f"{step.at_backward['gathered parameters'] / unit:,.0f} {name[:2]} gathered at the dashed line"
        ax.set_title(f"{title}\n{gathered}", fontsize=9, pad=16)
        ax.set(xlabel="operators, counted from the start of the backward", xlim=(-first, last - 1),
               ylim=(0, highest / unit * 1.08))
        lines.append(f"{title}: {sum(step.at_backward.values()):,} bytes alive where the backward begins")
        lines += [f"  {size:,} {kind}" for kind, size in step.at_backward.items()]
        lines.append(f"  peak: {step.forward_peak:,} in the forward, {step.backward_peak:,} in the backward")
    axes[0].set_ylabel(f"alive, {name}", fontsize=9)
    labels = [LABELS.get(kind, kind) for kind in COLORS]
    if len(found) == 1:
        labels = [f"{label}\n{size:,} bytes at the dashed line"
                  for label, size in zip(labels, step.at_backward.values(), strict=True)]
    figure.legend(drawn[::-1], labels[::-1], loc="outside right center" if len(found) == 1 else "outside lower center",
                  ncols=1 if len(found) == 1 else 4, frameon=False, fontsize=9)
    return finish(figure, "Bytes alive over a step, in bands. " + "; ".join(map(str.strip, lines)) + ".",
                  "\n".join(lines), colors=64)


def bars(rows: Sequence[SavedTensor]) -> Picture:
    """A bar for each module: the bytes that its saved tensors hold, activations and gathered parameters."""
    held: dict[str, dict[str, int]] = defaultdict(lambda: {"activations": 0, "gathered parameters": 0})
    for row in rows:
        if not row.held_bytes:  # an input of the step
            continue
        kind = "gathered parameters" if row.gathered else "activations"
        held[row.module][kind] += row.held_bytes
    figure, (axes,) = panels(8.6, 0.9 + 0.27 * len(held))
    left = [0.0] * len(held)
    for kind in ("activations", "gathered parameters"):
        sizes = [parts[kind] / KB for parts in held.values()]
        axes.barh(range(len(held)), sizes, 0.75, left=left, color=COLORS[kind], label=kind)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(held)), [module or "the model itself" for module in held], fontsize=9)
    axes.set(ylim=(len(held) - 0.5, -0.5), xlabel="kB saved (1 kB = 1,000 bytes)")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    lines = [f"{module or 'the model itself'}: " + ", ".join(f"{size:,} {kind}" for kind, size in parts.items())
             for module, parts in held.items()]
    return finish(figure, "Bytes saved by module. " + "; ".join(lines) + ".", "\n".join(lines), colors=64)


def prices(pairs: Mapping[str, ForwardBackward]) -> Table:
    """A row for each pair: gathered parameters kept, the peak, and the gathers that its backward repeats."""
    rows = []
    for name, pair in pairs.items():
        memory = step_memory(pair)
        repeated = [c for c in list_collectives(pair.backward) if c.kind == "all_gather"]
        moved = sum(c.bytes_out for c in repeated)
        rows.append((name, memory.at_backward["gathered parameters"], memory.peak, len(repeated), moved))
    columns = ("", "gathered bytes kept", "peak", "gathers in the backward", "their bytes")
    return table("what resharding saves, and what it costs", columns, rows)


def edges(joint: JointGraph) -> dict[str, Any]:
    """What `names` grades by: the roots of all names, and those that the backward reads when nothing is recomputed."""
    root_of = {node.name: root.name for node, root in roots(joint.graph).items()}
    read = saved_tensors(*partition(joint.fork(), by="default").graphs)
    kinds = {row.root: "a gathered weight" if row.gathered else "an activation or the batch" for row in read}
    inputs = joint.graph.graph.find_nodes(op="placeholder")
    ignored = [n.name for n in inputs if is_tangent(n) or not isinstance(n.meta["val"], Tensor)]
    return {"owner": root_of, "kinds": kinds, "ignored": ignored, "gathers": gathered_from(joint.graph)}


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


def fall(answer: Any, *, low: float, high: float) -> tuple[float, str]:
    """Grades a fall in percent that must lie between two limits: 1 or 0."""
    if not isinstance(answer, int | float) or not abs(answer) <= 100:
        return 0.0, f"not a percentage: {answer!r}"
    said = f"the peak falls by {answer:.1f} %, wanted {low:g} to {high:g} %"
    return float(low <= answer <= high), said + (": too much" if answer > high else ": too little" if answer < low
                                                 else "")
