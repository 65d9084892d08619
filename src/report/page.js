// The page: of one run everything, of several their curves and what differs.

const page = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("page");

// What a step had cost by its end, by kind of x axis.
const axes = {
  step: {text: (x) => number(x), of: (training) => training.step},
  tokens: {text: (x) => short(x), of: (training) => runningSum(training.step, training.num_tokens)},
  hours: {text: (x) => number(Number(x.toPrecision(4))), of: (training) => runningSum(training.step, training.seconds).map((sum) => sum / 3600)},
};
let axis = "step";

function runningSum(steps, values) {
  let sum = 0;
  return steps.map((_, i) => (sum += values?.[i] ?? 0));
}

// The x of evaluations: that of the step after which they were.
function evaluationXs(run) {
  if (axis === "step") return run.evaluation.step;
  const xs = axes[axis].of(run.training);
  return run.evaluation.step.map((step) => {
    const i = nearest(run.training.step, step);
    return run.training.step[i] <= step ? xs[i] : 0;
  });
}

const several = page.runs.length > 1;
const seriesColor = (i) => color(`series-${i % 8}`);
const label = (run, name) => (several ? (name ? `${run.name}, ${name}` : run.name) : name);

function trainingCurves(name, column) {
  return page.runs.map((run, i) => ({name: label(run, several ? "" : name), color: seriesColor(i), xs: axes[axis].of(run.training), ys: column(run.training)}))
    .filter((curve) => curve.ys?.some((y) => Number.isFinite(y)));
}

function evaluationCurves() {
  return page.runs.flatMap((run, i) => Object.keys(run.evaluation).filter((name) => name.startsWith("eval_") && name.endsWith("loss")).map((name, j) => ({
    name: label(run, name.replace("eval_", "eval ").replaceAll("_", " ")), color: several ? seriesColor(i) : seriesColor(1 + j), xs: evaluationXs(run), ys: run.evaluation[name], dots: true, dashed: several})));
}

const tokensPerSecond = (training) => training.num_tokens?.map((tokens, i) => (training.seconds?.[i] > 0 ? tokens / training.seconds[i] : null));

function charts() {
  const kinds = [
    {title: "Loss", curves: () => [...trainingCurves("training", (t) => t.loss), ...evaluationCurves()], smooth: true, log: true, trim: true, wide: true},
    {title: "Gradient norm", curves: () => trainingCurves("before clipping", (t) => t.grad_norm), smooth: true, log: true, trim: true},
    {title: "Learning rate", curves: () => trainingCurves("learning rate", (t) => t.learning_rate), zero: true},
    {title: "Tokens per second", curves: () => trainingCurves("tokens/s", tokensPerSecond), smooth: true, zero: true},
  ];
  return kinds.filter((kind) => kind.curves().length > 0).map((kind) => {
    const chart = chartCard({...kind, xName: () => axis, xText: (x) => axes[axis].text(x)});
    chart.dataset.part = kind.title;
    return chart;
  });
}

function axisChoice(drawnCharts) {
  const select = element("select", {}, ...Object.keys(axes).map((name) => element("option", {value: name}, {step: "steps", tokens: "tokens", hours: "hours of steps"}[name])));
  select.addEventListener("change", () => {
    axis = select.value;
    for (const chart of drawnCharts) chart.redraw();
  });
  return element("div", {class: "controls bar"}, element("label", {}, "curves over", select));
}

function tiles(figures) {
  return element("div", {class: "tiles"}, ...figures.map(([name, text]) => {
    const [, value, note] = text.match(/^(.*?)(?: \((.*)\))?$/);
    return element("div", {class: "tile"}, element("b", {}, value), element("span", {}, note ? `${name}, ${note}` : name));
  }));
}

