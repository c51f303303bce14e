"""Odd messages: of a page to its view, and of a rank to its pool."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import strategies as st
from odd import damaged, holds, is_a_sentence, python_values

from workbench import build, fake_world, load_recipe
from workbench.notebook.views import GraphView, PassStepper
from workbench.world.rank_output import Echo
from workbench.world.rank_processes import KINDS, RankProcesses

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def views() -> list[Any]:
    recipe = load_recipe("tour").override({"model.n_layers": 1})
    with fake_world(recipe.mesh.world_size) as world:
        step = build(recipe, world)
        last = step.records[-1]
        return [GraphView(dict(zip(last.parts, last.before, strict=True))), PassStepper(step.records)]


MESSAGES = [("ready", None, False), ("ok", None, True), ("error", {"summary": "s", "traceback": "t"}, False),
            ("aside", (1, {"launches": []}), False), ("progress", 0.5, False)]
framed = st.one_of(  # as a rank may send it, with its length before it; or whatever else it writes there
    st.sampled_from(MESSAGES).map(pickle.dumps).flatmap(lambda sound: st.one_of(st.just(sound), damaged(sound))).map(
        lambda data: len(data).to_bytes(4, "big") + data),
    st.binary(max_size=40),
    python_values.map(lambda value: pickle.dumps(value)).map(lambda data: len(data).to_bytes(4, "big") + data))


def test_a_pool_takes_any_message_of_a_rank() -> None:
    """Each is a message of a known kind, or the rank's last, with the reason; the wait ends in time."""
    processes = RankProcesses(1, "gloo", {}, Echo("none", 1))
    os.kill(processes.pids[0], signal.SIGKILL)  # what it sent before counts

    def check(frames: list[bytes]) -> None:
        ours, theirs = socket.socketpair()
        processes._channels[0].close()
        processes._channels, found = [Connection(ours.detach())], []
        processes._gone.clear()
        processes.bound(0.05)
        with theirs:
            with suppress(BrokenPipeError):
                theirs.sendall(b"".join(frames))
            theirs.shutdown(socket.SHUT_WR)
            limit = time.monotonic() + 5
            while not processes._gone and time.monotonic() < limit:
                found += processes.events(1)
        *before, (rank, kind, why) = found
        assert rank == 0 and kind in ("died", "stuck") and {kind for _, kind, _ in before} <= set(KINDS)
        if kind == "stuck":
            is_a_sentence(why)

    holds(5000, check, st.lists(framed, max_size=4))
    processes.kill()
