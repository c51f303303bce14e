"""Code of a graph, and code and kernels that Inductor made of one, taken out of one process and loaded in another.

Source: torch/fx/graph.py (`_BoxedCodeGen`), torch/_functorch/_aot_autograd/descriptors.py,
torch/_inductor/output_code.py (`CompiledFxGraph`), torch/_inductor/utils.py (`clear_caches`,
`align_inputs_from_check_idxs`), torch/_inductor/runtime/cache_dir_utils.py (`cache_dir`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd import descriptors
from torch.fx.graph import _BoxedCodeGen

from workbench.errors import WorkbenchError
from workbench.torch_api.aot import clone

_LEFT = ("fxgraph", "aotautograd", "locks", "precompiled_headers")
"""Pickled graphs, which nothing here loads, and what belongs to one process."""
_BUILT = (".so", ".cubin", ".hsaco", ".best_config", ".json", ".ptx", ".llir", ".ttir", ".ttgir", ".source")


@contextlib.contextmanager
def kernels_kept(folder: Path) -> Iterator[None]:
    """Inside, Inductor builds every kernel with an empty cache; at the end the kernels are copied to `folder`."""
    from torch._inductor.utils import clear_caches

    with tempfile.TemporaryDirectory() as cache:
        clear_caches()
        with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}):
            yield
        clear_caches()
        for built in _built(Path(cache)):
            _copy(built, folder / built.relative_to(cache))


def _built(cache: Path) -> Iterator[Path]:
    for path in sorted(cache.rglob("*")):
        inside = path.relative_to(cache).parts
        if path.is_file() and inside[0] not in _LEFT and path.suffix in _BUILT:
            yield path


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy(source, partial)
    partial.replace(target)  # several ranks may install one kernel at once


def install_kernels(folder: Path) -> None:
    """Put built kernels where Inductor looks for them; what is there already stays."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for built in _built(folder) if folder.is_dir() else ():
        target = Path(cache_dir()) / built.relative_to(folder)
        if not target.exists():
            _copy(built, target)


def written(compiled: Any) -> tuple[str, dict[str, list[int]]] | None:
    """The Python source of what `compile_fx_inner` returned, and which of its inputs must be aligned; None for others.

    Raises WorkbenchError for code that reads constants from this process.
    """
    source = getattr(compiled, "source_code", None)
    if not isinstance(source, str) or not hasattr(compiled, "inputs_to_check"):
        return None
    held = [*(compiled.constants or {}), *(compiled.torchbind_constants or {})]
    if held:
        raise WorkbenchError(f"Inductor's code reads the constant {held[0]!r} from this process: make it a buffer of "
                             "the model")
    return source, {"check": list(compiled.inputs_to_check), "written": sorted(compiled.mutated_input_idxs or ())}


def callable_of(module: ModuleType, align: dict[str, list[int]]) -> Callable[[list[Any]], Sequence[Any]]:
    """The boxed function of a module that Inductor wrote."""
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    function: Callable[[list[Any]], Sequence[Any]] = align_inputs_from_check_idxs(
        module.call, align["check"], OrderedSet(align["written"]))
    return function


def one_list_code(graph: torch.fx.GraphModule) -> Any:
    """The source of a `forward(self, args_list)`, which empties its list, and the globals that it reads, by name."""
    copy = clone(graph)
    copy.graph.set_codegen(_BoxedCodeGen())
    return copy.graph.python_code("self")


def input_description(of: str | None, tangent: bool) -> Any:
    """What an input's `meta["desc"]` holds: of a parameter or buffer by name, of a tangent, or of anything else."""
    if of is not None:
        return descriptors.ParamAOTInput(of)
    return descriptors.TangentAOTInput(descriptors.PlainAOTOutput(0)) if tangent else descriptors.PlainAOTInput(0)
