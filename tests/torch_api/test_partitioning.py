"""What our settings around torch's partitioner change, and that torch is left as it was."""

from __future__ import annotations

from torch._functorch import config, partitioners

from workbench.torch_api import partitioning


def patched():
    return partitioners.has_recomputable_rng_ops, partitioners.classify_nodes, config.activation_memory_budget


def test_torch_is_left_as_it_was():
    before = patched()
    with partitioning.settings({"activation_memory_budget": 0.3}):
        assert partitioners.has_recomputable_rng_ops is partitioning.recomputes_draws
        assert all(a is not b for a, b in zip(patched(), before, strict=True))
        assert config.activation_memory_budget == 0.3
    assert patched() == before
