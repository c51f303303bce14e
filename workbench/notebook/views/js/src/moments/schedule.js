// The ranks of a pipeline: drag a computation in its rank's lane, and the bubble follows.
import { make } from "../dom.js";
import { ticks } from "../plot.js";
import { FAINT, FILL, INK, RED, redraw, svg, text } from "./svg.js";

const WIDE = 960, LEFT = 60, RIGHT = 90, ROW = 36, KEYS = 26, FIGURES = 40;
const number = (name) => name.slice(1);
const units = (d, name) => d.kinds[name[0]][2];

// [begin, end, name] of each rank's computations in order, as Plan.spans has them; of a rank that waits for ever, those
// before that. waits: by rank, the rank that it waits for, and for what.
export function simulate(d, order) {
  const lanes = order.map((row) => row.split(" "));
  const ends = lanes.map(() => ({})), spans = lanes.map(() => []);
  const source = (rank, name) => { // the rank whose result it needs, and what: undefined where it needs none
    if (name[0] === "W") return undefined;
    const from = name[0] === "F" ? rank - 1 : rank + 1;
    return lanes[from] && [from, name[0] === "F" ? "activation" : "gradient", number(name)];
  };
  const arrived = ([from, what, i]) => (what === "activation" ? ends[from][`F${i}`] : ends[from][`B${i}`] ?? ends[from][`I${i}`]);
  for (let moving = true; moving;) {
    moving = false;
    lanes.forEach((lane, rank) => {
      const name = lane[spans[rank].length], needs = name && source(rank, name);
      const ready = needs ? arrived(needs) : 0;
      if (!name || ready === undefined) return;
      const begin = Math.max(ready, spans[rank].at(-1)?.[1] ?? 0);
      ends[rank][name] = begin + units(d, name);
      spans[rank].push([begin, ends[rank][name], name]);
      moving = true;
    });
  }
  const waits = {};
  lanes.forEach((lane, rank) => {
    if (spans[rank].length < lane.length) waits[rank] = source(rank, lane[spans[rank].length]);
  });
  const total = Math.max(0, ...spans.flat().map(([, end]) => end));
  const busy = spans.flat().reduce((sum, [begin, end]) => sum + end - begin, 0);
  return { lanes, spans, waits, total, bubble: 1 - busy / (total * lanes.length), alive: lanes.map(alive) };
}

// The most microbatches of a rank whose forward has run, and whose backward has not ended.
function alive(lane) {
  let now = 0;
  return Math.max(...lane.map((name) => { now += { F: 1, I: 0 }[name[0]] ?? -1; return now; }));
}

// The order with the computation at one place of a rank's lane put at another one; wall: which of the same microbatch
// has stopped it on the way.
export function moved(order, rank, at, to) {
  const lane = order[rank].split(" ");
  const [name] = lane.splice(at, 1);
  const same = lane.flatMap((each, i) => (number(each) === number(name) ? [i] : []));
  const first = Math.max(0, ...same.filter((i) => i < at).map((i) => i + 1));
  const last = Math.min(lane.length, ...same.filter((i) => i >= at));
  const wall = to < first ? lane[first - 1] : to > last ? lane[last] : "";
  lane.splice(Math.min(Math.max(to, first), last), 0, name);
  return { order: order.map((row, k) => (k === rank ? lane.join(" ") : row)), wall };
}

