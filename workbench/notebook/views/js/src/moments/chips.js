// Pass chips: Enter switches a pass on or off, arrow keys or dragging move it; every list has been recorded.
import { bytes, count, make, table } from "../dom.js";
import { FAINT, RED, press, redraw } from "./svg.js";

export function chips({ root, note, data: d, traits, tell }) {
  const box = make("div", { "data-role": "chips" });
  const results = make("div", { "data-role": "results" });
  root.insertBefore(box, note);
  root.insertBefore(results, note);
  let drag = null;
  const now = () => [[...traits.get("joint_passes")], [...traits.get("passes")]];
  const key = (lists) => lists.map((list) => list.join(" ")).join("|");
  const off = () => d.names.filter((name) => !now().flat().includes(name));
  const choose = ([joint, later]) => traits.set({ joint_passes: joint, passes: later });
  const given = d.runs[key(d.given)].figures;

  // Where a pass goes that is switched on: to its list, before those that are declared after it.
  function put(lists, name) {
    const mine = lists[d.given[0].includes(name) ? 0 : 1];
    const after = mine.findIndex((each) => d.names.indexOf(each) > d.names.indexOf(name));
    mine.splice(after < 0 ? mine.length : after, 0, name);
    return lists;
  }

  const without = (name) => now().map((list) => list.filter((each) => each !== name));
  const toggle = (name) => choose(off().includes(name) ? put(now(), name) : without(name));

  // One place to the left or right; from an end of a list into the other list.
  function move(name, way) {
    const lists = now();
    const from = lists.findIndex((list) => list.includes(name));
    if (from < 0) return tell(`${name} is off: press Enter to switch it on`);
    const at = lists[from].indexOf(name);
    const to = at + way;
    if (to >= 0 && to < lists[from].length) [lists[from][at], lists[from][to]] = [lists[from][to], name];
    else if (lists[from + way]) {
      lists[from].splice(at, 1);
      if (way < 0) lists[0].push(name);
      else lists[1].unshift(name);
    } else return tell("this is the end of the list");
    return choose(lists);
  }

  function drop(event) {
    const found = drag && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 6
      && document.elementsFromPoint(event.clientX, event.clientY);
    const list = found && found.find((each) => each.dataset?.list);
    const name = drag?.name;
    drag = null;
    if (!list) return;
    const lists = without(name);
    if (list.dataset.list !== "off") {
      const others = [...list.querySelectorAll("[data-key]")].filter((each) => each.dataset.key !== name);
      const after = others.findIndex((each) => event.clientX < each.getBoundingClientRect().x + each.offsetWidth / 2);
      lists[Number(list.dataset.list)].splice(after < 0 ? others.length : after, 0, name);
    }
    dropped = true;
    choose(lists);
  }
  let dropped = false; // the click that ends a drag is none
  box.addEventListener("pointerup", drop);
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    choose(d.given);
  });

  function chip(name, on, wrong) {
    const act = press(() => {
      if (!dropped) toggle(name);
      dropped = false;
    });
    const keys = (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return act.onkeydown(event);
      event.preventDefault();
      event.stopPropagation();
      return move(name, way);
    };
    return make("span", { ...act, onkeydown: keys, onpointerdown: (event) => {
      dropped = false;
      drag = { name, x: event.clientX, y: event.clientY };
    }, "data-key": name, "data-wrong": wrong || undefined, "aria-pressed": String(on), "aria-label": `${name}, ${on ? "on" : "off"}`,
    style: `cursor:grab;user-select:none;touch-action:none;padding:4px 10px;border-radius:12px;border:2px ${on ? "solid" : "dashed"} ${wrong ? RED : FAINT};`
      + (on ? `color:${wrong ? "#fff" : "#222"};background:${wrong ? RED : "#f1f3f5"}` : "opacity:0.75") }, name);
  }

  const row = (title, list, inside) => make("div", { "data-list": list, style: "display:flex;flex-wrap:wrap;gap:8px;align-items:center;"
    + "padding:5px 0;min-height:40px" }, make("span", { style: `width:110px;color:${FAINT}` }, title), ...inside);

  function difference(label, name, format, found) {
    const by = found[name] - given[name];
    const sign = by > 0 ? "+" : "−";
    return [label, format(found[name]), Math.abs(by) < 5e-5 ? "none" : `${sign}${format(Math.abs(by))}`];
  }

  function verdicts(run) {
    const cells = Object.entries(run.verdicts).map(([name, outcomes]) => [name, ...outcomes.map((outcome) => make("span", {
      class: "wb-badge", style: `background:${d.fills[outcome]}` }, outcome))]);
    return cells.length ? table(cells, ["pass", ...run.checks]) : make("div", {}, "no pass, no verdict");
  }

  function show() {
    const lists = now();
    const run = d.runs[key(lists)] ?? { refused: [traits.get("message")] };
    const wrong = (name) => Boolean(run.refused) && run.refused.some((said) => said.includes(`'${name}'`));
    redraw(box, row("joint passes", "0", lists[0].map((name) => chip(name, true, wrong(name)))),
      row("passes", "1", lists[1].map((name) => chip(name, true, wrong(name)))),
      row("off", "off", off().map((name) => chip(name, false, false))));
    root.dataset.problem = run.refused ? run.refused.join("\n") : "";
    root.dataset.launches = run.refused ? "" : String(run.figures.launches);
    root.dataset.saved = run.refused ? "" : String(run.figures["bytes saved"]);
    if (run.refused) {
      results.replaceChildren(make("div", { style: `color:${RED};font-weight:600` }, "the recipe check refuses this list:"),
        ...run.refused.map((said) => make("div", { style: `color:${RED}` }, said)));
    } else {
      const ms = (value) => `${value.toFixed(4)} ms`;
      results.replaceChildren(make("div", { style: "display:flex;flex-wrap:wrap;gap:40px" }, table([
        difference("launches", "launches", count, run.figures), difference("saved bytes", "bytes saved", bytes, run.figures),
        difference("peak", "peak bytes", bytes, run.figures), difference("step", "step ms", ms, run.figures)],
      ["", "this list", "change from the recipe"]), verdicts(run)), ...run.notes.map((said) => make("div", {}, said)));
    }
    tell("Click a pass, or focus it and press Enter, to switch it on or off. Drag it, or use the arrow keys, to move it. Escape: as in the recipe. "
      + `Step: ${d.simulated}.`);
  }

  traits.follow(["joint_passes", "passes", "message"], show);
  show();
}
