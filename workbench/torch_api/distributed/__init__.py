"""Private names of DTensor, process groups and their backends.

    adamw             AdamW's operators: on shards, on fake tensors
    dtensor           DTensor and DeviceMesh
    experts           all-to-all with gradients, grouped products
    fake              fake process groups and fake tensors
    flight_recorder   collectives launched by this process
    fsdp2             what FSDP2 knows of a module; its hooks taken away
    gloo              gloo with one thread a group
    named_groups      process groups under chosen names
    nccl              NCCL's setting for CUDA graphs
    simulated         torch's local-tensor mode
    symmetric_memory  products that send while they multiply
"""
