// Views whose data stand in the widget's state: they draw with a kernel and without.
import { STYLE, hideTwins, make } from "../dom.js";
import { memory } from "../memory.js";
import { timeline } from "../timeline.js";
import { chips } from "./chips.js";
import { counters } from "./counters.js";
import { order } from "./order.js";
import { partitioner } from "./partitioner.js";
import { placement } from "./placement.js";
import { schedule } from "./schedule.js";

const VIEWS = { chips, counters, memory, order, partitioner, placement, schedule, timeline };

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Where no kernel keeps a control and its trait equal, the page does.
async function join(model) {
  const find = (reference) => (typeof reference === "string"
    ? model.widget_manager.get_model(reference.replace("IPY_MODEL_", "")) : reference);
  for (const [reference, values] of model.get("presses")) {
    (await find(reference)).on("press", () => { // an event of the page's own
      for (const [name, value] of Object.entries(values)) model.set(name, value);
      model.save_changes();
    });
  }
  for (const [reference, theirs, ours, values] of model.get("linked")) {
    const control = await find(reference);
    if (control.comm_live || control.joined) continue;
    control.joined = true;
    const copy = (to, name, value) => { to.set(name, value); to.save_changes(); };
    const given = () => (values ? values[control.get(theirs)] : control.get(theirs));
    control.on(`change:${theirs}`, () => copy(model, ours, given()));
    model.on(`change:${ours}`, () => copy(control, theirs, values ? values.indexOf(model.get(ours)) : model.get(ours)));
  }
}

export default {
  async render({ model, el }) {
    const root = make("div", { class: "wb", "data-view": model.get("kind") }, make("style", {}, STYLE));
    const note = make("div", { class: "wb-note", role: "status" });
    root.append(note);
    el.append(root);
    const ends = [];
    const traits = {
      get: (name) => model.get(name),
      set: (values) => {
        for (const [name, value] of Object.entries(values)) model.set(name, value);
        model.save_changes();
      },
      follow: (names, work) => names.forEach((name) => {
        model.on(`change:${name}`, work);
        ends.push(() => model.off(`change:${name}`, work));
      }),
    };
    const tell = (said, wrong) => {
      note.textContent = said;
      note.style.color = wrong ? "#d55e00" : "";
    };
    await join(model);
    VIEWS[model.get("kind")]({ root, note, tell, traits, data: await unpack(model.get("data")), title: model.get("title") });
    hideTwins(el, model.get("twins"), model.get("title"));
    root.dataset.ready = String(Date.now());
    return () => ends.forEach((end) => end());
  },
};
