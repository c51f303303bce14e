"""How long a reader waits for a view in JupyterLab: first paint, and a step to another pass.

    python benchmarks/views.py [--layers 32] [--json FILE]

Headless Chromium on this machine. First paint: from the call in the cell until the page has drawn; the graph of 50 000
nodes is the captured one several times over, each time under modules of its own. A step: from the slider's event
until graph and lines are drawn, when the view has made ready what it shows first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser")]

from jupyter import IDLE, jupyterlab, new_page, run_all, write_notebook  # noqa: E402
from playwright.sync_api import Page  # noqa: E402

from workbench.pipeline.machine import machine, versions  # noqa: E402

CELLS = (
    """import torch
from workbench import build, draw, fake_world, load_recipe
from workbench.notebook.views import GraphView, MemoryView, PassStepper, TimelineView
recipe = load_recipe("tour").override({"model.n_layers": LAYERS})
with fake_world(recipe.mesh.world_size) as world:
    built = build(recipe, world)
calls = {}""",
    """def larger(gm, times):
    graph = torch.fx.Graph()
    for k in range(times):
        copies = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            new = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                new.target = new.name
            new.meta = {key: {at: (f"part_{k}.{path}", kind) for at, (path, kind) in value.items()}
                        if key in ("nn_module_stack", "fwd_nn_module_stack") and value else value
                        for key, value in node.meta.items()}
    graph.output(())
    return torch.fx.GraphModule(gm, graph)


large = larger(built.captured, -(-50_000 // len(built.captured.graph.nodes)))""",
    """import time
calls["graph"] = [time.time(), len(built.captured.graph.nodes)]
view = GraphView({"joint": built.captured})
view""",
    """calls["large"] = [time.time(), len(large.graph.nodes)]
large_view = GraphView({"joint": large})
large_view""",
    """calls["timeline"] = [time.time(), len(built.records[-1].after[1].graph.nodes)]
TimelineView(built.records[-1])""",
    """calls["memory"] = [time.time(), len(built.records[-1].after[1].graph.nodes)]
MemoryView(built.step.pair)""",
    """calls["passes"] = [time.time(), len(built.records[-1].after[1].graph.nodes)]
stepper = PassStepper(built.records)
stepper""",
    """import json
print(json.dumps({"calls": calls}))""",
)
VIEWS = {"graph": 2, "large": 3, "timeline": 4, "memory": 5, "passes": 6}
STEP = """async at => {
    const cell = document.querySelectorAll('.jp-Cell')[at];
    const [view, slider] = [cell.querySelector('.wb'), cell.querySelector('.noUi-handle')];
    const times = [];
    const steps = Number(slider.getAttribute('aria-valuemax')) + 1;
    for (const key of ['End', ...Array(steps - 1).fill('ArrowLeft')]) {
        const begun = performance.now();
        const drawn = view.dataset.drawn;
        slider.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
        while (view.dataset.drawn === drawn) await new Promise(done => setTimeout(done, 2));
        times.push(performance.now() - begun);
    }
    return times;
}"""
RUN_ONE = """async at => {
    const { content } = jupyterapp.shell.currentWidget;
    await content.scrollToItem(at);
    content.activeCellIndex = at;
    content.deselectAll();
    await jupyterapp.commands.execute('notebook:run-cell');
}"""
WARM = "at => document.querySelectorAll('.jp-Cell')[at].querySelector('.wb').dataset.warm === 'true'"
READY = "at => Number(document.querySelectorAll('.jp-Cell')[at]?.querySelector('.wb')?.dataset.ready ?? 0)"


def settle(page: Page) -> None:
    """Wait until the kernel has nothing left to answer of the views above: it is idle for a second."""
    idle, limit = 0, time.monotonic() + 120
    while idle < 20:
        assert time.monotonic() < limit, "the kernel does not come to rest"
        idle = idle + 1 if page.evaluate(IDLE) else 0
        time.sleep(0.05)


def measure(layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        notebooks = Path(folder) / "notebooks"
        notebooks.mkdir()
        cells = (CELLS[0].replace("LAYERS", str(layers)), *CELLS[1:])
        write_notebook(notebooks / "views.ipynb", cells)
        with jupyterlab(notebooks) as address, new_page() as page:
            run_all(page, address.format("views.ipynb"), 600)
            ready = {}
            for name, cell in VIEWS.items():  # again, each alone: while cells run, a kernel answers no view
                settle(page)
                page.evaluate(RUN_ONE, cell)
                limit = time.monotonic() + 60
                while not (at := page.evaluate(READY, cell)):
                    assert time.monotonic() < limit, f"{name} is not drawn"
                    time.sleep(0.05)
                ready[name] = at / 1e3
            page.evaluate(RUN_ONE, len(CELLS) - 1)
            time.sleep(1)
            outputs = page.evaluate("() => jupyterapp.shell.currentWidget.content.model.toJSON().cells"
                                    ".flatMap(cell => cell.outputs)")
            calls = json.loads("".join(outputs[-1]["text"]))["calls"]
            rows = [{"view": name, "nodes": nodes, "first_paint_s": round(ready[name] - called, 3)}
                    for name, (called, nodes) in calls.items()]
            page.evaluate("at => { jupyterapp.shell.currentWidget.content.scrollToItem(at); }", VIEWS["passes"])
            limit = time.monotonic() + 120
            while not page.evaluate(WARM, VIEWS["passes"]):
                assert time.monotonic() < limit, "the stepper does not get ready"
                time.sleep(0.1)
            steps = page.evaluate(STEP, VIEWS["passes"]) + page.evaluate(STEP, VIEWS["passes"])
    half = len(steps) // 2
    return {"rows": rows,
            "steps_ms": {"first": [round(s, 1) for s in steps[:half]], "again": [round(s, 1) for s in steps[half:]]},
            "median_step_ms": round(statistics.median(steps), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"command": f"python benchmarks/views.py --layers {options.layers}", "machine": machine(),
             "versions": versions(), "layers": options.layers, **measure(options.layers)}
    print(json.dumps({k: found[k] for k in ("rows", "steps_ms")}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
