"""Bytes alive over a step by kind, and the graders of "Capture a joint graph"."""

from collections import OrderedDict

import pytest
import torch
from blocks import Summed
from torch import nn

from workbench import JointGraph, author_module, capture, fake_world, partition, run_joint
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.peak import live_bytes
from workbench_lessons.l02_capture_a_joint_graph.step_memory import fall, names, step_memory


def block() -> JointGraph:
    """Two linears under 2-way FSDP."""
    with fake_world(4) as world:
        mesh = world.mesh_of({"dp_shard": 2, "tp": 2})
        layers = OrderedDict(up=nn.Linear(16, 32, bias=False), relu=nn.ReLU(), down=nn.Linear(32, 16, bias=False))
        return capture(author_module(Summed(layers), world, mesh, batch=lambda: (torch.empty(8, 16),)))


def test_the_bands_hold_what_is_saved_and_inputs_stay_to_the_end() -> None:
    joint = block()
    again = joint.fork()
    pair = partition(joint)
    found = step_memory(pair)
    rows = saved_tensors(*pair.graphs)
    assert found.at_backward == {
        "inputs": live_bytes(pair.forward).input_bytes, "other values": 4,  # the loss
        "activations": sum(row.held_bytes for row in rows if not row.gathered),
        "gathered parameters": sum(row.held_bytes for row in rows if row.gathered)}
    assert found.at_backward["gathered parameters"] == 16 * 32 * 4 and len(set(found.alive["inputs"])) == 1
    assert sum(found.at_peak.values()) == found.peak == max(found.forward_peak, found.backward_peak)
    # the gradients, shards again, are alive at the end
    assert found.total[-1] == found.at_backward["inputs"] + 2 * 16 * 16 * 4
    run_joint(again, ["reshard_after_forward"])
    resharded = step_memory(partition(again))
    assert resharded.at_backward == {**found.at_backward, "gathered parameters": 0}
    assert max(resharded.alive["gathered parameters"][resharded.start :]) == 2048  # gathered again


OWNER = {"x": "x", "t": "w", "w": "w", "v": "v", "relu": "relu", "tangent": "tangent", "mm": "mm"}
KINDS = {"x": "an activation", "w": "a weight", "relu": "an activation"}


def test_names_score_a_share_each_and_a_fall_must_lie_between_its_limits() -> None:
    for answer, score, message in (
            (["x", "w", "relu", "tangent"], 1, "right"),
            (["x", "relu"], 2 / 3, "1 missing, a weight"),
            (["x", "w", "relu", "v"], 2 / 3, "1 gathered weight that the backward does not read"),
            (["mm"], 0, "3 missing; 1 not read by the backward"),
            (["y"], 0, "no tensor of this program is called 'y'")):
        found = names(answer, owner=OWNER, kinds=KINDS, ignored=["tangent"], gathers=["v", "w"])
        assert found == (pytest.approx(score), message)
    assert fall(8.0, low=8, high=10) == (1, "the peak falls by 8.0 %, wanted 8 to 10 %")
    assert fall(13.94, low=8, high=10) == (0, "the peak falls by 13.9 %, wanted 8 to 10 %: too much")
    assert fall(float("nan"), low=8, high=10) == (0, "not a percentage: nan")
