// What a compiler made of the graph: a row for each call of a kernel; its source beside the nodes it came from.
import { count, make, table } from "./dom.js";

const COLORS = { triton: "#0072b2", cpp: "#009e73", extern: "#e69f00", collective: "#d55e00", wait: "#999999", other: "#c9b458" };
const SHOWN = 400;

export async function kernels({ root, note, tell, ask, traits }) {
  const { graphs } = await ask("graphs");
  const list = make("div", { class: "wb-results wb-stage", style: "flex:0 0 42%;max-height:420px;overflow:auto;padding:4px", "data-role": "calls" });
  const side = make("div", { class: "wb-side wb-code", style: "flex:1 1 auto;height:420px", "data-role": "source" });
  const legend = make("div", { class: "wb-legend" }, ...Object.entries(COLORS).map(([kind, color]) =>
    make("span", {}, make("i", { style: `background:${color}` }), kind)));
  root.insertBefore(make("div", {}, legend,
    make("div", { class: "wb-split" }, list, side)), note);

  function show() {
    const graph = graphs.find((each) => each.name === traits.get("graph"));
    const query = traits.get("query").trim().toLowerCase();
    const most = Math.max(1, ...graph.calls.map(([, , nodes]) => nodes.length));
    const found = graph.calls.map((call, i) => [i, ...call]).filter(([, name, kind, nodes]) =>
      [name, kind, ...nodes].some((text) => text.toLowerCase().includes(query)));
    list.replaceChildren(...found.slice(0, SHOWN).map(([i, name, kind, nodes]) => make("button",
      { onclick: () => traits.set({ selected: i }), title: nodes.join(", ") },
      make("span", { style: `display:inline-block;width:${4 + (70 * nodes.length) / most}px;height:9px;margin-right:6px;background:${COLORS[kind]}` }),
      `${i} ${name} · ${count(nodes.length)} nodes`)));
    tell(`${graph.summary} · ${count(found.length)} calls shown`);
    root.dataset.calls = String(found.length);
  }

  async function open() {
    const about = await ask("kernel", { graph: traits.get("graph"), number: traits.get("selected") });
    side.replaceChildren(make("h4", {}, about.name), table(about.rows),
      make("pre", { style: "margin:4px 6px;white-space:pre-wrap" }, about.source));
  }

  traits.follow(["graph", "query"], show);
  traits.follow(["graph", "selected"], open);
  show();
  await open();
}
