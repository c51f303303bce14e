"""fused_clip_adamw: what it does to the update, what trains, and the faults that are caught."""

import pytest
import torch
from on_ranks import of_the_list, outcomes, small, user_pass
from torch import nn

from lab.whole_step.whole_steps import BLOCKS, gloo_and_nccl, trained, whole
from workbench import ParallelPlan, WorkbenchError, World, author_module, build, capture, partition, run_partitioned
from workbench.graph.read.nodes import lists_of_update, updates_of
from workbench.lab.whole_step.join import Update, join
from workbench.lab.whole_step.transform import clipping_in_the_update

pytestmark = pytest.mark.integration
ALONE = World("gloo", 1, 0, torch.device("cpu"))
FUSED = "fused_clip_adamw"


def built(*passes, **changes):
    recipe = small({}).override({"training.step": "whole", "passes": list(passes), **changes})
    return build(recipe, ALONE)


def verdict(found, check="effect"):
    return found.records[-1].verdict(check)


def test_clipping_is_part_of_the_update_and_each_gradient_is_read_twice():
    found = built(FUSED, **{"training.clip": 0.1})
    effect = verdict(found)
    assert effect.outcome == "PASS" and verdict(found, "lint").outcome == "PASS"
    assert effect.evidence == {"scaled_before": 12, "scaled_after": 0, "reads_before": 3, "reads_after": 2}


def proved(recipe):
    """What is proved of the last pass, and how far five steps end from the eager loop's, each tensor by its norm."""
    (seen, ours, found), (wanted, theirs, _) = trained(recipe, False, "full"), trained(recipe, True)
    found.step.close()
    pairs = [(torch.tensor(getattr(seen, name)), torch.tensor(getattr(wanted, name))) for name in ("losses", "norms")]
    pairs += [(ours[name], theirs[name]) for name in ours]
    far = max(float((a - b).double().norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)
    told = {check: outcome for check, (outcome, _) in outcomes(found, found.records[-1].name).items()}
    return told, [outcome for _, outcome in of_the_list(found)], len(pairs), far


@gloo_and_nccl(2)
@pytest.mark.parametrize("mesh", [
    pytest.param({"dp_shard": 2}, id="dp_shard 2"), pytest.param({"tp": 2}, id="tp 2", marks=pytest.mark.nightly)])
def test_the_pass_is_proved_on_ranks(pool, mesh):
    passes = (BLOCKS, FUSED) if "dp_shard" in mesh else (FUSED,)
    recipe = whole(mesh, (), passes, **{"training.clip": 0.1, "model.n_layers": 1})
    for told, pipeline, compared, far in pool.run(proved, recipe):
        assert set(told.values()) == set(pipeline) == {"PASS"}
        assert {"effect", "lint", "collectives", "numerics"} <= told.keys()
        assert compared >= 2 + 12 * 4 and far <= 1e-5


def test_without_clipping_there_is_nothing_to_fold():
    effect = verdict(built(FUSED, **{"training.clip": None}))
    assert effect.outcome == "NO_EFFECT"
    assert effect.message == ("no gradient is scaled before the update: training.clip is off, or the scaling is part "
                              "of the update already")


@pytest.mark.parametrize(("left", "said"), [
    (1, "1 gradients are still scaled on their own"), (0, "the update does not scale the gradients")])
def test_half_a_fold_is_no_effect(left, said):
    def unscaled(gm):
        """So many gradients stay scaled, and the update, which is to scale too, does so only beside these."""
        (update,) = updates_of(gm)
        scaled = lists_of_update(update)[1]
        gradients = [*scaled[:left], *(node.args[0] for node in scaled[left:])]
        update.args = (update.args[0], gradients, *update.args[2:])
        update.kwargs = {**update.kwargs, "grad_scale": scaled[0].args[1] if left else None}
        return gm

    with user_pass("broken", unscaled, stage="step", effect=clipping_in_the_update):
        effect = verdict(built("broken"))
    assert (effect.outcome, effect.message) == ("NO_EFFECT", said)


class Shared(nn.Module):
    """Both parameters have one gradient: the same tensor."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        return (((self.one + self.two) * x - y) ** 2).sum()


def test_gradients_that_share_memory_are_refused():
    batch = torch.ones(4), torch.zeros(4)
    authored = author_module(Shared(), ALONE, None, ParallelPlan(), batch=lambda: batch)
    whole = join(partition(capture(authored)), Update())
    with pytest.raises(WorkbenchError, match=r"pass 'fused_clip_adamw' on the step graph: gradients (\S+) and \1 share "
                                             "memory, and the update would scale them twice: drop the pass"):
        run_partitioned(whole, [FUSED])
