// Elements, colours and number formats that the views share.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

// Okabe and Ito's colours, as in the static pictures.
export const KINDS = {
  module: "#8a94a0", collective: "#d55e00", matmul: "#0072b2", attention: "#cc79a7", pointwise: "#009e73",
  reduction: "#e69f00", view: "#b0b7bf", copy: "#56b4e9", input: "#c9b458", wait: "#e8a87c",
};
export const MARKS = { added: "#009e73", removed: "#d55e00", moved: "#0072b2", changed: "#e69f00", tagged: "#cc79a7" };
export const EDGE = "#8b0000"; // of an exposed collective: it must show on every lane's colour
export const OUTCOMES = { PASS: "#bfe5d9", FAIL: "#f5c7a9", NO_EFFECT: "#f7ee8f", UNKNOWN: "#e6e6e6" };

export function theme(el) {
  const read = (name, otherwise) => getComputedStyle(el).getPropertyValue(name).trim() || otherwise;
  return {
    ink: read("--jp-ui-font-color1", "#222222"), faint: read("--jp-ui-font-color2", "#666666"),
    paper: read("--jp-layout-color1", "#ffffff"), line: read("--jp-border-color1", "#bbbbbb"),
    fill: read("--jp-layout-color2", "#f1f3f5"),
  };
}

// Calls `redraw` when JupyterLab changes its theme, until `el` has left the page.
export function onTheme(el, redraw) {
  const observer = new MutationObserver(() => (el.isConnected ? setTimeout(redraw, 50) : observer.disconnect()));
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "class"] });
}

// Hides the static twins of a view, which shows the same live: so many pictures, or the table of its title, right above.
export function hideTwins(el, twins, title) {
  let above = el.closest(".jp-OutputArea-child")?.previousElementSibling;
  for (let i = 0; i < twins && above; i += 1, above = above.previousElementSibling) {
    const still = above.querySelector(".jp-RenderedImage")
      ?? [...above.querySelectorAll(".jp-RenderedHTMLCommon")].find((each) => each.querySelector("b")?.textContent === title);
    if (!still) return;
    still.style.display = "none";
  }
}

export const count = (n) => n.toLocaleString("en-US");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) [n, i] = [n / 1024, i + 1];
  return `${n.toLocaleString("en-US", { maximumFractionDigits: i ? 1 : 0 })} ${units[i]}`;
}

export function table(rows, heads = []) {
  const row = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  return make("table", {}, ...(heads.length ? [make("thead", {}, row("th", heads))] : []),
    make("tbody", {}, ...rows.map((cells) => row("td", cells))));
}

export const STYLE = `
.wb { font: 13px var(--jp-ui-font-family, sans-serif); color: var(--jp-ui-font-color1, #222); margin: 4px 0 10px;
  max-width: 1180px; }
.wb * { box-sizing: border-box; }
.wb-bar { display: flex; flex-wrap: wrap; gap: 6px 12px; align-items: center; padding: 4px 0; }
.wb button { font: inherit; color: inherit; padding: 2px 7px; border-radius: 3px;
  background: var(--jp-layout-color1, #fff); border: 1px solid var(--jp-border-color1, #bbb); }
.wb button { cursor: pointer; }
.wb button:focus-visible { outline: 2px solid #0072b2; }
.wb-split { display: flex; gap: 8px; }
.wb-stage { flex: 1 1 auto; min-width: 0; border: 1px solid var(--jp-border-color2, #ddd); border-radius: 4px;
  background: var(--jp-layout-color1, #fff); overflow: hidden; position: relative; contain: content; }
.wb-side { flex: 0 0 330px; overflow: auto; font-size: 12px; }
.wb-side[hidden] { display: none; }
[data-jp-theme-light="false"] .jp-RenderedImage img.jp-needs-light-background[width][height] { filter: invert(1) hue-rotate(180deg); }
.wb-side h4, .wb h4 { margin: 2px 0 4px; font-size: 13px; overflow-wrap: anywhere; }
.wb table { border-collapse: collapse; font-size: 12px; margin: 0; }
.wb td, .wb th { padding: 1px 6px 1px 0; vertical-align: top; text-align: left; overflow-wrap: anywhere;
  background: none; border: 0; }
.wb-side td:first-child { color: var(--jp-ui-font-color2, #666); white-space: nowrap; overflow-wrap: normal; }
.wb-note { color: var(--jp-ui-font-color2, #666); font-size: 12px; min-height: 1.3em; }
.wb-badge { color: #222; padding: 1px 7px; border-radius: 9px; font-size: 12px; white-space: nowrap; }
.wb-code { font: 11.5px/1.45 var(--jp-code-font-family, monospace); height: 27vh; overflow: auto; contain: content;
  border: 1px solid var(--jp-border-color2, #ddd); border-radius: 4px; }
.wb-code .hunk { display: grid; grid-template-columns: 1fr 1fr; border-bottom: 1px dashed var(--jp-border-color1, #bbb);
  content-visibility: auto; contain-intrinsic-size: auto 60px; }
.wb-code .hunk > div { padding: 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; min-height: 1.45em; }
.wb-code .minus { background: #d55e0038; } .wb-code .plus { background: #009e7338; }
.wb-code .moved { background: #0072b230; }
.wb-results button { display: block; width: 100%; text-align: left; border: 0; padding: 1px 2px; overflow-wrap: anywhere; }
.wb-results button:hover { background: var(--jp-layout-color2, #eee); }
.wb-census span { display: inline-block; margin: 0 14px 2px 0; font-size: 12px; }
.wb-legend span { display: inline-flex; align-items: center; gap: 4px; margin-right: 9px; font-size: 12px; }
.wb-legend i { width: 11px; height: 11px; border-radius: 2px; display: inline-block; }
.wb-tip { position: absolute; pointer-events: none; background: var(--jp-layout-color1, #fff); padding: 3px 7px;
  border: 1px solid var(--jp-border-color1, #999); border-radius: 3px; font-size: 12px; max-width: 420px; z-index: 3; }
`;
