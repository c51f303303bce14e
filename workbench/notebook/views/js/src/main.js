// Which view a model asks for, and how a view asks its kernel.
import { STYLE, hideTwins, make } from "./dom.js";
import { graph } from "./graph.js";
import { kernels } from "./kernels.js";
import { stepper } from "./stepper.js";

const VIEWS = { graph, stepper, kernels };
let asked = 0;

// ask(name, arguments) resolves with what the kernel answers, or rejects with its error.
function asker(model) {
  const open = new Map();
  const heard = (message) => {
    const waiting = open.get(message.id);
    if (!waiting) return;
    open.delete(message.id);
    if ("error" in message) waiting.reject(new Error(message.error));
    else waiting.resolve(message.value);
  };
  model.on("msg:custom", heard);
  const ask = (call, args = {}) => new Promise((resolve, reject) => {
    const id = `${model.model_id ?? ""}:${(asked += 1)}`;
    open.set(id, { resolve, reject });
    model.send({ id, call, args });
  });
  return { ask, end: () => model.off("msg:custom", heard) };
}

export async function render({ model, el }) {
  const { ask, end } = asker(model);
  const root = make("div", { class: "wb", "data-view": model.get("kind") }, make("style", {}, STYLE));
  const note = make("div", { class: "wb-note", role: "status" }, "drawing …");
  root.append(note);
  el.append(root);
  const tell = (text) => { note.textContent = text ?? ""; };
  const safely = (work) => Promise.resolve(work).catch((error) => tell(error.message));
  const ends = [end];
  const atEnd = (work) => ends.push(work);
  const on = (event, work) => {
    const heard = (message) => safely(work(message));
    model.on(event, heard);
    atEnd(() => model.off(event, heard));
  };
  const traits = {
    get: (name) => model.get(name),
    set: (values) => {
      for (const [name, value] of Object.entries(values)) model.set(name, value);
      model.save_changes();
    },
    follow: (names, work) => names.forEach((name) => on(`change:${name}`, () => work(model.get(name)))),
    heard: (work) => on("msg:custom", work),
  };
  await safely(VIEWS[model.get("kind")]({ root, note, tell, safely, ask, atEnd, traits })
    .then(() => hideTwins(el, model.get("twins"), model.get("title"))));
  root.dataset.ready = String(Date.now());
  return () => ends.forEach((work) => work());
}
