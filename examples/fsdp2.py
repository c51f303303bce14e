"""An FSDP2 model, adopted in place and compiled whole: torchrun --nproc-per-node 2 examples/fsdp2.py, on CPUs or GPUs.

Exit status 0 only if losses and parameters of five steps are those of FSDP2 in eager mode, bit for bit.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import workbench

RANK, WORDS, WIDTH = int(os.environ["LOCAL_RANK"]), 256, 128
DEVICE = f"cuda:{RANK}" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or a GPU's matmuls are not deterministic


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WORDS, bias=False))
    _ = [fully_shard(block) for block in model.to(DEVICE)[1:-1]]
    return fully_shard(model)


def train(model: nn.Module, step: nn.Module) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    torch.manual_seed(dist.get_rank())
    for tokens in torch.randint(WORDS, (5, 4, 65), device=DEVICE):
        losses.append(F.cross_entropy(step(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
        optimizer.step(), optimizer.zero_grad()
    return [*losses, *(parameter.to_local() for parameter in model.parameters())]


torch.use_deterministic_algorithms(True)
torch.accelerator.set_device_index(RANK) if DEVICE != "cpu" else None
dist.init_process_group()
eager, model = build(), workbench.adopt(build())  # parameters, optimizers and checkpoints as before
passes = "transformer_block_bucketing", "overlap_collectives"  # a bucket for each unit of FSDP2
backend = workbench.as_backend(passes, authored=workbench.adopted(model))
same = all(map(torch.equal, train(model, torch.compile(model, backend=backend, fullgraph=True)), train(eager, eager)))
print(f"{backend.table()}\nrank {RANK}: bitwise equal to FSDP2: {same}")
sys.exit(dist.destroy_process_group() if same else 1)
