"""The model families, as plain modules with the loss inside.

    attention    attention kernels and masks
    causal_lm    wrap a model that returns logits
    decoder      what decoder-only models share
    deepseek_v3  DeepSeek-V3
    layers       norm, feed-forward, rotary embedding
    llama3       Llama 3
    loss         cross entropy, vocabulary whole or sharded
    moe          mixture of experts: router, experts, dispatch
"""
