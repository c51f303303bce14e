"""The steps whose graphs are mutated: small models through several recipes, for two ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from workbench import Authored, ParallelPlan, PassSpec, World, capture, compile_step, partition
from workbench.authoring.author import author, author_module
from workbench.graph.facts import facts_of, set_facts
from workbench.pipeline.proofs.numerics_proof import real_inputs
from workbench.pipeline.run_passes import capture_decompositions, run_joint, run_partitioned
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.torch_api.determinism import deterministic

TINY = {"model.n_layers": 1, "model.dim": 16, "model.n_heads": 2, "model.ffn_dim": 32, "data.seq_len": 16}
FSDP = {**TINY, "model.n_kv_heads": 1, "mesh.dp_shard": 2, "mesh.tp": 1}
TP = {**TINY, "model.n_kv_heads": 2, "mesh.dp_shard": 1, "mesh.tp": 2}
EXPERTS = {"model.n_layers": 2, "data.seq_len": 16, "mesh.dp_shard": 2, "mesh.tp": 1, "mesh.ep": 2}
RECIPES = {
    "tour": ("tour", FSDP),
    "llama3_fsdp": ("llama3_fsdp", FSDP),
    "llama3_tp": ("llama3_tp", TP),
    "llama3_checkpointing_block_bucketing": ("llama3_checkpointing_block_bucketing", FSDP),
    "llama3_block_bucketing_overlap_cleanup": (
        "llama3_block_bucketing_overlap_cleanup", {**FSDP, "precision.param": "bfloat16"}),
    "deepseek_v3_checkpointing": ("deepseek_v3_checkpointing", EXPERTS),
    "llama3_autobucketing": ("llama3_autobucketing", FSDP),
    "llama3_float8": ("llama3_float8", {**FSDP, "joint_passes": [{"name": "float8_matmul", "smallest": 16}]}),
    "llama3_memory_budget": ("llama3_fsdp", {
        **FSDP, "model.ffn_dim": 256,
        "joint_passes": ["reshard_after_forward", {"name": "memory_budget", "fraction": 0.8}]}),
    "llama3_async_tp": ("llama3_tp", {**TP, "passes": ["async_tensor_parallel", "graph_cleanup"]}),
    "llama3_less_memory": ("llama3_fsdp", {
        **FSDP, "model.loss": "workbench.lab.chunked_loss.loss:in_pieces:4",
        "joint_passes": ["inductor_decomposition"],
        "passes": [{"name": "offload_activations", "choose": "all", "min_bytes": 0}]}),
}
PARTS = ("joint", "forward", "backward")


@dataclass
class Subject:
    """The graphs of one step: joint, as its passes left it, and forward and backward after all passes.

    inputs, tangents: one step's, flat; empty on a fake world. size: ranks of the largest group.
    """

    joint: GraphModule
    pair: tuple[GraphModule, GraphModule]
    inputs: list[Any]
    tangents: list[Any]
    size: int

    def graphs(self, part: str) -> tuple[GraphModule, ...]:
        """The graphs that a pass on this part is given: the joint graph, or both others."""
        return (self.joint,) if part == "joint" else self.pair

    def graph(self, part: str) -> GraphModule:
        return {"joint": self.joint, "forward": self.pair[0], "backward": self.pair[1]}[part]


def recipe_of(name: str) -> Recipe:
    """The recipe of a subject, cut to two ranks and a tiny model."""
    source, changes = RECIPES[name]
    return load_recipe(source).override({"name": name, **changes})


class Dropout(nn.Module):
    """Two linear layers with biases, batch statistics and dropout: random numbers, and parameters that start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        for layer in self.layers:
            nn.init.zeros_(layer.bias)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.relu(layer(x)), 0.5)
        return self.norm(x).square().mean()


def _dropout(world: World) -> Authored:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    module, x = Dropout(), torch.randn(4, 16)
    return author_module(module, world, mesh, ParallelPlan(units=("layers.*",)), batch=lambda: (x,))


NAMES = (*RECIPES, "dropout")


def subject(name: str, world: World) -> Subject:
    """Capture one subject on this rank; on real ranks with the inputs of a step."""
    joint_specs: Sequence[PassSpec | str] = ["activation_checkpointing", "reshard_after_forward"]
    specs: Sequence[PassSpec | str] = ["transformer_block_bucketing"]
    decompositions: Any = None
    if name == "dropout":
        authored = _dropout(world)
    else:
        recipe = recipe_of(name)
        authored, joint_specs, specs = author(recipe, world), recipe.joint_passes, recipe.passes
        decompositions = capture_decompositions(recipe.joint_passes)
    with deterministic(True):
        joint = capture(authored, decompositions=decompositions)
        run_joint(joint, joint_specs)
        inputs, tangents = [], []
        if not world.is_fake:
            inputs, tangents = real_inputs(compile_step(partition(joint.fork())), authored.microbatch())
        kept, pair = joint.graph, partition(joint)
        for gm in pair.graphs if name == "llama3_async_tp" else ():  # on gloo the pass keeps its graphs
            set_facts(gm, replace(facts_of(gm), world="fake"))
        run_partitioned(pair, specs)
    assert authored.mesh is not None
    return Subject(kept, pair.graphs, inputs, tangents, max(authored.mesh.shape))

