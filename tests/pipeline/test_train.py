"""Training: this rank's batches, the whole gradient's norm, microbatches, and `run` on ranks."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import FSDP_TP, calls, insert, small

from workbench import (
    WorkbenchError,
    World,
    author,
    author_module,
    build,
    current_world,
    load_recipe,
    register_model,
    register_pass,
)
from workbench.authoring.microbatches import cut
from workbench.checks.verdicts import Outcome
from workbench.lab.bisect.search import bisect
from workbench.pipeline.report import Report
from workbench.pipeline.run import run
from workbench.pipeline.run_passes import Level
from workbench.pipeline.train import Batches, total_norm, train
from workbench.recipe.recipe import RecipeError
from workbench.world.ranks import RankPool

pytestmark = pytest.mark.integration

ALONE = World("gloo", 1, 0, torch.device("cpu"))


def test_a_module_without_a_recipe_has_no_text():
    authored = author_module(torch.nn.Linear(2, 2), ALONE, None)
    for use in (Batches, train):
        with pytest.raises(WorkbenchError, match="authored without a recipe"):
            use(authored)


def norms(recipe):
    """(our norm of the whole gradient, torch's of the gathered gradients, this rank's tokens)."""
    authored = author(recipe, current_world())
    tokens, targets = Batches(authored).at(0)
    authored.module(tokens, targets).backward()
    local = [p.grad for p in authored.module.parameters()]
    whole = [g.full_tensor() for g in local]
    return float(total_norm(local)), float(torch.nn.utils.get_total_norm(whole)), tokens.tolist()


@pytest.mark.ranks
def test_the_norm_is_the_whole_gradients_and_ranks_of_one_tp_group_read_the_same_text(pool4):
    found = pool4.run(norms, small(FSDP_TP))
    for ours, theirs, _ in found:
        assert ours == pytest.approx(theirs, rel=1e-5)
    texts = [text for _, _, text in found]
    assert texts[0] == texts[1] != texts[2] == texts[3]


# Gradient accumulation: one update for several microbatches, in the eager loop and with a compiled pair.

TWO = {"training.accumulate": 2, "data.batch_per_rank": 4, "training.steps": 2}


def accumulating(mesh, **changes):
    return small(mesh).override({**TWO, **changes})


def left(recipe, compiled, world=None):
    """Losses, norms and parameters after training, and the copies of tokens that each step routed."""
    built = build(recipe, world or current_world()) if compiled else None
    authored = built.authored if compiled else author(recipe, world or current_world())
    seen = train(authored, built.step if compiled else None)
    routed = seen.load and [seen.load.copies(step) for step in range(len(seen.losses))]
    parameters = [getattr(p, "_local_tensor", p).tolist() for p in authored.module.parameters()]
    return seen.losses, seen.norms, parameters, routed


def test_a_compiled_pair_accumulates_as_the_eager_loop_does(pool2):
    recipe = accumulating({"dp_shard": 2})
    first, second = compiled = pool2.run(left, recipe, True)
    assert compiled == pool2.run(left, recipe, False)
    assert first[:2] == second[:2]  # losses and norms are those of all ranks


def test_two_microbatches_train_as_one_batch_of_both():
    """The mean of the microbatches' mean losses is the mean over the batch, up to the order of additions."""
    two, one = (left(accumulating({}, **{"training.accumulate": count}), True, ALONE) for count in (2, 1))
    assert two[0] == pytest.approx(one[0], rel=1e-5) and two[1] == pytest.approx(one[1], rel=1e-4)


def test_the_load_of_experts_is_that_of_all_microbatches(pool2):
    recipe = load_recipe("deepseek_v3").override({
        "model.n_layers": 2, "data.seq_len": 16, "mesh": {"dp_shard": 2, "ep": 2}, "passes": [], **TWO})
    sizes = recipe.model.sizes()
    wanted = (sizes["n_layers"] - sizes["n_dense_layers"]) * sizes["top_k"] * 2 * 4 * 16
    assert [routed for *_, routed in pool2.run(left, recipe, False)] == [[wanted, wanted]] * 2


@pytest.mark.nightly
def test_level_full_compares_one_microbatch(pool2):
    report = run(accumulating({"dp_shard": 2}, joint_passes=["inductor_decomposition"],
                              passes=["full_inductor_compilation"]), world=pool2, level="full", progress=False)
    assert report.ok and [str(v.outcome) for v in report.pipeline] == ["PASS", "PASS"]


