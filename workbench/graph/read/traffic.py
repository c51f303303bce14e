"""What kernels read from memory and write to it, from shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import output_values
from workbench.torch_api.ops import tensor_bytes


@dataclass(frozen=True)
class KernelTraffic:
    """The nodes that one kernel computes, and the bytes of each tensor that it reads and writes.

    readers: of each tensor that is read, the first node of the kernel that reads it.
    """

    nodes: tuple[Node, ...]
    reads: dict[str, int]
    writes: dict[str, int]
    readers: dict[str, Node] = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def kernel_traffic(gm: GraphModule, kernels: Sequence[Iterable[str]]) -> list[KernelTraffic]:
    """The traffic of each kernel, given as the names of its nodes.

    A kernel reads each tensor from outside once, and writes each result that a node outside of it uses. Views cost
    nothing: their readers read the tensor that owns the memory, and of an expanded one no more than it has. WorkbenchError
    for a name that the graph lacks.
    """
    owner, known = roots(gm), {n.name: n for n in gm.graph.nodes}
    if unknown := [name for kernel in kernels for name in kernel if name not in known]:
        raise WorkbenchError(f"the graph has no node {unknown[0]!r}")
    returned = {owner[n] for n in output_values(gm) if isinstance(n, Node)}
    found = []
    for kernel in kernels:
        nodes = tuple(known[name] for name in kernel)
        inside = {n for n in known.values() if n in nodes or owner[n] in nodes}
        reads, readers = dict[str, int](), dict[str, Node]()
        for node, given in ((n, given) for n in nodes for given in n.all_input_nodes if given not in inside):
            size = min(tensor_bytes(given.meta.get("val")), tensor_bytes(owner[given].meta.get("val")))
            reads[owner[given].name] = max(size, reads.get(owner[given].name, 0))
            readers.setdefault(owner[given].name, node)
        used = {owner[n] for n in inside if any(user not in inside and user.op != "output" for user in n.users)}
        writes = {n.name: tensor_bytes(n.meta.get("val")) for n in nodes if owner[n] is n and n in used | returned}
        found.append(KernelTraffic(nodes, reads, writes, readers))
    return found