export function schedule({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "schedule" });
  root.insertBefore(box, note);
  const rival = simulate(d, d.rival);
  let drag = null, chosen = {};

  const figures = (run) => `bubble ${(100 * run.bubble).toFixed(1)} %, step ${run.total} units`;
  const said = (rank, name) => `rank ${rank}: ${d.kinds[name[0]][0]} of microbatch ${number(name)}`;

  function place(rank, at, to) {
    const { order, wall } = moved(traits.get("order"), rank, at, to);
    const name = traits.get("order")[rank].split(" ")[at];
    if (order.join() !== traits.get("order").join()) traits.set({ order });
    if (wall && !root.dataset.stuck) tell(`wall: on rank ${rank}, ${wall} and ${name} are of one microbatch, and keep their order`);
  }

  function key(event, rank, at, name) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key !== "Escape" && !way) return;
    event.preventDefault();
    event.stopPropagation();
    chosen = { rank, name };
    if (way) place(rank, at, at + way);
    else traits.set({ order: d.given });
  }

  // As long as the pointer is down, the bars of the moment at which it came down say which place it is over.
  function grab(event, rank, name, bars, scale) {
    chosen = { rank, name };
    drag = { rank, name, scale, others: bars.filter((bar) => bar[2] !== name).map(([begin, end]) => (begin + end) / 2) };
    event.currentTarget.focus();
    box.setPointerCapture(event.pointerId);
    event.preventDefault();
    show();
  }
  box.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const frame = box.querySelector("svg").getBoundingClientRect();
    const time = ((event.clientX - frame.left) * (WIDE / frame.width) - LEFT) / drag.scale;
    const at = traits.get("order")[drag.rank].split(" ").indexOf(drag.name);
    place(drag.rank, at, drag.others.filter((middle) => middle < time).length);
  });
  for (const end of ["pointerup", "pointercancel"]) box.addEventListener(end, () => { drag = null; });

  function bar(rank, [begin, end, name], at, bars, scale, never) {
    const [x, y] = [LEFT + begin * scale, KEYS + FIGURES + rank * ROW + 3];
    const sister = chosen.name && number(chosen.name) === number(name), mine = sister && chosen.rank === rank && chosen.name === name;
    return svg("g", { tabindex: 0, role: "button", "data-key": `${rank} ${name}`, "aria-label": said(rank, name), style: "cursor:grab;touch-action:none",
      onkeydown: (event) => key(event, rank, at, name), onpointerdown: (event) => grab(event, rank, name, bars, scale) },
    svg("rect", { x, y, width: (end - begin) * scale - 1.5, height: ROW - 8, rx: 3, fill: d.kinds[name[0]][1], "fill-opacity": never ? 0.25 : undefined,
      stroke: never ? RED : sister ? INK : "none", "stroke-width": mine ? 3 : 1.5, "stroke-dasharray": never ? "4 3" : undefined }),
    text(x + ((end - begin) * scale - 1.5) / 2, y + 19, name, { "text-anchor": "middle", "pointer-events": "none",
      fill: never ? INK : "FB".includes(name[0]) ? "#fff" : "#222" }),
    svg("title", {}, said(rank, name)));
  }

  function show() {
    const run = simulate(d, traits.get("order"));
    const stuck = Object.keys(run.waits).map(Number);
    const left = run.lanes.map((lane, rank) => { // what never runs stands behind what does
      let now = run.total;
      return lane.slice(run.spans[rank].length).map((name) => [now, now += units(d, name), name]);
    });
    const longest = Math.max(rival.total + 1, run.total, ...left.flat().map(([, end]) => end));
    const scale = (WIDE - LEFT - RIGHT) / longest, low = KEYS + FIGURES + run.lanes.length * ROW;
    const lanes = run.lanes.flatMap((lane, rank) => {
      const bars = [...run.spans[rank], ...left[rank]], y = KEYS + FIGURES + rank * ROW;
      return [svg("rect", { x: LEFT, y, width: (stuck.length ? longest : run.total) * scale, height: ROW - 2, fill: FILL }),
        text(4, y + 21, `rank ${rank}`, { fill: FAINT }), text(WIDE - RIGHT + 8, y + 21, `holds ${run.alive[rank]}`),
        ...bars.map((each, at) => bar(rank, each, at, bars, scale, at >= run.spans[rank].length))];
    });
    const kinds = Object.entries(d.kinds).filter(([kind]) => run.lanes.flat().some((name) => name[0] === kind));
    const keys = kinds.flatMap(([kind, [label, color]], k) => [
      svg("rect", { x: 4 + 200 * k, y: 5, width: 22, height: 12, fill: color }), text(4 + 200 * k + 28, 15, `${kind}: ${label}`)]);
    const end = LEFT + rival.total * scale;
    const axis = ticks(0, longest).filter(Number.isInteger).map((time) => text(LEFT + time * scale, low + 14, String(time), { "text-anchor": "middle", fill: FAINT }));
    redraw(box, svg("svg", { viewBox: `0 0 ${WIDE} ${low + 20}`, width: "100%" }, ...keys,
      text(4, KEYS + 16, stuck.length ? "yours: ranks wait for ever" : `yours: ${figures(run)}`, { "font-weight": 600, "font-size": 15,
        fill: stuck.length ? RED : INK }),
      text(4, KEYS + 33, `1F1B, whole backwards: ${figures(rival)}`, { fill: FAINT }),
      ...lanes, svg("path", { d: `M${end},${KEYS + FIGURES - 6} V${low}`, stroke: INK, "stroke-dasharray": "3 3" }),
      text(end, KEYS + FIGURES - 10, "1F1B ends", { "text-anchor": "middle", "font-size": 11, fill: FAINT }), ...axis));
    root.dataset.bubble = stuck.length ? "" : (100 * run.bubble).toFixed(1);
    root.dataset.units = String(run.total);
    root.dataset.alive = run.alive.join(" ");
    root.dataset.stuck = stuck.join(" ");
    const first = stuck.find((rank) => run.waits[rank][0] === rank + 1 && run.waits[rank + 1]?.[0] === rank);
    if (first !== undefined) {
      const each = [first, first + 1].map((rank) => `rank ${rank} for the ${run.waits[rank][1]} of microbatch ${run.waits[rank][2]}`);
      tell(`Ranks ${first} and ${first + 1} wait for each other: ${each.join(", ")}. Dashed: never runs. Escape: as given.`, true);
    } else {
      tell("Grey: the rank waits. Drag a bar along its row, or use Tab and the arrow keys. Escape: as given.");
    }
  }

  traits.follow(["order", "message"], show);
  show();
}
