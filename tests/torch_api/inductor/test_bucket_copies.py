"""Gradients are cast while they are copied into their bucket: fewer kernels, fewer bytes, the same bits."""

from __future__ import annotations

import pytest
import torch
from graphs_by_hand import C10D, group_name, trace
from on_ranks import calls, small, trajectory

from workbench import author, build, capture, partition, run_partitioned
from workbench.graph.read.nodes import kind_of
from workbench.torch_api.distributed import named_groups  # noqa: F401  registers torch's operators
from workbench.torch_api.inductor import bucket_copies, bucketing
from workbench.torch_api.ops import tensor_bytes

pytestmark = pytest.mark.integration
BLOCKS = "transformer_block_bucketing"
BFLOAT16 = {"precision.param": "bfloat16"}


def bucket(parts):
    return torch.ops.bucketing._pre_bucket_reduce_scatter(parts, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_bucket_is_that_of_casts_and_a_concatenation(ranks):
    parts = [torch.randn(8, 3).bfloat16(), torch.randn(4, 5).bfloat16().t().contiguous().t(), torch.randn(4).bfloat16()]
    wanted = torch.cat([part.float().reshape(ranks, -1) for part in parts], 1).flatten()
    made = bucket_copies.copy_into_bucket(parts, ranks, torch.float32)
    assert torch.equal(made, wanted) and made.dtype is torch.float32


def test_the_operator_keeps_torchs_rules_for_operators():
    torch.library.opcheck(bucket_copies.copy_into_bucket, ([torch.randn(4, 2).bfloat16()], 2, torch.float32),
                          test_utils=("test_schema", "test_faketensor"))


def cast_twice_read(x, y):
    wide = x.float()
    return bucket([wide, y.float()]), wide.sin()


def not_cast(x, y):
    return bucket([x.float(), y.float() + 1])


def two_dtypes(x, y):
    return bucket([x.float(), y.to(torch.float16).float()])


@pytest.mark.parametrize("function", [cast_twice_read, not_cast, two_dtypes])
def test_what_others_read_or_no_cast_made_stays(fake4, function):
    gm = trace(function, torch.empty(4, 2).bfloat16(), torch.empty(4).bfloat16())
    before = str(gm.graph)
    assert bucket_copies.fold_casts(gm.graph) == 0 and str(gm.graph) == before


def test_bucketing_by_module_folds_casts(fake4, monkeypatch):
    def moved(folding):
        with monkeypatch.context() as patch:
            if not folding:
                patch.setattr(bucketing, "fold_casts", lambda graph: 0)
            recipe = small({"dp_shard": 4}, layers=2).override({**BFLOAT16, "model.dim": 512, "model.ffn_dim": 2048})
            pair = partition(capture(author(recipe, fake4)))
            records, _ = run_partitioned(pair, [BLOCKS])
        assert all(v.outcome == "PASS" for v in records[-1].verdicts), records[-1].verdicts
        copies = [n for n in pair.backward.graph.nodes if kind_of(n) == "copy"]
        return len(copies), sum(tensor_bytes([i.meta["val"] for i in (n, *n.all_input_nodes)]) for n in copies)

    (many, much), (few, little) = moved(False), moved(True)
    assert few == many - 21 and little < 0.75 * much  # 21 parameters


def bfloat16_trajectory():
    found = trajectory(small({"dp_shard": 2}, (), (BLOCKS,)).override({**BFLOAT16, "training.steps": 2}))
    return found["differing"], found["outcomes"]


def test_a_bfloat16_step_is_bitwise_eagers(pool2):
    for differing, outcomes in pool2.run(bfloat16_trajectory):
        assert differing == [] and outcomes == {BLOCKS: "PASS"}


@pytest.mark.nightly
def test_inductor_compiles_buckets_that_cast(fake4):
    """It read the arguments of the operator before, of which a cast had been one."""
    recipe = small({"dp_shard": 4}, ("inductor_decomposition",), (BLOCKS, "full_inductor_compilation"))
    built = build(recipe.override(BFLOAT16), fake4)
    assert "copy_into_bucket" in str(built.step.pair.backward.graph)
    assert [str(record.outcome) for record in built.records] == ["PASS"] * 3


def test_an_in_between_order_would_be_seen():
    """A fault: rows of rank 1 before those of rank 0."""
    parts = [torch.arange(4.0).bfloat16(), torch.arange(4.0).bfloat16() + 4]
    made = bucket_copies.copy_into_bucket([part.flip(0) for part in parts], 2, torch.float32)
    assert not torch.equal(made, torch.cat([part.float().reshape(2, -1) for part in parts], 1).flatten())


def test_a_bucket_over_ranks_is_still_a_reduce_scatters_input(fake4):
    def step(x, y):
        return C10D.wait_tensor(C10D.reduce_scatter_tensor(bucket([x.float(), y.float()]), "sum", 2, group_name()))

    gm = trace(step, torch.empty(4, 2).bfloat16(), torch.empty(4).bfloat16())
    assert bucket_copies.fold_casts(gm.graph) == 2
    gm.graph.lint()
    (copy,), (sent,) = calls(gm, "workbench.copy_into_bucket"), calls(gm, "_c10d_functional.reduce_scatter_tensor")
    assert sent.args[0] is copy and not calls(gm, "aten._to_copy") and copy.meta["val"].dtype is torch.float32
