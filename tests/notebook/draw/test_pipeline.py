"""The pipeline's picture and the verdicts' table say what the report says; curves say their steps."""

from __future__ import annotations

import pytest

from workbench import load_recipe, register_pass, run
from workbench.notebook import draw
from workbench.notebook.draw.picture import Picture, Table
from workbench.passes import registry
from workbench.pipeline.build import build
from workbench.pipeline.report import Report
from workbench.recipe.contracts import CONTRACTS
from workbench.world.fake import fake_world

pytestmark = pytest.mark.integration
RECIPE = load_recipe("llama3_tp").override({"model.n_layers": 1, "mesh.tp": 2})


@pytest.fixture(scope="module")
def report() -> Report:
    return run(RECIPE, world="fake", progress=False)


@pytest.fixture
def idle_pass():
    @register_pass("idle", stage="joint", numerics="exact")
    def idle(gm, example_inputs, *, options):
        return gm

    yield "idle"
    del CONTRACTS["idle"], registry._PASSES["idle"]


def test_a_recipe_shows_what_its_passes_claim() -> None:
    lines = draw.pipeline(load_recipe("tour")).text.splitlines()
    assert lines == [
        "tour on 8 ranks (dp_shard 2 x tp 4)",
        "Recipe > author > model on a World > capture > JointGraph > partition > ForwardBackward > compile > "
        "CompiledStep > train > Report",
        "joint passes: inductor_decomposition lossy, activation_checkpointing exact, reshard_after_forward exact",
        "passes: transformer_block_bucketing reduction order",
    ]


@pytest.mark.nightly
def test_a_report_shows_its_verdicts_and_a_pass_that_did_nothing(idle_pass: str) -> None:
    recipe = RECIPE.override({"joint_passes": ["inductor_decomposition", idle_pass]})
    found = run(recipe, world="fake", progress=False)
    assert draw.pipeline(found).text.splitlines()[0] == "llama3_tp on 2 fake ranks (tp 2)"
    assert draw.pipeline(found).text.splitlines()[2] == "joint passes: inductor_decomposition PASS, idle NO_EFFECT"
    with fake_world(2) as world:
        built = build(recipe, world)
    assert draw.pipeline(built).text == draw.pipeline(found).text
    table = draw.verdicts(built.records)
    assert table.rows[1] == ("idle", "PASS", "NO_EFFECT", "PASS", "UNKNOWN", "PASS", "UNKNOWN")
    assert table.notes == ("idle: effect: NO_EFFECT, every node is as it was before the pass",)
    assert "background:#f7ee8f" in table._repr_html_()


def test_a_picture_is_a_png_with_an_alternative_text(report: Report, tmp_path) -> None:
    picture = draw.pipeline(report)
    data, metadata = picture._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"} and data["text/plain"] == picture.text == repr(picture)
    assert metadata["needs_background"] == "light"  # a dark page inverts what has this mark
    assert metadata["image/png"]["alt"] == picture.alt and picture.alt.endswith(".")
    assert picture.save(tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert len(picture.png) < 80_000
    assert draw.pipeline(report).png == picture.png  # the same facts, the same bytes


def test_a_table_in_text_and_html() -> None:
    table = draw.table("t", ("a", "n"), [("x<y", 12345), ("b", 7)], "note")
    assert repr(table).splitlines() == ["t", "a         n", "x<y  12,345", "b         7", "note"]
    html = table._repr_html_()
    assert "x&lt;y" in html and "12,345" in html and "<div>note</div>" in html
    assert isinstance(table, Table) and repr(draw.table("t", ("a",), [])) == "t\na"
    assert repr(Picture(b"", "a", "text", 1, 1)) == "text"
