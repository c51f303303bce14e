"""From a model to FX graphs: capture, partition, lower.

    attributes        what a forward changes in Python
    callables         one direction of a step as a callable
    capture           authored module to joint graph
    facts             what is known of a graph and of its step
    gather_chains     from a sharded parameter to the whole weight
    input_check       a step's inputs against those of its capture
    list_schedule     an order in which compute hides collectives
    lower             partitioned pair to a step that a training loop calls
    make_nodes        add nodes with their fake values
    microbatches      forward and backward of each microbatch in one graph
    model_contract    what a model must be to be captured
    partition         joint graph to forward and backward
    patterns          find nodes, replace subgraphs
    products          matrix products: beside collectives, of linear layers, in float8
    read              what a graph holds, moves, costs and keeps
    replay_rehearsal  a stand-in for CUDA graphs on a CPU
    saving            what is saved for the backward, sent to the host, or computed again
    step_graph        join forward, backward and optimizer in one graph
    update            norm, clipping and AdamW as graph nodes
    whole_step        the joined graph as a step that trains
"""

from typing import TYPE_CHECKING

from workbench.recipe.exports import exported

if TYPE_CHECKING:
    from workbench.graph.callables import kernels_of
    from workbench.graph.read.collectives import launches, list_collectives
    from workbench.graph.read.cost import flops, node_flops, node_ms
    from workbench.graph.read.fused_cost import kernel_traffic
    from workbench.graph.read.kernels import region_kernels
    from workbench.graph.read.memory import gathered_parameters_kept, inputs_written, roots, saved_tensors
    from workbench.graph.read.nodes import (
        census,
        is_backward,
        is_compute,
        kind_of,
        lists_of_update,
        module_path,
        nodes_from_line,
        updates_of,
    )
    from workbench.graph.read.program import program
    from workbench.graph.read.replay import starts_work
    from workbench.graph.read.simulated_run import launches_of, simulated
    from workbench.graph.read.timeline import costs_of
    from workbench.graph.saving.partitioner import repeatable

__all__, __getattr__, __dir__ = exported(__name__)
