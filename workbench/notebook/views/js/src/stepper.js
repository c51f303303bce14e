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

export async function stepper({ root, note, tell, safely, atEnd, traits, ask: fromKernel }) {
  const { steps } = await fromKernel("steps");
  const kept = keeper(fromKernel);
  const first = (step, part) => kept("first", { step, part }); // what a step shows at first, in one answer
  const ask = (call, args) => (call === "view" && !args.opened && args.fold
    ? first(args.step, args.part).then((found) => found.view) : kept(call, args));
  const state = { step: 0, part: steps[0].parts[0], turn: 0 };
  const name = make("b", { "data-role": "pass" });
  const verdicts = make("div", { class: "wb-bar", "data-role": "verdicts" });
  const census = make("div", { "data-role": "census" });
  const code = make("div", { class: "wb-code", "data-role": "code" });
  const box = make("div");
  root.insertBefore(make("div", {}, make("div", { class: "wb-bar" }, name, verdicts), census, box, code), note);

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
    const { step, part: shown } = state;
    const context = traits.get("around");
    const found = context === 1 ? (await first(step, shown)).hunks : await ask("hunks", { step, part: shown, context });
    if (step !== state.step || shown !== state.part) return;
    code.replaceChildren(...found.hunks.slice(0, SEEN).map(lines));
    code.scrollTop = 0;
    if (!found.hunks.length) code.append(make("div", { style: "padding:4px 6px" }, found.why));
    shownHunks = found;
    if (found.hunks.length) rest(found, SEEN);
  }

  async function show() {
    state.step = traits.get("step");
    const step = steps[state.step];
    if (!step) throw new Error(`there is no pass ${state.step}: the last one is ${steps.length - 1}`);
    state.part = step.parts.includes(traits.get("part")) ? traits.get("part") : step.parts[0];
    state.turn += 1;
    const { turn } = state;
    name.textContent = `${state.step + 1} of ${steps.length}: ${step.name}`;
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

  const holder = make("div");
  box.append(holder);
  const inner = make("div", { class: "wb-note" });
  holder.append(inner);
  const view = await graph({ root: holder, note: inner, tell, safely, ask, atEnd, traits, height: "27vh",
    extra: { step: 0, part: state.part } });
  traits.follow(["step", "part"], show);
  traits.follow(["around"], showCode);
  await show();
  (async () => { // what the other steps show, while the reader reads the first
    for (let step = 0; step < steps.length; step += 1) {
      for (const shown of steps[step].parts) view.prepare((await first(step, shown)).view);
    }
    root.dataset.warm = "true";
  })().catch(() => {});
}
