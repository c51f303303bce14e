"""Turns a recipe, or any module, into a model whose parameters are sharded over a mesh.

    adopt            a model under fully_shard becomes ours in place
    author           author a recipe or a module
    authored         Authored: what authoring gives
    families         model families by name
    layout           the part of a parameter that a rank holds
    materialise      fill shards, from the meta device
    microbatches     gradient accumulation
    models           the families' modules
    plans            ParallelPlan: a layout as data
    shardable        what a module's parameters must be like
    simple_fsdp      FSDP by parametrised parameters (SimpleFSDP)
    tensor_parallel  tensor and sequence parallelism from a plan
"""
