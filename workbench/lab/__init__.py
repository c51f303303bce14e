"""What the workbench can do beside its core: one folder a capability, each of which the core works without.

    artifacts              compile once, start on all ranks without capture
    async_tensor_parallel  a tensor-parallel collective and its products in one operator
    bisect                 the first pass that fails a check, and its first wrong node; `workbench bisect`
    calibration            measure this machine, for simulated timelines of it; `workbench calibrate`
    chunked_loss           output layer and cross entropy in pieces of the tokens
    compile_backend        passes under `torch.compile`: `as_backend`
    float8                 products of linear layers multiply float8
    fsdp2_methods          FSDP2's methods on an adopted model
    graph_passes           passes in other compilers' lists, such as torchtitan's: `as_graph_pass`
    inside_inductor        what Inductor does below the graph: its passes, kernels, memory; `workbench explain`
    memory_budget          what is saved fits a budget, by torch's own solvers; `workbench plan`
    offload_activations    saved tensors on the host between forward and backward
    pipeline               the model in stages, on torch's schedules; `workbench pipeline`
    schedule               whether all ranks would launch the same collectives; `workbench schedule`
    traced_capture         forward, loss and gradients traced by make_fx
    traces                 what a torch.profiler trace shows of communication; `workbench order`
    user_step              a step of the user's own module, for the user's own loop: `compile`
    weights                weights of Hugging Face, and checkpoints of training
    what_if                what a change does to verdicts, memory and time: `what_if`; `workbench what-if`
    whole_step             forward, backward, clipping and AdamW in one graph, and clipping inside its update

A folder joins as any other package does: by an entry point of the group `workbench.plugins` in pyproject.toml, which
names its declarations. They import no torch; the other files are imported when their pass, command or public name is
used. Private names of torch that one folder alone needs are in its `torch_api`. A folder that is deleted takes its
passes, commands and recipes with it, and nothing else.
"""
