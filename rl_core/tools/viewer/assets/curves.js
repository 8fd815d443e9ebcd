// Curves, by uPlot.
const DASHES = [[undefined, "solid"], [[7, 4], "dashed"], [[2, 3], "dotted"], [[12, 3, 2, 3], "dashed"]]; // on the canvas, in the legend
const HEIGHT = 210, FEW_WARNINGS = 3; // More are folded at first.
const [LEAST_RANGE_FRAC, NEAR_ZERO] = [0.01, 1e-6]; // as in data.py
const NOISE = { pattern: /\/(mismatch_|canary_|step_kl)/, range: 1e-4 }; // differences of equal weights below this are rounding
const plots = new Map(); // id of a panel -> { plot, key, area, axis, steps, curves, xs, title }

function settings() {
  const input = (name) => $(`#curves form [name=${name}]`);
  const [smooth, find] = [+input("smooth").value, input("find").value.toLowerCase()];
  const is = (name) => input(name).checked;
  return { smooth, find, x: input("x").value, logy: is("logy"), logx: is("logx"), seeds: is("seeds"), split: is("split"), together: is("together") };
}

// Step -> its place on the x axis: steps, or what had been sampled or had passed by its end.
function placesOf(run, x) {
  if (!x) return (step) => step;
  const places = new Map([[0, 0]]);
  let sum = 0;
  for (const step of [...run.steps.keys()].sort((a, b) => a - b)) {
    const values = Object.entries(run.steps.get(step));
    if (x === "tokens") sum += values.filter(([name]) => /^rollout\/[^/]+\/tokens$/.test(name)).reduce((a, [, value]) => a + value, 0);
    else sum += (run.steps.get(step)["time/step_s"] ?? 0) / 3600;
    places.set(step, sum);
  }
  return (step) => places.get(step) ?? null;
}

const SEED = /(^|\.)(seed|out|run_name|resume|config)$/;
// Flags without the seed, and without the name of the folder that holds the run's own model and data.
const seedless = (run) => {
  const text = JSON.stringify(Object.entries(run.config).filter(([flag]) => !SEED.test(flag)).sort());
  const folder = String(run.config.out ?? "").split("/").slice(0, -1).join("/");
  return folder ? text.replaceAll(`${folder}/`, "") : text;
};

function smoothed(values, weight) { // exponential, without bias at its beginning
  let total = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value, count = weight * count + (1 - weight);
    return total / count;
  });
}

// The places on x that have a value, the steps there, and each curve's values. A log axis has no place for 0.
function curvesOf({ title, curves: chosen }, { smooth, logy, logx, x, seeds }) {
  const places = new Map(runs.map((run) => [run, placesOf(run, x)]));
  const valuesOf = (run, metric) => {
    const values = new Map();
    for (const step of run.steps.keys()) {
      const value = run.steps.get(step)[metric] ?? null, place = places.get(run)(step);
      if (value !== null && place !== null && !(logy && value <= 0) && !(logx && place <= 0)) values.set(place, [value, step]);
    }
    return values;
  };
  const labels = unique(chosen.map(({ key }) => key)), name = withoutCommon(labels);
  let curves = chosen.map(({ run, key, metric }) => ({
    run, metric, values: valuesOf(run, metric), place: labels.indexOf(key),
    label: runs.length === 1 ? name(key) : `${name(key) === title ? "" : `${name(key)}, `}${run.short}`,
  })).filter(({ values }) => values.size);
  const isOneRun = (seeds ? unique(runs.map(seedless)) : runs).length === 1; // Else a colour is a run's, and dashes tell curves apart.
  if (seeds) curves = overSeeds(curves, (place) => (name(labels[place]) === title ? "" : name(labels[place])));
  const xs = [...new Set(curves.flatMap(({ values }) => [...values.keys()]))].sort((a, b) => a - b);
  const steps = xs.map((place) => curves.find(({ values }) => values.has(place)).values.get(place)[1]);
  for (const curve of curves) {
    Object.assign(curve, isOneRun ? { hue: curve.place, dash: 0 } : { hue: curve.run.n, dash: curve.place % DASHES.length });
    curve.raw = xs.map((place) => curve.values.get(place)?.[0] ?? null);
    const isDense = curve.values.size > 20; // an evaluation stays as it is
    curve.shown = smooth && isDense && !curve.isBound ? smoothed(curve.raw, smooth) : curve.raw;
  }
  return { xs, steps, curves };
}

