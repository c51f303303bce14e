// Ranks that all-reduce over two mesh axes: a click launches one; where none can go on, the recorded report stands.
import { make } from "../dom.js";
import { FAINT, FILL, GREEN, INK, RED, press, redraw, svg, text } from "./svg.js";

const ORANGE = "#e69f00", LEFT = 90, ROW = 56, BOX = 150, GAP = 60;

export function counters({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "ranks" });
  const said = make("pre", { "data-role": "report", style: "white-space:pre-wrap;font-size:12px;margin:4px 0" });
  root.insertBefore(box, note);
  root.insertBefore(said, note);
  const ranks = [...Array(d.size).keys()];
  const key = (state) => state.map((own) => own.join(" ")).join("|");
  const members = (rank, axis) => d.groups[axis].find((group) => group.includes(rank));

  function current() {
    const state = ranks.map(() => []);
    for (const click of traits.get("launched")) {
      const [rank, axis] = click.split(": ");
      state[rank].push(axis);
    }
    return state;
  }

  function launch(rank, axis, state, waits) {
    if (state[rank].includes(axis)) tell(`rank ${rank} has launched its all-reduce over ${axis} already`);
    else if (waits.includes(rank)) tell(`rank ${rank} waits in its all-reduce over ${state[rank].at(-1)}: it cannot launch another one`);
    else traits.set({ launched: [...traits.get("launched"), `${rank}: ${axis}`] });
  }

  // An all-reduce: done, waited in, or still to be launched; those launched stand first, in their order.
  function collective(rank, axis, at, state, waits) {
    const own = state[rank];
    const started = own.includes(axis);
    const waiting = waits.includes(rank) && own.at(-1) === axis;
    const missing = waiting ? members(rank, axis).filter((each) => !state[each].includes(axis)) : [];
    const wanted = !started && members(rank, axis).some((each) => waits.includes(each) && state[each].at(-1) === axis);
    const free = !started && !waits.includes(rank);
    const how = waiting ? `waits for rank ${missing.join(", ")}` : started ? "done" : wanted ? "others wait here" : "not launched";
    const [x, y] = [LEFT + at * (BOX + 16), rank * ROW + 8];
    const label = `rank ${rank}: all_reduce over ${axis}, ${how}`;
    return svg("g", { ...press(() => launch(rank, axis, state, waits)), "data-key": `${rank}: ${axis}`, "aria-label": label,
      "aria-disabled": String(!free), style: free ? "cursor:pointer" : "" },
    svg("rect", { x, y, width: BOX, height: ROW - 14, rx: 4, fill: waiting ? ORANGE : started ? GREEN : FILL,
      stroke: wanted ? RED : started ? "none" : FAINT, "stroke-width": wanted ? 3 : 1, "stroke-dasharray": wanted ? "5 3" : undefined,
      opacity: free || started || wanted ? 1 : 0.6 }),
    text(x + BOX / 2, y + 18, `all_reduce over ${axis}`, { "text-anchor": "middle", fill: started ? "#222" : INK }),
    text(x + BOX / 2, y + 34, how, { "text-anchor": "middle", "font-size": 11, fill: started ? "#222" : wanted ? INK : FAINT }),
    svg("title", {}, label));
  }

  function lane(rank, state, waits) {
    const own = [...state[rank], ...d.axes.filter((axis) => !state[rank].includes(axis))];
    const at = Math.max(0, state[rank].length - (waits.includes(rank) ? 1 : 0));
    const end = at === d.axes.length;
    return [text(8, rank * ROW + 34, `rank ${rank}`, { "font-weight": 600 }),
      svg("path", { d: `M${LEFT + at * (BOX + 16) - 13},${rank * ROW + 21} l10,8 l-10,8 z`, fill: INK }),
      ...own.map((axis, i) => collective(rank, axis, i, state, waits)),
      end ? text(LEFT + d.axes.length * (BOX + 16) + 4, rank * ROW + 34, "returned", { fill: GREEN, "font-weight": 600 }) : undefined];
  }

  // The groups, so that one sees who waits for whom.
  const mesh = () => d.axes.map((axis, i) => text(LEFT + d.axes.length * (BOX + 16) + GAP + 50, 28 + 24 * i,
    `${axis}: ranks ${d.groups[axis].map((group) => group.join(" and ")).join(", ranks ")}`, {}));

  function show() {
    if (traits.get("message")) return tell(traits.get("message"), true);
    const state = current();
    const waits = d.states[key(state)];
    const report = d.reports[key(state)];
    redraw(box, svg("svg", { viewBox: `0 0 960 ${d.size * ROW + 8}`, width: "100%" },
      ...ranks.flatMap((rank) => lane(rank, state, waits)), ...mesh()));
    said.textContent = report ?? "";
    root.dataset.waits = waits.join(" ");
    root.dataset.deadlock = String(Number(Boolean(report)));
    const done = state.every((own) => own.length === d.axes.length) && !waits.length;
    tell((report ? "Nobody can go on. Above: what real ranks reported in this order. " : done ? "All ranks returned. " : "")
      + "Click an all-reduce, or focus it and press Enter: its rank launches it. Green: done. Orange: the rank waits. Dashed frame: "
      + "others wait for this one. The triangle is the rank's program counter: any grey box after it may be next. Backspace takes the last launch back, Escape all.");
    return undefined;
  }
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Backspace" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    traits.set({ launched: event.key === "Escape" ? [] : traits.get("launched").slice(0, -1) });
  });

  traits.follow(["launched", "message"], show);
  show();
}