def test_what_cannot_accumulate_is_refused():
    for key, value, message in [
        ("data.batch_per_rank", 3, "training.accumulate: data.batch_per_rank 3 does not divide by training.accumulate "
                                   "2: change one of them"),
        ("training.step", "whole", "training.accumulate: 2 microbatches have their gradients added up outside any "
                                   'graph, and training.step is "whole": set it to "pair", or accumulate to 1'),
        ("passes", ["cudagraph"], "passes[0]: pass 'cudagraph' writes over the gradients of the microbatch before, and "
                                  "training.accumulate is 2: set it to 1, or drop the pass"),
    ]:
        with pytest.raises(RecipeError) as told:
            accumulating({"dp_shard": 2}, **{key: value})
        assert str(told.value).endswith(message)
    with pytest.raises(WorkbenchError, match=r"input 1 of the step is \[3, 2\], and 2 microbatches need a tensor"):
        cut((torch.zeros(4), torch.zeros(3, 2)), 2)


# `run` on real ranks: a user's own pass is shipped, each rank is heard, and figures are measured.

SMALL = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 2, "model.n_layers": 1, "training.steps": 3})


def mine(pool: RankPool, name: str, change, **options: Level) -> Report:
    """A run of a pass that this test registers, as a notebook's cell would; by default at `run`'s own level."""

    @register_pass(name, stage="joint", numerics="exact")
    def own(gm, example_inputs, *, options):
        return change(gm)

    return run(SMALL.override({"joint_passes": [name]}), world=pool, progress=False, **options)


def test_a_users_own_pass_gets_every_verdict_and_a_planted_no_op_shows(pool2: RankPool) -> None:
    report = mine(pool2, "does_nothing", lambda gm: gm)
    row = report.pass_row("does_nothing")
    assert row.verdict("effect").outcome is Outcome.NO_EFFECT
    assert report.idle == [("does_nothing", row.verdict("effect").message)]
    assert {row.verdict(c).outcome for c in ("lint", "collectives", "numerics")} == {Outcome.PASS}
    assert row.memory[0] == row.memory[1]
    assert report.ok and report.roofline.ceiling and report.roofline.ceiling > 1e8
    training = report.training
    assert training is not None and training.losses[2] < training.losses[0]
    assert len(training.losses) == len(training.norms) == len(training.step_seconds) == 3
    assert training.tokens_per_step == 64 * 2 * 2 and training.peak_bytes is None
    assert {v.check: v.outcome for v in report.pipeline} == {"numerics": Outcome.PASS, "authoring": Outcome.PASS}
    with pytest.raises(WorkbenchError, match=r"needs 4 ranks, and this pool has 2: .* start 4 ranks"):
        run(SMALL.override({"mesh.dp_shard": 4}), world=pool2)


def _rounded_on_rank_1(gm):
    if dist.get_rank() == 1:
        scaled = next(n for n in calls(gm, "aten.mul") if n.meta["val"].is_floating_point())
        more = insert(gm, scaled, torch.ops.aten.mul.Tensor, scaled, 1.5)
        scaled.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    return gm


def test_a_fault_on_one_rank_is_shown_with_its_rank(pool2: RankPool) -> None:
    report = mine(pool2, "wrong_on_one", _rounded_on_rank_1)
    assert not report.ok
    assert report.schedule.outcome is Outcome.FAIL and "computed otherwise" in report.schedule.message
    assert report.schedule.message.startswith("behind pass 'wrong_on_one', rank 1 would run ")
    assert report.pass_row("wrong_on_one").verdict("numerics").message.startswith("rank ")
    assert "FAIL" in report.table()


def _gathers_on_rank_1(gm):
    """A gather that nothing reads: the partitioner drops it, and the proof ran it."""
    if dist.get_rank() == 1:
        gather = calls(gm, "_c10d_functional.all_gather_into_tensor")[0]
        with gm.graph.inserting_after(gather):
            gm.graph.node_copy(gather, lambda node: node)
    return gm


def test_a_launch_on_one_rank_alone_is_told_before_the_proof_runs_it(pool2: RankPool) -> None:
    """The ranks ended in SIGABRT, and no pass was named."""
    with pytest.raises(WorkbenchError, match="pass 'gathers_on_one' .*rank 1 would run"):
        mine(pool2, "gathers_on_one", _gathers_on_rank_1)


