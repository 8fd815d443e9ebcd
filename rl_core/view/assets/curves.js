// Curves, by uPlot.
const DASHES = [[undefined, "solid"], [[7, 4], "dashed"], [[2, 3], "dotted"], [[12, 3, 2, 3], "dashed"]]; // on the canvas, in the legend
const HEIGHT = 190;
const [LEAST_RANGE_FRAC, NEAR_ZERO] = [0.01, 1e-6]; // as in data.py
const plots = new Map(); // title of a panel -> { plot, key, area, logx }

function settings() {
  const input = (name) => $(`#curves form [name=${name}]`);
  const [smooth, find] = [+input("smooth").value, input("find").value.toLowerCase()];
  return { smooth, find, logy: input("logy").checked, logx: input("logx").checked };
}

function smoothed(values, weight) { // exponential, without bias at its beginning
  let total = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value, count = weight * count + (1 - weight);
    return total / count;
  });
}

// The steps that have a value, and each curve's values there. A log axis has no place for 0.
function curvesOf(title, { smooth, logy, logx }) {
  const all = unique(runs.flatMap((run) => [...run.steps.keys()])).filter((step) => !logx || step > 0).sort((a, b) => a - b);
  const found = runs.filter((run) => !run.isHidden).flatMap((run) => {
    const panel = Object.entries(run.panels[title] || {}), name = withoutCommon(panel.map(([key]) => key));
    return panel.map(([key, metric], place) => ({
      run, metric, at: (step) => run.steps.get(step)?.[metric] ?? null,
      label: runs.length === 1 ? name(key) : `${name(key) === title ? "" : `${name(key)}, `}${run.short}`,
      hue: runs.length > 1 ? run.n : place, dash: runs.length > 1 ? place % DASHES.length : 0,
    }));
  });
  const at = (curve, step) => (logy && curve.at(step) <= 0 ? null : curve.at(step));
  const steps = all.filter((step) => found.some((curve) => at(curve, step) !== null));
  for (const curve of found) {
    curve.raw = steps.map((step) => at(curve, step));
    const isDense = curve.raw.filter((value) => value !== null).length > 20; // an evaluation stays as it is
    curve.values = smooth && isDense ? smoothed(curve.raw, smooth) : curve.raw;
  }
  return { steps, curves: found.filter((curve) => curve.raw.some((value) => value !== null)) };
}

// The steps that the reader chose to see; nothing where all are shown.
function zoomOf(plot) {
  const { min, max, range } = plot.scales.x, steps = plot.data[0], [low, high] = range(plot, steps[0], steps.at(-1), "x");
  return min === low && max === high ? undefined : { min, max };
}

