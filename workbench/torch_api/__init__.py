"""torch's private names, one file a topic; differences between torch versions stay inside.

What one folder of the lab alone needs stands there, in its own `torch_api`.

    aot           AOTAutograd and Dynamo entry points
    cuda_graphs   record and replay CUDA graphs
    determinism   deterministic algorithms and seeds, as contexts
    devices       devices that the cost model simulates; what a device lacks or holds outside its memory
    distributed   DTensor, process groups, gloo, NCCL's flight recorder
    flex          FlexAttention and block masks
    forked_joint  a second handle on a capture
    garbage       pause Python's garbage collector
    inductor      lowering, kernels, regions, bucketing
    matcher       torch's subgraph matcher, strict and lax
    module_paths  a node's module, from its metadata
    ops           what an operator does, read from its schema
    partitioning  torch's partitioners
    refusals      where and why a model could not be traced
    restoring     runs that leave a module's tensors as they were
    subgraph      a part of a graph as a graph of its own
    supported     supported torch versions and platforms; no torch here
    tree          torch's pytree
"""
