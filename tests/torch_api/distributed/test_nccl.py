"""NCCL's setting for CUDA graphs: made before NCCL starts, and missed by the pass. No GPU is needed."""

import os
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from workbench import WorkbenchError, World, author_module, capture, load_recipe, partition, run_partitioned
from workbench.pipeline.recipe_ranks import joined
from workbench.torch_api.distributed.nccl import REGISTER, refuse_registered_buffers
from workbench.world import worker

MISSED = f"NCCL was started here without {REGISTER}=0: set it in this process's environment before init_process_group"


class Started(Exception):
    """Stands for NCCL's start."""


@pytest.fixture
def machine(monkeypatch):
    """A rank of torchrun with one GPU, and the variable as NCCL's start finds it."""
    seen = []

    def start(*_, **__):
        seen.append(os.environ.get(REGISTER))
        raise Started

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(REGISTER, "")  # so that it is as before after the test
    monkeypatch.delenv(REGISTER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", start)
    return seen


def under_torchrun(folder):
    with joined(load_recipe("llama3").override({"mesh.dp_shard": 1, "mesh.tp": 1})):
        pytest.fail("no rank")


def in_a_pool(folder):
    with ExitStack() as life, patch.object(worker, "_FOR_LIFE", life):
        worker._join({"backend": "nccl", "store": str(folder / "store"), "size": 1, "rank": 0})


@pytest.mark.parametrize("start", [under_torchrun, in_a_pool])
def test_it_is_set_before_nccl_starts_unless_the_user_set_it(machine, monkeypatch, tmp_path, start):
    with pytest.raises(Started):
        start(tmp_path)
    monkeypatch.setenv(REGISTER, "1")
    with pytest.raises(Started):
        start(tmp_path)
    assert machine == ["0", "1"]


def test_the_pass_refuses_a_process_without_the_setting(monkeypatch):
    world = World("gloo", 1, 0, torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(8, 1))
    pair = partition(capture(author_module(model, world, None, batch=lambda: (torch.ones(2, 4),))))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for backend, size, value in ("nccl", 2, "0"), ("nccl", 1, "1"), ("gloo", 2, "1"), ("nccl", 2, "1"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        monkeypatch.setattr(dist, "get_world_size", lambda size=size: size)
        monkeypatch.setenv(REGISTER, value)
        if (backend, size, value) != ("nccl", 2, "1"):
            refuse_registered_buffers()  # these need no setting, or have it
    with pytest.raises(WorkbenchError, match=MISSED):
        run_partitioned(pair, ["cudagraph"])
    monkeypatch.delenv(REGISTER)
    with pytest.raises(WorkbenchError, match=MISSED):
        refuse_registered_buffers()
