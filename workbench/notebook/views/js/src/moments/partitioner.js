// A joint graph: click a tensor, or press Enter on it, to save it or to compute it again. Arrow width is bytes.
// Saved and computed again differ by fill and dash alone: colours stand for kinds of operators elsewhere.
import { bytes, count, make } from "../dom.js";
import { FAINT, FILL, INK, PINK, RED, SKY, press, redraw, svg, text } from "./svg.js";

const WIDE = 960, HIGH = 250, BOX = 30, CHART = 240, PAPER = "var(--jp-layout-color1, #fff)";

export function partitioner({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "cut" });
  root.insertBefore(box, note);
  const columns = 1 + Math.max(...d.boxes.map(([, , x]) => x));
  const step = (WIDE - 20) / columns;
  const x = (column) => 10 + step * (column + 0.5);
  const y = (row) => (row ? 70 : HIGH - 50);
  const most = Math.max(...d.boxes.map(([, , , , size]) => size));
  const chosen = () => d.cuts.find(([kept]) => kept.length === traits.get("saved").length
    && kept.every((name) => traits.get("saved").includes(name)));

  function toggle(name) {
    const saved = traits.get("saved");
    traits.set({ saved: saved.includes(name) ? saved.filter((each) => each !== name) : [...saved, name] });
  }

  function arrow([from, to]) {
    const [name, label, a, row, size] = d.boxes[from];
    const [, , b, other] = d.boxes[to];
    const wide = 1 + (9 * size) / most;
    const across = row > other;
    const again = across && label && !traits.get("saved").includes(name);
    const path = across ? `M${x(a)},${y(row) + BOX / 2} L${x(b)},${y(other) - BOX / 2}`
      : `M${x(a)},${y(row) + (row ? -1 : 1) * BOX / 2} Q${(x(a) + x(b)) / 2},${y(row) + (row ? -1 : 1) * (BOX / 2 + 14 + 9 * Math.abs(a - b))} ${x(b)},${y(row) + (row ? -1 : 1) * BOX / 2}`;
    return svg("path", { d: path, fill: "none", "stroke-width": again ? 1.5 : wide, opacity: 0.6,
      stroke: across && label ? INK : FAINT, "stroke-dasharray": again ? "5 4" : undefined },
    svg("title", {}, `${label || name}: ${bytes(size)}${across && label ? (again ? ", computed again" : ", saved") : ""}`));
  }

  function tensor([name, label, column, row, size, input]) {
    const saved = traits.get("saved").includes(name);
    const said = label ? `${label}, ${bytes(size)}: ${saved ? "saved" : "computed again"}` : `${name}, ${bytes(size)}`;
    const wide = Math.min(step - 6, 84);
    return svg("g", label ? { ...press(() => toggle(name)), "data-key": name, "aria-label": said, "aria-pressed": saved,
      style: "cursor:pointer" } : {},
    svg("rect", { x: x(column) - wide / 2, y: y(row) - BOX / 2, width: wide, height: BOX, rx: 4, stroke: label ? INK : FAINT,
      fill: label ? (saved ? INK : PAPER) : FILL, "stroke-width": label ? 2 : 1,
      "stroke-dasharray": label && !saved ? "5 3" : input ? "2 2" : undefined }),
    text(x(column), y(row) + 4, label || name, { "text-anchor": "middle", fill: label && saved ? PAPER : INK,
      "font-size": label ? 14 : 9, "font-weight": label ? 700 : 400 }), svg("title", {}, said));
  }

  function chart(now) {
    const [left, top, wide, high] = [90, HIGH + 16, 420, CHART - 62];
    const far = Math.max(...d.cuts.map((cut) => cut[1]), 1);
    const up = Math.max(...d.cuts.map((cut) => cut[2]), 1);
    const [px, py] = [(size) => left + (wide * size) / far, (flop) => top + high - (high * flop) / up];
    const dot = ([, size, flop], more) => svg("circle", { cx: px(size), cy: py(flop), r: 4, fill: FAINT, ...more });
    const colors = { "minimum cut": PINK, default: SKY };
    const key = (row, color, said) => [svg("circle", { cx: left + wide + 34, cy: top + 16 + 20 * row, r: 5, fill: color }),
      text(left + wide + 46, top + 20 + 20 * row, said)];
    return [svg("path", { d: `M${left},${top} V${top + high} H${left + wide}`, fill: "none", stroke: FAINT }),
      text(left, top + high + 30, `bytes saved, up to ${count(far)}`, { fill: FAINT }),
      text(4, top + 6, "FLOP again", { fill: FAINT }), text(4, top + 22, count(up), { fill: FAINT }),
      svg("polyline", { points: d.budgets.map(([, size, flop]) => `${px(size)},${py(flop)}`).join(" "), fill: "none",
        stroke: RED, "stroke-width": 2 }),
      ...d.cuts.map((cut) => dot(cut, {})), ...d.budgets.map(([share, size, flop]) => svg("circle", { cx: px(size),
        cy: py(flop), r: 3, fill: RED }, svg("title", {}, `budget ${share}: ${count(size)} bytes, ${count(flop)} FLOP again`))),
      ...Object.entries(d.marked).map(([name, cut]) => dot(cut, { r: 8, fill: colors[name] })),
      dot(now, { r: 10, fill: "none", stroke: INK, "stroke-width": 2.5 }),
      ...Object.entries(d.marked).flatMap(([name, [kept, size, flop]], i) => key(i, colors[name],
        `${name}: saves ${kept.map((each) => d.boxes.find(([n]) => n === each)[1]).join(" ") || "nothing"}, ${count(size)} bytes, ${count(flop)} FLOP again`)),
      ...key(2, RED, "the memory budget, from 0 to 1"), ...key(3, FAINT, "all choices; the ring is yours")];
  }

  function show() {
    if (traits.get("message")) return tell(traits.get("message"), true);
    const now = chosen();
    const reveal = traits.get("reveal");
    redraw(box, svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH + (reveal ? CHART : 0)}`, width: "100%" },
      text(10, 16, `yours: ${count(now[1])} bytes saved, ${count(now[2])} FLOP computed again`, { "font-weight": 600 }),
      text(10, HIGH - 6, "backward, from right to left", { fill: FAINT }),
      ...d.arrows.map(arrow), ...d.boxes.map(tensor), ...(reveal ? chart(now) : [])));
    root.dataset.bytes = String(now[1]);
    root.dataset.flop = String(now[2]);
    tell("Click a named tensor, or focus it and press Enter: solid is saved, dashed is computed again. An arrow is as wide "
      + "as its bytes; inputs and weights are in memory anyway.");
    return undefined;
  }

  traits.follow(["saved", "reveal", "message"], show);
  show();
}
