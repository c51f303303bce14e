"""Every gloo group of a rank, also of a mesh that a user makes, has one worker thread: two corrupt the heap."""


import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from workbench.world.ranks import ranks

pytestmark = pytest.mark.ranks


def threads_of_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    groups = [dist.group.WORLD, mesh.get_group("dp_shard"), mesh.get_group("tp"), dist.new_group([0, 1, 2, 3])]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


def left_by_six_models():
    """Groups and threads that six models on two meshes leave behind."""
    from pathlib import Path

    from on_ranks import small

    from workbench import author
    from workbench.world.mesh import current_world

    dense = small({"dp_shard": 2})
    experts = dense.override({"model.family": "deepseek_v3", "model.n_layers": 2, "mesh.ep": 2})
    groups = []
    for recipe in 3 * [dense, experts]:
        author(recipe, current_world())
        groups.append(len(dist.distributed_c10d._world.pg_map))
    loops = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return groups, loops.count("gloo_tcp_loop")


def default_again():
    """What the ranks run without the cure: torch's own number of threads."""
    from workbench.world.worker import _FOR_LIFE

    _FOR_LIFE.close()


@pytest.mark.nightly
@pytest.mark.compat
def test_one_worker_thread_in_each_group():
    with ranks(4, backend="gloo", timeout=60, echo="none") as pool:
        assert pool.run(threads_of_groups) == [[1, 1, 1, 1]] * 4
        pool.run(default_again)  # the gate can fail
        assert pool.run(threads_of_groups) == [[1, 2, 2, 2]] * 4


def test_models_share_their_groups_and_groups_their_device(pool2):
    for groups, loops in pool2.run(left_by_six_models):
        assert len(set(groups[1:])) == 1 and loops == 1
