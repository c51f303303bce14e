"""A Hugging Face Llama in bfloat16 on one GPU, with the mask that a whole capture holds, and without it.

    python benchmarks/causal_attention.py FILE.jsonl [--variants NAME ...] [--rounds 1] [--timeout 540] [--tiny]

16 layers, dim 2048, feed-forward 5632, 32 heads and 8 of keys, vocabulary 32,000, 4 x 2048 tokens, fused AdamW,
clipping. The median of 20 steps, each to the end of the device's work. Each variant is a process of its own, and a line
of FILE as soon as it is done; `--tiny` is for a CPU, and times nothing worth knowing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result import of_process, tell_variants
from torch import nn

import workbench
from workbench import CausalLM

Step = Callable[..., torch.Tensor]
LOWERED = ["inductor_decomposition", "full_inductor_compilation"]
CAUSAL = "causal_attention"
_ATTENTION = re.compile("fmha|flash|sdpa|attention", re.IGNORECASE)
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 2048}
TINY = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 16}


def made(sizes: dict[str, Any]) -> CausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return CausalLM(LlamaForCausalLM(LlamaConfig(**sizes)))


def in_users_loop(module: nn.Module, forward: Step, mixed: bool) -> Step:
    """mixed: under autocast, where nothing else casts."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=mixed):
            loss = forward(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fsdp2(sizes: dict[str, Any], device: torch.device) -> nn.Module:
    """In the units that a user takes: each block, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = made(sizes).to(device)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in module.model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def per_block(sizes: dict[str, Any], device: torch.device, loss: bool) -> tuple[Step, Any]:
    """loss: compiled too, as it is in a capture of the whole model."""
    module = fsdp2(sizes, device)
    for block in module.model.model.layers:
        block.compile()
    if loss:
        module.loss.compile()
    return in_users_loop(module, module, mixed=False), None


def whole(sizes: dict[str, Any], device: torch.device) -> tuple[Step, Any]:
    module = made(sizes).to(device)
    return in_users_loop(module, torch.compile(module, dynamic=False), mixed=True), None


def by_backend(sizes: dict[str, Any], device: torch.device, passes: list[str]) -> tuple[Step, Any]:
    """FSDP2's model, adopted, under torch.compile."""
    module, backend = workbench.adopt(fsdp2(sizes, device)), workbench.as_backend(passes)
    compiled = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
    return in_users_loop(module, compiled, mixed=False), backend


def by_compile(sizes: dict[str, Any], device: torch.device, joint: list[str], whole: bool) -> tuple[Step, Any]:
    """FSDP2's model, adopted, its own capture recorded in CUDA graphs. whole: with clipping and the optimizer."""
    module = workbench.adopt(fsdp2(sizes, device))
    batch = tuple(torch.zeros(4, sizes["max_position_embeddings"], dtype=torch.int64, device=device) for _ in range(2))
    recorded = ["cudagraph"] if device.type == "cuda" else []
    inside: dict[str, Any] = {}
    if whole:
        inside = {"optimizer": torch.optim.AdamW(module.parameters(), lr=3e-4), "clip": 1.0}
    step = workbench.compile(module, batch, joint_passes=joint, passes=[LOWERED[1], *recorded], level="light", **inside)
    if whole:
        return lambda *batch: step(*batch)[0].detach(), step
    return in_users_loop(module, step, mixed=False), step


VARIANTS: dict[str, Callable[..., tuple[Step, Any]]] = {
    "fsdp2_per_block_compile": lambda *at: per_block(*at, loss=False),
    "fsdp2_per_block_compile_loss": lambda *at: per_block(*at, loss=True),
    "whole_compile_autocast": whole,
    "backend": lambda *at: by_backend(*at, LOWERED),
    "backend_causal": lambda *at: by_backend(*at, [CAUSAL, *LOWERED]),
    "cudagraph": lambda *at: by_compile(*at, LOWERED[:1], whole=False),
    "cudagraph_causal": lambda *at: by_compile(*at, [CAUSAL, *LOWERED[:1]], whole=False),
    "whole_step_causal": lambda *at: by_compile(*at, [CAUSAL, *LOWERED[:1]], whole=True),
}


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured(variant: str, tiny: bool) -> dict[str, Any]:
    """Figures of this process: milliseconds, gibibytes, losses of the first and the last step, and the verdicts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, steps = (TINY, 2) if tiny else (SIZES, 20)
    generator = torch.Generator().manual_seed(1)
    shape = 4, sizes["max_position_embeddings"]
    batches = [[torch.randint(sizes["vocab_size"], shape, generator=generator).to(device) for _ in range(2)]
               for _ in range(4)]
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with one_rank(device):
        began = time.perf_counter()
        step, ours = VARIANTS[variant](sizes, device)
        losses, seconds = [], []
        for number in range(steps + 6):
            start = time.perf_counter()
            losses.append(step(*batches[number % 4]))
            synchronise()
            seconds.append(time.perf_counter() - start)
            if number == 0:
                first = time.perf_counter() - began
        figures: dict[str, Any] = {
            "step_ms": 1e3 * statistics.median(seconds[6:]), "steps_ms": [1e3 * s for s in seconds[6:]],
            "first_step_s": first, "losses": [float(losses[0]), float(losses[-1])],
        }
        if device.type == "cuda":
            figures |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, **kernels(step, batches[0])}
        if ours is not None:
            figures["verdicts"] = {record.name: {v.check: str(v) for v in record.verdicts} for record in ours.records}
            figures["effects"] = {r.name: r.verdict("effect").evidence for r in ours.records if r.name == CAUSAL}
    return figures


def kernels(step: Step, batch: list[torch.Tensor]) -> dict[str, Any]:
    """Milliseconds of all kernels of a step, and of attention's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(*batch)
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
    attention = {name[:100]: ms for name, ms in times.items() if _ATTENTION.search(name)}
    return {"kernels_ms": sum(times.values()), "attention_ms": sum(attention.values()), "attention_kernels": attention}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=540)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measured(options.variants[0], options.tiny)))
        return 0

    def alone(variant: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--variants", variant, "--alone", *["--tiny"] * options.tiny]
        return of_process(command, {"NCCL_GRAPH_REGISTER": "0"}, options.timeout)

    return tell_variants(alone, ["step_ms", "attention_ms", "peak_gib", "losses"], options)


if __name__ == "__main__":
    sys.exit(main())
