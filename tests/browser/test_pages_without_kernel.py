"""Moments in a page without kernel and network: each is used by the keyboard, and shows Python's figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from jupyter import on, write_notebook
from playwright.sync_api import ElementHandle, Page
from stack import split
from unpacked import unpacked

from workbench import fake_world
from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder
from workbench_lessons.l18_fill_the_bubble.schedule_board import ScheduleBoard

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
CELLS = (
    "from IPython.display import display\n"
    "from workbench import RankError, author_module, capture, draw, fake_world, load_recipe, ranks, show, what_if\n"
    "from workbench.notebook.views import GraphView\n"
    "from workbench_lessons.l03_split_forward_and_backward.partitioner import Partitioner\n"
    "from workbench_lessons.l00_tour.pass_chips import PassChips\n"
    "from workbench_lessons.l01_author_with_dtensor.placement_lab import PlacementLab\n"
    "from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder\n"
    "from workbench_lessons.l10_run_on_real_ranks.program_counters import ProgramCounters\n"
    "from workbench_lessons.l18_fill_the_bubble.schedule_board import ScheduleBoard\n"
    "from all_reduces import all_reduces\n"
    "from lessons.test_partitioner import GatedMLP, NAMES\n"
    "from stack import split",
    'recipe = load_recipe("tour").override({"model.n_layers": 1, "mesh.tp": 1, "joint_passes": [\n'
    '    "activation_checkpointing", "reshard_after_forward"]})\n'
    "with fake_world(2) as world:\n"
    '    chips = PassChips(study := what_if(recipe.override({"joint_passes": [], "passes": []}), world), recipe)\n'
    "    study.change(passes=recipe.passes)\n"
    "show(chips)",
    'show(study.records[-1], "timeline")\nshow(study.records[-1], "memory")',
    "import torch\nwith fake_world(1) as world:\n"
    "    joint = capture(author_module(GatedMLP(), world, None, batch=lambda: (torch.empty(8, 32),)))\n"
    "show(Partitioner(joint, NAMES))",
    "show(PlacementLab())",
    "with fake_world(2) as world:\n    pair = split(world)\n"
    'show(CollectiveOrder(pair.backward, "h200x2"))',
    "display(draw.graph(pair.forward), ScheduleBoard())",  # a picture that is no twin
    "GraphView(pair.forward)",
    'with ranks(4, backend="gloo", timeout=5, echo="none") as four:\n'
    "    def record(order):\n"
    "        try:\n"
    "            four.run(all_reduces, order)\n"
    "        except RankError as error:\n"
    "            return error\n"
    '    counters = ProgramCounters({"dp": 2, "tp": 2}, record)\n'
    "show(counters)",
)
STATE, VIEW = (f"application/vnd.jupyter.widget-{name}+json" for name in ("state", "view"))
ANSWER = """async (element, key) => {
    const begun = performance.now();
    element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - begun;
}"""
"""Milliseconds from a key until the page has drawn what follows."""


def nbconvert(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT)))}
    done = subprocess.run([sys.executable, "-m", "nbconvert", *arguments], capture_output=True, text=True, timeout=200,
                          env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Executed as the committed notebooks are, with its page beside it."""
    path = tmp_path_factory.mktemp("moments") / "moments.ipynb"
    write_notebook(path, CELLS)
    nbconvert("--config", str(ROOT / ".ci" / "execute_notebooks.py"), "--execute", "--to", "notebook", "--inplace",
              str(path))
    nbconvert("--to", "html", str(path))
    return path


@pytest.fixture(scope="module")
def data(notebook: Path) -> dict[str, dict[str, object]]:
    """What Python recorded, by the kind of view."""
    models = json.loads(notebook.read_text())["metadata"]["widgets"][STATE]["state"]
    views = [each["state"] for each in models.values() if each["model_name"] == "AnyModel"]
    assert all(len(json.dumps(each)) < 100_000 for each in views)
    return {each["kind"]: unpacked(each["data"]) for each in views}


@pytest.fixture
def views(notebook: Path, page: Page) -> dict[str, ElementHandle]:
    """Each view in the page, by its kind."""
    html = notebook.with_suffix(".html")
    assert html.stat().st_size < 3_000_000
    page.context.set_offline(True)
    page.goto(html.as_uri(), wait_until="domcontentloaded")
    page.wait_for_function("document.querySelectorAll('.wb[data-ready]').length === 8")
    found = page.query_selector_all(".wb[data-ready]")
    return {each.get_attribute("data-view") or "": each for each in found}


