"""Answers to the checkpoints of 08_replay_with_cudagraphs; kept apart from the notebook."""

from collections.abc import Callable


def update() -> Callable:
    """Gradients copied out of the recording's memory, and parameters changed where they are."""

    def in_place(module, i):
        for p in module.parameters():
            if i % 2:
                p.data.sub_(0.1 * p.grad)
            else:
                p.grad = p.grad.clone()
        if i % 2:
            module.zero_grad(set_to_none=True)

    return in_place
