"""torchtitan 0.3.0's graph_trainer: our passes in its list, and its list under our verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Block
from on_ranks import calls, user_pass
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from workbench import as_graph_pass, judged, ranks
from workbench.torch_api.ops import collective_kind

ROOT = Path(__file__).parents[2]
BLOCKS = ["layers.0", "layers.1"]
CHECKS = ("lint", "collectives", "numerics")

GRAPH_TRAINER = Path(sys.prefix) / "graph_trainer"  # torchtitan 0.3.0, which cannot be imported beside 0.2.2
TRAINER = pytest.mark.skipif(
    not GRAPH_TRAINER.is_dir() and not os.environ.get("CI"),
    reason="needs torchtitan 0.3.0: pip install --no-deps --target .venv/graph_trainer torchtitan==0.3.0 "
           "spmd_types==0.2.3")


def clamp_for_relu(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    for node in calls(gm, "aten.relu"):
        node.target, node.args = torch.ops.aten.clamp_min.default, (node.args[0], 0)
    return gm


def lose_a_gather(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The second block reads the first one's weight."""
    waits = calls(gm, "_c10d_functional.wait_tensor")
    (gather,) = waits[4].all_input_nodes
    waits[4].replace_all_uses_with(waits[0])
    gm.graph.erase_node(waits[4])
    gm.graph.erase_node(gather)
    return gm


def through_graph_trainer(root: str, titan: str) -> tuple[Any, Any, Any, Any]:
    """(their passes, the traced step of the small module, its flat values, whether it computes what eager does)."""
    sys.path[:0] = [titan, root]
    from benchmarks.reference import fill_in

    fill_in()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.experiments.graph_trainer import make_fx_tracer, passes, simple_fsdp
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
    from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    blocks = OrderedDict(layers=nn.Sequential(Block(), Block()))
    module = simple_fsdp.data_parallel(nn.Sequential(blocks), mesh, mode="fully_shard")
    annotate_module_fqns(module)
    step = make_fwd_bwd_step(module, lambda pred, labels, **_: (pred - labels).square().mean())
    batch = torch.randn(4, 8), torch.randn(4, 8), torch.tensor(4), {}
    loss, *gradients = step(*batch)
    traced = make_fx_tracer.minimal_fx_tracer(step, module=module)(*batch)
    state, optimizer = make_fx_tracer.extract_train_state(module, None)
    values: list[Any] = []
    for value in tree_leaves(({"model": state, "optim": optimizer}, batch)):
        sharded = isinstance(value, DTensor)
        values += [value.to_local().detach(), value.device_mesh] if sharded else [value]

    def bitwise() -> bool:
        now, *others = make_fx_tracer.run_traced(traced, module=module)(*batch)
        pairs = zip(gradients, others, strict=True)
        return torch.equal(loss, now) and all(torch.equal(g.to_local(), o.to_local()) for g, o in pairs)

    return passes, traced, values, bitwise


def negates(gm: torch.fx.GraphModule, example_inputs: Any) -> torch.fx.GraphModule:
    first = calls(gm, "aten.relu")[0]
    first.target = torch.ops.aten.neg.default
    gm.recompile()
    return gm


def both_ways(root: str, titan: str) -> None:
    """Five of its passes and a wrong one under our verdicts; then a step of the five, and ours among two of its own."""
    passes, traced, values, bitwise = through_graph_trainer(root, titan)
    listed = [passes.eliminate_dead_code_pass, passes.canonicalize_graph_pass,
              passes.deduplicate_fsdp_unshard_chains_pass, passes.reassign_collective_pgs_pass,
              passes.async_tensor_parallel_pass]
    *theirs, wrong = judged(traced.gm, traced.example_inputs, [*listed, negates], values)[1]
    for record in theirs:
        assert [str(record.verdict(check).outcome) for check in CHECKS] == ["PASS"] * 3
        assert record.item.contract.numerics == "exact"  # bitwise, so that none was loosened
    assert str(wrong.verdict("numerics").outcome) == "FAIL"

    with user_pass("lose_a_gather", lose_a_gather) as broken:
        fault = as_graph_pass(broken)
        passes.apply_graph_passes(traced.gm, traced.example_inputs, [fault])
    lost = str(fault.records[0].verdict("collectives"))
    assert "FAIL" in lost and "all_gather" in lost

    before = len(traced.gm.graph.nodes)
    traced.gm, _ = judged(traced.gm, traced.example_inputs, listed)
    assert len(traced.gm.graph.nodes) < before
    with user_pass("clamp_for_relu", clamp_for_relu) as mine:
        ours = [as_graph_pass(mine), as_graph_pass({"name": "transformer_block_bucketing", "buckets": BLOCKS}),
                as_graph_pass("graph_cleanup")]
        traced.gm = passes.apply_graph_passes(traced.gm, traced.example_inputs, [
            passes.canonicalize_graph_pass, *ours, passes.eliminate_dead_code_pass])
        assert [[str(record.outcome) for record in each.records] for each in ours] == [["PASS"]] * 3
    nodes = [n for n in traced.gm.graph.nodes if collective_kind(n.target)]
    launches = [(collective_kind(n.target), n.meta.get("autograd_backward", False)) for n in nodes]
    assert launches == [("all_gather", False)] * 2 + [("reduce_scatter", True)] * 2
    assert len(calls(traced.gm, "aten.clamp_min")) == len(BLOCKS) and bitwise()


@TRAINER
@pytest.mark.ranks
@pytest.mark.nightly
def test_its_passes_are_judged_in_its_trainer_and_ours_run_in_its_list():
    """On its one graph of loss and gradients: 8 parameters, 2 buckets."""
    with ranks(2, backend="gloo", timeout=200, echo="none") as pool:
        pool.run(both_ways, str(ROOT), str(GRAPH_TRAINER))


@TRAINER
@pytest.mark.ranks
@pytest.mark.nightly
def test_its_list_passes_and_the_exhibits_say_what_they_said(tmp_path):
    """The page's command, on one recipe."""
    file = tmp_path / "rows.jsonl"
    script = [sys.executable, str(ROOT / "benchmarks/graph_trainer_passes.py"), str(file), "--torchtitan",
              str(GRAPH_TRAINER), "--recipes", "llama3_fsdp2", "--lists", "default", "offload"]
    subprocess.run(script, check=True, timeout=280, capture_output=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    passes = {(row["list"], row["pass"]): row["verdicts"] for row in rows if row.get("pass")}
    assert len(passes) == 14 and not [row for row in rows if "refused" in row]
    for check in CHECKS:
        assert {verdicts[check] for verdicts in passes.values()} == {"PASS"}
    effects = {name: verdicts["effect"] for (_, name), verdicts in passes.items()}
    assert effects["selective_activation_remat_pass"] == effects["canonicalize_graph_pass"] == "PASS"
    assert effects["tag_with_memory_policy_pass"] == "UNKNOWN" and effects["async_tensor_parallel_pass"] == "NO_EFFECT"
    steps = [row["verdicts"] for row in rows if row.get("pass") == ""]
    assert len(steps) == 2 and all(set(verdicts.values()) == {"PASS"} for verdicts in steps)
    recorded = (ROOT / "benchmarks/results/graph_trainer_passes_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    said = [[row["exhibit"], row["verdict"]] for row in map(json.loads, recorded) if "exhibit" in row]
    assert [[row["exhibit"], row["verdict"]] for row in rows if "exhibit" in row] == said and len(said) == 4
