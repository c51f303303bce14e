"""Answers to the checkpoints of 08_replay_with_cudagraphs; kept apart from the notebook."""

from collections.abc import Callable


def sequences(captured, paced, large, chosen) -> int:
    """The line through two tries, up to the CPU's time."""
    few, many = (paced(captured(large.override({"data.seq_len": 128, "data.batch_per_rank": n})).by_part,
                       chosen.machine) for n in (8, 16))
    each = (many.gpu_us - few.gpu_us) / 8
    return round((few.cpu_us - few.gpu_us) / each + 8)


def copied_bytes(large) -> int:
    """Tokens and targets are int64, and the gradient of the loss is one float32."""
    sizes = large.data
    return 2 * sizes.batch_per_rank * sizes.seq_len * 8 + 4


def update() -> Callable:
    """Gradients copied out of the recording's memory, and parameters changed where they are."""

    def in_place(module, i):
        for p in module.parameters():
            p.grad = p.grad.clone()
            if i % 2:
                p.data.sub_(0.1 * p.grad)
        if i % 2:
            module.zero_grad(set_to_none=True)

    return in_place
