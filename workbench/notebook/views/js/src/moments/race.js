// Lists of passes against each other, at the place that two sliders choose; a map of who is fastest where.
import { make } from "../dom.js";
import { FAINT, FILL, INK, RED, press, redraw, svg, text } from "./svg.js";

const WIDE = 420, BAR = 22, LEFT = 90, CELL = 84, HIGH = 26;

export function race({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "race", style: "display:flex;flex-wrap:wrap;gap:30px" });
  root.insertBefore(box, note);
  const [tokens, links] = [d.axes[0], [...d.axes[1]].reverse()];
  const color = (name) => d.colors[d.names.indexOf(name)] ?? FILL;
  const hatch = svg("defs", {}, svg("pattern", { id: "wb-exposed", width: 6, height: 6, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, svg("rect", { width: 6, height: 6, fill: "#fbe3d4" }),
  svg("path", { d: "M0,0 V6", stroke: RED, "stroke-width": 2 })));

  function bars(now, here) {
    const [rows, gbps] = here.split(" ").map(Number);
    const longest = Math.max(...Object.values(now).map(([, , total]) => total));
    const wide = (ms) => (ms / longest) * WIDE;
    const drawn = d.names.flatMap((name, i) => {
      const [compute, exposed, total] = now[name];
      const y = 24 + i * (BAR + 8);
      return [text(0, y + 15, name, { "font-weight": 600 }), svg("rect", { x: LEFT, y, width: wide(compute), height: BAR, fill: color(name) }),
        svg("rect", { x: LEFT + wide(compute), y, width: wide(exposed), height: BAR, fill: "url(#wb-exposed)" }),
        text(LEFT + wide(total) + 6, y + 15, `${total.toFixed(2)} ms, ${exposed.toFixed(2)} exposed`)];
    });
    const high = 30 + d.names.length * (BAR + 8);
    return svg("svg", { viewBox: `0 0 ${LEFT + WIDE + 160} ${high}`, width: LEFT + WIDE + 160, style: "max-width:100%" }, hatch,
      text(0, 14, `${rows.toLocaleString("en-US")} tokens, ${gbps} GB/s`, { "font-weight": 600 }),
      text(LEFT + 90, 14, "a step: compute in colour, exposed communication hatched", { fill: FAINT }), ...drawn);
  }

  function map(here) {
    const cells = links.flatMap((gbps, row) => tokens.map((each, column) => {
      const winner = d.winners[`${each} ${gbps}`], key = `${each} ${gbps}`, close = winner.endsWith("?");
      const [x, y] = [LEFT + column * CELL, 20 + row * HIGH];
      return svg("g", { ...press(() => traits.set({ tokens: column, link_speed: links.length - 1 - row })), "data-key": key, style: "cursor:pointer",
        "aria-label": `${each} tokens, ${gbps} GB/s: ${winner}` },
      svg("rect", { x: x + 1, y: y + 1, width: CELL - 2, height: HIGH - 2, fill: color(winner.replace(" ?", "")),
        "fill-opacity": close ? 0.35 : 1,        stroke: key === here ? INK : "none", "stroke-width": 3 }),
      text(x + CELL / 2, y + 17, winner, { "text-anchor": "middle", fill: close ? INK : "#222" }));
    }));
    return svg("svg", { viewBox: `0 0 ${LEFT + CELL * tokens.length + 4} ${24 + HIGH * links.length}`,
      width: LEFT + CELL * tokens.length + 4, style: "max-width:100%" },
    text(0, 14, "tokens"), ...tokens.map((each, i) => text(LEFT + CELL * (i + 0.5), 14, each.toLocaleString("en-US"), { "text-anchor": "middle" })),
    ...links.map((gbps, i) => text(0, 20 + HIGH * i + 17, `${gbps} GB/s`)), ...cells);
  }

  function show() {
    const here = `${d.axes[0][traits.get("tokens")]} ${d.axes[1][traits.get("link_speed")]}`;
    redraw(box, bars(d.runs[here], here), map(here));
    root.dataset.winner = d.winners[here];
    tell("The map: the fastest list by tokens of a rank and GB/s of its link; ?: it leads by less than the model's error. "
      + "Move a slider, or click a cell.");
  }

  traits.follow(["tokens", "link_speed"], show);
  show();
}
