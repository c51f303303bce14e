// A graph on a clock: drag a collective's bar, or the dot of its wait; arrow keys move what is focused.
import { EDGE, bytes, make } from "../dom.js";
import { ticks } from "../plot.js";
import { moved, simulate } from "./simulator.js";
import { FAINT, FILL, INK, RED, redraw, svg, text } from "./svg.js";

const WIDE = 960, LEFT = 120, ROW = 30, HIGH = 70, AXIS = 20, KEYS = 24, STRIPED = "reduce_scatter";

export function order({ root, note, data: d, traits, tell }) {
  const place = new Map(d.names.map((name, i) => [name, i]));
  const names = (found) => found.map((i) => d.names[i]);
  const given = simulate(d, d.names.map((_, i) => i));
  const rival = simulate(d, d.rival);
  const box = make("div", { "data-role": "timeline" });
  root.insertBefore(box, note);
  let drag = null;

  const striped = (x, y, width, height) => svg("rect", { x, y, width, height, fill: "url(#wb-stripes)", "pointer-events": "none" });
  const current = () => traits.get("order").map((name) => place.get(name));
  const figures = (run) => `${run.exposedMs.toFixed(4)} ms exposed, peak ${bytes(run.peak)}, step ${run.total.toFixed(4)} ms`;
  const choose = (found) => traits.set({ order: names(found) });

  function move(i, way) {
    const { order: found, wall } = moved(d, current(), i, way);
    if (found) choose(found);
    else tell(wall ? `wall: ${d.names[wall[1]]} reads ${d.names[wall[0]]}` : "wall: the graph ends here");
  }

  const mark = (i) => traits.get("selected") !== d.names[i] && traits.set({ selected: d.names[i] });

  function key(event, i) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") choose(d.names.map((_, k) => k));
    else if (way) {
      mark(i);
      move(i, way);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Where a drag can take node i: [time, order], to the wall on either side.
  function stops(i) {
    const at = (run) => (d.group[i] >= 0 ? run.begin[i] : run.issued[i]);
    const found = [[at(simulate(d, current())), current()]];
    for (const way of [-1, 1]) {
      let next = moved(d, current(), i, way).order;
      while (next) {
        found.push([at(simulate(d, next)), next]);
        next = moved(d, next, i, way).order;
      }
    }
    return found;
  }

  function grab(event, i, scale) {
    drag = { from: event.clientX, stops: stops(i), scale };
    event.currentTarget.focus();
    box.setPointerCapture(event.pointerId);
    event.preventDefault();
    mark(i);
  }
  box.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const wide = box.querySelector("svg").getBoundingClientRect().width / WIDE;
    const wanted = drag.stops[0][0] + (event.clientX - drag.from) / wide / drag.scale;
    const best = drag.stops.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    if (names(best[1]).join() !== traits.get("order").join()) choose(best[1]);
  });
  for (const end of ["pointerup", "pointercancel"]) box.addEventListener(end, () => { drag = null; });

  function panel(found, run, top, title, scale, most, mine) {
    const x = (ms) => LEFT + ms * scale;
    const parts = [text(4, top + 14, `${title}: ${figures(run)}`, { "font-weight": 600 })];
    ["compute", ...d.lanes].forEach((lane, k) => {
      const y = top + 24 + k * ROW;
      parts.push(svg("rect", { x: LEFT, y, width: WIDE - LEFT - 8, height: ROW - 6, fill: FILL }),
        text(4, y + 16, lane, { fill: FAINT }));
    });
    for (const i of found) {
      const lane = d.group[i] + 1;
      if (!lane && !(run.finish[i] > run.begin[i])) continue;
      const y = top + 24 + lane * ROW;
      const wide = Math.max(1, x(run.finish[i]) - x(run.begin[i]));
      const said = `${d.names[i]} ${d.modules[i]}: ${(run.finish[i] - run.begin[i]).toFixed(4)} ms`
        + (run.exposed[i] ? `, ${run.exposed[i].toFixed(4)} ms exposed` : lane ? ", not exposed" : "");
      const chosen = mine && d.names[i] === traits.get("selected");
      parts.push(svg("rect", { x: x(run.begin[i]), y: y + 2, width: wide, height: ROW - 10, fill: d.colors[lane],
        stroke: chosen ? INK : run.exposed[i] ? EDGE : "none", "stroke-width": chosen ? 3 : 2,
        ...(mine && lane ? { tabindex: 0, role: "button", "data-key": d.names[i], "aria-label": said, style: "cursor:ew-resize",
          onkeydown: (event) => key(event, i), onpointerdown: (event) => grab(event, i, scale) } : {}) },
      svg("title", {}, said)));
      if (d.kind[i] === STRIPED) parts.push(striped(x(run.begin[i]), y + 2, wide, ROW - 10));
      if (run.exposed[i]) {
        parts.push(svg("rect", { x: x(run.finish[i] - run.exposed[i]), y: top + 26, width: x(run.exposed[i]) - LEFT,
          height: ROW - 10, fill: "url(#wb-hatch)" }, svg("title", {}, `compute waits for ${d.names[i]}`)));
      }
    }
    const low = top + 24 + (d.lanes.length + 1) * ROW + HIGH;
    const y = (size) => low - (size / most) * (HIGH - 8);
    const line = found.map((i, at) => `${x(at ? run.issued[found[at - 1]] : 0)},${y(run.curve[at])} ${x(run.issued[i])},${y(run.curve[at])}`);
    parts.push(svg("polygon", { points: `${LEFT},${low} ${line.join(" ")} ${x(run.total)},${low}`, fill: "#99999966" }),
      text(4, low - HIGH / 2, "bytes alive", { fill: FAINT }));
    for (const i of mine ? found.filter((k) => d.movable[k] && d.group[k] < 0) : []) {
      const said = `${d.names[i]}: compute waits here for ${d.names[d.waits[i]]}`;
      parts.push(svg("circle", { cx: x(run.issued[i]), cy: top + 24 + (d.group[d.waits[i]] + 1) * ROW - 3, r: 5, fill: INK,
        stroke: d.names[i] === traits.get("selected") ? RED : "none", "stroke-width": 3, tabindex: 0, role: "button",
        "data-key": d.names[i], "aria-label": said, style: "cursor:ew-resize", onkeydown: (event) => key(event, i),
        onpointerdown: (event) => grab(event, i, scale) }, svg("title", {}, said)));
    }
    for (const ms of ticks(0, (WIDE - LEFT - 12) / scale)) {
      parts.push(svg("path", { d: `M${x(ms)},${low} v4`, stroke: FAINT }),
        text(x(ms), low + 16, `${ms} ms`, { "text-anchor": ms ? "middle" : "start", fill: FAINT }));
    }
    return parts;
  }

  // What the fills and edges of the bars mean.
  const legend = () => {
    const kinds = [...new Set(d.kind.filter(Boolean))].sort((a, b) => (a === STRIPED) - (b === STRIPED));
    const fill = (kind) => d.colors[1 + d.group[d.kind.indexOf(kind)]];
    const keys = [["compute", d.colors[0]], ...kinds.map((kind) => [kind.replaceAll("_", "-"), fill(kind), kind === STRIPED]),
      ["exposed collective", "#fff", false, EDGE], ["compute waits", "url(#wb-hatch)"]];
    return keys.flatMap(([said, color, stripes, edge], k) => [svg("rect", { x: 4 + 155 * k, y: 4, width: 24, height: 12, fill: color,
      stroke: edge, "stroke-width": 2 }), stripes ? striped(4 + 155 * k, 4, 24, 12) : undefined, text(4 + 155 * k + 30, 14, said)]);
  };

  function show() {
    const found = current();
    const problem = traits.get("message");
    root.dataset.problem = problem;
    if (problem) return tell(problem, true);
    const run = simulate(d, found);
    const both = traits.get("race");
    const scale = (WIDE - LEFT - 12) / Math.max(given.total, run.total, both ? rival.total : 0);
    const most = Math.max(given.peak, run.peak, both ? rival.peak : 0);
    const tall = 24 + (d.lanes.length + 1) * ROW + HIGH + AXIS + 8;
    const hatch = svg("defs", {}, svg("pattern", { id: "wb-hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, svg("line", { y2: 6, stroke: RED, "stroke-width": 2.4 })),
    svg("pattern", { id: "wb-stripes", width: 7, height: 7, patternUnits: "userSpaceOnUse" },
      svg("line", { x1: 2, x2: 2, y2: 7, stroke: "#222", "stroke-width": 1.6 })));
    redraw(box, svg("svg", { viewBox: `0 0 ${WIDE} ${KEYS + tall * (both ? 2 : 1)}`, width: "100%" }, hatch, ...legend(),
      ...panel(found, run, KEYS, "yours", scale, most, true),
      ...(both ? panel(d.rival, rival, KEYS + tall, "overlap_collectives", scale, most, false) : [])));
    root.dataset.exposed = run.exposedMs.toFixed(4);
    root.dataset.peak = String(run.peak);
    tell(`as captured: ${figures(given)}. Hatched: compute waits. Drag a bar to start a collective earlier, a dot to wait for it later; or use Tab `
      + "and the arrow keys. Escape: as captured.");
    return undefined;
  }

  traits.follow(["order", "race", "selected", "message"], show);
  show();
}
