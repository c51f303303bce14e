"""A Llama of transformers as it is, in its own training loop: its causal mask is proved and dropped.

Exit status 0 only if no attention has a mask any more, no verdict fails, and losses and gradients of three steps agree
with the model's own.
"""

import copy
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import workbench

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, ROWS, LENGTH, WORDS = 3, 2, 64, 256

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(DEVICE)  # or LlamaForCausalLM.from_pretrained(...)
theirs = copy.deepcopy(model)
batches = torch.randint(WORDS, (STEPS, ROWS, LENGTH), device=DEVICE)
step = workbench.compile(
    model,
    example={"input_ids": batches[0], "labels": batches[0]},
    joint_passes=["causal_attention", "inductor_decomposition", "activation_checkpointing"],
    passes=["full_inductor_compilation", "cudagraph"] if DEVICE == "cuda" else ["graph_cleanup"],
    level="full",
)
optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in (model, theirs)]
agree = True
for tokens in batches:
    loss = step(input_ids=tokens, labels=tokens).loss
    expected = theirs(input_ids=tokens, labels=tokens).loss
    loss.backward(), expected.backward()
    agree &= torch.allclose(loss, expected, rtol=1e-3)
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        agree &= bool((mine.grad - other.grad).norm() <= 1e-2 * other.grad.norm() + 1e-6)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}, the model's own {expected.item():.4f}")
print(step.report)
before, after = step.report.pass_row("causal_attention").verdict("effect").evidence["masked"]
print(f"attentions with a mask: {before} before causal_attention, {after} after")
print("losses and gradients agree" if agree else "losses or gradients differ")
sys.exit(0 if agree and before and not after and step.report.ok else 1)
