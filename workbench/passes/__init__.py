"""One folder a pass, of the pass's own name, and what all passes share.

    activation_checkpointing     which forward values are saved or recomputed
    async_tensor_parallel        a tensor-parallel collective and its products in one operator
    autobucketing_reordering     buckets of collectives, chosen and placed by estimated cost
    chunked_loss                 output layer and cross entropy in pieces of the tokens
    cudagraph                    record a direction once, replay it with one launch
    effect                       Effect: what a pass's predicate found
    float8_matmul                products of linear layers multiply float8
    full_inductor_compilation    each graph becomes one compiled callable
    fused_clip_adamw             clipping scales gradients inside the optimizer's update
    graph_cleanup                views and dead code that do nothing
    inductor_decomposition       operators become primitives that Inductor lowers
    memory_budget                what is saved fits a budget, at the least time
    merged_collectives           what both bucketing passes need
    offload_activations          saved tensors on the host between forward and backward
    overlap_collectives          independent work moves behind collectives
    regional_inductor            named regions are compiled by Inductor
    registry                     @register_pass, and `find_pass` by name
    reshard_after_forward        free gathered parameters after the forward
    transformer_block_bucketing  buckets of collectives by module

`__init__.py` of a pass says what it promises: a docstring with a graph before and after, its options, its CONTRACT.
`transform.py` does it: the effect, the function, and the PASS that joins them to the contract. Two files, because
recipes and the command line read all contracts before torch is imported, and every transform needs torch. No list
names the passes: `workbench.recipe.contracts` finds the folders. `tests/passes/test_docstrings.py` runs the examples.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def loads_on_use(folder: str) -> Callable[[str], Any]:
    """The `__getattr__` of a pass's folder: the names of its transform are there too, and the first loads torch."""

    def get(name: str) -> Any:
        if name.startswith("__"):  # asked of every module, such as `__path__`
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return getattr(import_module(f"{folder}.transform"), name)

    return get
