// Boxes for modules and operators: collapsed in the kernel, laid out here.
import dagre from "@dagrejs/dagre";
import cytoscape from "cytoscape";
import { KINDS, MARKS, bytes, count, make, onTheme, table, theme } from "./dom.js";

const MANY = 60;
const FONT = 12, READABLE = 0.75; // the zoom at which a label is 9 pixels high
const LOW = "460px", HIGH = "75vh"; // least and greatest height of a drawing that grows
const AROUND = 20; // of the layout, for frames and names of open modules

function sizeOf(box) {
  const name = box.alike > 1 ? `${box.label}  x ${box.alike}` : box.label;
  const inputs = box.kinds.input ?? 0;
  const holds = box.nodes > inputs ? `${count(box.nodes - inputs)} operators` : inputs === 1 ? "1 input" : `${count(inputs)} inputs`;
  const under = box.kind === "module" && !box.open ? holds : "";
  const marks = Object.entries(box.marks).map(([mark, n]) => `${count(n)} ${mark}`).join(", ");
  const lines = [name, under, box.kind === "module" ? marks : ""].filter(Boolean);
  const width = Math.max(46, 14 + 6.6 * Math.max(...lines.map((line) => line.length)));
  return { text: lines.join("\n"), width, height: 12 + 15 * lines.length };
}

function layout(boxes, links) {
  const g = new dagre.graphlib.Graph({ compound: true });
  g.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26, ranker: boxes.length > MANY ? "tight-tree" : "network-simplex" });
  g.setDefaultEdgeLabel(() => ({}));
  for (const box of boxes) g.setNode(box.id, box.open ? {} : { width: box.width, height: box.height });
  for (const box of boxes) if (box.parent) g.setParent(box.id, box.parent);
  for (const link of links) if (!link.saved) g.setEdge(link.source, link.target);
  // the backward stands beside the forward: what is saved crosses, and orders nothing
  dagre.layout(g);
  return { places: new Map(boxes.map((box) => [box.id, g.node(box.id)])), size: g.graph() };
}

function arrange(view) {
  const boxes = view.boxes.map(([id, parent, label, kind, nodes, alike, open, kinds, marks]) => {
    const box = { id, parent, label, kind, nodes, alike, open, kinds, marks };
    return { ...box, ...sizeOf(box) };
  });
  const links = view.links.map(([source, target, n, saved, size]) => ({ source, target, n, saved, size }));
  return { boxes, links, ...layout(boxes, links) };
}

