// Bytes alive along the graphs, with the peak; the pointer tells the node and who holds the most there.
import { bytes, count } from "./dom.js";
import { plot } from "./plot.js";

const HIGH = 250, COLORS = ["#8a94a0", "#0072b2"];

export function memory({ root, note, tell, data, traits }) {
  const { curves, measured } = data;
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
      const color = COLORS[curves.length === 1 ? 1 : k];
      pen.beginPath();
      pen.moveTo(toPixel(0), y(0));
      for (const [at, size] of curve.points) pen.lineTo(toPixel(at), y(size));
      pen.lineTo(toPixel(curve.points.at(-1)[0]), y(0));
      pen.fillStyle = `${color}40`;
      pen.fill();
      pen.strokeStyle = color;
      pen.lineWidth = 1.4;
      pen.stroke();
      pen.fillStyle = "#d55e00";
      pen.beginPath();
      pen.arc(toPixel(curve.peak_at), y(curve.peak), 4.5, 0, 7);
      pen.fill();
      for (const [name, start] of curve.parts) {
        pen.fillStyle = colors.faint;
        pen.fillRect(toPixel(start), 14, 1, HIGH - 38);
        if (k === curves.length - 1) pen.fillText(name, toPixel(start) + 4, 12);
      }
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
    pen.fillText(`nodes ${count(Math.round(state.from))} to ${count(Math.round(state.to))}, in their order`, left, HIGH - 6);
  }

  function tip(at) {
    const curve = curves.at(-1);
    const near = curve.points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
    return `${near[2]}: ${bytes(near[1])} alive`;
  }

  plot({ root, note, traits, height: HIGH, extent: [0, end], paint, tip });
  tell(curves.map((curve) => `${curve.title}: peak ${bytes(curve.peak)} at ${curve.peak_node}`).join(" · "));
  root.dataset.points = String(curves.reduce((sum, curve) => sum + curve.points.length, 0));
}
