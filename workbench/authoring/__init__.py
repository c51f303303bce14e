"""From a recipe, or any module, to a model whose parameters are sharded over a mesh.

    author           author a recipe or a module
    families         model families by name
    layout           which part of a parameter a rank holds
    materialise      fill shards, from the meta device
    models           the families' modules
    plans            ParallelPlan: a layout as data
    simple_fsdp      FSDP by parametrised parameters (SimpleFSDP)
    tensor_parallel  tensor and sequence parallelism from a plan
"""
