// In a page made by nbconvert: draws the widgets of the saved state, without require.js and a CDN.
const VIEW = "application/vnd.jupyter.widget-view+json", STATE = "application/vnd.jupyter.widget-state+json";
const element = (tag, attributes = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
};

class Model {
  constructor(id, state, manager) {
    Object.assign(this, { model_id: id, state: { ...state }, widget_manager: manager, heard: [] });
  }
  get(name) { return this.state[name]; }
  set(name, value) {
    if (JSON.stringify(this.state[name]) === JSON.stringify(value)) return;
    this.state[name] = value;
    for (const [event, work] of [...this.heard]) if (event === `change:${name}`) work();
  }
  on(event, work) { this.heard.push([event, work]); }
  off(event, work) { this.heard = this.heard.filter(([a, b]) => a !== event || b !== work); }
  press() { for (const [event, work] of this.heard) if (event === "press") work(); }
  save_changes() {}
  send() {}
}

const labelled = (label, ...inside) => element("label", { style: "display:inline-flex;gap:6px;align-items:center;margin:2px 14px 2px 0" },
  label, ...inside);
// An input that shows a trait and sets it; read and write turn the trait into the input's value and back.
function input(model, name, made, property, event, read = (v) => v, write = (v) => v, label = model.get("description") ?? "") {
  const said = element("output");
  const digits = /\.(\d)f/.exec(model.get("readout_format"))?.[1] ?? 0;
  const show = () => {
    made[property] = read(model.get(name));
    if (model.get("readout")) said.textContent = Number(made.value).toFixed(digits);
  };
  made.addEventListener(event, () => model.set(name, write(made[property])));
  model.on(`change:${name}`, show);
  show();
  return labelled(label, made, said);
}
const range = (model, step) => input(model, "value", element("input", { type: "range", min: model.get("min"),
  max: model.get("max"), step }), "value", "input", String, Number);
const ends = (model) => element("span", {}, ...["from", "to"].map((label, end) => input(model, "value", element("input", {
  type: "range", min: model.get("min"), max: model.get("max"), step: model.get("step"),
  ariaLabel: `${label}, ${model.get("description")}` }), "value", "input", (v) => String(v[end]),
(v) => model.get("value").map((old, i) => (i === end ? Number(v) : old)), `${label}, ${model.get("description")}`)));
const labels = (model) => model.get("_options_labels");

// Of ipywidgets, what our views use. Selections hold `index` alone: what
// a view is linked to is the value, which the state of the view names in `linked`.
const CONTROLS = {
  ButtonModel: (m) => element("button", { textContent: m.get("description"), onclick: () => m.press() }),
  CheckboxModel: (m) => input(m, "value", element("input", { type: "checkbox" }), "checked", "change"),
  ToggleButtonModel: (m) => input(m, "value", element("input", { type: "checkbox" }), "checked", "change"),
  IntSliderModel: (m) => range(m, m.get("step") || 1),
  FloatRangeSliderModel: ends,
  FloatSliderModel: (m) => range(m, m.get("step") || "any"),
  TextModel: (m) => input(m, "value", element("input", { type: "text" }), "value", "change"),
  DropdownModel: (m) => input(m, "index", element("select", {}, ...labels(m).map((each) => element("option", {}, each))),
    "selectedIndex", "change", (v) => v ?? -1),
  HTMLModel: (m) => element("div", { innerHTML: m.get("value") }),
  LabelModel: (m) => element("span", { textContent: m.get("value") }),
};

async function draw(model) {
  const kind = model.get("_model_name");
  if (kind === "VBoxModel" || kind === "HBoxModel") {
    const children = await Promise.all(model.get("children").map(async (each) => draw(
      await model.widget_manager.get_model(each.replace("IPY_MODEL_", "")))));
    return element("div", { style: kind === "HBoxModel" ? "display:flex;flex-wrap:wrap" : "" }, ...children);
  }
  if (kind !== "AnyModel") return CONTROLS[kind]?.(model) ?? element("span");
  const el = element("div");
  const url = URL.createObjectURL(new Blob([model.get("_esm")], { type: "text/javascript" }));
  const { default: view } = await import(url);
  model.drawn = () => view.render({ model, el }); // once it stands in the page
  return el;
}

async function start() {
  const saved = document.querySelector(`script[type="${STATE}"]`);
  if (!saved || globalThis.workbenchPage) return; // JupyterLab, or done
  globalThis.workbenchPage = true;
  const { state } = JSON.parse(saved.textContent);
  const models = new Map();
  const manager = { get_model: async (id) => models.get(id) };
  for (const [id, each] of Object.entries(state)) {
    models.set(id, new Model(id, { _model_name: each.model_name, ...each.state }, manager));
  }
  for (const place of document.querySelectorAll(`script[type="${VIEW}"]`)) {
    const model = models.get(JSON.parse(place.textContent).model_id);
    if (!model) continue;
    place.replaceWith(await draw(model)); // html-manager, where there is a network, finds nothing left to draw
    for (const each of models.values()) {
      await each.drawn?.();
      delete each.drawn;
    }
  }
}
if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
else start();
