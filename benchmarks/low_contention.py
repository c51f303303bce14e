"""Collectives of two layers beside those layers' products: NCCL's, and torch's low-contention ones on copy engines.

    torchrun --standalone --nproc-per-node 2 benchmarks/low_contention.py [FILE.json]

llama3 1b in bfloat16 on two ranks. `dp_shard 2`: each block's weights are gathered, and its gradients scattered, while
a block multiplies 8,192 tokens. `tp 2`: activations of half a batch, 4,096 tokens, travel while half a block's products
run on the other half. In each of two layers the collective starts before the products and is waited for after them.

Ways: "nccl"; "copies" (`symm_mem._low_contention_*`, which first copies an ordinary input into symmetric memory) and
"symmetric" (the same, and the input is there already). Times are medians of replays of a CUDA graph, in ms for the two
layers: the products alone, the collectives alone, and `both`. `exposed` is both less the products alone.
`products_beside` is the products' kernels in a profile of `both`; `equal` says that the values are NCCL's, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from float8_products import CALLS, milliseconds, recorded
from result import tell
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from workbench.recipe.model_sizes import SIZES
from workbench.torch_api.distributed.symmetric_memory import reserve

LAYERS = 2
PRODUCT = re.compile("gemm|nvjet|cutlass")
SIZE = SIZES["llama3"]["1b"]


def factors(tp: int) -> list[tuple[int, int]]:
    """(in, out) features of each product of a block on one of `tp` ranks."""
    dim, hidden = SIZE["dim"], SIZE["ffn_dim"] // tp
    kv = dim * SIZE["n_kv_heads"] // SIZE["n_heads"] // tp
    return [(dim, dim // tp), (dim, kv), (dim, kv), (dim // tp, dim), (dim, hidden), (dim, hidden), (hidden, dim)]


def products(tokens: int, tp: int) -> Callable[[], None]:
    """A block's products of one direction, on operands that stay."""
    made = [(torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16),
             torch.randn(k, n, device="cuda", dtype=torch.bfloat16)) for k, n in factors(tp)]

    def multiply() -> None:
        for left, right in made:
            left @ right

    return multiply


def starts(kind: str, way: str, rows: int, columns: int) -> Callable[[], Tensor]:
    """Start one collective of this rank's [rows, columns], and give what `wait_tensor` waits for."""
    group = dist.group.WORLD.group_name
    if way == "symmetric":
        given = symm_mem.empty(rows, columns, device=torch.device("cuda", dist.get_rank()), dtype=torch.bfloat16)
        symm_mem.rendezvous(given, group)
    else:
        given = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    given.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(dist.get_rank())))
    if way == "copies":
        reserve(group, given.nbytes)
    ranks, ops = dist.get_world_size(), torch.ops
    if kind == "all_gather":
        if way == "nccl":
            return lambda: ops._c10d_functional.all_gather_into_tensor(given, ranks, group)
        return lambda: ops.symm_mem._low_contention_all_gather(given, group)
    if way == "nccl":
        return lambda: ops._c10d_functional.reduce_scatter_tensor(given, "sum", ranks, group)
    return lambda: ops.symm_mem._low_contention_reduce_scatter(given, "sum", group)


def multiplying_ms(call: Callable[[], Any]) -> float:
    """The kernels of products in one call, in a replayed CUDA graph."""
    graph = recorded(call)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found = [e.device_time_total for e in profile.events() if PRODUCT.search(e.name)]
    if len(found) < 7 * LAYERS * CALLS:
        raise RuntimeError(f"{len(found)} products in the profile, and {7 * LAYERS * CALLS} ran: mend PRODUCT by "
                           f"{sorted({e.name for e in profile.events()})}")
    return sum(found) / CALLS / 1e3


def measured(kind: str, way: str, multiply: Callable[[], None], rows: int, columns: int) -> dict[str, Any]:
    start = starts(kind, way, rows, columns)
    wait = torch.ops._c10d_functional.wait_tensor

    def sent() -> None:
        for _ in range(LAYERS):
            wait(start())

    def both() -> None:
        for _ in range(LAYERS):
            result = start()
            multiply()
            wait(result)

    def multiplied() -> None:
        for _ in range(LAYERS):
            multiply()

    equal = bool(wait(start()).equal(wait(starts(kind, "nccl", rows, columns)())))
    found = {name: milliseconds(call) for name, call in
             (("products", multiplied), ("collectives", sent), ("both", both))}
    return {**found, "exposed": found["both"] - found["products"], "products_beside": multiplying_ms(both),
            "products_kernels": multiplying_ms(multiplied), "equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path)
    target = parser.parse_args().target
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    dim, rows = SIZE["dim"], []
    weights = sum(k * n for k, n in factors(1)) // dim
    for mesh, tokens, tp, full in (("dp_shard 2", 8192, 1, weights), ("tp 2", 4096, 2, 4096)):
        multiply = products(tokens, tp)
        for kind in ("all_gather", "reduce_scatter"):
            given = full // dist.get_world_size() if kind == "all_gather" else full
            for way in ("nccl", "copies", "symmetric"):
                case = {"mesh": mesh, "kind": kind, "way": way, "bytes": full * dim * 2}
                rows.append(case | measured(kind, way, multiply, given, dim))
                if dist.get_rank() == 0:
                    print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        tell("torchrun --standalone --nproc-per-node 2 benchmarks/low_contention.py", {"rows": rows}, target)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
