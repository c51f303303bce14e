"""What the documents show is what the code says: tables, picture, and the worked diffs."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.pipeline.build import check_buildable
from workbench.recipe.recipe import load_recipe, recipe_names

ROOT = Path(__file__).parent.parent
MADE = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)


def report(name: str, kind: str, ok: bool = True, outcome: str = "PASS") -> dict:
    return {"recipe": {"name": name}, "ok": ok, "level": "light", "passes": [{"name": "p", "outcome": outcome}],
            "world": {"kind": kind, "size": 4}, "versions": {"torch": "2.13.0+cpu"}}


def test_the_tables_are_current() -> None:
    text = (ROOT / "README.md").read_text()
    assert MADE["with_tables"](text, MADE["tables"]()) == text, "stale: run `python docs/make_tables.py`"


def test_the_picture_is_current() -> None:
    assert (ROOT / "docs" / "pipeline.svg").read_text() == MADE["picture"](), "stale: run `python docs/make_tables.py`"


def test_the_arrows_are_public_functions() -> None:
    import workbench

    assert {verb for _, verb in MADE["STEPS"] if verb} <= set(workbench.__all__)


def test_a_cell_says_what_was_measured_and_nothing_else() -> None:
    runs = [report("a", "gloo"), report("a", "gloo"), report("b", "gloo", ok=False)]
    assert MADE["cell"](runs, "nccl") == "not measured yet"
    assert MADE["cell"](runs, "gloo") == "PASS (light): 4 ranks, torch 2.13.0; FAIL (light): 4 ranks, torch 2.13.0"


def test_fewer_ranks_are_named_only_where_they_do_not_pass() -> None:
    two, four = ({**report("a", "gloo"), "world": {"kind": "gloo", "size": size}} for size in (2, 4))
    assert MADE["cell"]([two, four], "gloo") == "PASS (light): 4 ranks, torch 2.13.0"
    assert MADE["cell"]([{**two, "ok": False}, four], "gloo").startswith("FAIL (light): 2 ranks")


def test_a_pass_without_effect_is_not_a_pass_of_the_run() -> None:
    runs = [report("a", "gloo", outcome="NO_EFFECT")]
    assert MADE["cell"](runs, "gloo", "p") == "NO_EFFECT (light): 4 ranks, torch 2.13.0"
    assert MADE["cell"](runs, "gloo", "q") == "not measured yet"


def test_other_results_are_no_reports(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(report("a", "gloo")))
    (tmp_path / "compat.json").write_text(json.dumps({"torch": "2.11.0", "counts": {}}))
    assert [r["recipe"]["name"] for r in MADE["reports"](tmp_path)] == ["a"]


def test_step_times_are_those_of_the_variant_as_it_is(tmp_path: Path) -> None:
    usual, own = {"recipe": {"mesh": {"dp_shard": 2, "tp": 2}}}, {"recipe": {"mesh": {"dp_shard": 4}}}
    lines = [{"variant": "a", "changes": {}, "step_ms": 2.0, **usual},
             {"variant": "a", "changes": {}, "step_ms": 1.26, **usual},
             {"variant": "a", "changes": {"mesh.tp": "4"}, "step_ms": 9.0, **usual},
             {"variant": "b", "changes": {}, "problem": "no"}, {"variant": "c", "changes": {}, "step_ms": 3.0, **own}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert MADE["step_times"](tmp_path / "s.jsonl") == {"a": "2.0, 1.3 ms", "c": "3.0 ms (dp_shard 4)"}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_said_to_need_cuda_where_the_run_is_refused_for_it(name: str) -> None:
    recipe, said = load_recipe(name), MADE["needs_cuda"](load_recipe(name))
    if not said:
        check_buildable(recipe, "gloo")
        return
    with pytest.raises(WorkbenchError) as refused:
        check_buildable(recipe, "gloo")
    which, why = re.fullmatch(r"pass '(\w+)' needs CUDA \((.+)\), and world gloo .*", str(refused.value)).groups()
    assert f"`{which}`, {why}" in said


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"README\.md: no <!-- table:begin -->"):
        MADE["with_tables"]("# name\n", {"table": ""})


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{name}: {target}"


def fits(patch: str) -> str:
    """What git says of a patch that does not fit the checkout; nothing is written."""
    done = subprocess.run(["git", "apply", "--check", "-p0", "-"], cwd=ROOT, input=patch, text=True,
                          capture_output=True, check=False)
    return done.stderr


def test_the_worked_diffs_fit_the_code() -> None:
    assert len(DIFFS) == 8
    assert fits("".join(DIFFS)) == ""


def test_a_diff_of_other_code_is_told() -> None:
    assert "patch does not apply" in fits("".join(DIFFS).replace(' ))\n', ' )))\n', 1))