function drawPanel(title, box, how) {
  const { steps, curves } = curvesOf(title, how), before = plots.get(title);
  if (!curves.length) { // on log axes
    before?.plot.destroy();
    plots.delete(title);
    box.replaceChildren(el("h2", {}, title), el("p", { class: "soft" }, "No value has a place on this axis."));
    return;
  }
  const table = [steps, ...curves.flatMap((c) => (how.smooth ? [c.raw, c.values] : [c.values]))];
  const key = JSON.stringify([curves.map((c) => [c.label, c.hue]), how]);
  const latest = curves.map((c) => `${c.label} ${short(c.raw.findLast((value) => value !== null))}`).join(", ");
  const zoom = before && before.logx === how.logx ? zoomOf(before.plot) : undefined;
  const hidden = before ? before.plot.series.filter((series) => !series.show).map((series) => series.label) : [];
  if (before?.key === key) {
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
  box.replaceChildren(
    el("h2", {}, title),
    el("details", { class: "about" }, el("summary", { "aria-label": `About ${title}` }, "?"),
      el("dl", {}, metrics.map((c) => [el("dt", {}, c.metric), el("dd", {}, c.run.about[c.metric])]))),
    area,
  );
  const plot = new uPlot(plotOptions(box, curves, steps, how, hidden), table, area);
  if (zoom) plot.setScale("x", zoom);
  area.uplot = plot;
  box.append(el("div", { class: "legend", tabindex: 0, role: "group", "aria-label": `Values of ${title}` }, $(".u-legend", area)));
  plots.set(title, { plot, key, area, logx: how.logx });
}

function plotOptions(box, curves, steps, how, hidden) {
  const points = { show: steps.length < 25, size: 5 }, curveOf = (i) => curves[how.smooth ? (i - 1) >> 1 : i - 1];
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const series = curves.flatMap((c) => {
    const stroke = css(hue(c.hue));
    const show = !hidden.includes(c.label);
    const main = { label: c.label, stroke, show, width: 2, dash: DASHES[c.dash][0], points, spanGaps: true, value: (u, v) => short(v) };
    return how.smooth ? [{ ...main, class: "raw", stroke: `${stroke}44`, width: 1, points: { show: false } }, main] : [main];
  });
  // Without a pointer the legend has each curve's last value.
  const lasts = (u) => u.data.map((values) => values.findLastIndex((value) => value !== null));
  const rest = (u) => { if ((u.cursor.idx ?? null) === null) u.setLegend({ idxs: lasts(u) }, false); };
  const hideRaw = (u, i, change) => {
    if (how.smooth && change.show !== undefined && i % 2 === 0) u.setSeries(i - 1, { show: change.show });
  };
  const rangeX = (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);
  return {
    ...sizeOf(box),
    scales: {
      x: { time: false, distr: how.logx ? 3 : 1, range: how.logx ? undefined : rangeX },
      y: { distr: how.logy ? 3 : 1, range: how.logy ? undefined : rangeY },
    },
    series: [{ label: "step", value: (u, v) => short(v) }, ...series],
    axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (u, ticks) => ticks.map((v) => (v === null ? "" : short(v))) }],
    legend: { markers: { width: 2, dash: (u, i) => DASHES[curveOf(i).dash][1] } },
    cursor: { sync: { key: "steps" }, y: false },
    hooks: { setCursor: [rest], ready: [rest], setData: [rest], setSeries: [hideRaw] },
  };
}

// Smaller changes than LEAST_RANGE_FRAC of the values are a flat line, whatever their digits do.
function rangeY(u, low, high) {
  if (!low && !high) return [0, 1]; // zeros, or no value
  const least = LEAST_RANGE_FRAC * Math.max(Math.abs(low), Math.abs(high), NEAR_ZERO), middle = (low + high) / 2;
  return high - low < least ? [middle - least / 2, middle + least / 2] : uPlot.rangeNum(low, high, 0.08, true);
}

function moveCursor(event) {
  const u = event.currentTarget.uplot, steps = u.data[0], by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const i = Math.min(steps.length - 1, Math.max(0, (u.cursor.idx ?? steps.length) + by));
  u.setCursor({ left: u.valToPos(steps[i], "x"), top: 20 });
}

function showCurves() {
  const how = settings(), known = runs.flatMap((run) => Object.keys(run.panels)).sort();
  const titles = unique([...data.panels, ...known]).filter((title) => known.includes(title));
  const others = titles.filter((title) => title.includes("/")); // metrics without a panel of their own
  const main = titles.filter((title) => !title.includes("/"));
  for (const [root, own] of [[$("#curves > .charts"), main], [$("#others .charts"), $("#others").open ? others : []]]) {
    for (const [place, title] of own.entries()) {
      const found = [...root.children].find((node) => node.dataset.title === title);
      const box = found || el("div", { class: "chart", "data-title": title });
      if (root.children[place] !== box) root.insertBefore(box, root.children[place] ?? null);
      const names = runs.filter((run) => !run.isHidden).flatMap((run) => Object.values(run.panels[title] || {}));
      box.hidden = !names.length || !`${title} ${names.join(" ")}`.toLowerCase().includes(how.find);
      if (!box.hidden) drawPanel(title, box, how);
    }
  }
  const of = (run) => (runs.length > 1 ? `${run.short} ` : "");
  const told = runs.flatMap((run) => run.warnings.map((one) => el("li", {}, `${of(run)}step ${one.step}: ${one.text}`)));
  $("#warnings").replaceChildren(...told);
  $("#warnings").hidden = !told.length;
  $("#others").hidden = !others.length;
  $("#nothing").hidden = titles.length > 0;
}

const sizeOf = (box) => ({ width: Math.max(200, box.clientWidth - 24), height: HEIGHT });
function resizeCurves() {
  for (const { plot, area } of plots.values()) plot.setSize(sizeOf(area.parentNode));
}
