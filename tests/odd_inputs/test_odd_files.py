"""Odd files that a command reads back, and odd sizes of recipes: they are used, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from odd import damaged, edited, edits, holds, is_a_sentence, json_values

from workbench.errors import WorkbenchError
from workbench.torch_api.devices.profile import MACHINES, load_profile, measured_spec
from workbench.world.fake import fake_world

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

LARGE = [b"[" * 99_999, b'{"a":' * 99_999, b"9" * 5000, b"", b"null", b"3", b"\xff\xfe", b"[]", b"{}"]


def odd(data: Any) -> st.SearchStrategy[bytes]:
    """JSON text of `data` with odd values in it, or damaged."""
    return st.one_of(edits(json_values).map(lambda changes: json.dumps(edited(data, changes)).encode()),
                     damaged(json.dumps(data, indent=1).encode()), st.sampled_from(LARGE))


def refused(act: Callable[[], Any], *named: str) -> Any:
    """What `act` gives; None where it refuses."""
    try:
        return act()
    except WorkbenchError as error:
        is_a_sentence(str(error), *named)
        return None


def test_a_calibration_is_a_device_or_is_refused(tmp_path: Path) -> None:
    """Whatever the file says, times are positive numbers."""
    data, path = json.loads((MACHINES / "h200x2.json").read_text()), tmp_path / "machine.json"
    few = {**data, "matmuls": data["matmuls"][:9], "attentions": data["attentions"][:4], "moves": data["moves"][:3],
           "collectives": data["collectives"][:4]}  # so that an edit of the other fields is as likely

    def check(text: bytes) -> None:
        path.write_bytes(text)
        device = refused(lambda: measured_spec("machine", load_profile(path)), "machine")
        if device is not None:
            times = [device.product_ms(2e9, 1024, 1000, torch.bfloat16), device.moving_ms(12_345.0),
                     device.attention_ms(1e9, 512, 64, True, torch.bfloat16),
                     device.sending_ms("all_gather", 2, 9)]
            assert all(0 < ms < float("inf") for ms in times) and device.trust

    holds(5000, check, odd(few))


@pytest.mark.usefixtures("fake4")
def test_a_valid_recipe_with_odd_sizes_builds_or_is_refused() -> None:
    from workbench.pipeline.build import build
    from workbench.recipe.recipe import load_recipe

    def check(name: str, changes: dict[str, int]) -> None:
        def made() -> Any:
            recipe = load_recipe(name).override({"model.n_layers": 1, "data.batch_per_rank": 1, **changes})
            with fake_world(recipe.mesh.world_size) as world:
                return build(recipe, world)

        refused(made)

    small = st.integers(1, 9)
    holds(150, check, st.sampled_from(["llama3", "llama3_fsdp", "llama3_tp", "llama3_block_bucketing", "tour"]),
          st.fixed_dictionaries({}, optional={key: small for key in (
              "model.dim", "model.n_heads", "model.n_kv_heads", "model.vocab_size", "model.ffn_dim", "data.seq_len",
              "model.max_seq_len", "mesh.dp_shard", "mesh.dp_replicate", "mesh.tp", "training.steps")}))
