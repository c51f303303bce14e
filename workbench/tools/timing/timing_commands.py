"""The commands that need no recipe: `order` and `calibrate`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.pipeline.progress import loading_torch, telling
from workbench.recipe.files import write_whole
from workbench.recipe.wording import counted


def writable(path: Path | None, option: str = "--json") -> None:
    """Raise WorkbenchError where a file cannot be written, before the work is done."""
    if path is not None and path.is_dir():
        raise WorkbenchError(f"{option} {path}: is a folder: give a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise WorkbenchError(f"{option} {path}: the folder {path.parent} does not exist: make it first")


def order(args: argparse.Namespace) -> int:
    from workbench.tools.timing.order import read_order

    writable(args.json)
    with telling() as tell:
        tell("read the traces")
        found = read_order(args.traces, args.step, args.device)
    print(found)
    if args.json is not None:
        write_whole(args.json, found.to_json())
    return 0


def calibrate(args: argparse.Namespace) -> int:
    writable(args.out, "--out")
    with loading_torch():
        from workbench.tools.timing.calibrate import measure
        from workbench.world.ranks import ranks

    with telling() as tell:
        tell(f"start {counted(args.ranks, 'rank')}")
        with ranks(args.ranks, timeout=args.timeout, echo="none") as pool:
            tell("measure")
            found = pool.run(measure, shlex.join(["workbench", *args.line]))[0]
    write_whole(args.out, found.to_json())
    print(f"{args.out}: {found.summary()}")
    return 0
