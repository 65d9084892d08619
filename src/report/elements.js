// Making elements, and writing numbers.

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

function card(title, ...children) {
  const head = element("div", {class: "head"}, element("h2", {}, title));
  return element("section", {class: "card"}, head, ...children);
}

// rows: arrays of strings or nodes; numeric: indices of columns that are numbers.
function table(heads, rows, numeric = []) {
  const cells = (name, texts) => texts.map((text, i) =>
    element(name, numeric.includes(i) ? {class: "number"} : {}, text));
  return element("div", {class: "table"}, element("table", {},
    element("thead", {}, element("tr", {}, ...cells("th", heads))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))))));
}

function color(name) {
  return `var(--${name})`;
}

// 5 significant digits, without an exponent where that is readable.
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3).replace("e+", "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(5)));
}

// For the ticks of an axis: 12000 as 12k.
function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return Number((value / unit).toPrecision(4)) + letter;
  }
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value === 0) return "0";
  if (value < 1e-3) return `${number(Number((1e6 * value).toPrecision(4)))} µs`;
  if (value < 1) return `${number(Number((1e3 * value).toPrecision(4)))} ms`;
  if (value < 120) return `${number(Number(value.toPrecision(4)))} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(2)} h`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit + 1 < units.length; ++unit) value /= 1024;
  return unit === 0 ? `${value} B` : `${value.toFixed(2)} ${units[unit]}`;
}

function percent(part, whole) {
  return `${(whole > 0 ? 100 * part / whole : 0).toFixed(1)} %`;
}

// Draws again whenever the width of `node` changes.
function drawn(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(node.clientWidth);
    if (now === width || now === 0) return;
    width = now;
    draw(width);
  }).observe(node);
  return () => { if (width > 0) draw(width); };
}
