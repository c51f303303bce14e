"""Kernels that Inductor built in one process, carried to another one, and there to whichever GPU the process has.

Code that was compiled for GPU 0 names it. Here its number becomes the global RANK_GPU of the code's module.

Source: torch/_inductor/codegen/cuda/device_op_overrides.py (what names a GPU in a wrapper), torch/_inductor/
runtime/hints.py (`DeviceProperties`, which a kernel's source makes), torch/_inductor/utils.py (`clear_caches`),
torch/_inductor/runtime/cache_dir_utils.py (`cache_dir`, `triton_cache_dir`), torch/_inductor/async_compile.py;
triton/runtime/cache.py (`FileCacheManager.get_group`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from workbench.errors import WorkbenchError, temporary
from workbench.torch_api.inductor.lowering import configured

RANK_GPU = "RANK_GPU"
_NAMED = re.compile(r"(\btorch\.cuda\.(?:_DeviceGuard|set_device)\(|\bget_raw_stream\(|"
                    r"\bdevice\(type='cuda', index=)\d+(?=\))")
_NUMBERED = re.compile(r"(\bindex=|\bstream|\bcuda:)\d+\b")
_LEFT = ("fxgraph", "aotautograd", "locks", "precompiled_headers")
"""Pickled graphs, which nothing here loads, and what belongs to one process."""
_CHOSEN, _GROUP = ".best_config", "__grp__"
_BUILT = (".so", ".cubin", ".hsaco", ".json", _CHOSEN)
_TRITON = "triton"


def for_any_gpu(source: str) -> str:
    """Python source of a process with one GPU, with RANK_GPU in place of that GPU's number."""
    return _NAMED.sub(rf"\g<1>{RANK_GPU}", source)


def text_for_any_gpu(source: str) -> str:
    """Inductor's code, to be compared: without comments, which tell of the process, and with kernels and their
    benchmarks for any GPU.
    """
    return _NUMBERED.sub(rf"\g<1>{RANK_GPU}", re.sub(r"(?m)^\s*#.*$", "", for_any_gpu(source)))


@contextlib.contextmanager
def _empty_cache() -> Iterator[tuple[str, dict[str, str]]]:
    """A temporary folder, and the variables that make it the cache."""
    with temporary(tempfile.TemporaryDirectory) as cache:
        yield cache, {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/{_TRITON}"}


@contextlib.contextmanager
def kernels_kept(folder: Path) -> Iterator[None]:
    """Inside, Inductor builds every kernel with an empty cache; at the end the kernels are copied to `folder`."""
    from torch._inductor.utils import clear_caches

    with _empty_cache() as (cache, variables):
        clear_caches()
        with mock.patch.dict(os.environ, variables):
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
    if source.name.startswith(_GROUP):
        # which names them by their absolute paths
        files = json.loads(source.read_text())["child_paths"]
        partial.write_text(
            json.dumps({"child_paths": {name: str(target.with_name(name)) for name in files}})
        )
    else:
        shutil.copy(source, partial)
    partial.replace(target)  # several ranks may install one kernel at once


def rebuild(folder: Path, command: list[str]) -> None:
    """Put what `command` builds in place of the kernels in `folder`, whose launch configurations it finds.

    Triton names a kernel after all that built it, and that depends on what its process has done before: only a process
    that does what a rank does finds the names that a rank looks for. Raises WorkbenchError where the command fails.
    """
    with _empty_cache() as (cache, variables):
        for chosen in folder.rglob(f"*{_CHOSEN}"):
            _copy(chosen, Path(cache) / chosen.relative_to(folder))
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if done.returncode:
            raise WorkbenchError(
                f"the code that was compiled cannot be loaded: {done.stderr[-2000:]}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        for built in _built(Path(cache)):
            _copy(built, folder / built.relative_to(cache))


def install_kernels(folder: Path, gpu: int | None = None) -> None:
    """Put built kernels where Inductor and Triton look for them; what is there already stays. gpu: this process's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    for built in _built(folder) if folder.is_dir() else ():
        inside = built.relative_to(folder)
        target = Path(cache_dir()) / inside
        if inside.parts[0] == _TRITON:
            target = Path(triton_cache_dir(gpu or 0), *inside.parts[1:])
        if not target.exists():
            _copy(built, target)


@contextlib.contextmanager
def kernels_for(gpu: int | None) -> Iterator[None]:
    """Inside, kernels are loaded for this GPU, whichever their source names, one after the other in this process.

    Their source stays as it is: its hash is the name under which the chosen launch configuration is found.
    """
    from torch._inductor.runtime import hints

    if gpu is None:
        yield
        return
    original = hints.DeviceProperties

    def for_gpu(*args: Any, **keywords: Any) -> Any:
        return original(*args, **{**keywords, "index": gpu})

    # a pool of compilers would take seconds to start, and has nothing to compile
    with mock.patch.object(hints, "DeviceProperties", for_gpu), configured({"compile_threads": 1}):
        yield
