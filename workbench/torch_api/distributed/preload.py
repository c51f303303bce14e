"""The modules that a rank needs for a recipe and that are slow to import. They compute nothing."""

PRELOAD = (
    "torch",
    "torch.distributed.tensor.experimental",
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch._inductor.pattern_matcher",  # which the first partition imports
    "torch._inductor.fx_passes.overlap_manual_scheduling",
    "workbench.pipeline.run",
)
