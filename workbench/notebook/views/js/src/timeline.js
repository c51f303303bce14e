// A step on the clock: a lane for compute and one for each process group; exposed communication is hatched.
import { EDGE, make } from "./dom.js";
import { plot, ticks } from "./plot.js";

const ROW = 26, HEAD = 22, AXIS = 26;
const EXPOSED = "#d55e00";

export function timeline({ root, note, tell, data, traits }) {
  const { runs, colors: laneColors } = data;
  const lanes = [...new Set(runs.flatMap((run) => run.lanes))];
  const panel = HEAD + ROW * lanes.length;
  const end = Math.max(...runs.map((run) => run.total_ms)) || 1;
  const key = (style, text) => make("span", { class: "wb-note" }, make("span",
    { style: `display:inline-block;width:18px;height:10px;margin-right:4px;vertical-align:middle;${style}` }), text);
  const bar = make("div", { class: "wb-bar" }, ...lanes.map((lane) => key(`background:${laneColors[lane]}`, lane)),
    key(`background:repeating-linear-gradient(135deg,${EXPOSED} 0 1px,#d55e0026 1px 5px)`, "compute waits: exposed"),
    key(`background:#fff;border:1.5px solid ${EDGE};box-sizing:border-box`, "exposed collective"),
    make("span", { class: "wb-note" }, "Ctrl+wheel: zoom, drag: move, pointer: what it is"));
  root.insertBefore(bar, note);
  const top = (p, lane) => p * panel + HEAD + lane * ROW;

  function paint({ pen, toPixel, colors, width, left, state }) {
    pen.font = "12px sans-serif";
    pen.textBaseline = "middle";
    runs.forEach((run, p) => {
      pen.fillStyle = colors.ink;
      pen.fillText(run.title, 4, p * panel + HEAD / 2);
      lanes.forEach((lane, i) => {
        pen.fillStyle = colors.fill;
        pen.fillRect(left, top(p, i) + 2, width - left - 10, ROW - 4);
        pen.fillStyle = colors.faint;
        pen.fillText(lane, 4, top(p, i) + ROW / 2, left - 8);
      });
    });
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left - 10, panel * runs.length);
    pen.clip();
    runs.forEach((run, p) => {
      for (const [lane, , begin, ending, exposed] of run.spans) {
        const i = lanes.indexOf(lane);
        const x = toPixel(begin);
        const wide = Math.max(1, toPixel(ending) - x);
        pen.fillStyle = laneColors[lane];
        pen.fillRect(x, top(p, i) + 3, wide, ROW - 6);
        if (!exposed) continue;
        pen.strokeStyle = EDGE;
        pen.lineWidth = 1.5;
        pen.strokeRect(x + 0.5, top(p, i) + 3.5, Math.max(1, wide - 1), ROW - 7);
        hatch(pen, toPixel(ending - exposed), toPixel(ending), top(p, 0) + 3, ROW - 6);
      }
    });
    pen.restore();
    pen.fillStyle = colors.faint;
    for (const x of ticks(state.from, state.to)) pen.fillText(`${x} ms`, toPixel(x), panel * runs.length + AXIS / 2);
  }

  function hatch(pen, from, to, y, high) {
    pen.fillStyle = "#d55e0026";
    pen.fillRect(from, y, to - from, high);
    pen.strokeStyle = EXPOSED;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = from; x < to; x += 6) {
      pen.moveTo(x, y + high);
      pen.lineTo(Math.min(x + high, to), y + Math.max(0, high - (to - x)));
    }
    pen.stroke();
  }

  function tip(ms, y) {
    const p = Math.floor(y / panel);
    const lane = lanes[Math.floor((y - p * panel - HEAD) / ROW)];
    const found = runs[p]?.spans.find(([of, , begin, ending]) => of === lane && begin <= ms && ms <= ending);
    if (!found) return "";
    const [, name, begin, ending, exposed, limit, label, about] = found;
    const fate = exposed ? `${exposed.toFixed(4)} ms exposed: ${limit}` : limit;
    return [name, `${(ending - begin).toFixed(4)} ms`, label, fate, about].filter(Boolean).join(" · ");
  }

  plot({ root, note, traits, height: panel * runs.length + AXIS, extent: [0, end], paint, tip });
  root.dataset.spans = String(runs.reduce((sum, run) => sum + run.spans.length, 0));
  tell(runs.map((run) => `${run.title}: ${run.fates}`).join(" · "));
}
