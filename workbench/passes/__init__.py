"""The graph passes of the core: one file each, of the pass's own name, and what all passes share.

    activation_checkpointing     which forward values are saved or recomputed
    autobucketing_reordering     buckets of collectives, chosen and placed by estimated cost
    causal_attention             attention whose mask is the causal one reads none
    cudagraph                    record a direction once, replay it with one launch
    effect                       Effect: what a pass's predicate found
    full_inductor_compilation    each graph becomes one compiled callable
    graph_cleanup                views and dead code that do nothing
    inductor_decomposition       operators become primitives that Inductor lowers
    merged_collectives           what both bucketing passes need
    overlap_collectives          independent work moves behind collectives
    regional_inductor            named regions are compiled by Inductor
    registry                     @register_pass, and `find_pass` by name
    reshard_after_forward        free gathered parameters after the forward
    transformer_block_bucketing  buckets of collectives by module

A pass's file has a docstring with a graph before and after, its options, its effect, and the function under the same
`@register_pass` as in a notebook's cell. No code lists the passes: `workbench.recipe.contracts` finds the files.
`tests/passes/test_docstrings.py` runs the examples.
"""
