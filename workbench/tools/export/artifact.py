"""The files of an artifact: what they were made of and for, written whole or not at all, checked before any is read.

A manifest names each file with its SHA-256. Its fingerprint, over everything else in it, tells damage and changes. It
is no signature: an artifact is code, and is to be trusted like a script that one starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workbench.authoring.families import find_family
from workbench.errors import WorkbenchError, full_disk
from workbench.passes.registry import find_pass
from workbench.pipeline.machine import device_of
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import json_text
from workbench.tools.export.code import Code, region_file

FORMAT = 4
MANIFEST, KERNELS, _CONSTANTS = "manifest.json", "kernels", ".safetensors"
_PACKAGE = Path(__file__).parents[2]
_ROOMS = {"models": ("authoring/**/*.py",), "captures and graphs": ("graph/**/*.py",),
          "use of torch": ("torch_api/**/*.py",),
          "code that passes share": ("passes/effect.py", "passes/merged_collectives.py", "passes/registry.py")}


@dataclass(frozen=True)
class Manifest:
    """What an artifact was made of.

    recipe: as data. world: the kind of its ranks, gloo or nccl. made_of: what must be the same where it is loaded, by
    what a message calls it. programs: for ranks whose graphs are equal, a digest of the graphs, the file of each
    graph's code by part, the names of the process groups in order, and data of the step (see `compiled`). ranks: for
    each rank, its program. passes, schedule, pipeline: the verdicts, as a report has them. files: SHA-256 by relative
    path.
    """

    recipe: dict[str, Any]
    world: str
    made_of: dict[str, str]
    programs: list[dict[str, Any]]
    ranks: list[int]
    passes: list[dict[str, Any]]
    schedule: dict[str, Any]
    pipeline: list[dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all of it."""
        return _sha(json_text(asdict(self)).encode())


def made_of(recipe: Recipe, world: str) -> dict[str, str]:
    """What the code of a step depends on beside the recipe, by what a message calls it. world: gloo or nccl."""
    found = {"torch": torch.__version__, "Python": platform.python_version(), "device": device_of(world)}
    found |= {f"the source of the package's {what}": _sources(*files) for what, files in _ROOMS.items()}
    for name in dict.fromkeys(recipe.pass_names):
        item = find_pass(name)
        if item.contract.source == "user":
            continue
        package, _, place = item.contract.home.replace(".", "/").partition("/")
        found[f"the source of pass {name!r}"] = (
            _sources(f"{place}.py", f"{place}/**/*.py") if package == "workbench"  # a file, or a folder of the lab
            else _sha(_source(item.function, f"pass {name!r}").encode()))
    own = own_sources(recipe)
    return found | ({"the source of your own model and passes": _sha(own.encode())} if own else {})


def own_sources(recipe: Recipe) -> str:
    """The files that define the user's own model and passes in `recipe`; "" without any.

    Of a notebook's cell it is the function alone, without what it calls. WorkbenchError, naming the pass or the model,
    where there is no source.
    """
    own: dict[str, Callable[..., Any]] = {}
    family = find_family(recipe.model.family)
    if family.sizes is not None:
        own[f"model {family.name!r}"] = family.make
    for name in recipe.pass_names:
        item = find_pass(name)
        if item.contract.source == "user":
            own[f"pass {name!r}"] = item.function
    return "\n".join(_source(function, what) for what, function in own.items())


def _source(function: Callable[..., Any], what: str) -> str:
    function = inspect.unwrap(function)
    try:
        file = Path(inspect.getsourcefile(function) or "")
        return file.read_text(encoding="utf-8") if file.is_file() else inspect.getsource(function)
    except (OSError, TypeError):
        raise WorkbenchError(f"the source of {what} cannot be found: define it in a file or a cell of a notebook, "
                             "as a function") from None


def require_same(manifest: Manifest, here: dict[str, str], folder: Path) -> None:
    """Raise WorkbenchError where this process is not what the artifact was made for, naming each difference."""
    there = manifest.made_of
    found = [f"{name} was {_shown(there.get(name))} and is {_shown(here.get(name))} here"
             for name in dict.fromkeys([*there, *here]) if there.get(name) != here.get(name)]
    if found:
        raise WorkbenchError(f"artifact {folder}: {'; '.join(found)}: compile the recipe again, here")


