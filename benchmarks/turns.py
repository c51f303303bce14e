"""Variants of a benchmark in processes of their own: built at once, then timed one at a time, the others waiting."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().with_name("step_time.py")
WAIT = 1800  # s that a variant waits for its turn
FIGURES = ("step_ms", "tokens_per_second", "peak_gib", "kernels_ms", "nccl_ms", "exposed_nccl_ms", "launches",
           "enqueue_ms", "first_step_s", "build_s")


def append(results: Path, line: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rounds_of(options: argparse.Namespace, rank: int) -> Iterator[int]:
    """The rounds of this variant, each once the driver gives the word."""
    for turn in range(options.rounds + 1):
        sign(options, turn, f"rank{rank}").touch()
        if turn == options.rounds:
            return
        until = time.monotonic() + WAIT
        while not sign(options, turn, "go").exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{options.variants[0]}: no word for round {turn} in {WAIT} s")
            time.sleep(0.2)
        yield turn


def sign(options: argparse.Namespace, turn: int, what: str, variant: str | None = None) -> Path:
    return Path(options.signs) / f"{variant or options.variants[0]}.{turn}.{what}"


def done(results: Path, variant: str, family: str, changes: dict[str, str]) -> bool:
    """Whether a line of it is there; lines of old name no family."""
    return any(line["variant"] == variant and line.get("family", "llama3") == family and line["changes"] == changes
               and "step_ms" in line for line in lines_of(results))


class Running:
    """One variant in processes of its own."""

    def __init__(self, options: argparse.Namespace, variant: str, changes: dict[str, str]) -> None:
        self.options, self.variant = options, variant
        self.line = {"variant": variant, "family": options.family, "changes": changes}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(options.ranks), str(SCRIPT), str(options.results), variant, "--signs", options.signs, "--family",
                   options.family, "--steps", str(options.steps), "--warmup", str(options.warmup), "--rounds",
                   str(options.rounds), "--command", options.command]
        if options.no_optimizer:
            command.append("--no-optimizer")
        if options.traces:
            command += ["--traces", str(options.traces)]
        if options.set:
            command += ["--set", *options.set]
        path = os.pathsep.join(filter(None, (str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH"))))
        self.said = (Path(options.signs) / f"{variant}.log").open("w+")
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "NCCL_GRAPH_REGISTER": "0"},
                                        start_new_session=True, stdout=self.said, stderr=subprocess.STDOUT)

    def reached(self, turn: int, until: float) -> bool:
        """Wait until every rank has come to round `turn`; end it, and say why in its results, where one does not."""
        wanted = [sign(self.options, turn, f"rank{rank}", self.variant) for rank in range(self.options.ranks)]
        while not all(path.exists() for path in wanted):
            if self.process.poll() is not None or time.monotonic() > until:
                self.end(0)
                return False
            time.sleep(0.2)
        return True

    def end(self, seconds: float = 60) -> None:
        """Give it `seconds` to end by itself, and say in its results what went wrong."""
        problem = ""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            problem = f"not done in its time, {self.options.seconds:g} s"
        self.said.seek(0)
        if self.process.returncode and not any("problem" in line for line in self.lines()):
            append(self.options.results, {**self.line, "problem": f"{problem}\n{self.said.read()[-3000:]}"})

    def lines(self) -> list[dict[str, Any]]:
        """What it has found."""
        return [line for line in lines_of(self.options.results) if self.line.items() <= line.items()]


def drive(options: argparse.Namespace) -> None:
    """Run what has no results yet; nothing that it started outlives it."""
    changes = dict(item.split("=", 1) for item in options.set)
    todo = [variant for variant in dict.fromkeys(options.variants)
            if not done(options.results, variant, options.family, changes)]
    for start in range(0, len(todo), options.together):
        with tempfile.TemporaryDirectory() as options.signs, ExitStack() as ending:
            begun = time.monotonic()
            group = [Running(options, variant, changes) for variant in todo[start : start + options.together]]
            for running in group:
                ending.callback(running.end, 0)
            alive = [running for running in group if running.reached(0, begun + options.seconds)]
            for turn in range(options.rounds):
                for running in list(alive):
                    sign(options, turn, "go", running.variant).touch()
                    if not running.reached(turn + 1, time.monotonic() + options.seconds):
                        alive.remove(running)
            for running in alive:
                running.end()
            for line in itertools.chain.from_iterable(running.lines() for running in group):
                shown = ", ".join(f"{key} {line[key]:.1f}" for key in FIGURES if key in line)
                print(f"{line['variant']}: {line.get('problem') or shown}", flush=True)
            print(f"{len(group)} of {len(todo) - start}: {time.monotonic() - begun:.0f} s", flush=True)
