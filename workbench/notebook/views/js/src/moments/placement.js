// Two factors on a mesh: drag an axis onto rows, columns or the whole of a factor, or press Enter on it.
import { count, make } from "../dom.js";
import { FILL, GREEN, INK, press, redraw, svg, text } from "./svg.js";

const COLORS = ["#f0e442", "#999999"], NEXT = { replicate: "rows", rows: "columns", columns: "replicate" };
const PLACES = { "S(0)": "rows", "S(1)": "columns", R: "replicate" };
// As in the pictures of a mesh (RANK_COLORS), and a red that no rank has.
const RANKS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00", "#999999"], WRONG = "#b00020";
const SIDE = 150, GAP = 120, TOP = 56;

export function placement({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "lab" });
  const said = make("div", { "data-role": "cost" });
  root.insertBefore(box, note);
  root.insertBefore(said, note);
  const sizes = d.axes.map(([, size]) => size);
  const placed = (tensor) => [traits.get(`${tensor}_0`), traits.get(`${tensor}_1`)];
  const now = () => d.table[[...placed("x"), ...placed("w")].join(" ")];
  const coordinate = () => [Math.floor(traits.get("rank") / sizes[1]), traits.get("rank") % sizes[1]];

  // The part of rows and columns that the marked rank holds, each as [from, to] of 1.
  function shard(places) {
    const held = [[0, 1], [0, 1]];
    places.forEach((place, axis) => {
      const dim = { rows: 0, columns: 1 }[place];
      if (dim === undefined) return;
      const [from, to] = held[dim];
      const part = (to - from) / sizes[axis];
      held[dim] = [from + part * coordinate()[axis], from + part * (coordinate()[axis] + 1)];
    });
    return held;
  }

  function tensor(name, places, left, own) {
    const [[top, bottom], [start, end]] = shard(places);
    const lines = [];
    const cuts = [1, 1];
    places.forEach((place, axis) => {
      const dim = { rows: 0, columns: 1 }[place];
      if (dim === undefined) return;
      cuts[dim] *= sizes[axis];
      for (let i = 1; i < cuts[dim]; i += 1) {
        const at = (SIDE * i) / cuts[dim];
        lines.push(svg("path", { d: dim ? `M${left + at},${TOP} v${SIDE}` : `M${left},${TOP + at} h${SIDE}`, stroke: COLORS[axis],
          "stroke-width": 3 }));
      }
    });
    const zone = (place, x, y, width, height) => svg("rect", { x, y, width, height, fill: "transparent",
      "data-tensor": name, "data-place": place }, svg("title", {}, `${name}: ${place}`));
    const chips = places.map((place, axis) => {
      const [x, y] = { rows: [left - 78, TOP + 20 + 30 * axis], columns: [left + 4 + 76 * axis, TOP - 28],
        replicate: [left + 40, TOP + 46 + 30 * axis] }[place] ?? [left + 40, TOP + 46 + 30 * axis];
      const label = `${name} over ${d.axes[axis][0]}: ${place}`;
      const handle = own ? { ...press(() => choose(name, axis, NEXT[place])), "data-key": `${name}_${axis}`, "aria-label": label,
        style: "cursor:grab", onpointerdown: (event) => { drag = { name, axis, from: [event.clientX, event.clientY] }; } } : {};
      return svg("g", handle, svg("rect", { x, y, width: 70, height: 22, rx: 11, fill: COLORS[axis],
        "stroke-dasharray": place === "partial" ? "4 3" : undefined, stroke: INK }), text(x + 35, y + 15,
        place === "partial" ? `Σ ${d.axes[axis][0]}` : d.axes[axis][0], { "text-anchor": "middle", fill: "#222", "font-size": 11 }),
      svg("title", {}, label));
    });
    const shape = d.shapes[name];
    return [svg("rect", { x: left, y: TOP, width: SIDE, height: SIDE, fill: FILL, stroke: INK }),
      svg("rect", { x: left + SIDE * start, y: TOP + SIDE * top, width: SIDE * (end - start), height: SIDE * (bottom - top),
        fill: `${RANKS[traits.get("rank") % RANKS.length]}77` }), ...lines, text(left, TOP + SIDE + 18, `${name}${shape ? ` [${shape.join(", ")}]` : ""}`, { "font-weight": 600 }),
      ...(own ? [zone("rows", left - 84, TOP, 84, SIDE), zone("columns", left, TOP - 36, SIDE, 36),
        zone("replicate", left, TOP, SIDE, SIDE)] : []), ...chips];
  }

  let drag = null;
  const choose = (name, axis, place) => traits.set({ [`${name}_${axis}`]: place });
  box.addEventListener("pointerup", (event) => {
    const moved = drag && Math.hypot(event.clientX - drag.from[0], event.clientY - drag.from[1]) > 6;
    const zone = moved && document.elementsFromPoint(event.clientX, event.clientY).find((each) => each.dataset?.place);
    if (zone && zone.dataset.tensor === drag.name) choose(drag.name, drag.axis, zone.dataset.place);
    drag = null;
  });

  function show() {
    const found = now();
    const lefts = { x: 90, w: 90 + SIDE + GAP, y: 90 + 2 * (SIDE + GAP) };
    const result = found.result.map((each) => PLACES[each] ?? "partial");
    const sign = (left, mark) => text(left - 96, TOP + SIDE / 2 + 8, mark, { "font-size": 22 });
    redraw(box, svg("svg", { viewBox: "0 0 960 240", width: "100%" }, ...tensor("x", placed("x"), lefts.x, true),
      ...tensor("w", placed("w"), lefts.w, true), ...tensor("x @ w", result, lefts.y, false), sign(lefts.w, "@"), sign(lefts.y, "=")));
    const line = (title, moves, color) => make("div", { style: color ? `color:${color}` : "" }, `${title}: ${moves.join("; ") || "nothing"}`);
    said.replaceChildren(line("to bring x here", found.x), line("to bring w here", found.w),
      found.added.length ? line("the placements do not fit: DTensor adds", found.added, WRONG)
        : line("the placements fit: DTensor adds", [], GREEN),
      line("to sum partial results (Σ)", found.summed),
      make("b", {}, `${count(found.bytes)} bytes moved in all`),
      make("span", {}, traits.get("reveal") ? ` · the least is ${count(d.best)}` : ""));
    root.dataset.bytes = String(found.bytes);
    root.dataset.added = String(found.added.length);
    tell(`Drag an axis to the left edge (rows), the top (columns) or the middle (replicate); or press Enter on it. Coloured: `
      + `the shard of rank ${traits.get("rank")}. Bytes: of the larger side of each collective, on one rank; an all-reduce counts twice.`);
  }

  traits.follow(["x_0", "x_1", "w_0", "w_1", "rank", "reveal"], show);
  show();
}