// height: of the drawing; by default it grows with the graph until all boxes are seen, as far as the window allows.
export async function graph({ root, note, tell, safely, ask, atEnd, traits, extra = {}, height = "" }) {
  const state = { shown: [], turn: 0, focus: null };
  const laid = new WeakMap(); // by the kernel's answer
  const stage = make("div", { class: "wb-stage", style: `height:${height || LOW}`, "data-role": "graph" });
  const side = make("div", { class: "wb-side", style: `max-height:${height || LOW}`, "data-role": "details", hidden: true });
  const beside = (...facts) => {
    side.replaceChildren(make("button", { style: "float:right", title: "close", onclick: () => { side.hidden = true; } }, "×"), ...facts);
    side.hidden = false;
  };
  const legend = make("div", { class: "wb-legend" });
  root.insertBefore(make("div", {}, legend, make("div", { class: "wb-split" }, stage, side)), note);
  let cy = null;
  let extent = { width: 1, height: 1 }; // of the layout; a box's name stands above it
  // The page scrolls, hides and shows cells behind cytoscape's back, and may draw one before it stands in the page.
  function measure() {
    const before = cy?.width();
    cy?.resize();
    if (before || !cy?.width()) return;
    cy.style(styles());
    look();
  }
  for (const event of ["pointerdown", "mousedown", "pointerenter"]) stage.addEventListener(event, measure, true);
  new ResizeObserver(measure).observe(stage);

  function look() {
    if (!cy) return;
    const [width, height] = [extent.width + 2 * AROUND, extent.height + 2 * AROUND];
    const fits = Math.min(3, (cy.width() - 12) / width, (cy.height() - 12) / height);
    const zoom = Math.max(fits, READABLE); // what does not fit then is reached by dragging
    const at = (room, size) => (zoom * (size + AROUND) > room ? 6 + zoom * AROUND : (room - zoom * size) / 2);
    cy.viewport({ zoom, pan: { x: at(cy.width(), extent.width), y: at(cy.height(), extent.height) } });
  }

  // Only what differs is drawn anew: a step leaves most of the graph as it was.
  function update(elements) {
    const wanted = new Map(elements.map((element) => [element.data.id, element]));
    cy.batch(() => {
      cy.elements().filter((old) => {
        const now = wanted.get(old.id());
        return !now || now.data.same !== old.data("same");
      }).remove();
      const fresh = [];
      for (const element of elements) {
        const old = cy.getElementById(element.data.id);
        if (!old.length) fresh.push(element);
        else if (element.position) old.position(element.position);
      }
      cy.add(fresh);
      cy.elements(":selected").unselect();
    });
  }

  function prepare(view) {
    if (!laid.has(view)) laid.set(view, arrange(view));
    return laid.get(view);
  }

  async function draw() {
    state.turn += 1;
    const { turn, focus } = state;
    const view = await ask("view", { opened: traits.get("opened"), fold: traits.get("fold"), ...extra });
    if (turn !== state.turn) return;
    state.shown = view.opened;
    const { boxes, links, places, size } = prepare(view);
    extent = size;
    if (!height) stage.style.height = `max(${LOW}, min(${HIGH}, ${Math.ceil(READABLE * (size.height + 2 * AROUND)) + 14}px))`;
    cy?.resize();
    const parents  = new Set(boxes.map((box) => box.parent));
    const elements = boxes.map((box) => ({ group: "nodes", data: { ...box, parent: box.parent || undefined,
      color: KINDS[box.kind] ?? "#8a94a0", mark: Object.keys(box.marks)[0] ?? "" },
      position: parents.has(box.id) ? undefined : { x: places.get(box.id).x, y: places.get(box.id).y } }));
    elements.push(...links.map((link) => ({ group: "edges", data: {
      id: `${link.source} > ${link.target} ${link.saved}`, ...link,
      label: link.saved ? `${count(link.n)} saved, ${bytes(link.size)}` : "" } })));
    for (const { data } of elements) data.same = JSON.stringify(data);
    if (!cy) {
      stage.addEventListener("wheel", (event) => { // the page scrolls; with Ctrl, cytoscape zooms
        if (!event.ctrlKey && !event.metaKey) event.stopImmediatePropagation();
      }, { capture: true });
      cy = cytoscape({ container: stage, style: styles(), layout: { name: "preset" }, minZoom: 0.05, maxZoom: 3,
        autoungrabify: true, boxSelectionEnabled: false });
      cy.on("tap", "node", (event) => safely(tapped(event.target)));
      root.cy = cy;
    }
    update(elements);
    root.dataset.boxes = boxes.length;
    const kinds = [...new Set(boxes.map((box) => box.kind))].filter((kind) => kind in KINDS && kind !== "module");
    const marks = [...new Set(boxes.flatMap((box) => Object.keys(box.marks)))];
    legend.replaceChildren(...[...kinds.map((k) => [k, KINDS[k]]), ...marks.map((m) => [m, MARKS[m]])].map(
      ([word, color]) => make("span", {}, make("i", { style: `background:${color}` }), word)));
    tell([`${count(view.operators)} operators and ${count(view.inputs)} inputs in ${count(boxes.length)} boxes`,
      "click a module to open it, an operator to read about it", view.note, ...view.missing].filter(Boolean).join(" · "));
    if (focus && cy.getElementById(focus).length) {
      cy.animate({ center: { eles: cy.getElementById(focus) }, zoom: 1, duration: 0 });
      cy.getElementById(focus).select();
    } else look();
  }

  function styles() {
    const t = theme(document.body); // of an element that is not in the page yet it would be none
    return [
      { selector: "node", style: { shape: "round-rectangle", width: "data(width)", height: "data(height)", label: "data(text)",
        "text-wrap": "wrap", "text-valign": "center", "font-size": FONT, color: t.ink, "background-color": "data(color)",
        "background-opacity": 0.28, "border-width": 1.2, "border-color": "data(color)" } },
      { selector: "node[?open]", style: { "text-valign": "top", "background-opacity": 0.08, "border-color": t.line,
        "font-weight": "bold", padding: 9 } },
      ...Object.entries(MARKS).map(([mark, color]) => ({ selector: `node[mark = "${mark}"]`,
        style: { "border-color": color, "border-width": 3 } })),
      { selector: "node:selected", style: { "border-width": 4, "border-color": t.ink } },
      { selector: "edge", style: { width: 1.1, "line-color": t.faint, "target-arrow-color": t.faint, opacity: 0.75,
        "target-arrow-shape": "triangle", "arrow-scale": 0.75, "curve-style": "bezier" } },
      { selector: "edge[?saved]", style: { "line-style": "dashed", "line-color": "#cc79a7", "target-arrow-color": "#cc79a7",
        "source-label": "data(label)", "source-text-offset": 62, "font-size": 9, color: t.ink, "text-background-color": t.paper,
        "text-background-opacity": 0.9, "text-background-padding": 1 } },
    ];
  }

  async function tapped(node) {
    const box = node.data();
    if (box.kind !== "module") return traits.get("selected") === box.id ? details(box.id) : traits.set({ selected: box.id });
    beside(make("h4", {}, box.id), table([
      ["operators", count(box.nodes - (box.kinds.input ?? 0))], ...(box.alike > 1 ? [["blocks alike", String(box.alike)]] : []),
      ...Object.entries(box.kinds).map(([kind, n]) => [kind, count(n)]),
      ...Object.entries(box.marks).map(([mark, n]) => [mark, count(n)])]));
    state.focus = box.id;
    return traits.set({ opened: box.open ? state.shown.filter((id) => id !== box.id) : [...state.shown, box.id] });
  }

  async function details(id) {
    const facts = await ask("details", { id, ...extra });
    beside(make("h4", {}, facts.name), table(facts.rows));
  }

  async function find(query) {
    if (!query) return;
    const found = await ask("find", { query, ...extra });
    beside(make("h4", {}, `${count(found.count)} found`), make("div", { class: "wb-results" },
      ...found.ids.map((id) => make("button", { onclick: () => traits.set({ selected: id }) }, id))));
  }

  async function reveal(id) {
    if (!id) return;
    state.focus = id;
    if (!cy.getElementById(id).length) {
      traits.set(await ask("way", { id, opened: state.shown, fold: traits.get("fold"), ...extra }));
      await draw();
    }
    await details(id);
  }

  traits.follow(["opened", "fold"], draw);
  traits.follow(["query"], find);
  traits.follow(["selected"], reveal);
  traits.heard((message) => {
    if (!message.fit) return;
    state.focus = null;
    look();
  });
  await draw();
  onTheme(root, () => cy?.style(styles()));
  new IntersectionObserver(measure).observe(stage);
  atEnd(() => cy?.destroy()); // it would go on drawing
  return { draw: (more) => { Object.assign(extra, more); state.focus = null; return draw(); }, prepare };
}
