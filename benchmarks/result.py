"""What a benchmark found: its command, the machine and the versions, and its figures, printed and kept as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.pipeline.machine import machine, versions


def tell(command: str, figures: dict[str, Any], target: Path | None) -> None:
    """Print the result, and write it to `target` where there is one."""
    text = json.dumps({"command": command, "machine": machine(), "versions": versions(), **figures}, indent=1)
    print(text)
    if target is not None:
        target.write_text(text + "\n", encoding="utf-8")


def of_process(command: list[str], environment: dict[str, str], timeout: int) -> dict[str, Any]:
    """The figures that a process printed, as the last line of JSON, or why there are none. timeout: seconds."""
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": done.stderr[-3000:]}
    return dict(json.loads(lines[-1]))


def tell_variants(
    measure: Callable[[str], dict[str, Any]], shown: list[str], options: argparse.Namespace, **about: Any
) -> int:
    """Measure each of `options.variants` for `options.rounds`: each a line of the file `options.target` as soon as it
    is done, and its figures of the names `shown` printed. Returns the exit status: 1 where one failed.
    """
    about |= {"command": " ".join(["python", *sys.argv]), "machine": machine(), "versions": versions()}
    failed = False
    for number in range(options.rounds):
        for variant in options.variants:
            figures = measure(variant)
            failed |= "error" in figures
            if options.target is not None:
                with options.target.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"variant": variant, "round": number, **about, **figures}) + "\n")
            print(variant, number, {n: figures[n] for n in (*shown, "error") if n in figures}, flush=True)
    return int(failed)