// Runs that differ by the seed alone become their mean, with the lowest and the highest as a band.
function overSeeds(curves, label) {
  const groups = groupsOf(curves, ({ run, place }) => JSON.stringify([seedless(run), place]));
  return [...groups.values()].flatMap((group) => {
    if (group.length === 1) return group;
    const places = unique(group.flatMap(({ values }) => [...values.keys()]));
    const over = (reduce) => new Map(places.flatMap((place) => {
      const found = group.flatMap(({ values }) => (values.has(place) ? [values.get(place)] : []));
      return found.length === group.length ? [[place, [reduce(found.map(([value]) => value)), found[0][1]]]] : [];
    }));
    const name = [label(group[0].place), `mean of ${group.length} seeds`].filter(Boolean).join(", ");
    const bound = (of, text) => ({ ...group[0], values: over((all) => of(...all)), label: `${name}, ${text}`, isBound: true });
    return [bound(Math.max, "highest"), bound(Math.min, "lowest"), { ...group[0], values: over((all) => all.reduce((a, b) => a + b) / all.length), label: name }];
  });
}

// The steps that the reader chose to see; nothing where all are shown.
function zoomOf(plot) {
  const { min, max, range } = plot.scales.x, steps = plot.data[0], [low, high] = range(plot, steps[0], steps.at(-1), "x");
  return min === low && max === high ? undefined : { min, max };
}

function drawPanel(panel, box, how) {
  const { title, id } = panel, { xs, steps, curves } = curvesOf(panel, how), before = plots.get(id);
  if (!curves.length) { // on log axes
    before?.plot.destroy();
    plots.delete(id);
    box.replaceChildren(el("h2", {}, title), el("p", { class: "soft" }, "No value has a place on this axis."));
    return;
  }
  const table = [xs, ...curves.flatMap((c) => (how.smooth ? [c.raw, c.shown] : [c.shown]))];
  const key = JSON.stringify([curves.map((c) => [c.label, c.hue]), how]);
  const latest = curves.map((c) => `${c.label} ${short(c.raw.findLast((value) => value !== null))}`).join(", ");
  const zoom = before && before.axis === `${how.logx} ${how.x}` ? zoomOf(before.plot) : undefined;
  const hidden = before ? before.plot.series.filter((series) => !series.show).map((series) => series.label) : [];
  if (before?.key === key) {
    Object.assign(before, { steps, curves, xs });
    before.plot.batch(() => {
      before.plot.setData(table);
      if (zoom) before.plot.setScale("x", zoom);
    });
    before.area.setAttribute("aria-label", `${title}: ${latest}`);
    return;
  }
  before?.plot.destroy();
  const area = el("div", { tabindex: 0, role: "img", "aria-label": `${title}: ${latest}`, onkeydown: moveCursor });
  const metrics = curves.filter((c, i) => curves.findIndex((other) => other.metric === c.metric) === i);
  const save = ([type, of]) => button(type, () => download(of(plots.get(id), title), `${runs.length === 1 ? leaf(runs[0].name) : `${runs.length} runs`} ${title}`.replace(/\W+/g, "_") + `.${type.toLowerCase()}`));
  box.replaceChildren(
    el("h2", {}, title),
    el("details", { class: "about" }, el("summary", { "aria-label": `About ${title}` }, "?"),
      el("dl", {}, metrics.map((c) => [el("dt", {}, c.metric), el("dd", {}, c.run.about[c.metric])])),
      el("p", { class: "bar" }, "Save as ", Object.entries({ PNG: pngOf, SVG: svgOf, CSV: csvOf }).map(save))),
    area,
  );
  const plot = new uPlot(plotOptions(box, curves, steps, how, hidden), table, area);
  if (zoom) plot.setScale("x", zoom);
  area.uplot = plot;
  let opening; // A double click shows all steps again.
  plot.over.addEventListener("click", ({ detail }) => {
    const at = plot.cursor.idx ?? null;
    clearTimeout(opening);
    if (detail === 1 && at !== null) opening = setTimeout(() => toStep(id, at), 300);
  });
  area.addEventListener("keydown", (event) => event.key === "Enter" && plot.cursor.idx !== null && toStep(id, plot.cursor.idx));
  box.append(el("div", { class: "legend", tabindex: 0, role: "group", "aria-label": `Values of ${title}` }, $(".u-legend", area)));
  plots.set(id, { plot, key, area, axis: `${how.logx} ${how.x}`, steps, curves, xs, title });
}

