"""What this process registered is registered on the ranks, whichever way they are called, and as it is by then."""

import sys
import threading
import time

import pytest
import torch
from on_ranks import small
from torch import nn
from torch.fx import symbolic_trace

from workbench import WorkbenchError, register_model, register_pass
from workbench.authoring import families
from workbench.passes import registry
from workbench.tools.own_files import import_file
from workbench.world import registered

pytestmark = pytest.mark.ranks
FACTOR = 2


class SlowToLoad:
    """Unpickling it takes a second and a half, as an import does."""

    def __reduce__(self):
        return time.sleep, (1.5,)


def test_a_registration_that_imports_is_no_part_of_the_calls_time(pool2, monkeypatch):
    slow = SlowToLoad()

    @register_pass("slow_to_load", stage="joint", numerics="exact", changes="nothing")
    def slow_to_load(gm, example_inputs, *, options, held=slow):
        return gm

    monkeypatch.setattr(pool2, "timeout", 1)
    assert pool2.run(contract, "slow_to_load") == [contract("slow_to_load")] * 2


def register(width=8, changes="nothing"):
    """As a notebook's cell would; run twice, it replaces."""

    @register_model("net", sizes={"vocab_size": 256, "max_seq_len": 64})
    def make(sizes):
        return nn.Linear(width, 8)

    @register_pass("idle", stage="joint", numerics="exact", changes=changes)
    def idle(gm, example_inputs, *, options):
        gm.meta["factor"] = FACTOR
        return gm


def contract(name="idle"):
    """As this process knows it: a global would be sent along with the function that reads it."""
    from workbench.recipe.contracts import CONTRACTS as known

    return known[name]


def seen(asked):
    """On a rank: (the model's width, what the pass says that it changes, what it read of its cell)."""
    graph = symbolic_trace(nn.Identity())
    registry.find_pass("idle").function(graph, [], options=None)
    return families.find_family("net").make(asked).in_features, contract().changes, graph.meta["factor"]


def test_a_call_of_a_pool_knows_them_and_knows_them_again(harmed, monkeypatch):
    register()
    recipe = small({"dp_shard": 2}).override({"model": {"family": "net"}})
    assert harmed.run(seen, recipe) == [(8, "nothing", 2)] * 2
    register(16, "still nothing")
    assert harmed.run_on([1], lambda: contract().changes) == ["still nothing"]
    assert harmed.run(seen, recipe) == [(16, "still nothing", 2)] * 2  # rank 0 had it not yet
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)  # a global of the cell, and the cell is not run again
    assert harmed.run(seen, recipe) == [(16, "still nothing", 3)] * 2
    assert list(harmed.stream(lambda asked: iter([seen(asked)]), recipe)) == [[(16, "still nothing", 3)] * 2]
    harmed.restart()
    assert harmed.run(seen, recipe) == [(16, "still nothing", 3)] * 2


def test_they_are_sent_where_they_changed_and_not_with_every_call(pool2):
    register()
    pool2.run(lambda: vars(contract()).update(seen=True))
    assert pool2.run(lambda: vars(contract()).get("seen")) == [True, True]  # what was installed, untouched
    register(changes="more")
    assert pool2.run(lambda: vars(contract()).get("seen")) == [None, None]


def test_what_cannot_be_pickled_is_named(pool2):
    register()
    lock = threading.Lock()

    @register_model("locked", sizes={"vocab_size": 256, "max_seq_len": 64})
    def make(sizes):
        return lock

    with pytest.raises(WorkbenchError) as caught:
        pool2.run(int)
    assert str(caught.value) == (
        "model 'locked' is registered here, and cannot be sent to the ranks: TypeError: cannot pickle "
        "'_thread.lock' object. Create what cannot be pickled inside the function, and register it again")


def test_nothing_is_sent_where_nothing_is_registered(monkeypatch):
    monkeypatch.setattr(registry, "_PASSES", {n: p for n, p in registry._PASSES.items() if p.contract.source != "user"})
    monkeypatch.setattr(families, "_FAMILIES", {n: f for n, f in families._FAMILIES.items() if f.sizes is None})
    assert registered.packed() == b""


def test_ranks_import_a_users_file_also_where_it_registers_nothing(pool2, tmp_path):
    file = tmp_path / "patches_only.py"
    file.write_text("import torch\n\ntorch.patched_by_a_file = 7\n")
    import_file(file)
    assert pool2.run(lambda: getattr(torch, "patched_by_a_file", None)) == [7, 7]
    vars(torch).pop("patched_by_a_file")
