// Two factors on a mesh: drag an axis onto rows, columns or the whole of a factor, or press Enter on it.
import { count, make } from "../dom.js";
import { FILL, GREEN, INK, press, redraw, svg, text } from "./svg.js";

const COLORS = ["#f0e442", "#999999"], NEXT = { replicate: "rows", rows: "columns", columns: "replicate" };
const PLACES = { "S(0)": "rows", "S(1)": "columns", R: "replicate" };
// As in the pictures of a mesh (RANK_COLORS), and a red that no rank has.
const RANKS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00", "#999999"], WRONG = "#b00020";
const SCALE = 256, GAP = 150, TOP = 56, CHIP = 70; // SCALE: pixels of the longest side; all others are in proportion

export function placement({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "lab" });
  const said = make("div", { "data-role": "cost" });
  root.insertBefore(box, note);
  root.insertBefore(said, note);
  const sizes = d.axes.map(([, size]) => size);
  const shapes = { ...d.shapes, "x @ w": [d.shapes.x[0], d.shapes.w[1]] };
  const longest = Math.max(...Object.values(shapes).flat());
  const extent = (name) => shapes[name].map((each) => (SCALE * each) / longest);
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
    const [high, wide] = extent(name), middle = left + wide / 2 - CHIP / 2;
    const lines = [];
    const cuts = [1, 1];
    places.forEach((place, axis) => {
      const dim = { rows: 0, columns: 1 }[place];
      if (dim === undefined) return;
      cuts[dim] *= sizes[axis];
      for (let i = 1; i < cuts[dim]; i += 1) {
        const at = ((dim ? wide : high) * i) / cuts[dim];
        lines.push(svg("path", { d: dim ? `M${left + at},${TOP} v${high}` : `M${left},${TOP + at} h${wide}`, stroke: COLORS[axis],
          "stroke-width": 3 }));
      }
    });
    const zone = (place, x, y, width, height) => svg("rect", { x, y, width, height, fill: "transparent",
      "data-tensor": name, "data-place": place }, svg("title", {}, `${name}: ${place}`));
    const chips = places.map((place, axis) => {
      const [x, y] = { rows: [left - CHIP - 8, TOP + high / 2 - 26 + 30 * axis], columns: [middle - 38 + 76 * axis, TOP - 28],
      }[place] ?? [middle, TOP + high / 2 - 26 + 30 * axis];
      const label = `${name} over ${d.axes[axis][0]}: ${place}`;
      const handle = own ? { ...press(() => choose(name, axis, NEXT[place])), "data-key": `${name}_${axis}`, "aria-label": label,
        style: "cursor:grab", onpointerdown: (event) => { drag = { name, axis, from: [event.clientX, event.clientY] }; } } : {};
      return svg("g", handle, svg("rect", { x, y, width: CHIP, height: 22, rx: 11, fill: COLORS[axis],
        "stroke-dasharray": place === "partial" ? "4 3" : undefined, stroke: INK }), text(x + CHIP / 2, y + 15,
        place === "partial" ? `Σ ${d.axes[axis][0]}` : d.axes[axis][0], { "text-anchor": "middle", fill: "#222", "font-size": 11 }),
      svg("title", {}, label));
    });
    return [svg("rect", { x: left, y: TOP, width: wide, height: high, fill: FILL, stroke: INK }),
      svg("rect", { x: left + wide * start, y: TOP + high * top, width: wide * (end - start), height: high * (bottom - top),
        fill: `${RANKS[traits.get("rank") % RANKS.length]}77` }), ...lines, text(left, TOP + high + 18, `${name} [${shapes[name].join(", ")}]`, { "font-weight": 600 }),
      ...(own ? [zone("rows", left - 84, TOP, 84, Math.max(high, 60)), zone("columns", middle - 42, TOP - 36, 154, 36),
        zone("replicate", left, TOP, wide, high)] : []), ...chips];
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
    const [high, wide] = extent("x"), w = 90 + wide + GAP, lefts = { x: 90, w, y: w + extent("w")[1] + GAP };
    const size = `0 0 ${Math.max(960, lefts.y + extent("x @ w")[1] + 60)} ${TOP + Math.max(high, extent("w")[0]) + 34}`;
    const result = found.result.map((each) => PLACES[each] ?? "partial");
    const sign = (left, mark) => text(left - 128, TOP + 26, mark, { "font-size": 22 });
    redraw(box, svg("svg", { viewBox: size, width: "100%" }, ...tensor("x", placed("x"), lefts.x, true),
      ...tensor("w", placed("w"), lefts.w, true), ...tensor("x @ w", result, lefts.y, false), sign(lefts.w, "@"), sign(lefts.y, "=")));
    const line = (title, moves, color) => make("div", { style: color ? `color:${color}` : "" }, `${title}: ${moves.join("; ") || "nothing"}`);
    said.replaceChildren(line("to bring x here", found.x), line("to bring w here", found.w),
      found.added.length ? line("the placements do not fit: DTensor adds", found.added, WRONG)
        : line("the placements fit: DTensor adds", [], GREEN),
      line("to sum partial results (Σ)", found.summed),
      make("b", {}, `total cost: ${count(found.bytes)} bytes`),
      make("span", {}, traits.get("reveal") ? ` · the least is ${count(d.best)}` : ""));
    root.dataset.bytes = String(found.bytes);
    root.dataset.added = String(found.added.length);
    tell(`Drag an axis to the left edge (rows), the top (columns) or the middle (replicate); or press Enter on it. Coloured: `
      + `the shard of rank ${traits.get("rank")}. The cost: the larger side of each collective, on one rank; an all-reduce costs twice that.`);
  }

  traits.follow(["x_0", "x_1", "w_0", "w_1", "rank", "reveal"], show);
  show();
}
