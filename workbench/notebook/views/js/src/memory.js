// Bytes alive along the graphs, with the peak and the tensors that hold it; the pointer tells the node.
import { bytes, count, make } from "./dom.js";
import { plot } from "./plot.js";

const HIGH = 250, RED = "#d55e00", MARK = 6; // MARK: half a peak's triangle

export function memory({ root, note, tell, data, traits }) {
  const { curves, measured, colors: inks, begins, holders } = data;
  const several = curves.length > 1;
  const end = Math.max(...curves.map((curve) => curve.points.at(-1)[0]));
  const most = Math.max(measured ?? 0, ...curves.map((curve) => curve.peak)) * 1.06;
  const y = (size) => HIGH - 24 - (size / most) * (HIGH - 44);

  function paint({ pen, toPixel, colors, width, left, state }) {
    pen.font = "12px sans-serif";
    pen.fillStyle = colors.faint;
    for (let i = 0; i <= 4; i += 1) {
      const size = (most * i) / 4;
      pen.fillRect(left, y(size), width - left - 10, 0.5);
      pen.fillText(bytes(size), 4, y(size) + 4);
    }
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left - 10, HIGH);
    pen.clip();
    curves.forEach((curve, k) => {
      const color = inks[k];
      pen.beginPath();
      pen.moveTo(toPixel(0), y(0));
      for (const [at, size] of curve.points) pen.lineTo(toPixel(at), y(size));
      pen.lineTo(toPixel(curve.points.at(-1)[0]), y(0));
      pen.fillStyle = `${color}40`;
      pen.fill();
      pen.strokeStyle = color;
      pen.lineWidth = 1.4;
      pen.stroke();
    });
    pen.lineWidth = 1;
    for (const [start, said, color, before] of begins) {
      pen.strokeStyle = color || "#999999";
      pen.setLineDash(start ? [5, 3] : []);
      if (start) pen.strokeRect(toPixel(start), 16, 0, HIGH - 40);
      pen.fillStyle = color || colors.ink;
      pen.textAlign = before ? "right" : "left";
      pen.fillText(said, toPixel(start) + (before ? -4 : 4), 12);
    }
    pen.setLineDash([]);
    pen.textAlign = "left";
    curves.forEach((curve, k) => {
      const [at, top] = [toPixel(curve.peak_at), y(curve.peak)];
      pen.beginPath();
      pen.moveTo(at - MARK, top - MARK);
      pen.lineTo(at + MARK, top - MARK);
      pen.lineTo(at, top + MARK);
      pen.closePath();
      pen.fillStyle = several ? inks[k] : RED;
      pen.fill();
      pen.strokeStyle = several ? colors.ink : RED;
      pen.stroke();
    });
    pen.restore();
    if (measured) {
      pen.setLineDash([4, 3]);
      pen.strokeStyle = colors.ink;
      pen.strokeRect(left, y(measured), width - left - 10, 0);
      pen.setLineDash([]);
      pen.fillStyle = colors.ink;
      pen.fillText(`measured ${bytes(measured)}`, left + 6, y(measured) - 6);
    }
    pen.fillStyle = colors.faint;
    pen.fillText(`nodes ${count(Math.round(state.from))} to ${count(Math.round(state.to))}, in their order, inputs first`, left, HIGH - 6);
  }

  function tip(at) {
    const curve = curves.at(-1);
    const near = curve.points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
    return `${near[2]}: ${bytes(near[1])} alive`;
  }

  const key = (color, said) => make("span", {}, make("i", { style: `background:${color}` }), said);
  const largest = Math.max(...holders.map(([, size]) => size));
  const held = holders.map(([name, size, module]) => make("div", { style: "position:relative;padding:1px 4px;margin:2px 0" },
    make("div", { style: `position:absolute;inset:0 auto 0 0;width:${(100 * size) / largest}%;background:#0072b240` }),
    make("div", { style: "position:relative" }, `${name}: ${bytes(size)}`), make("div", { style: "position:relative" }, module)));
  const stage = plot({ root, note, traits, height: HIGH, extent: [0, end], paint, tip });
  root.insertBefore(make("div", { class: "wb-split" }, stage, make("div", { class: "wb-side", "data-role": "holders" },
    make("h4", {}, `held at the ${several ? "blue " : ""}peak ▼`), ...held)), note);
  if (several) root.prepend(make("div", { class: "wb-legend", "data-role": "legend" },
    ...curves.map((curve, k) => key(inks[k], curve.title))));
  tell(curves.map((curve) => `${curve.title}: peak ${bytes(curve.peak)} at ${curve.peak_node}`).join(" · "));
  root.dataset.points = String(curves.reduce((sum, curve) => sum + curve.points.length, 0));
}
