"""How far float8 moves gradients and losses: against float64, beside what bfloat16 moves them.

    python benchmarks/float8_numerics.py [FILE.json] [--steps N]

llama3_float8's debug model on gloo ranks, where scaled products are emulated in float32. Gradients: of one step from
the same weights on the same tokens, one rank; each parameter's norm-relative distance to float64's, and of all layers
the largest. Losses: of `--steps` steps on text, two ranks, the same seeds.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from result import tell

from workbench import load_recipe, ranks, run
from workbench.authoring.families import find_family
from workbench.authoring.materialise import default_initialise, seed_of
from workbench.pipeline.build import build
from workbench.pipeline.train import Batches, deterministic
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import current_world

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"joint_passes": []},
    "tensorwise": {},
    "rowwise": {"joint_passes.float8_matmul.scaling": "rowwise"},
    "tensorwise, gradients in e5m2": {"joint_passes.float8_matmul.gradients": "e5m2"},
}


def reference(recipe: Recipe, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Each parameter's gradient in float64, by name."""
    module = find_family(recipe.model.family).make(recipe)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            default_initialise(name, parameter, torch.Generator().manual_seed(seed_of(recipe.training.seed, name)))
    module = module.double()
    module(*batch).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def distances(recipe: Recipe) -> dict[str, float]:
    """Norm-relative distance of each gradient to float64's, the largest of all layers, by the parameter's name."""
    built = build(recipe, current_world())
    batch = Batches(built.authored).at(0)
    with deterministic(True):
        built.step(*batch).backward()
    expected, found = reference(recipe, batch), dict[str, float]()
    for name, parameter in built.authored.module.named_parameters():
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        far = float((gradient.double() - expected[name]).norm() / expected[name].norm())
        kind = re.sub(r"layers\.\d+\.", "layers.*.", name)
        found[kind] = max(found.get(kind, 0.0), far)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    recipe = load_recipe("llama3_float8")
    gradients, losses = {}, {}
    with ranks(1, backend="gloo", timeout=300, echo="none") as pool:
        for name, changes in VARIANTS.items():
            one = recipe.override({**changes, "mesh.dp_shard": 1, "passes": []})
            gradients[name] = pool.run(distances, one)[0]
    for name, changes in VARIANTS.items():
        report = run(recipe.override({**changes, "training.steps": args.steps}), world="gloo", progress=False)
        assert report.training is not None
        losses[name] = [round(loss, 5) for loss in report.training.losses]
    tell(f"python benchmarks/float8_numerics.py --steps {args.steps}",
         {"gradients": gradients, "losses": losses}, args.target)


if __name__ == "__main__":
    main()