@pytest.mark.parametrize("step", ["pair", "whole"])
def test_replicas_are_compared_at_level_light_too(pool2: RankPool, step: str) -> None:
    recipe = small({"tp": 2}).override({"training.steps": 1, "training.step": step})
    report = run(recipe, world=pool2, level="light", progress=False)
    (verdict,) = (v for v in report.pipeline if v.check == "authoring")
    assert verdict.outcome is Outcome.PASS and "gradients are equal on all ranks that hold them" in verdict.message


def validated(recipe):
    """What the compiled step says of a validation under inference_mode, after one under no_grad."""
    built = build(recipe, current_world())
    batch = Batches(built.authored).first()
    with torch.no_grad():
        assert torch.isfinite(built.step(*batch))
    try:
        with torch.inference_mode():
            built.step(*batch)
    except WorkbenchError as error:
        return str(error)
    finally:
        built.step.close()


@pytest.mark.ranks
def test_a_step_under_inference_mode_is_refused_and_under_no_grad_it_validates(pool2: RankPool) -> None:
    assert pool2.run(validated, small({"dp_shard": 2})) == [
        "model Llama3 of recipe 'small': its step ran under torch.inference_mode(): validate under torch.no_grad() "
        "instead"] * 2


class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)

    def forward(self, tokens, targets):
        x = torch.nn.functional.dropout(self.embed(tokens), 0.5)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def dropped(recipe):
    """(losses, a number that this rank draws after each step)."""
    torch.seed()  # whatever this process has drawn before
    built = build(recipe, current_world())
    drawn = []
    seen = train(built.authored, built.step, progress=lambda *_: drawn.append(float(torch.rand(()))))
    built.step.close()
    return seen.losses, drawn


@pytest.mark.ranks
def test_a_run_with_dropout_is_reproducible_and_ranks_of_one_tp_group_draw_the_same(pool4: RankPool) -> None:
    register_model("dropped", sizes={"vocab_size": 256, "max_seq_len": 64})(lambda sizes: Dropped())
    recipe = small(FSDP_TP).override({"model": {"family": "dropped"}, "training.steps": 2})
    first = pool4.run(dropped, recipe)
    assert pool4.run(dropped, recipe) == first
    draws = [drawn for _, drawn in first]
    assert draws[0] == draws[1] != draws[2] == draws[3]


def _unused_on_rank_1(gm):
    """One more product, which nothing reads."""
    if dist.get_rank() == 1:
        product = calls(gm, "aten.mul")[0]
        insert(gm, product, torch.ops.aten.mul.Tensor, *product.args)
    return gm


def strictly_built(recipe):
    build(recipe.model_copy(update={"strict": True}), current_world()).step.close()


def test_a_pass_with_an_effect_on_one_rank_has_one(pool2: RankPool) -> None:
    report = mine(pool2, "on_one", _unused_on_rank_1, level="light")
    effect = report.pass_row("on_one").verdict("effect")
    assert (effect.outcome, effect.message[:6], report.idle) == (Outcome.PASS, "rank 1", [])
    pool2.run(strictly_built, report.recipe)
    assert bisect(report.recipe, world=pool2, progress=False).found is None


class Table(torch.nn.Module):
    """Integers and booleans as parameters, which no step trains."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)
        self.order = torch.nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)
        self.kept = torch.nn.Parameter(torch.arange(8) % 3 > 0, requires_grad=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)[..., self.order] * self.kept
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def trained_both_ways(recipe):
    """(losses of the compiled step, of eager, the integers that are left)."""
    built = build(recipe, current_world(), level="full")
    compiled = train(built.authored, built.step).losses
    eager = author(recipe, current_world())
    whole = {name: p.full_tensor().tolist() for name, p in built.authored.module.named_parameters() if p.ndim == 1}
    return compiled, train(eager).losses, whole["order"], whole["kept"]


@pytest.mark.ranks
def test_a_parameter_of_integers_is_sharded_and_stays(pool2: RankPool) -> None:
    register_model("table", sizes={"vocab_size": 256, "max_seq_len": 64})(lambda sizes: Table())
    recipe = small({"dp_shard": 2}).override({"model": {"family": "table"}, "training.steps": 2})
    for compiled, eager, order, kept in pool2.run(trained_both_ways, recipe):
        assert compiled == pytest.approx(eager, rel=1e-6) and compiled[1] != compiled[0]
        assert order == [7, 6, 5, 4, 3, 2, 1, 0] and kept == [False, True, True] * 2 + [False, True]