def test_a_notebook_keeps_the_views_with_data_under_the_same_names_each_time(notebook: Path) -> None:
    kept = json.loads(notebook.read_text())
    models = kept["metadata"]["widgets"][STATE]["state"]
    assert sorted(models) == [f"{i:032x}" for i in range(len(models))]
    data = [output["data"] for cell in kept["cells"] for output in cell["outputs"] if "data" in output]
    shown = [each[VIEW]["model_id"] for each in data if VIEW in each]
    assert shown[0] in models and shown.count("") == 1  # the graph's view has nothing to show without its kernel


def test_collective_order(views):
    view = views["order"]
    with fake_world(2) as world:
        twin = CollectiveOrder(split(world).backward, "h200x2")
    assert float(view.get_attribute("data-exposed")) == twin.figures["exposed ms"]
    assert int(view.get_attribute("data-peak")) == twin.figures["peak bytes"]
    keys = {"compute", "all-gather", "reduce-scatter", "exposed collective", "compute waits", "0 ms"}
    assert keys <= {each.text_content() for each in view.query_selector_all("text")}
    bar = view.query_selector_all("rect[role=button]")[1]
    bar.focus()
    assert bar.evaluate(ANSWER, "ArrowLeft") < 300
    assert float(view.get_attribute("data-exposed")) != twin.figures["exposed ms"]
    above = view.evaluate_handle("view => view.parentElement.parentElement")
    marked = view.query_selector("rect[stroke-width='3']")
    assert above.query_selector("select").input_value() == marked.get_attribute("data-key")
    above.query_selector("input[type=checkbox]").check()
    assert "overlap_collectives: " in view.inner_text()


def test_a_picture_is_hidden_by_its_live_twin_alone_and_stands_without_scripts(views, page, notebook):
    pictures = page.query_selector_all(".jp-RenderedImage")
    assert [picture.is_visible() for picture in pictures].count(True) == 1
    still = page.context.browser.new_context(java_script_enabled=False, offline=True).new_page()
    still.goto(notebook.with_suffix(".html").as_uri(), wait_until="domcontentloaded")
    assert still.locator(".jp-RenderedImage img").first.is_visible()


def test_pass_chips(views, data):
    view, runs = views["chips"], data["chips"]["runs"]
    declared = "activation_checkpointing reshard_after_forward|transformer_block_bucketing"
    assert int(view.get_attribute("data-launches")) == runs[declared]["figures"]["launches"]
    on(view, "transformer_block_bucketing", "Enter")
    off = runs["activation_checkpointing reshard_after_forward|"]["figures"]
    assert int(view.get_attribute("data-launches")) == off["launches"] > runs[declared]["figures"]["launches"]
    assert int(view.get_attribute("data-saved")) == off["bytes saved"]
    on(view, "transformer_block_bucketing", "Enter")
    still = view.evaluate("each => each.getRootNode().querySelector('.jp-RenderedHTMLCommon table').checkVisibility()")
    assert still is False  # its live twin is shown
    on(view, "reshard_after_forward", "ArrowLeft")
    (refused,) = runs["reshard_after_forward activation_checkpointing|transformer_block_bucketing"]["refused"]
    assert view.get_attribute("data-problem") == refused and refused in view.inner_text()
    assert "must come before" in refused
    red = {each.get_attribute("data-key") for each in view.query_selector_all("[data-wrong]")}
    assert red == {"activation_checkpointing", "reshard_after_forward"}
    view.query_selector("[data-key=reshard_after_forward]").press("Escape")
    assert view.get_attribute("data-problem") == "" and not view.query_selector_all("[data-wrong]")


def test_partitioner(views, data):
    view = views["partitioner"]
    on(view, "silu", "Enter")
    on(view, "mul", " ")
    cut = next(each for each in data["partitioner"]["cuts"] if each[0] == ["mm", "mm_1"])
    assert [int(view.get_attribute(f"data-{name}")) for name in ("bytes", "flop")] == cut[1:]
    view.evaluate_handle("view => view.parentElement.parentElement.querySelector('button')").click()  # save all
    assert int(view.get_attribute("data-bytes")) == data["partitioner"]["cuts"][0][1] > cut[1]


