// SVG elements, and what the views with data of their own share.
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

export const INK = "var(--jp-ui-font-color1, #222)", FAINT = "var(--jp-ui-font-color2, #666)";
export const FILL = "var(--jp-layout-color2, #f1f3f5)", RED = "#d55e00", GREEN = "#009e73";
export const SKY = "#56b4e9", PINK = "#cc79a7";

export const text = (x, y, said, more = {}) => svg("text", { x, y, "font-size": 12, fill: INK, ...more }, said);

// Draws again, and keeps the keyboard's focus on the element of the same data-key.
export function redraw(box, ...children) {
  const key = box.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  box.replaceChildren(...children);
  if (key !== undefined) [...box.querySelectorAll("[data-key]")].find((each) => each.dataset.key === key)?.focus();
}

// A click, Enter or the space bar on an element.
export const press = (work) => ({
  tabindex: 0, role: "button", onclick: work,
  onkeydown: (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    work(event);
  },
});
