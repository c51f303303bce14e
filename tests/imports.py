"""What a module imports, read from its source: for tests of the package's shape."""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import networkx as nx

PACKAGE = Path(__file__).parents[1] / "workbench"
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
         for path in sorted(PACKAGE.rglob("*.py"))}
"""The text of each module, by its name without `workbench.`."""
PRIVATE = re.compile(r"(^|\.)_(?!_)\w")
NOT_FOR_A_PACKAGE = {"lessons", "workbench_lessons", "notebooks", "tests", "benchmarks"}


def all_imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imported_modules(source: str, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each module of the package that is imported, without `workbench.`: the longest that is known.

    Raises ValueError for a relative import, and for one of a folder that is no package.
    """
    for line, name in all_imports(source):
        first, _, rest = name.partition(".")
        if not first or first in NOT_FOR_A_PACKAGE:
            raise ValueError(f"line {line} imports {name}: name the module from `workbench` on")
        while rest and rest not in known:  # a public name of the package itself is none
            rest = rest.rpartition(".")[0]
        if first == "workbench" and rest:
            yield line, rest


def private_torch(source: str, module: str) -> list[str]:
    """Private names of torch that are imported, or reached as an attribute of `torch` or an alias of its modules."""
    found = []
    tree = ast.parse(source)
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for line, name in all_imports(source):
        if name.split(".")[0] == "torch" and (PRIVATE.search(name) or "testing._internal" in name):
            found.append(f"{module}:{line}: {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            name = f"{aliases.get(head, '')}.{rest}"
            # operators under torch.ops are called by their schema's name, also those with an underscore
            if head in aliases and PRIVATE.search(name) and not name.startswith("torch.ops."):
                found.append(f"{module}:{node.lineno}: {name}")
    return sorted(set(found))


@cache
def graph_of_imports() -> nx.DiGraph:
    """From each module of the package to those that it imports, also inside of functions."""
    graph = nx.DiGraph()
    for name, source in FILES.items():
        graph.add_node(name)
        graph.add_edges_from((name, target) for _, target in imported_modules(source, FILES))
    return graph
