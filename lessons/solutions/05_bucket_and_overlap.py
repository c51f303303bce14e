"""Answers to the checkpoints of 05_bucket_and_overlap; kept apart from the notebook."""


def latency_saved(before, after, spec) -> float:
    """The bytes are conserved, so what is saved is a start for each launch that is gone; in ms."""
    return (len(before) - len(after)) * spec.latency_us / 1e3


def tokens_to_hide(weights, spec, chosen) -> float:
    """A rank receives all of a layer but its own shard; matmuls reach three quarters of the peak."""
    received = 2 * weights * (chosen.dp_shard - 1) / chosen.dp_shard
    gather = spec.latency_us * 1e-6 + received / (spec.link_gbps * 1e9)
    a_token = 2 * weights / (0.75 * spec.tflops["bfloat16"] * 1e12)
    return gather / a_token


def bucket_plan(inner) -> list[list[str]]:
    """Buckets end in the middle of a layer: attention comes with the embedding, or with the layer before."""
    attention, feed_forward = [names[:2] for names in inner], [names[2:] for names in inner]
    between = [[*feed_forward[i], *attention[i + 1]] for i in range(len(inner) - 1)]
    return [["tok_embeddings", *attention[0]], *between, [*feed_forward[-1]], ["norm", "output"]]