// The conversations of a point's step; of an evaluation's curves those of the evaluation.
function toStep(id, at) {
  const { steps, curves } = plots.get(id), isEval = curves.every(({ metric }) => metric.startsWith("eval/"));
  const entries = runs.flatMap((run) => run.entries).filter((e) => e.step === steps[at] && (e.kind === "train") !== isEval);
  const kinds = unique(entries.map((e) => e.kind)).sort(); // "greedy" comes before "sampled"
  kept.talks = "";
  go({ only_step: steps[at], only_kind: kinds[0] }, true, "talks");
}

function download(href, name) {
  el("a", { href, download: name }).click();
}
// The chart below its title and above its curves' names, on the page's background, since labels have its colours.
function pngOf({ plot, curves, title }) {
  const { canvas: chart } = plot.ctx, ratio = uPlot.pxRatio, line = 18 * ratio, named = curves.filter((c) => !c.isBound);
  const canvas = el("canvas", { width: chart.width, height: chart.height + line * (2 + named.length) }), to = canvas.getContext("2d");
  const write = (text, x, row, fill) => { to.fillStyle = fill, to.fillText(text, x, row); };
  to.fillStyle = css("--card"), to.fillRect(0, 0, canvas.width, canvas.height), to.drawImage(chart, 0, 1.5 * line);
  to.font = `600 ${13 * ratio}px system-ui, sans-serif`, write(title, line / 2, line, css("--text"));
  to.font = `${12 * ratio}px system-ui, sans-serif`, to.lineWidth = 2 * ratio;
  for (const [n, c] of named.entries()) {
    const y = chart.height + (n + 2.2) * line;
    to.strokeStyle = css(hue(c.hue)), to.setLineDash((DASHES[c.dash][0] ?? []).map((length) => length * ratio));
    to.beginPath(), to.moveTo(line / 2, y - line / 4), to.lineTo(2.5 * line, y - line / 4), to.stroke();
    write(c.label, 3 * line, y, css("--text"));
  }
  return canvas.toDataURL("image/png");
}
const asFile = (text, type) => `data:${type};charset=utf-8,${encodeURIComponent(text)}`;
const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
function csvOf({ steps, curves }) {
  const rows = steps.map((step, i) => [step, ...curves.map((c) => c.raw[i] ?? "")].join());
  return asFile(`${[["step", ...curves.map((c) => quoted(c.label))].join(), ...rows].join("\n")}\n`, "text/csv");
}

