"""What a rank imports of torch before it builds a recipe, and what takes long: modules that compute nothing."""

PRELOAD = (
    "pydantic",
    "torch",
    "torch.distributed.tensor.parallel",
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch._inductor.pattern_matcher",  # which the first partition imports
)
