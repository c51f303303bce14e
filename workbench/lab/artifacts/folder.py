"""An artifact's files: written whole or not at all, and compared with what they were before any of them runs.

SHA256SUMS has the hash of each other file, as `sha256sum --check` reads it. That tells of damage and changes. It is no
signature: an artifact is code, and is to be trusted like a script.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import linecache
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import workbench
from workbench.authoring.families import find_family
from workbench.errors import WorkbenchError
from workbench.passes.registry import find_pass
from workbench.pipeline.machine import gpus
from workbench.recipe.recipe import Recipe
from workbench.tools.own_files import imports_of
from workbench.torch_api.supported import cpu_name, installed

MANIFEST, SUMS, KERNELS = "manifest.json", "SHA256SUMS", "kernels"
PACKAGE = Path(workbench.__file__).parent
Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Manifest:
    """recipe: as data. world: the kind of the ranks. made_of: what must be the same where it is loaded, by what a
    message calls it. programs: of each the digests of its graphs. ranks: of each the number of its program.
    collectives: how many each rank launches in a step.
    """

    recipe: dict[str, Any]
    world: Backend
    made_of: dict[str, str]
    programs: list[list[str]]
    ranks: list[int]
    collectives: int


def made_of(recipe: Recipe, world: str) -> dict[str, str]:
    """What the code of a step depends on beside the recipe, by what a message calls it; sources as SHA-256.

    Raises WorkbenchError, naming the pass or the model, where the source of the user's own cannot be read.
    """
    package = "".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    parts = {"torch": torch.__version__, "Python": platform.python_version(),
             "device": _device(world), "the source of this package": _sha256(package.encode())}
    functions = {f"pass {name!r}": find_pass(name).function for name in recipe.pass_names}
    functions[f"model {recipe.model.family!r}"] = find_family(recipe.model.family).make
    loss = recipe.model.loss.partition(":")[0]
    modules = imports_of(f"import {loss}", "") if loss else {}
    for title, function in functions.items():
        if not function.__module__.startswith("workbench."):
            source = _source(function, title)
            parts[f"the source of {title}"] = _sha256(source.encode())
            inside = getattr(sys.modules.get(function.__module__), "__package__", None)
            modules |= imports_of(source, inside or "")
    return parts | {f"the source of module {name!r}": _sha256(file.read_bytes()) for name, file in modules.items()}


def _source(function: Callable[..., Any], title: str) -> str:
    """The file or the notebook's cell that defines it."""
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "")
    linecache.checkcache(file)
    source = "".join(linecache.getlines(file))
    if not source:
        raise WorkbenchError(f"the source of {title} cannot be found: define it in a file or a cell of a notebook, as "
                             "a function")
    return source


def require_same(there: dict[str, str], here: dict[str, str], folder: Path) -> None:
    """Raise WorkbenchError where this process is not what the artifact was made for, naming each difference."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    changes = "; ".join(f"{name} was {there.get(name)} and is {here.get(name)} here" for name in names)
    if names:
        raise WorkbenchError(f"artifact {folder}: {changes}: compile the recipe again, here")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A private folder beside `out`, which takes its name at the end, and is gone after an error. WorkbenchError where
    `out` exists, or nothing can be written.
    """
    if out.exists():
        raise WorkbenchError(f"{out} exists already: remove it, or give another folder")
    part = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        yield part
        sums = "".join(f"{value}  {name}\n" for name, value in _hashes(part).items())
        (part / SUMS).write_text(sums, encoding="utf-8")
        part.rename(out)
    except OSError as error:
        raise WorkbenchError(f"{out}: the artifact cannot be written: {error.strerror}") from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole, unchanged artifact. Reads every file, and runs none of them.

    Raises WorkbenchError for a folder that is none, a file that is missing, was changed or was added.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise WorkbenchError(f"{folder} is no artifact ({SUMS}: {error}): give a folder that "
                             "`workbench compile` wrote") from None
    there, here = {line[66:] or SUMS: line[:64] for line in lines}, _hashes(folder)
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise WorkbenchError(f"{folder}: {name} was changed, added or lost: compile the recipe again")
    try:
        return Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, TypeError):
        raise WorkbenchError(f"{folder} is of another release: compile the recipe again") from None


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return {str(file.relative_to(folder)): _sha256(file.read_bytes()) for file in files}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _device(world: str) -> str:
    """What code that was compiled for ranks of this kind depends on: the CPU, or under nccl GPU 0 and its compiler."""
    if world != "nccl":
        return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    if not gpus():
        return "no CUDA GPU"
    gpu = torch.cuda.get_device_properties(0)
    return (f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, CUDA {torch.version.cuda}, "
            f"Triton {installed('triton') or 'not installed'}")
