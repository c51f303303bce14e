"""What only GPUs can show: kernels that read block lists, and every recipe on NCCL with all its verdicts.

Reports are kept in the folder that WORKBENCH_RESULTS names, if any: `docs/make_tables.py` draws from them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_ranks import distances, gradients, small
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from workbench import as_backend, build, current_world, ranks
from workbench.graph.read.collectives import list_collectives
from workbench.recipe.recipe import load_recipe, recipe_names

REGIONAL = {"name": "regional_inductor", "regions": ["flex_attention"]}


def gradients_of(step, authored, batch):
    authored.module.zero_grad(set_to_none=True)
    step(*batch).backward()
    return {name: gradient.clone() for name, gradient in gradients(authored).items()}


def difference(mask, passes):
    """The largest of a gradient: FlexAttention through `passes`, against SDPA or eager."""
    sizes = {"data.seq_len": 1024, "model.max_seq_len": 1024}
    flex = {"model.attention": "flex", "model.mask": mask, "model.document_token": 10}
    results = []
    for listed, changes in (((), {} if mask == "causal" else flex), (passes, flex)):
        built = build(small({}, (), listed).override(sizes | changes), current_world())
        results.append(gradients_of(built.step, built.authored, built.authored.example_batch()))
        built.step.close()
    return max(distances(results[1], results[0]).values())


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "passes"), [("causal", (REGIONAL,)), ("document", (REGIONAL, "cudagraph"))])
def test_attention_compiled_as_a_region_reads_the_right_blocks(mask, passes):
    """Eager ignores the lists of blocks, and a sequence of one block shows nothing."""
    with ranks(1, backend="nccl", timeout=120, echo="none") as pool:
        (found,) = pool.run(difference, mask, passes)
    assert found < 1e-5


def offloaded(repeats=5):
    """The largest of a gradient, in steps whose saved tensors go to the host, from eager's."""
    offload = {"name": "offload_activations", "choose": "all", "min_bytes": 0}
    built = build(small({}, ("inductor_decomposition",), (offload, "full_inductor_compilation")), current_world())
    authored, batch = built.authored, built.authored.example_batch()
    expected = gradients_of(authored.module, authored, batch)
    runs = [distances(gradients_of(built.step, authored, batch), expected) for _ in range(repeats)]
    built.step.close()
    return max(max(run.values()) for run in runs)


@pytest.mark.gpu
def test_what_inductor_lays_out_otherwise_is_on_the_host_before_it_is_read():
    """No CPU waits for a copy; once, from the second step on, some gradients were wrong."""
    with ranks(1, backend="nccl", timeout=120, echo="none") as pool:
        (found,) = pool.run(offloaded)
    assert found < 1e-4


def on_four(name: str) -> dict[str, str]:
    """What makes a recipe's mesh one of four ranks."""
    mesh = load_recipe(name).mesh
    if mesh.world_size == 4:
        return {}
    if mesh.tp == 1:
        return {"mesh.dp_shard": str(4 // mesh.dp_replicate)}
    return {"mesh.tp": str(mesh.tp * 4 // mesh.world_size)}


@pytest.mark.multi_gpu(4)
@pytest.mark.parametrize("name", recipe_names())
def test_recipe_on_four_gpus(name, tmp_path):
    assert torch.cuda.device_count() >= 4
    folder = Path(os.environ.get("WORKBENCH_RESULTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "workbench", "run", name, "--world", "nccl", "--level", "full",
               "--timeout", "120", "--json", str(folder / f"{name}.1.json")]
    for key, value in on_four(name).items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / f"{name}.1.json").read_text())
    assert {row["outcome"] for row in report["passes"]} <= {"PASS"}
    assert report["profile"]["kernels"] > 0


class Resharded(torch.nn.Module):
    """Rows come in cut, columns go out cut, as between attention's heads and its sequence."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.up = mesh, torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        rows = DTensor.from_local(self.up(x), self.mesh, [Shard(0)], run_check=False)
        return rows.redistribute(self.mesh, [Shard(1)]).to_local().square().sum()


def from_rows_to_columns():
    """The kinds of each graph's collectives, what a pass proved, eager's and compiled loss."""
    device = current_world().device
    module = Resharded(init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))).to(device)
    backend = as_backend(["graph_cleanup"])
    x = torch.randn(4, 8, device=device, requires_grad=True)
    losses = [step(x) for step in (module, torch.compile(module, backend=backend, fullgraph=True))]
    losses[1].backward()
    collectives = map(list_collectives, backend.graphs[0].pair.graphs)
    kinds = [[collective.kind for collective in listed] for listed in collectives]
    checks = {v.check: str(v.outcome) for v in backend.records[-1].verdicts if v.check in ("lint", "collectives")}
    return kinds, checks, [float(loss) for loss in losses]


@pytest.mark.multi_gpu(2)
def test_dtensors_own_all_to_all_is_seen():
    """On a CPU DTensor gathers instead."""
    with ranks(2, backend="nccl", timeout=120, echo="none") as pool:
        for kinds, checks, (eager, compiled) in pool.run(from_rows_to_columns):
            assert kinds == [["all_to_all"], ["all_to_all"]] and compiled == eager
            assert checks == {"lint": "PASS", "collectives": "PASS"}


def test_every_recipe_fits_four_ranks():
    for name in recipe_names():
        assert load_recipe(name).override(on_four(name)).mesh.world_size == 4
