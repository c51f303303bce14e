"""Odd messages: of a page to its view, of a rank to its pool, of a caller to a pool that listens."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import pytest
from hypothesis import strategies as st
from odd import damaged, edited, edits, holds, is_a_sentence, json_values, python_values

from workbench import build, fake_world, load_recipe
from workbench.notebook.views import GraphView, PassStepper
from workbench.world.handshakes import Handshakes
from workbench.world.rank_output import Echo
from workbench.world.rank_processes import KINDS, RankProcesses

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

KEY = b"0123456789abcdef"
HELLO = {"rank": 1, "size": 2, "pid": 4711}


@pytest.fixture(scope="module")
def views() -> list[Any]:
    recipe = load_recipe("tour").override({"model.n_layers": 1})
    with fake_world(recipe.mesh.world_size) as world:
        step = build(recipe, world)
        last = step.records[-1]
        return [GraphView(dict(zip(last.parts, last.before, strict=True))), PassStepper(step.records)]


ASKED = [{"id": "1", "call": call, "args": args} for call, args in [
    ("view", {"opened": None}), ("view", {"opened": ["forward"], "fold": False, "step": 0, "part": "joint"}),
    ("find", {"query": "mm"}), ("way", {"id": "forward/mm", "opened": [], "fold": True}), ("details", {"id": "a"}),
    ("first", {"step": 1, "part": "forward"}), ("step", {"step": 0, "part": ""}), ("steps", {}),
    ("hunks", {"step": 1, "part": "backward", "context": 1}), ("trait_change", {}), ("module", {})]]


def test_a_view_answers_any_message(views: list[Any]) -> None:
    """With a value, the module, or a sentence, and with the message's id."""
    def check(which: int, asked: int, changes: list[Any]) -> None:
        view, sent = views[which % len(views)], []
        view.send = lambda content, buffers=None: sent.append(content)
        message = edited({"m": ASKED[asked]}, changes).get("m")
        view._answer(None, message, [])
        ((content),) = sent
        json.dumps(content)
        if "error" in content:
            is_a_sentence(content["error"])
        given = message.get("id") if isinstance(message, dict) else None
        assert len(content) == 1 if "module" in content else [content["id"]] == [given]  # in lists, NaN equals itself

    holds(3000, check, st.integers(0, 1), st.integers(0, len(ASKED) - 1), edits(json_values))


MESSAGES = [("ready", None, False), ("ok", None, True), ("error", {"summary": "s", "traceback": "t"}, False),
            ("aside", (1, {"launches": []}), False), ("output", b"text\n", False), ("progress", 0.5, False)]
framed = st.one_of(  # as a rank may send it, with its length before it; or whatever else it writes there
    st.sampled_from(MESSAGES).map(pickle.dumps).flatmap(lambda sound: st.one_of(st.just(sound), damaged(sound))).map(
        lambda data: len(data).to_bytes(4, "big") + data),
    st.binary(max_size=40),
    python_values.map(lambda value: pickle.dumps(value)).map(lambda data: len(data).to_bytes(4, "big") + data))


def test_a_pool_takes_any_message_of_a_rank() -> None:
    """Each is a message of a known kind, or the rank's last, with the reason; the wait ends in time."""
    def check(frames: list[bytes]) -> None:
        processes = RankProcesses(1, Echo("none", 1))
        ours, theirs = socket.socketpair()
        processes._channels, found = [Connection(ours.detach())], []
        processes.bound(0.05)
        with theirs:
            with suppress(BrokenPipeError):
                theirs.sendall(b"".join(frames))
            theirs.shutdown(socket.SHUT_WR)
            limit = time.monotonic() + 5
            while not processes._gone and time.monotonic() < limit:
                found += processes.events(1)
        processes.kill()
        *before, (rank, kind, why) = found
        assert rank == 0 and kind in ("died", "stuck") and {kind for _, kind, _ in before} <= set(KINDS)
        if kind == "stuck":
            is_a_sentence(why)

    holds(5000, check, st.lists(framed, max_size=4))


def test_a_pool_that_listens_takes_ranks_alone() -> None:
    """Of callers that have the key, those with a rank's hello; the others are closed and counted."""
    def call(port: int, sent: bytes) -> None:
        with suppress(OSError, EOFError, AuthenticationError), Connection(
                socket.create_connection(("127.0.0.1", port), timeout=5).detach()) as channel:
            answer_challenge(channel, KEY)
            deliver_challenge(channel, KEY)
            channel.send_bytes(sent)
            channel.poll(5)

    def check(sent: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, Handshakes(KEY, 2) as handshakes:
            caller = threading.Thread(target=call, args=(listener.getsockname()[1], sent), daemon=True)
            caller.start()
            found, limit = [], time.monotonic() + 30
            while not found and not handshakes.refused() and time.monotonic() < limit:
                found = handshakes.wait(listener, 0.1)
                if handshakes._open and not found:
                    handshakes.wait(listener, 0.1)
            for channel, hello in found:
                assert {type(hello[name]) for name in HELLO} == {int} and 0 <= hello["rank"] < hello["size"]
                channel.close()
            assert found or "1 connection was closed" in handshakes.refused()
        caller.join(5)
        assert not caller.is_alive()

    hellos = st.one_of(edits(python_values).map(lambda changes: edited(HELLO, changes)), python_values)
    holds(1000, check, st.one_of(hellos.map(pickle.dumps), damaged(pickle.dumps(HELLO))))
