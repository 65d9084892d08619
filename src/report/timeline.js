// One step: what every lane did when, and what the compute lane waited for.

const groups = [
  ["forward", "compute", ["forward", "rebuild_key_value", "logits"]],
  ["backward", "backward", ["backward"]],
  ["loss", "loss", ["loss", "loss_and_gradient"]],
  ["weights", "weights", ["fetch_weights", "release_weights"]],
  ["activations", "activations", ["save_input", "save_intermediates", "load_input", "load_intermediates"]],
  ["gradients", "gradients", ["clear_gradient", "load_gradient", "gradient_norm", "emit_gradient", "keep_gradient", "verdict"]],
  ["optimizer", "optimizer", ["update", "load_state", "update_on_device", "store_state"]],
];
const groupOf = (kind) => groups.findIndex(([, , kinds]) => kinds.includes(kind));
const waitColors = {weights: "weights", optimizer: "optimizer", gradients: "gradients", activations: "activations", issue: "issue"};
const laneTexts = {compute: "compute", h2d: "to device", d2h: "to host", host: "host CPU", update: "update", update_out: "update out"};

function timelineCard(timeline) {
  const {operations, kinds} = timeline;
  const end = Math.max(1, ...[1e6 * timeline.seconds]);
  const used = timeline.lanes.map((_, lane) => lane).filter((lane) => operations.lane.includes(lane));
  const byLane = used.map((lane) => operations.lane.flatMap((other, i) => (other === lane ? [i] : [])));
  const group = kinds.map(groupOf);
  let from = 0, until = end;
  let picked = null;

  const readout = element("div", {class: "legend"});
  const box = element("div");
  const buttons = element("div", {class: "controls"});
  const section = card(`Step ${timeline.step}: what every lane did`, readout, box);
  section.classList.add("wide");
  section.dataset.part = "timeline";
  section.querySelector(".head").append(buttons);
  const button = (text, name, action) => {
    const node = element("button", {type: "button", "aria-label": name, title: name}, text);
    node.addEventListener("click", () => { action(); redraw(); });
    buttons.append(node);
  };
  const view = (center, span) => {
    span = Math.min(end, Math.max(20, span));
    from = Math.min(end - span, Math.max(0, center - span / 2));
    until = from + span;
  };
  button("–", "show more time", () => view((from + until) / 2, 2 * (until - from)));
  button("+", "show less time", () => view((from + until) / 2, (until - from) / 2));
  button("◀", "earlier", () => view((from + until) / 2 - (until - from) / 2, until - from));
  button("▶", "later", () => view((from + until) / 2 + (until - from) / 2, until - from));
  button("all", "the whole step", () => view(end / 2, end));

  function showReadout() {
    readout.replaceChildren();
    if (picked === null) {
      for (const [name, hue, members] of groups) {
        if (members.some((kind) => kinds.includes(kind))) readout.append(element("span", {}, element("i", {style: `background:${color(hue)}`}), name));
      }
      return;
    }
    const at = (values) => values[picked];
    const [, hue] = groups[group[at(operations.kind)]] ?? ["", "issue"];
    const place = [["block", at(operations.block)], ["chunk", at(operations.chunk)]].filter(([, index]) => index >= 0).map(([name, index]) => `${name} ${index}`);
    readout.append(
      element("span", {}, element("i", {style: `background:${color(hue)}`}), element("b", {}, kinds[at(operations.kind)].replaceAll("_", " "))),
      ...place.map((text) => element("span", {}, text)),
      element("span", {}, element("b", {}, seconds(1e-6 * (at(operations.end) - at(operations.begin)))), ` from ${seconds(1e-6 * at(operations.begin))} on`));
  }

  function draw(width) {
    const left = width < 520 ? 62 : 84, right = width - 8, row = 30, gap = 6, top = 4;
    const height = top + used.length * (row + gap) + 22;
    const toX = (time) => left + (right - left) * (time - from) / (until - from);
    const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "timeline of a step by lanes"});
    for (const tick of linearTicks(from, until, width / 100)) {
      const x = toX(tick);
      svg.append(shape("line", {class: "rule", x1: x, x2: x, y1: top, y2: height - 18}));
      svg.append(shape("text", {x: Math.min(x, right - 18), y: height - 4, "text-anchor": x < left + 20 ? "start" : "middle"}, seconds(1e-6 * tick)));
    }
    used.forEach((lane, i) => {
      const y = top + i * (row + gap);
      svg.append(shape("text", {x: left - 6, y: y + row / 2 + 4, "text-anchor": "end"}, laneTexts[timeline.lanes[lane].name] ?? timeline.lanes[lane].name),
                 shape("rect", {class: "lane", x: left, y, width: right - left, height: row, rx: 3}));
      const paths = groups.map(() => "").concat("");  // the last: of no group
      const ends = paths.map(() => -Infinity);
      for (const index of byLane[i]) {
        const a = Math.max(left, toX(operations.begin[index])), b = Math.min(right, toX(operations.end[index]));
        if (b < left || a > right) continue;
        const which = group[operations.kind[index]] < 0 ? groups.length : group[operations.kind[index]];
        if (b - ends[which] < 0.3) continue;  // nothing that a pixel shows
        ends[which] = b;
        const inset = b - a > 3 ? 0.5 : 0;
        paths[which] += `M${(a + inset).toFixed(1)} ${y}h${Math.max(0.6, b - a - 2 * inset).toFixed(1)}v${row}h-${Math.max(0.6, b - a - 2 * inset).toFixed(1)}z`;
      }
      paths.forEach((path, which) => {
        if (path) svg.append(shape("path", {d: path, fill: color(groups[which]?.[1] ?? "issue"), "data-lane": timeline.lanes[lane].name}));
      });
    });
    if (picked !== null) {
      const i = used.indexOf(operations.lane[picked]);
      const a = toX(operations.begin[picked]), b = toX(operations.end[picked]);
      if (b >= left && a <= right) {
        svg.append(shape("rect", {class: "picked", x: Math.max(left, a) - 1, y: top + i * (row + gap) - 1, width: Math.max(2, Math.min(right, b) - Math.max(left, a)) + 2, height: row + 2, rx: 2}));
      }
    }
    svg.addEventListener("click", (event) => {
      const bounds = svg.getBoundingClientRect();
      const time = from + (until - from) * ((event.clientX - bounds.left) * width / bounds.width - left) / (right - left);
      const i = Math.floor(((event.clientY - bounds.top) * height / bounds.height - top) / (row + gap));
      picked = pick(i, time, 8 * (until - from) / (right - left));
      redraw();
    });
    box.replaceChildren(svg);
    showReadout();
  }

  // The operation of row i at a time, or the nearest within `reach`; the longest where several are.
  function pick(i, time, reach) {
    let best = null, least = Infinity;
    for (const index of byLane[i] ?? []) {
      const distance = Math.max(0, operations.begin[index] - time, time - operations.end[index]);
      if (distance <= reach && distance < least) { best = index; least = distance; }
    }
    return best;
  }

  const redraw = drawn(box, draw);
  return section;
}

