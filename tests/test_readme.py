"""What the documents show is what the code says: tables, picture, and the worked diffs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.lab import whole_step
from workbench.pipeline.build import check_buildable
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.recipe import load_recipe, recipe_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
(PINNED,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
MADE = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)


def report(name: str, kind: str, ok: bool = True, outcome: str = "PASS") -> dict:
    return {"recipe": {"name": name}, "ok": ok, "level": "light", "passes": [{"name": "p", "outcome": outcome}],
            "world": {"kind": kind, "size": 4}, "versions": {"torch": "2.13.0+cpu"}}


@pytest.mark.parametrize("name", MADE["DOCUMENTS"])
def test_the_tables_are_current(name: str) -> None:
    assert MADE["documents"]()[name] == (ROOT / name).read_text(), "stale: run `python docs/make_tables.py`"


def test_a_docstring_gives_the_norm_s_share_of_a_step() -> None:
    cost = MADE["update_cost"](ROOT, "llama3_full_inductor_block_bucketing_overlap_cudagraph")
    assert f"takes, {cost['norm'] / cost['step']:.1%} of a step" in (whole_step.__doc__ or "")


def test_every_table_has_its_document() -> None:
    shown = [place for places in MADE["DOCUMENTS"].values() for place in places]
    assert sorted(shown) == sorted(MADE["tables"]())
    for name, places in MADE["DOCUMENTS"].items():
        assert sorted(re.findall(r"<!-- (\w+):begin -->", (ROOT / name).read_text())) == sorted(places)


def test_the_readme_fits_on_a_page() -> None:
    assert len(README.splitlines()) < 160


def example(text: str) -> tuple[str, list[str]]:
    """The one Python block of a document, and the lines of the output that it shows."""
    (code,), (output,) = (re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
                          for kind in ("python", "text"))
    return code, output.splitlines()


def printed(code: str) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    return out.getvalue().splitlines()


@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"the output is that of torch {PINNED}: other "
                    "versions capture other operators")
def test_the_example_prints_what_is_shown() -> None:
    code, shown = example(README)
    assert printed(code) == shown
    assert printed(code.replace("8, 4, bias", "8, 2, bias")) != shown, "another model prints the same"


@pytest.mark.parametrize("room", sorted(p.name for p in (ROOT / "workbench").iterdir() if (p / "__init__.py").exists()))
def test_the_design_names_every_room(room: str) -> None:
    assert f"`{room}`" in (ROOT / "docs" / "design.md").read_text()


def test_a_public_name_in_a_bullet_is_public_and_its_file_is_there() -> None:
    import workbench

    bullets = re.findall(r"^- \*\*.*?(?=^- |^$)", README, re.DOTALL | re.MULTILINE)
    assert bullets
    for bullet in bullets:
        quoted = re.findall(r"`([^`]+)`", bullet)
        paths = re.findall(r"\]\((workbench/[^)]+)\)", bullet)
        assert paths and all((ROOT / path).exists() for path in paths), bullet
        assert any(each in workbench.__all__ for each in quoted), bullet


def test_every_documented_command_is_a_command() -> None:
    from workbench.cli import parser

    (commands,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
    for path in DOCUMENTS:
        for name in re.findall(r"^ +workbench (\w+)", path.read_text(), re.MULTILINE):
            assert name in commands, f"{path.name}: workbench {name}"


def test_the_picture_is_current() -> None:
    for name, made in (("pipeline", "picture"), ("float8_losses", "losses_picture")):
        assert (ROOT / "docs" / f"{name}.svg").read_text() == MADE[made](), "stale: run `python docs/make_tables.py`"


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


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"docs/results\.md: no <!-- recipes:begin -->"):
        MADE["with_tables"]("# name\n", {"recipes": ""}, "docs/results.md")


def anchors(text: str) -> set[str]:
    """The names that a forge, or JupyterLab, gives to a document's headings."""
    heads = re.findall(r"^#+ (?:<.*>)?(.+)$", text, re.MULTILINE)
    return {name for head in heads
            for name in (re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-"), head.replace(" ", "-"))}


def broken_links(path: Path, text: str, served: Path = ROOT) -> list[str]:
    """The targets of a document's links that name no file below the folder that is served, or no heading of it."""
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve()
        inside = there.exists() and there.is_relative_to(served.resolve())
        if not inside or (anchor and anchor not in anchors(there.read_text() if name else text)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path, path.read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "markdown"]
    served = re.search(r"jupyter lab --notebook-dir=(\S+)", (ROOT / "Makefile").read_text())
    assert served is not None
    assert not broken_links(path, "\n".join("".join(cell["source"]) for cell in cells), ROOT / served[1])


def test_a_broken_link_is_told() -> None:
    text = "# One head\n[a](#one-head) [b](#two) [c](README.md) [d](gone.md) [e](http://x)"
    assert broken_links(ROOT / "x.md", text) == ["#two", "gone.md"]
    beyond = "[f](../docs/glossary.md)"
    assert broken_links(ROOT / "notebooks" / "x", beyond, ROOT / "notebooks") == ["../docs/glossary.md"]


def sentences(text: str) -> int:
    return len(re.findall(r"[.](?=\s|$)", text))


def test_the_glossary_says_each_term_in_two_sentences() -> None:
    terms = (ROOT / "docs" / "glossary.md").read_text().split("\n## ")[1:]
    assert {term.partition("\n")[0]: sentences(term) for term in terms if sentences(term) != 2} == {}
    assert len(terms) > 40


def fits(patch: str) -> str:
    """What git says of a patch that does not fit the checkout; nothing is written."""
    done = subprocess.run(["git", "apply", "--check", "-p0", "-"], cwd=ROOT, input=patch, text=True,
                          capture_output=True, check=False)
    return done.stderr


def test_the_worked_diffs_fit_the_code() -> None:
    assert len(DIFFS) == 7
    assert fits("".join(DIFFS)) == ""


def test_a_diff_of_other_code_is_told() -> None:
    assert "patch does not apply" in fits("".join(DIFFS).replace('\n     cudagraph', '\n     cudagraf', 1))


def test_float8_trains_as_bfloat16_does():
    """Gradients are further from float64's than bfloat16's, within the contract's bound; the losses fall alike."""
    found = MADE["float8_numerics_found"]()
    bound = CONTRACTS["float8_matmul"].tolerance
    assert len(found["losses"]["bfloat16"]) == 200
    for name in ("tensorwise", "rowwise", "tensorwise, gradients in e5m2"):
        assert max(found["gradients"]["bfloat16"].values()) < max(found["gradients"][name].values()) < bound
        mine, plain = (sum(found["losses"][v][-20:]) / 20 for v in (name, "bfloat16"))
        assert abs(mine - plain) < 0.05 * plain < plain < found["losses"]["bfloat16"][0] / 1.5
