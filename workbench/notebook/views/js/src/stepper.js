// A slider over the passes: what each did to the graph, in its code, and what was proved.
import { OUTCOMES, count, make } from "./dom.js";
import { graph } from "./graph.js";

const SEEN = 8; // of the changed places
const later = globalThis.requestIdleCallback ?? ((work) => setTimeout(work, 30));
const SIDES = { "-": "minus", "+": "plus", ">": "moved", " ": "" };

function lines(hunk) {
  const cells = [];
  const left = [];
  const right = [];
  const flush = () => {
    for (let i = 0; i < Math.max(left.length, right.length); i += 1) {
      cells.push(make("div", { class: i < left.length ? "minus" : "" }, left[i] ?? ""),
        make("div", { class: i < right.length ? "plus" : "" }, right[i] ?? ""));
    }
    left.length = 0;
    right.length = 0;
  };
  for (const [mark, text] of hunk) {
    if (mark === "-") left.push(text);
    else if (mark === "+") right.push(text);
    else {
      flush();
      cells.push(make("div", {}, mark === ">" ? "" : text), make("div", { class: SIDES[mark] }, text));
    }
  }
  flush();
  return make("div", { class: "hunk" }, ...cells);
}

// Records do not change: what the kernel has said once is kept here, and a step that was seen asks for nothing.
function keeper(ask) {
  const kept = new Map();
  return (call, args) => {
    const key = JSON.stringify([call, args]);
    if (!kept.has(key)) kept.set(key, ask(call, args).catch((error) => { kept.delete(key); throw error; }));
    return kept.get(key);
  };
}

export async function stepper({ root, note, tell, safely, atEnd, ask: fromKernel }) {
  const { steps } = await fromKernel("steps");
  const kept = keeper(fromKernel);
  const first = (step, part) => kept("first", { step, part }); // what a step shows at first, in one answer
  const ask = (call, args) => (call === "view" && !args.opened && args.fold
    ? first(args.step, args.part).then((found) => found.view) : kept(call, args));
  const state = { step: 0, part: steps[0].parts[0], context: 1, turn: 0 };
  const slider = make("input", { type: "range", min: 0, max: steps.length - 1, value: 0, "aria-label": "pass",
    oninput: () => safely(go(Number(slider.value))), onkeydown: (event) => event.stopPropagation() });
  const name = make("b", { "data-role": "pass" });
  const part = make("select", { "aria-label": "graph", onchange: () => { state.part = part.value; safely(show()); } });
  const jump = make("select", { "aria-label": "jump", onchange: () => {
    const at = steps.findIndex((step) => step.verdicts.some(([, outcome]) => outcome === jump.value));
    if (at >= 0) safely(go(at));
    jump.value = "";
  } }, make("option", { value: "" }, "first step with …"), ...Object.keys(OUTCOMES).filter((outcome) =>
    steps.some((step) => step.verdicts.some(([, found]) => found === outcome))).map((o) => make("option", { value: o }, o)));
  const verdicts = make("div", { class: "wb-bar", "data-role": "verdicts" });
  const census = make("div", { "data-role": "census" });
  const code = make("div", { class: "wb-code", "data-role": "code" });
  const more = make("button", { onclick: () => { state.context *= 4; safely(showCode()); } }, "more lines around the changes");
  const box = make("div");
  root.insertBefore(make("div", {}, make("div", { class: "wb-bar" }, slider, name, part, jump), verdicts, census, box,
    make("div", { class: "wb-bar" }, more), code), note);

  let shownHunks = null;

  function rest(found, from) { // below what is seen, when the page has time
    later(() => {
      if (shownHunks !== found) return;
      code.append(...found.hunks.slice(from, from + SEEN).map(lines));
      if (from + SEEN < found.hunks.length) rest(found, from + SEEN);
      else if (found.left) code.append(make("div", { class: "wb-note" }, `… and ${count(found.left)} more places`));
    });
  }

  async function showCode() {
    const { step, part: shown, context } = state;
    const found = context === 1 ? (await first(step, shown)).hunks : await ask("hunks", { step, part: shown, context });
    if (step !== state.step || shown !== state.part) return;
    code.replaceChildren(...found.hunks.slice(0, SEEN).map(lines));
    code.scrollTop = 0;
    if (!found.hunks.length) code.append(make("div", { style: "padding:4px 6px" }, found.why));
    shownHunks = found;
    if (found.hunks.length) rest(found, SEEN);
  }

  async function show() {
    const step = steps[state.step];
    if (!step.parts.includes(state.part)) state.part = step.parts[0];
    state.turn += 1;
    const { turn } = state;
    name.textContent = `${state.step + 1} of ${steps.length}: ${step.name}`;
    part.replaceChildren(...step.parts.map((p) => make("option", { value: p, selected: p === state.part }, p)));
    verdicts.replaceChildren(...step.verdicts.map(([check, outcome, message]) => make("span", { class: "wb-badge",
      title: message, style: `background:${OUTCOMES[outcome]}` }, `${check} ${outcome}`)));
    const about = (await first(state.step, state.part)).step;
    if (turn !== state.turn) return; // the reader is at another step by now
    const drawn = Promise.all([showCode(), view.draw({ step: state.step, part: state.part })]);
    census.replaceChildren(make("h4", {}, about.summary), make("div", { class: "wb-census" },
      ...about.rows.map(([op, before, after]) => make("span", {}, `${op} ${before} → ${after}`))));
    root.dataset.step = String(state.step);
    await drawn;
    requestAnimationFrame(() => setTimeout(() => { // once it is on the screen
      root.dataset.drawn = String(Number(root.dataset.drawn ?? 0) + 1);
    }));
  }

  async function go(at) {
    state.step = at;
    slider.value = String(at);
    await show();
  }

  const holder = make("div");
  box.append(holder);
  const inner = make("div", { class: "wb-note" });
  holder.append(inner);
  const view = await graph({ root: holder, note: inner, tell, safely, ask, atEnd, height: 360,
    extra: { step: 0, part: state.part } });
  await show();
  (async () => { // what the other steps show, while the reader reads the first
    for (let step = 0; step < steps.length; step += 1) {
      for (const shown of steps[step].parts) view.prepare((await first(step, shown)).view);
    }
    root.dataset.warm = "true";
  })().catch(() => {});
}
