"""What stays in a process of each capture whose result was dropped."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import kept_by_captures
import pytest
import torch

from workbench.authoring.author import author_module
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.recipe.sections import MeshSpec
from workbench.world.fake import fake_world

pytestmark = pytest.mark.integration


@pytest.mark.nightly
def test_a_capture_leaves_no_global_in_the_model_s_file_and_no_graph():
    with fake_world(4) as world:
        authored = author_module(kept_by_captures.Mlp(), world, world.mesh(MeshSpec(dp_shard=4)),
                                 batch=lambda: kept_by_captures.batch(world))
        capture(authored)  # names of modules, such as __import_torch, come once and are shared with torch.compile
        before = set(vars(kept_by_captures))
        joint = capture(authored)
        assert set(vars(kept_by_captures)) == before
        partition(joint)
        gone = [weakref.ref(joint.graph), weakref.ref(joint.tracing_context)]
        del joint
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def test_a_compiled_function_of_the_same_file_keeps_its_globals():
    compiled = torch.compile(kept_by_captures.doubled, backend="eager")
    x = torch.ones(3)
    assert torch.equal(compiled(x), x * 2)
    with fake_world(4) as world:
        capture(author_module(kept_by_captures.Mlp(), world, world.mesh(MeshSpec(dp_shard=4)),
                              batch=lambda: kept_by_captures.batch(world)))
    assert torch.equal(compiled(x), x * 2)


def kept(which: str) -> float:
    """MB that each capture of one loop keeps in its process."""
    ran = subprocess.run([sys.executable, kept_by_captures.__file__, which], capture_output=True, text=True, check=True)
    return float(json.loads(ran.stdout.splitlines()[-1])["kept"])


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc")
def test_a_capture_keeps_at_most_0_3_mb_and_no_more_than_torch_alone_and_0_3_mb():
    ours, alone = kept("ours"), kept("torch")
    assert ours <= 0.3 and ours - alone <= 0.3, f"{ours:.2f} MB a capture, torch alone {alone:.2f} MB"
    assert kept("held") > 0.3  # the measure tells a loop that keeps its joint graphs