function memoryCard(memory) {
  const pair = element("div", {class: "pair"});
  const section = card("Memory: where every byte is", pair);
  section.classList.add("wide");
  section.dataset.part = "memory";
  const hues = ["compute", "weights", "gradients", "activations", "optimizer", "issue"];
  for (const [space, limit, used, what] of [
    ["device", memory.device_limit, memory.simulated_device ? 0 : memory.device_used, "in use on the device"],
    ["host", memory.host_limit, memory.process_peak, "peak of the process"]]) {
    const lines = memory.ledger.filter((line) => line.space === space && line.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    const total = lines.reduce((sum, line) => sum + line.bytes, 0);
    if (total === 0) continue;
    const rows = lines.map((line, i) => [
      element("span", {}, line.component, element("i", {class: "share", style: `width:${100 * line.bytes / total}%;background:${color(hues[i % hues.length])}`})),
      bytes(line.bytes), percent(line.bytes, total)]);
    const node = table([space, "planned and held", "share"], rows, [1, 2]);
    const sum = element("tr", {class: "total"}, element("td", {}, "total"), element("td", {class: "number"}, bytes(total)), element("td"));
    node.querySelector("tbody").append(sum);
    pair.append(element("div", {}, node, element("p", {class: "note"},
      [`limit ${bytes(limit)}${space === "host" ? ` (${memory.host_limit_is})` : ""}`, used > 0 ? `measured: ${bytes(used)} ${what}` : "the device is simulated in host memory"].join("; "))));
  }
  return section;
}

// A key that may be broken after its words.
function keyName(key) {
  const parts = key.split(/(?<=[_.])/);
  return element("code", {}, ...parts.flatMap((part) => [part, element("wbr")]));
}

function configurationCard(record) {
  const keys = record.configuration;
  const shown = keys.filter(({from}) => from !== "default" && from !== "chosen");
  const section = card("Configuration", element("div", {class: "keys"}, ...shown.map(({key, value, from}) =>
    element("div", {}, keyName(key), element("span", {}, value), element("span", {class: "from"}, from)))));
  section.classList.add("wide");
  section.dataset.part = "configuration";
  const more = (title, lines) => section.append(element("details", {}, element("summary", {}, title),
    element("pre", {}, lines.map(({key, value}) => `${key}: ${value}`).join("\n"))));
  more("placement that was chosen", keys.filter(({from}) => from === "chosen"));
  more("every key", keys);
  return section;
}

function facts(run) {
  const record = run.record;
  if (!record) return [run.path];
  const {model, steps, planned} = record;
  return [
    `${short(model.parameters)} parameters, ${model.layers} layers, hidden ${model.hidden_size}, vocabulary ${model.vocab_size}${model.tied_embeddings ? ", tied embeddings" : ""}`,
    `${record.numbers}; ${record.optimizer}`,
    `${record.device}; backend ${record.backend}; host memory: ${record.host_memory}`,
    `${number(steps.total)} steps of ${steps.rows_per_step} rows of up to ${number(steps.row_tokens)} tokens` + (planned ? `; planned: ${seconds(planned.step_seconds)} a step, ${number(Math.round(planned.tokens_per_second))} tokens/s with the rates of ${planned.profile}` : ""),
    `layerstream ${record.layerstream} on ${record.host}; ${run.path}`,
  ];
}

function differences(comparison) {
  const part = (title, rows) => {
    if (rows.length === 0) return element("p", {class: "note"}, `${title}: nothing differs.`);
    const node = table(["", ...page.runs.map((run) => run.name)], []);
    const body = node.querySelector("tbody");
    for (const {name, values} of rows) {
      body.append(element("tr", {}, element("th", {scope: "row"}, name), ...values.map((value, i) => element("td", {"data-run": page.runs[i].name}, value || "–"))));
    }
    node.classList.add("differences");
    return element("div", {}, element("h3", {}, title), node);
  };
  const section = card("The runs side by side", part("Figures", comparison.figures), part("Configuration: what differs", comparison.configuration));
  section.classList.add("wide");
  section.dataset.part = "differences";
  return section;
}

function build() {
  const run = page.runs[0];
  main.append(element("h1", {}, page.title));
  if (!several) main.append(element("div", {class: "facts"}, ...facts(run).map((text) => element("div", {}, text))), tiles(page.figures));
  else main.append(element("div", {class: "facts"}, ...page.runs.map((one) => element("div", {}, `${one.name}: ${one.path}`))));
  const drawnCharts = charts();
  main.append(axisChoice(drawnCharts));
  const grid = element("div", {class: "grid"}, ...drawnCharts);
  main.append(grid);
  if (several) return grid.append(differences(page.comparison));
  if (run.timeline) grid.append(timelineCard(run.timeline), waitsCard(run.timeline), lanesCard(run.timeline));
  else grid.append(element("p", {class: "note wide"}, "There is no timeline of a step (timeline.json) in this directory."));
  if (run.record) grid.append(memoryCard(run.record.memory), configurationCard(run.record));
}

build();
