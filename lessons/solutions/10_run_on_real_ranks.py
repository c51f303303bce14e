"""Answers to the checkpoints of 10_run_on_real_ranks; kept apart from the notebook."""


def log_on_one_rank():
    """The collective stands before the question of who prints."""

    def step(loss, rank, size):
        import torch.distributed as dist

        dist.all_reduce(loss)
        if rank == 0:
            print("mean loss", loss.item() / size)
        return loss.item() / size

    return step
