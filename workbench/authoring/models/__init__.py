"""The model families as plain modules, each with its loss.

    attention    attention kernels and masks
    causal_lm    wrap a model that returns logits
    decoder      shared parts of decoder-only models
    deepseek_v3  DeepSeek-V3
    layers       norm, feed-forward, rotary embedding
    llama3       Llama 3
    loss         cross entropy, vocabulary whole or sharded
    moe          mixture of experts: router, experts, dispatch
"""