function waitsCard(timeline) {
  const whole = timeline.seconds;
  const compute = timeline.lanes.find((lane) => lane.name === "compute");
  const parts = [["compute busy", "compute", compute.busy], ...Object.entries(timeline.waits).map(([cause, time]) => [
    cause === "issue" ? "waits: nothing was issued" : `waits for ${cause}`, waitColors[cause] ?? "issue", time])];
  const stack = element("div", {class: "stack", role: "img", "aria-label": "the compute lane's time by cause"},
    ...parts.map(([name, hue, time]) => element("i", {style: `width:${100 * time / whole}%;background:${color(hue)}`, title: name})));
  const rows = parts.filter(([, , time]) => time > 0).map(([name, hue, time]) => [
    element("span", {class: "legend", style: "margin:0;min-height:0"}, element("span", {}, element("i", {style: `background:${color(hue)}`}), name)), seconds(time), percent(time, whole)]);
  const section = card("Exposed waits of the compute lane", stack, table(["", "time", "share"], rows, [1, 2]),
    element("p", {class: "note"}, `Step ${timeline.step}, ${seconds(whole)} in all. What is not busy is exposed: it makes the step longer.`));
  section.dataset.part = "waits";
  return section;
}

function lanesCard(timeline) {
  const line = (name, use) => [name, percent(use.busy, timeline.seconds), use.bytes > 0 ? number(Number((1e-9 * use.bytes).toPrecision(3))) : "–", use.bytes > 0 && use.busy > 0 ? number(Number((1e-9 * use.bytes / use.busy).toPrecision(3))) : "–"];
  const rows = timeline.lanes.filter((lane) => lane.busy > 0).map((lane) => line(laneTexts[lane.name] ?? lane.name, lane));
  rows.push(line("link, to device", timeline.link.to_device), line("link, to host", timeline.link.to_host));
  const rate = 1e-12 * timeline.model_flops / timeline.seconds;
  const section = card("Lanes of that step", table(["lane", "busy", "GB", "GB/s"], rows, [1, 2, 3]),
    element("p", {class: "note"}, `${number(1e-12 * timeline.model_flops)} model TFLOP, ${number(Number(rate.toPrecision(3)))} TFLOP/s; ${number(1e-12 * timeline.device_flops)} TFLOP with what is recomputed.`));
  section.dataset.part = "lanes";
  return section;
}