def test_placement_lab(views, data):
    view, table = views["placement"], data["placement"]["table"]
    rank = view.evaluate_handle("""each => [...each.getRootNode().querySelectorAll('label')].find(
        label => label.textContent.startsWith('rank'))""")
    rank.evaluate("label => { label.children[0].value = 2; label.children[0].dispatchEvent(new Event('input')); }")
    assert rank.evaluate("label => label.textContent") == "rank2"
    given = table["rows columns rows columns"]
    assert int(view.get_attribute("data-bytes")) == given["bytes"] and given["added"]
    on(view, "x_1", "Enter")  # columns, replicate
    on(view, "w_0", "Enter", "Enter")  # rows, columns, replicate
    best = table["rows replicate replicate columns"]
    assert int(view.get_attribute("data-bytes")) == best["bytes"] == data["placement"]["best"]
    assert view.get_attribute("data-added") == "0" and best["x"][0] in view.inner_text()


def test_timeline_and_memory(views, data, page):
    runs, curves = data["timeline"]["runs"], data["memory"]["curves"]
    assert int(views["timeline"].get_attribute("data-spans")) == sum(len(run["spans"]) for run in runs) > 20
    assert int(views["memory"].get_attribute("data-points")) == sum(len(each["points"]) for each in curves) > 100
    assert all(run["title"] in views["timeline"].inner_text() for run in runs)
    assert all(each["peak_node"] in views["memory"].inner_text() for each in curves)
    legend, held = (views["memory"].query_selector(f"[data-role={role}]") for role in ("legend", "holders"))
    assert [each.inner_text() for each in legend.query_selector_all("span")] == [each["title"] for each in curves]
    assert all(name in held.inner_text() for name, _, _ in data["memory"]["holders"])
    for name in ("timeline", "memory"):
        canvas = views[name].query_selector("canvas")
        drawn = "canvas => canvas.toDataURL()"
        whole = canvas.evaluate(drawn)
        canvas.press("+")
        nearer = canvas.evaluate(drawn)
        assert nearer != whole
        left = page.evaluate_handle("view => view.parentElement.parentElement.querySelector('input[type=range]')",
                                    views[name])
        left.evaluate("input => { input.value = input.min; input.dispatchEvent(new Event('input')); }")
        assert canvas.evaluate(drawn) not in (whole, nearer)  # the slider above moves it, too


def test_program_counters(views, data):
    view, recorded = views["counters"], data["counters"]
    for click in ("0: dp", "1: tp", "2: tp"):
        on(view, click, "Enter")
    assert view.get_attribute("data-waits") == "0 1 2" and view.get_attribute("data-deadlock") == "0"
    on(view, "0: tp", "Enter")
    assert "rank 0 waits in its all-reduce over dp: it cannot launch another one" in view.inner_text()
    on(view, "3: dp", "Enter")
    assert view.get_attribute("data-deadlock") == "1"
    assert view.query_selector("[data-role=report]").text_content() == recorded["reports"]["dp|tp|tp|dp"]
    on(view, "3: dp", "Backspace")
    for click in ("3: tp", "2: dp", "0: tp", "1: dp", "3: dp"):
        on(view, click, "Enter")
    assert view.get_attribute("data-waits") == "" and view.inner_text().count("returned") >= 4


def test_schedule(views, page):
    view, board = views["schedule"], ScheduleBoard()

    def drag(key: str, onto: str) -> None:
        places = []
        for each in (key, onto):
            view.query_selector(f"[data-key='{each}']").scroll_into_view_if_needed()
            box = view.query_selector(f"[data-key='{each}']").bounding_box()
            places.append((box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2))
        page.mouse.move(*places[0])
        page.mouse.down()
        page.mouse.move(*places[1], steps=5)
        page.mouse.up()

    def agrees(last: str) -> None:
        board.order = [*board.given[:3], last]
        figures = {"bubble": f"{board.figures['bubble %']:.1f}", "units": str(board.figures["units"])}
        assert {name: view.get_attribute(f"data-{name}") for name in figures} == figures

    agrees(board.given[3])
    drag("3 W0", "3 W3")
    on(view, "3 W3", "ArrowRight")
    agrees("F0 I0 F1 I1 W1 F2 I2 W2 F3 I3 W0 W3")
    drag("2 F2", "2 W3")
    assert "wall: on rank 2, I2 and F2 are of one microbatch" in view.inner_text()
    on(view, "2 F0", "Escape")
    agrees(board.given[3])
    drag("0 F1", "0 I1")  # rank 1 wants it before its own I0
    assert view.get_attribute("data-stuck") == "0 1 2 3" and "wait for each other" in view.inner_text()
    view.evaluate_handle("view => view.parentElement.parentElement.querySelectorAll('button')[1]").click()
    assert view.get_attribute("data-bubble") == f"{board.measure(board.whole)['bubble %']:.1f}"
