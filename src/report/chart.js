// Curves over steps, tokens or hours.

// About `count` round numbers in [low, high].
function linearTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + step * 1e-9; ++i) ticks.push(i * step);
  return ticks;
}

// Powers of ten, with 2 and 5 between where there are few.
function logTicks(low, high) {
  const factors = Math.log10(high / low) > 3 ? [1] : Math.log10(high / low) > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); ++e) {
    for (const factor of factors) {
      const tick = factor * 10 ** e;
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks.length >= 2 ? ticks : linearTicks(low, high, 4);
}

// An exponential moving average that does not lean towards its first value.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Of more points than pixels the least and the greatest of each pixel, in their order.
function thinned(points, width) {
  if (points.length <= 4 * width) return points;
  const kept = [];
  const size = points.length / width;
  for (let pixel = 0; pixel < width; ++pixel) {
    const part = points.slice(Math.floor(pixel * size), Math.floor((pixel + 1) * size));
    const finite = part.filter(([, y]) => Number.isFinite(y));
    if (finite.length === 0) { kept.push(part[0]); continue; }
    const low = finite.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = finite.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

// The top of a scale on which one point in two hundred does not make all others flat.
function typicalTop(values, low, high) {
  if (values.length < 200) return high;
  const typical = values.sort((a, b) => a - b)[Math.floor(0.995 * values.length)];
  return high - low > 3 * (typical - low) && typical > low ? typical + 0.25 * (typical - low) : high;
}

// The index of the x in ascending xs that is nearest.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// A card with a chart.
//   title, xName() -> "step", xText(x)
//   curves() -> [{name, color, xs, ys, dots, dashed}], xs ascending; null in ys: no value
//   smooth: offers smoothing, log: offers a logarithmic scale, zero: the scale begins at 0
//   trim: a linear scale leaves out what stands far above the rest
function chartCard(options) {
  const legend = element("div", {class: "legend"});
  const box = element("div");
  const section = card(options.title, legend, box);
  const controls = element("div", {class: "controls"});
  section.querySelector(".head").append(controls);
  section.classList.add(options.wide ? "wide" : "third");

  let logarithmic = false;
  let weight = 0;
  let cursor = null;  // an x
  let frame = null;   // of what is drawn

  if (options.smooth) {
    const longest = Math.max(...options.curves().map((curve) => curve.ys.length));
    weight = longest >= 200 ? Math.min(0.99, 1 - 20 / longest) : 0;
    const range = element("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: weight, "aria-label": `smoothing of ${options.title}`});
    range.addEventListener("input", () => { weight = Number(range.value); redraw(); });
    controls.append(element("label", {}, "smooth", range));
  }
  if (options.log) {
    const check = element("input", {type: "checkbox"});
    check.addEventListener("change", () => { logarithmic = check.checked; redraw(); });
    controls.append(element("label", {}, check, "log"));
  }

  function showLegend(curves) {
    legend.replaceChildren();
    if (cursor !== null) legend.append(element("span", {}, `${options.xName()} `, element("b", {}, options.xText(cursor))));
    for (const curve of curves) {
      const item = element("span", {}, element("i", curve.dashed ? {class: "dashed", style: `border-color:${curve.color}`} : {style: `background:${curve.color}`}), curve.name);
      if (cursor !== null) item.append(" ", element("b", {}, number(curve.shown[nearest(curve.xs, cursor)])));
      legend.append(item);
    }
  }

  // {low, high} of the scale, and what of the values it leaves out: {highest}.
  function yRange(curves) {
    let low = Infinity, high = -Infinity;
    for (const curve of curves) {
      for (const y of curve.ys) {
        if (!Number.isFinite(y) || (logarithmic && y <= 0)) continue;
        low = Math.min(low, y);
        high = Math.max(high, y);
      }
    }
    if (low > high) return {low: logarithmic ? 0.1 : 0, high: 1};
    if (logarithmic) return low < high ? {low: low / 1.05, high: high * 1.05} : {low: low / 2, high: high * 2};
    if (options.zero) return {low: 0, high: high > 0 ? 1.06 * high : 1};
    const top = options.trim ? typicalTop(curves.flatMap((curve) => curve.ys.filter(Number.isFinite)), low, high) : high;
    const margin = low < top ? 0.05 * (top - low) : 0.1 * Math.abs(low) || 1;
    return {low: low - margin, high: top + margin, highest: top < high ? high : null};
  }

  function draw(width) {
    const curves = options.curves().filter((curve) => curve.xs.length > 0);
    for (const curve of curves) curve.shown = weight > 0 && !curve.dots ? smoothed(curve.ys, weight) : curve.ys;
    const height = width < 520 ? 210 : 250;
    const {low: yLow, high: yHigh, highest} = yRange(curves);
    const yTicks = logarithmic ? logTicks(yLow, yHigh) : linearTicks(yLow, yHigh, height / 48);
    const left = 10 + 6.4 * Math.max(...yTicks.map((tick) => short(tick).length), 2);
    const right = width - 10, top = 8, bottom = height - 24;
    const firsts = curves.map((curve) => curve.xs[0]), lasts = curves.map((curve) => curve.xs.at(-1));
    let xLow = Math.min(...firsts), xHigh = Math.max(...lasts);
    if (!(xHigh > xLow)) { xLow -= 1; xHigh = xLow + 2; }
    const toX = (x) => left + (right - left) * (x - xLow) / (xHigh - xLow);
    const scale = logarithmic ? Math.log : (y) => y;
    const toY = (y) => bottom - (bottom - top) * (scale(y) - scale(yLow)) / (scale(yHigh) - scale(yLow));

    const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `${options.title} over ${options.xName()}`});
    for (const tick of yTicks) {
      const y = toY(tick);
      svg.append(shape("line", {class: "rule", x1: left, x2: right, y1: y, y2: y}),
                 shape("text", {x: left - 6, y: y + 4, "text-anchor": "end"}, short(tick)));
    }
    for (const tick of linearTicks(xLow, xHigh, width / 90)) {
      const x = toX(tick);
      svg.append(shape("line", {class: "rule", x1: x, x2: x, y1: bottom, y2: bottom + 4}),
                 shape("text", {x: Math.min(x, right - 8), y: height - 6, "text-anchor": "middle"}, short(tick)));
    }
    if (highest) svg.append(shape("text", {x: right, y: top + 10, "text-anchor": "end"}, `▲ up to ${short(highest)}`));
    const inside = shape("svg", {x: 0, y: 0, width, height: bottom + 4});  // cuts off what is above the scale
    svg.append(inside);
    for (const curve of curves) {
      const add = (ys, cls) => inside.append(shape("path", {class: cls, stroke: curve.color, "data-series": curve.name,
        d: pathOf(curve.xs.map((x, i) => [x, ys[i]]), Math.floor(right - left), toX, toY, logarithmic),
        ...(curve.dashed ? {"stroke-dasharray": "5 4"} : {})}));
      if (curve.shown !== curve.ys) add(curve.ys, "curve faint");
      add(curve.shown, "curve");
      if (curve.dots || curve.xs.length === 1) {
        curve.xs.forEach((x, i) => {
          if (Number.isFinite(curve.ys[i])) inside.append(shape("circle", {cx: toX(x), cy: toY(curve.ys[i]), r: 3, fill: curve.color}));
        });
      }
    }
    const marks = shape("g");
    svg.append(marks);
    frame = {svg, marks, curves, toX, toY, top, bottom, left, right, xLow, xHigh, width};
    listen(svg);
    box.replaceChildren(svg);
    showCursor();
  }

  function pathOf(points, pixels, toX, toY, logarithmic) {
    let pen = false;
    let path = "";
    for (const [x, y] of thinned(points, pixels)) {
      const visible = Number.isFinite(y) && (!logarithmic || y > 0);
      if (visible) path += `${pen ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`;
      pen = visible;
    }
    return path;
  }

  function showCursor() {
    const {marks, curves, toX, toY, top, bottom} = frame;
    marks.replaceChildren();
    showLegend(curves);
    if (cursor === null) return;
    marks.append(shape("line", {class: "cursor", x1: toX(cursor), x2: toX(cursor), y1: top, y2: bottom}));
    for (const curve of curves) {
      const i = nearest(curve.xs, cursor);
      const y = curve.shown[i];
      if (Number.isFinite(y) && (!logarithmic || y > 0)) marks.append(shape("circle", {cx: toX(curve.xs[i]), cy: toY(y), r: 4, fill: curve.color}));
    }
  }

  // The x with a value that is nearest, of the curve with most of them.
  function moveTo(x) {
    const main = frame.curves.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
    cursor = main.xs[nearest(main.xs, x)];
    showCursor();
  }

  function listen(svg) {
    const point = (event) => {
      const {left, right, xLow, xHigh, width} = frame;
      const bounds = svg.getBoundingClientRect();
      const pixel = (event.clientX - bounds.left) * width / bounds.width;
      moveTo(xLow + (xHigh - xLow) * (pixel - left) / (right - left));
    };
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") { cursor = null; showCursor(); }
    });
    svg.addEventListener("keydown", (event) => {
      const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!by) return;
      event.preventDefault();
      const xs = frame.curves.reduce((a, b) => (b.xs.length > a.xs.length ? b : a)).xs;
      const at = cursor === null ? (by > 0 ? -1 : xs.length) : nearest(xs, cursor);
      cursor = xs[Math.min(xs.length - 1, Math.max(0, at + by))];
      showCursor();
    });
  }

  const redraw = drawn(box, draw);
  section.redraw = () => { cursor = null; redraw(); };
  return section;
}
