"""float8_matmul: which casts are saved and gathered."""

from __future__ import annotations

import pytest
from on_ranks import small

from workbench.authoring.author import author
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import saved_tensors

pytestmark = pytest.mark.integration
NAME = "float8_matmul"
WO, TOKENS = "layers.0.attention.wo", 2 * 16


@pytest.fixture(scope="module")
def bfloat16(fake4):
    """llama3 of one layer on dp_shard 4, without values."""
    return author(small({"dp_shard": 4}).override({"precision.param": "bfloat16"}), fake4)


def converted(through, authored, **options):
    return through(authored, [{"name": NAME, "smallest": 16, **options}] if options else [])


def saved_for(pair, module, rows):
    """(dtypes of the matrices of `rows` rows that a layer saves, but for its own result; all bytes that are saved)."""
    saved = saved_tensors(*pair.graphs)
    return ({row.dtype for row in saved if row.module == module and row.shape[:1] == (rows,) and "mm" not in row.name},
            sum(row.held_bytes for row in saved))


def test_both_scalings_save_their_activations_in_float8(bfloat16, through):
    plain = saved_for(converted(through, bfloat16)[1], WO, TOKENS)
    whole, rows = (saved_for(converted(through, bfloat16, scaling=scaling)[1], WO, TOKENS)
                   for scaling in ("tensorwise", "rowwise"))
    assert (plain[0], whole[0], rows[0]) == ({"bfloat16"}, {"float8_e4m3fn"}, {"float8_e4m3fn"})
    assert whole[1] < rows[1] < 1.01 * whole[1] < 0.7 * plain[1]  # rowwise saves a scale for each column


def test_rowwise_gathers_bfloat16_and_saves_float8_of_it(bfloat16, through):
    found = converted(through, bfloat16, scaling="rowwise")
    assert {c.dtype for c in list_collectives(found[2]) if c.kind == "all_gather"} == {"bfloat16"}
    assert found[0][NAME].verdict("collectives").outcome == "PASS"
    assert saved_for(found[1], WO, 128)[0] == {"float8_e4m3fn"}  # its weight, as the input gradient reads it
