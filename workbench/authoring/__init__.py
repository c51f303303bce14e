"""Turns a recipe, or any module, into a model whose parameters are sharded over a mesh.

    author           author a recipe or a module
    authored         Authored: what authoring gives
    families         model families by name
    hugging_face     transformers' names and sizes
    layout           the part of a parameter that a rank holds
    materialise      fill shards, from the meta device
    microbatches     gradient accumulation
    models           the families' modules
    plans            ParallelPlan: a layout as data
    read_weights     weights from a folder of safetensors
    shardable        what a module's parameters must be like
    simple_fsdp      FSDP by parametrised parameters (SimpleFSDP)
    tensor_parallel  tensor and sequence parallelism from a plan
    write_weights    weights as a folder of safetensors
"""
