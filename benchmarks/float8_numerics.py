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

from result import tell

from workbench import load_recipe, ranks, run
from workbench.pipeline.build import build
from workbench.pipeline.train import Batches
from workbench.recipe.recipe import Recipe
from workbench.torch_api.determinism import deterministic
from workbench.world.mesh import current_world
from workbench_lessons.l16_fewer_bits_proved.fewer_bits import distance, exact_gradients

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"joint_passes": []},
    "tensorwise": {},
    "rowwise": {"joint_passes.float8_matmul.scaling": "rowwise"},
    "tensorwise, gradients in e5m2": {"joint_passes.float8_matmul.gradients": "e5m2"},
}


def distances(recipe: Recipe) -> dict[str, float]:
    """Norm-relative distance of each gradient to float64's, the largest of all layers, by the parameter's name."""
    built = build(recipe, current_world())
    batch = Batches(built.authored).at(0)
    with deterministic(True):
        built.step(*batch).backward()
    expected, found = exact_gradients(recipe, batch), dict[str, float]()
    for name, parameter in built.authored.module.named_parameters():
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        kind = re.sub(r"layers\.\d+\.", "layers.*.", name)
        found[kind] = max(found.get(kind, 0.0), distance(gradient, expected[name]))
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
