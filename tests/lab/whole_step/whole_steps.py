"""Recipes whose step is one graph, and their training beside the eager loop. In a module that ranks import."""

import pytest
import torch
from on_ranks import calls, of_the_list, small

from workbench import author, build, current_world, load_recipe
from workbench.lab.whole_step.step import WholeStep
from workbench.pipeline import train as training

BLOCKS = "transformer_block_bucketing"
CAPACITY = {"model.dispatch": "capacity"}


def gloo_and_nccl(n):
    """Run a test on n CPU ranks, and on n GPUs where a machine has them."""
    return pytest.mark.parametrize("pool", [
        pytest.param(f"pool{n}", id="gloo"),
        pytest.param(f"nccl{n}", id="nccl", marks=pytest.mark.multi_gpu(n))], indirect=True)


def whole(mesh, joint=(), passes=(), **changes):
    return small(mesh).override({"training.step": "whole", "joint_passes": list(joint), "passes": list(passes),
                                 **changes})


def experts(mesh, passes=(), **changes):
    found = load_recipe("deepseek_v3").override({"model.n_layers": 2, "data.seq_len": 16, "training.steps": 5})
    sizes = {f"mesh.{axis}": mesh.get(axis, 1) for axis in ("dp_shard", "tp", "ep")}
    return found.override({"training.step": "whole", "passes": list(passes), **sizes, **changes})


def state(module, optimizer):
    """Copies of a module's parameters and buffers and of the optimizer's state, by name; of a DTensor, this rank's."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, parameter in module.named_parameters():
        found |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    return {name: getattr(v, "_local_tensor", v).detach().clone() for name, v in found.items()}


def trained(recipe, eager, level="light"):
    """(losses and norms, what training left on this rank: parameters, buffers and the optimizer's state, the build)."""
    kept = []
    made = training.optimizer_of
    training.optimizer_of = lambda authored: kept.append(made(authored)) or kept[-1]
    try:
        built = None if eager else build(recipe, current_world(), level=level)
        authored = author(recipe, current_world()) if built is None else built.authored
        assert built is None or isinstance(built.step, WholeStep)
        seen = training.train(authored, built and built.step)
    finally:
        training.optimizer_of = made
    optimizer = kept[0] if built is None else built.step.optimizer
    return seen, state(authored.module, optimizer), built


def differing(recipe):
    """Names of what five steps leave other than the eager loop does, how much is compared, and the join's verdicts."""
    (whole, ours, built), (eager, theirs, _) = trained(recipe, False), trained(recipe, True)
    built.step.close()
    assert ours.keys() == theirs.keys()
    odd = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    odd += ["losses"] * (whole.losses != eager.losses) + ["norms"] * (whole.norms != eager.norms)
    return odd, len(ours), of_the_list(built), str(built.schedule.outcome)


JOINED = [("lint", "PASS"), ("collectives", "PASS")]
"""The join's verdicts."""


def forgets_the_step_count(gm):
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
    add.replace_all_uses_with(add.args[0])
    gm.graph.erase_node(add)


def leaves_out_the_other_ranks_norm(gm):
    start = calls(gm, "_c10d_functional.all_reduce")[-1]
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)
