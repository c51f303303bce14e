"""What our settings around torch's partitioner change, and that torch is left as it was."""

from __future__ import annotations

from torch._functorch import config, partitioners

from workbench.torch_api import partitioning


def test_torch_is_left_as_it_was():
    before = partitioners.has_recomputable_rng_ops, config.activation_memory_budget
    with partitioning.settings({"activation_memory_budget": 0.3}):
        inside = partitioners.has_recomputable_rng_ops, config.activation_memory_budget
    assert inside == (partitioning.recomputes_draws, 0.3)
    assert (partitioners.has_recomputable_rng_ops, config.activation_memory_budget) == before