def _shown(value: str | None) -> str:
    return "absent" if value is None else value[:12] if len(value) == 64 else value


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, private to its user, that takes its name at the end, and is gone after an error.

    Raises WorkbenchError where `out` exists, now or at the end, or nothing can be written.
    """
    _refuse_existing(out)
    made = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        yield made
        for path in made.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        _refuse_existing(out)  # a rename would replace an empty folder
        _rename(made, out)
    except (OSError, SafetensorError) as error:  # safetensors has the system's words in a message of its own
        why = getattr(error, "strerror", None) or full_disk(str(error)) or error
        raise WorkbenchError(f"{out}: the artifact cannot be written: {why}") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _rename(made: Path, out: Path) -> None:
    try:
        made.rename(out)
    except OSError:
        _refuse_existing(out)  # another process was faster by less than the check before
        raise


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise WorkbenchError(f"{out} exists already: remove it, or give another folder")


def write_code(folder: Path, name: str, code: Code) -> str:
    """Write one graph's code: `code/NAME.py`, what it takes and returns beside it, constants, and the code of its
    regions; returns the name.
    """
    place = folder / "code" / name
    place.parent.mkdir(exist_ok=True)
    place.with_suffix(".py").write_text(code.source, encoding="utf-8")
    place.with_suffix(".json").write_text(json_text(code.signature()), encoding="utf-8")
    for number, region in enumerate(code.regions):
        write_code(folder, region_file(place, number).name, region)
    if code.constants:
        save_file({key: value.contiguous() for key, value in code.constants.items()}, place.with_suffix(_CONSTANTS))
    return name


def read_code(folder: Path, name: str) -> Code:
    """What `write_code` wrote. Nothing of it is run."""
    place = folder / "code" / name
    constants, regions = place.with_suffix(_CONSTANTS), list[Code]()
    while region_file(place, len(regions)).with_suffix(".py").exists():
        regions.append(read_code(folder, region_file(place, len(regions)).name))
    return Code.read(json.loads(place.with_suffix(".json").read_text(encoding="utf-8")),
                     place.with_suffix(".py").read_text(encoding="utf-8"),
                     load_file(constants) if constants.exists() else {}, tuple(regions))


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest last, with the hash of each file in `folder`, and return it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            manifest.files[str(path.relative_to(folder))] = _sha(path.read_bytes())
    text = json_text({**asdict(manifest), "fingerprint": manifest.fingerprint})
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of a whole, unchanged artifact. Reads every file, and runs none of them.

    Raises WorkbenchError for a folder that is none, a file that is missing, was changed or was added.
    """
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkbenchError(f"{folder} is no artifact: {MANIFEST}: {error.strerror}: give a folder that `workbench "
                             "compile` wrote") from None
    except (ValueError, RecursionError):
        raise WorkbenchError(f"{folder}: {MANIFEST} is damaged: compile the recipe again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise WorkbenchError(f"{folder}: this package reads artifacts of format {FORMAT}, and this one has format "
                             f"{data.get('format') if isinstance(data, dict) else None}: compile the recipe again")
    said = data.pop("fingerprint", None)
    try:
        found = Manifest(**data)
        whole = said == found.fingerprint
    except TypeError:
        whole = False
    if not whole:
        raise WorkbenchError(f"{folder}: {MANIFEST} was changed after it was written: compile the recipe again")
    held = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted({*found.files, *held} - {MANIFEST}):
        why = ("is missing" if name not in held else "was added" if name not in found.files else
               "was changed" if _sha(held[name].read_bytes()) != found.files[name] else "")
        if why:
            raise WorkbenchError(f"{folder}: {name} {why}: compile the recipe again")
    return found


def _sources(*patterns: str) -> str:
    paths = sorted(path for pattern in patterns for path in _PACKAGE.glob(pattern))
    return _sha(b"\0".join(path.read_bytes() for path in paths))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
