// A canvas with a horizontal axis that can be zoomed (wheel) and moved (drag), and a tip under the pointer.
import { make, onTheme, theme } from "./dom.js";

// What is shown is the trait `window`, which a slider may move too. Returns the element around the canvas.
export function plot({ root, note, traits, height, extent, paint, tip }) {
  const canvas = make("canvas", { style: `width:100%;height:${height}px;display:block;touch-action:none`, tabindex: 0 });
  const said = make("div", { class: "wb-tip", hidden: true, "data-role": "tip" });
  const stage = make("div", { class: "wb-stage" }, canvas, said);
  root.insertBefore(stage, note);
  const state = { from: extent[0], to: extent[1], drag: null };
  const show = () => {
    [state.from, state.to] = traits.get("window");
    if (!(state.to > state.from)) [state.from, state.to] = extent;
    draw();
  };
  const move = (from, to) => traits.set({ window: [from, to] });

  const frame = () => ({ left: 118, right: 10, width: canvas.clientWidth });
  const toPixel = (x) => frame().left + ((x - state.from) / (state.to - state.from)) * (frame().width - frame().left - frame().right);
  const toValue = (p) => state.from + ((p - frame().left) / (frame().width - frame().left - frame().right)) * (state.to - state.from);

  function draw() {
    const scale = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.clearRect(0, 0, canvas.clientWidth, height);
    paint({ pen, toPixel, colors: theme(root), width: canvas.clientWidth, left: frame().left, state });
  }
  function zoom(at, factor) {
    const centre = toValue(at);
    const least = (extent[1] - extent[0]) / 20000;
    const span = Math.min(extent[1] - extent[0], Math.max(least, (state.to - state.from) * factor));
    const from = centre - ((centre - state.from) / (state.to - state.from)) * span;
    const start = Math.min(Math.max(extent[0], from), extent[1] - span);
    move(start, start + span);
  }
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.offsetX, event.deltaY > 0 ? 1.25 : 0.8);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { state.drag = [event.offsetX, state.from, state.to]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { state.drag = null; });
  canvas.addEventListener("pointerleave", () => { said.hidden = true; });
  canvas.addEventListener("pointermove", (event) => {
    if (state.drag) {
      const [start, from, to] = state.drag;
      const shift = ((start - event.offsetX) / (frame().width - frame().left - frame().right)) * (to - from);
      const moved = Math.min(Math.max(extent[0] - from, shift), extent[1] - to);
      move(from + moved, to + moved);
      return;
    }
    const text = tip(toValue(event.offsetX), event.offsetY, toPixel);
    said.hidden = !text;
    if (!text) return;
    said.textContent = text;
    const free = canvas.clientWidth - said.offsetWidth - 8;
    said.style.left = `${Math.max(4, Math.min(event.offsetX + 14, free))}px`;
    said.style.top = `${Math.max(2, Math.min(event.offsetY + 14, height - said.offsetHeight - 2))}px`;
  });
  canvas.addEventListener("keydown", (event) => {
    const factor = { "+": 0.8, "-": 1.25 }[event.key];
    if (factor) { event.stopPropagation(); zoom(canvas.clientWidth / 2, factor); }
  });
  new ResizeObserver(draw).observe(canvas);
  onTheme(root, draw);
  traits.follow(["window"], show);
  show();
  return stage;
}

export function ticks(from, to, about = 7) {
  const step = 10 ** Math.floor(Math.log10((to - from) / about));
  const wide = [1, 2, 5, 10].map((k) => k * step).find((s) => (to - from) / s <= about * 1.5) ?? step * 10;
  const found = [];
  for (let x = Math.ceil(from / wide) * wide; x <= to; x += wide) found.push(Number(x.toPrecision(10)));
  return found;
}