// The curves as lines of an SVG, with the labels of the axes' ends.
function svgOf({ plot, curves: all, xs, title }) {
  const [width, height, left, top] = [640, 320, 70, 30], { x, y } = plot.scales, curves = all.filter((c) => !c.isBound), axes = plot.axes.map(({ label }) => label);
  const at = (scale, value, from, size) => {
    const f = scale.distr === 3 ? Math.log10 : (v) => v;
    return from + (size * (f(value) - f(scale.min))) / (f(scale.max) - f(scale.min) || 1);
  };
  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const label = (text, px, py, anchor, fill = css("--text")) => `<text x="${px}" y="${py}" text-anchor="${anchor}" font-size="12" font-family="sans-serif" fill="${fill}">${escaped(text)}</text>`;
  const place = (c) => xs.flatMap((v, i) => (c.shown[i] === null || v < x.min || v > x.max ? [] : [`${at(x, v, left, width - left - 20).toFixed(1)},${(height - 40 - at(y, c.shown[i], 0, height - 40 - top)).toFixed(1)}`]));
  const lines = curves.map((c) => `<polyline fill="none" stroke="${css(hue(c.hue))}" stroke-width="2" stroke-dasharray="${(DASHES[c.dash][0] ?? []).join()}" points="${place(c).join(" ")}"/>`);
  const names = curves.map((c, i) => label(c.label, left + (i % 3) * 190, height - 8 + Math.floor(i / 3) * 14, "start", css(hue(c.hue))));
  const box = `0 0 ${width} ${height + Math.floor((curves.length - 1) / 3) * 14}`;
  return asFile(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="${box}"><rect width="100%" height="100%" fill="${css("--card")}"/>${label(title, left, 18, "start")}${label(short(y.max), left - 6, top + 10, "end")}${label(short(y.min), left - 6, height - 40, "end")}${label(short(x.min), left, height - 24, "start")}${label(short(x.max), width - 20, height - 24, "end")}${label(axes[0], width / 2, height - 24, "middle")}<g transform="rotate(-90 16 ${height / 2})">${label(axes[1], 16, height / 2, "middle")}</g>${lines.join("")}${names.join("")}</svg>`, "image/svg+xml");
}

const X_LABELS = { "": "step", tokens: "sampled tokens", time: "hours" };
const unitsOf = (curves) => unique(curves.map(({ run, metric }) => (run.units[metric] ?? "").split(";")[0]).filter(Boolean)).join(", ");

function plotOptions(box, curves, steps, how, hidden) {
  const points = { show: steps.length < 25, size: 5 }, curveOf = (i) => curves[how.smooth ? (i - 1) >> 1 : i - 1];
  const axis = { labelSize: 16, labelGap: -2, labelFont: "11px system-ui, sans-serif", stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const series = curves.flatMap((c) => {
    const stroke = css(hue(c.hue));
    const show = !hidden.includes(c.label);
    const main = { label: c.label, stroke: c.isBound ? `${stroke}55` : stroke, show, width: c.isBound ? 1 : 2, dash: DASHES[c.dash][0], points, spanGaps: true, value: (u, v) => short(v), class: c.isBound ? "raw" : undefined };
    return how.smooth ? [{ ...main, class: "raw", stroke: `${stroke}44`, width: 1, points: { show: false } }, main] : [main];
  });
  // Without a pointer the legend has each curve's last value.
  const lasts = (u) => u.data.map((values) => values.findLastIndex((value) => value !== null));
  const rest = (u) => { if ((u.cursor.idx ?? null) === null) u.setLegend({ idxs: lasts(u) }, false); };
  const hideRaw = (u, i, change) => {
    if (how.smooth && change.show !== undefined && i % 2 === 0) u.setSeries(i - 1, { show: change.show });
  };
  // Curves come as highest, lowest and mean of seeds; the band lies between the first two.
  const seriesOf = (i) => (how.smooth ? 2 * i + 2 : i + 1);
  const bands = curves.flatMap((c, i) => (c.isBound && curves[i + 1]?.isBound ? [{ series: [seriesOf(i), seriesOf(i + 1)], fill: `${css(hue(c.hue))}22` }] : []));
  const rangeX = (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);
  return {
    ...sizeOf(box),
    scales: {
      x: { time: false, distr: how.logx ? 3 : 1, range: how.logx ? undefined : rangeX },
      y: { distr: how.logy ? 3 : 1, range: how.logy ? undefined : rangeY(curves.every(({ metric }) => NOISE.pattern.test(metric)) ? NOISE.range : 0) },
    },
    bands,
    series: [{ label: X_LABELS[how.x], value: (u, v) => short(v) }, ...series],
    axes: [{ ...axis, size: 30, values: labels, label: X_LABELS[how.x] }, { ...axis, size: widthOf, values: labels, label: unitsOf(curves) }],
    legend: { markers: { width: 2, dash: (u, i) => DASHES[curveOf(i).dash][1] } },
    cursor: { sync: { key: "steps" }, y: false },
    hooks: { setCursor: [rest], ready: [rest], setData: [rest], setSeries: [hideRaw] },
  };
}

// Labels that tell neighbouring ticks apart, and an axis as wide as its longest label.
function labels(u, ticks) {
  const close = (digits) => (v) => (v === null ? "" : Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(Math.max(0, digits - 1)).replace(/\.?0+e/, "e") : String(+v.toPrecision(digits)));
  const shown = ticks.filter((v) => v !== null);
  const digits = [2, 3, 4, 5, 6, 7].find((n) => new Set(shown.map(close(n))).size === new Set(shown).size) ?? 8;
  return ticks.map(close(Math.max(digits, 3)));
}
const widthOf = (u, values) => 18 + 7 * Math.max(4, ...(values ?? []).map((text) => String(text).length));

// Smaller changes than LEAST_RANGE_FRAC of the values are a flat line, whatever their digits do.
const rangeY = (noise) => (u, low, high) => {
  if (!low && !high) return [0, 1]; // zeros, or no value
  const least = Math.max(noise, LEAST_RANGE_FRAC * Math.max(Math.abs(low), Math.abs(high), NEAR_ZERO)), middle = (low + high) / 2;
  return high - low < least ? [middle - least / 2, middle + least / 2] : uPlot.rangeNum(low, high, 0.08, true);
};

function moveCursor(event) {
  const u = event.currentTarget.uplot, steps = u.data[0], by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const i = Math.min(steps.length - 1, Math.max(0, (u.cursor.idx ?? steps.length) + by));
  u.setCursor({ left: u.valToPos(steps[i], "x"), top: 20 });
}

const actorOf = ({ metric }) => metric.match(/^(?:rollout|learn)\/([^/]+)\//)?.[1];
const envOf = ({ metric }) => metric.match(/^(?:eval|rollout\/[^/]+)\/([^/]+)\/(?:.*\/)?(?:reward_mean$|reward\/|greedy_|avg@|pass@|loss$)/)?.[1];

// Charts: { id, title, curves: [{ run, key, metric }] }; one for each environment, and with `split` for each actor.
function panelsOf({ split, together }) {
  const panels = new Map(Object.values(data.panels).map((title) => [title, []]));
  for (const run of runs) {
    for (const [title, curves] of Object.entries(run.panels)) {
      if (!panels.has(title)) panels.set(title, []);
      panels.get(title).push(...Object.entries(curves).map(([key, metric]) => ({ run, key, metric })));
    }
  }
  const named = [...panels].filter(([, curves]) => curves.length).map(([title, curves]) => ({ id: title, title, curves }));
  const byActor = split ? named.flatMap((panel) => (panel.curves.every(actorOf) ? apart(panel, actorOf) : [panel])) : named;
  return together ? byActor : byActor.flatMap((panel) => apart(panel, envOf));
}

// A chart for each name; curves without one stay in the first.
function apart({ title, curves }, nameOfCurve) {
  const groups = groupsOf(curves, (curve) => nameOfCurve(curve) ?? ""), numNames = groups.size - groups.has("");
  if (numNames < 2) return [{ id: title, title, curves }];
  return [...groups].sort(([a], [b]) => a.localeCompare(b)).map(([name, some]) => ({ id: `${title}: ${name}`, title: name ? `${title}: ${name}` : title, curves: some.map((curve) => ({ ...curve, key: withoutWord(curve.key, name) })) }));
}
const withoutWord = (key, word) => key.split("/").map((part) => part.split(" ").filter((piece) => piece !== word).join(" ")).filter(Boolean).join("/");

// True if the chart says nothing that one number would not.
function isConstant({ curves }) {
  return curves.every(({ run, metric }) => {
    const values = [...run.steps.values()].map((row) => row[metric]).filter((value) => value !== undefined);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return values.length > 1 && high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high), NEAR_ZERO);
  });
}

function showCurves() {
  const curves = runs.flatMap((run) => Object.values(run.panels).flatMap((named) => Object.values(named))).map((metric) => ({ metric }));
  $("#split").hidden = unique(curves.filter(({ metric }) => metric.startsWith("learn/")).map(actorOf)).length < 2;
  $("#together").hidden = unique(curves.map(envOf)).filter(Boolean).length < 2;
  $("#seeds").hidden = runs.length < 2 || unique(runs.map(seedless)).length === runs.length;
  const how = settings(), panels = panelsOf(how);
  const others = panels.filter(({ title }) => title.includes("/")); // metrics without a chart of their own
  const constant = panels.filter((panel) => !others.includes(panel) && isConstant(panel));
  const main = panels.filter((panel) => !others.includes(panel) && !constant.includes(panel));
  const boxes = new Map($$("#curves .chart").map((node) => [node.dataset.title, node]));
  for (const [root, shown] of [[$("#curves > .charts"), main], [$("#constant .charts"), $("#constant").open ? constant : []], [$("#others .charts"), $("#others").open ? others : []]]) {
    for (const [place, panel] of shown.entries()) {
      const box = boxes.get(panel.id) ?? el("div", { class: "chart", "data-title": panel.id });
      boxes.delete(panel.id);
      if (root.children[place] !== box) root.insertBefore(box, root.children[place] ?? null);
      box.hidden = !`${panel.title} ${panel.curves.map(({ metric }) => metric).join(" ")}`.toLowerCase().includes(how.find);
      if (!box.hidden) drawPanel(panel, box, how);
    }
  }
  for (const [id, box] of boxes) plots.get(id)?.plot.destroy(), plots.delete(id), box.remove();
  const of = (run) => (runs.length > 1 ? `${run.short} ` : "");
  const told = (run, one) => `${of(run)}step ${one.step}: ${one.text}`;
  // A warning leads to the conversations of its step; one about failures to those that failed.
  const line = (run, one) => {
    const failed = run.entries.filter((e) => e.step === one.step && e.status === "failed"), isOfFailures = /fail/.test(`${one.kind} ${one.metric} ${one.text}`);
    const text = isOfFailures && failed.length ? `${short(new Set(failed.map(numberOf)).size)} failed episodes` : "conversations";
    const open = () => { kept.talks = ""; go({ only_step: one.step, only_status: isOfFailures && failed.length ? "failed" : null }, true, "talks"); };
    return el("li", {}, `${told(run, one)} `, run.entries.some((e) => e.step === one.step) && button(text, open));
  };
  const all = runs.flatMap((run) => run.warnings.map((one) => [run, one])), lines = all.map(([run, one]) => line(run, one)), text = lines.map((node) => node.textContent).join("\n");
  const box = $("#warnings");
  if (box.dataset.text !== text) {
    if (!box.dataset.text) box.open = lines.length <= FEW_WARNINGS;
    box.dataset.text = text;
    $("ul", box).replaceChildren(...lines);
    $("summary", box).textContent = lines.length < 2 ? "1 warning" : `${lines.length} warnings, the last: ${told(...all.at(-1))}`;
  }
  box.hidden = !lines.length;
  $("#constant").hidden = !constant.length;
  $("#constant summary").textContent = `Constant: ${constant.map(({ title }) => title).join(", ")}`;
  $("#others").hidden = !others.length;
  $("#nothing").hidden = panels.length > 0 || runs.some(endOf);
}

const sizeOf = (box) => ({ width: Math.max(200, box.clientWidth - 24), height: HEIGHT });
function resizeCurves() {
  for (const { plot, area } of plots.values()) plot.setSize(sizeOf(area.parentNode));
}
