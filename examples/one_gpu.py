"""One GPU, or a CPU: a plain transformer in its own training loop, with passes and a verdict on each.

Exit status 0 only if no verdict fails, and losses and gradients of five steps agree with eager PyTorch.
"""

import copy
import sys

import torch
from torch import nn

import workbench

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, ROWS, LENGTH, WIDTH, WORDS = 5, 4, 64, 128, 256


class Transformer(nn.Module):
    """tokens, targets (rows, length) int64 -> mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, **options) for _ in range(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = Transformer().to(DEVICE)
eager = copy.deepcopy(model)
tokens = torch.randint(WORDS, (STEPS, ROWS, LENGTH + 1), device=DEVICE)
batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
passes = ["full_inductor_compilation", "cudagraph"] if DEVICE == "cuda" else ["graph_cleanup"]
joint_passes = ["inductor_decomposition", "activation_checkpointing"]
step = workbench.compile(model, example=batches[0], joint_passes=joint_passes, passes=passes)
optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in (model, eager)]
agree = True
for batch in batches:
    loss, expected = step(*batch), eager(*batch)
    loss.backward(), expected.backward()
    agree &= torch.allclose(loss, expected, rtol=1e-3)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        agree &= bool((ours.grad - theirs.grad).norm() <= 1e-2 * theirs.grad.norm() + 1e-6)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}, eager {expected.item():.4f}")
print(step.report)
print("losses and gradients agree with eager" if agree else "losses or gradients differ from eager")
sys.exit(0 if agree and step.report.ok else 1)
