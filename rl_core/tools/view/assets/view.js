"use strict";
// Texts of models reach the page as text nodes alone.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const el = (tag, props = {}, ...kids) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...kids.flat(Infinity).filter((kid) => kid !== null && kid !== undefined && kid !== false));
  return node;
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (n) => `--c${((n % 8) + 8) % 8}`;
const tinted = (node, n) => (node.style.setProperty("--c", `var(${colour(n)})`), node);
const short = (v) => (v === null || v === undefined ? "-" : Number.isInteger(v) ? v.toLocaleString("en") : String(+v.toPrecision(4)));
const inTail = data.runs.length > 1 ? data.runs.map((r) => r.name.split("/")) : [];
const numShared = inTail.length ? inTail[0].findIndex((part, i) => inTail.some((parts) => parts[i] !== part || i === parts.length - 1)) : 0;
const runs = data.runs.map((run, n) => ({ ...run, n, short: run.name.split("/").slice(Math.max(0, numShared)).join("/"), revision: -1, numRows: 0, steps: new Map(), entries: [], panels: {}, about: {} }));

// What a run has, from the server or out of the report.
const ask = async (run, path, query) => {
  if (data.report) return data.report[run.n][path](query);
  const response = await fetch(`api/${run.n}/${path}?${new URLSearchParams(query)}`);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
};
if (data.report) {
  for (const [n, own] of data.report.entries()) {
    const { news, episodes } = own;
    own.new = () => news;
    own.episode = ({ number }) => episodes[number];
    own.search = ({ q }) => ({ found: episodes.flatMap((e, i) => (JSON.stringify(e.messages).toLowerCase().includes(JSON.stringify(q).slice(1, -1).toLowerCase()) ? [i] : [])), next: null });
  }
}

async function refresh(run) {
  const found = await ask(run, "new", { revision: run.revision, rows: run.numRows, entries: run.entries.length });
  if (found.revision !== run.revision) Object.assign(run, { steps: new Map(), entries: [] });
  const before = [run.numRows, run.entries.length, run.is_live].join();
  for (const [step, ...values] of found.rows) {
    const at = run.steps.get(step) || {};
    values.forEach((value, i) => { if (value !== null) at[found.names[i]] = value; });
    run.steps.set(step, at);
  }
  for (const values of found.entries) run.entries.push(Object.fromEntries([["run", run], ["n", run.entries.length], ...values.map((value, i) => [data.fields[i], value])]));
  Object.assign(run, { revision: found.revision, numRows: found.num_rows, panels: found.panels, about: found.about, is_live: found.is_live, is_complete: found.is_complete });
  return before !== [run.numRows, run.entries.length, run.is_live].join();
}

async function poll() {
  let changed = false;
  try {
    for (const run of runs) changed = (await refresh(run)) || changed;
    if ($("#note").dataset.lost) delete $("#note").dataset.lost, note("");
  } catch (error) {
    $("#note").dataset.lost = "yes", note("The viewer does not answer; trying again.");
  }
  if (changed) showRuns(), show();
  if (!data.report) setTimeout(poll, runs.every((run) => run.is_complete) ? 2000 : 50);
}
const note = (text) => { $("#note").textContent = text; };

function showRuns() {
  $("#runs").replaceChildren(...runs.map((run) => {
    const last = Math.max(0, ...run.steps.keys());
    return el("li", { title: run.name }, tinted(el("span", { class: "dot" }), run.n), `${run.short} `, run.is_live && el("span", { class: "live" }, "live "), `step ${short(last)}`);
  }));
}

// Curves

const plots = new Map(); // of panels, by title
const DASHES = [[undefined, "solid"], [[7, 4], "dashed"], [[2, 3], "dotted"]]; // on the canvas, in the legend
const settings = () => Object.fromEntries(["smooth", "logy", "logx", "find"].map((name) => {
  const input = $(`#curves form [name=${name}]`);
  return [name, input.type === "checkbox" ? input.checked : input.type === "range" ? +input.value : input.value.toLowerCase()];
}));

function smoothed(values, weight) { // exponential, without bias at its beginning
  let total = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value, count = weight * count + (1 - weight);
    return total / count;
  });
}

function withoutCommon(names) { // the first words, where all names begin with them
  const parts = names.map((name) => name.split(/(?<=[ /])/));
  let num = 0;
  while (names.length > 1 && parts.every((p) => p.length > num + 1 && p[num] === parts[0][num])) num += 1;
  return (name) => name.split(/(?<=[ /])/).slice(num).join("");
}

function curvesOf(title, { smooth, logy, logx }) {
  const found = [];
  const steps = [...new Set(runs.flatMap((run) => [...run.steps.keys()]))].filter((s) => !logx || s > 0).sort((a, b) => a - b);
  const briefly = runs.map((run) => withoutCommon(Object.keys(run.panels[title] || {})));
  for (const run of runs) Object.entries(run.panels[title] || {}).forEach(([name, metric], place) => {
    const values = steps.map((step) => { const v = run.steps.get(step)?.[metric]; return v === undefined || (logy && v <= 0) ? null : v; });
    if (values.every((value) => value === null)) return;
    const label = briefly[run.n](name);
    found.push({ metric, run, label: runs.length > 1 ? `${label === title ? "" : `${label}, `}${run.short}` : label, values, raw: values,
      colour: runs.length > 1 ? run.n : place, dash: runs.length > 1 ? place % 3 : 0 });
  });
  if (smooth) for (const curve of found) curve.values = smoothed(curve.values, smooth);
  const used = steps.filter((_, i) => found.some((curve) => curve.raw[i] !== null));
  const at = new Set(used), keep = steps.map((step) => at.has(step));
  for (const curve of found) for (const key of ["values", "raw"]) curve[key] = curve[key].filter((_, i) => keep[i]);
  return { steps: used, found };
}

function drawPanel(title, box, how) {
  const { steps, found } = curvesOf(title, how);
  if (!found.length) return;
  const table = [steps, ...(how.smooth ? found.flatMap((c) => [c.raw, c.values]) : found.map((c) => c.values))];
  const key = JSON.stringify([found.map((c) => [c.label, c.colour]), how]);
  const before = plots.get(title);
  const lasts = found.map((c) => `${c.label} ${short(c.raw.findLast((v) => v !== null))}`).join(", ");
  if (before?.key === key && before.plot.root.isConnected) { before.plot.setData(table); before.area.setAttribute("aria-label", `${title}: ${lasts}`); return; }
  before?.plot.destroy();
  const line = css("--line"), soft = css("--soft"), points = { show: steps.length < 25, size: 5 };
  const series = found.flatMap((c) => {
    const stroke = css(colour(c.colour)), main = { label: c.label, stroke, width: 2, dash: DASHES[c.dash][0], points, spanGaps: true, value: (u, v) => short(v) };
    return how.smooth ? [{ ...main, label: "raw", class: "raw", stroke: stroke + "44", width: 1, points: { show: false } }, main] : [main];
  });
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const latest = (u) => { if (u.cursor.idx === null || u.cursor.idx === undefined) u.setLegend({ idx: u.data[0].length - 1 }, false); };
  const area = el("div", { tabindex: 0, role: "img", "aria-label": `${title}: ${lasts}`, onkeydown: (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    const u = plots.get(title).plot, i = Math.min(steps.length - 1, Math.max(0, (u.cursor.idx ?? steps.length) + move));
    event.preventDefault();
    u.setCursor({ left: u.valToPos(u.data[0][i], "x"), top: 20 });
  } });
  const rows = found.filter((c, i) => found.findIndex((d) => d.metric === c.metric) === i);
  const about = el("details", { class: "about" }, el("summary", { "aria-label": `About ${title}` }, "?"), el("dl", {}, rows.flatMap((c) => [el("dt", {}, c.metric), el("dd", {}, c.run.about[c.metric] || "")])));
  box.replaceChildren(el("h2", {}, title), about, area);
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth - 24), height: 190,
    scales: { x: { time: false, distr: how.logx ? 3 : 1, range: how.logx ? undefined : (u, a, b) => (a === b ? [a - 1, b + 1] : [a, b]) }, y: { distr: how.logy ? 3 : 1, range: how.logy ? undefined : (u, a, b) => (a === b ? [a && a - 1, (a ?? 0) + 1] : uPlot.rangeNum(a, b, 0.08, true)) } },
    series: [{ label: "step", value: (u, v) => short(v) }, ...series],
    axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (u, ticks) => ticks.map((v) => (v === null ? "" : short(v))) }],
    legend: { markers: { width: 2, dash: (u, i) => DASHES[found[how.smooth ? (i >> 1) - 1 + (i & 1) : i - 1].dash][1] } },
    cursor: { sync: { key: "steps" }, y: false },
    hooks: { setCursor: [latest], ready: [latest], setData: [latest], setSeries: [(u, i, change) => { if (how.smooth && change.show !== undefined && i % 2 === 0) u.setSeries(i - 1, { show: change.show }); }] },
  }, table, area);
  const legend = plot.root.querySelector(".u-legend");
  box.append(el("div", { class: "legend", tabindex: 0, role: "group", "aria-label": `Values of ${title}` }, legend));
  plots.set(title, { plot, key, area });
}

function showCurves() {
  const how = settings(), titles = [...new Set(runs.flatMap((run) => Object.keys(run.panels)))];
  const isOther = (title) => title.includes("/");
  for (const [root, chosen] of [[$("#curves > .charts"), titles.filter((t) => !isOther(t))], [$("#others .charts"), titles.filter(isOther)]]) {
    if (root.parentNode.tagName === "DETAILS" && !root.parentNode.open) continue;
    for (const title of chosen) {
      let box = [...root.children].find((node) => node.dataset.title === title);
      if (!box) root.append((box = el("div", { class: "chart", "data-title": title })));
      const names = runs.flatMap((run) => Object.values(run.panels[title] || {})).join(" ");
      box.hidden = Boolean(how.find) && !`${title} ${names}`.toLowerCase().includes(how.find);
      if (!box.hidden) drawPanel(title, box, how);
    }
  }
  $("#others").hidden = !titles.some(isOther);
  if (!titles.length) note("No metrics yet; the page updates by itself.");
  else if ($("#note").textContent.startsWith("No metrics")) note("");
}

// Conversations

const SORTS = {
  "newest first": (a, b) => b.step - a.step || a.run.n - b.run.n || a.n - b.n, "oldest first": (a, b) => a.step - b.step || a.run.n - b.run.n || a.n - b.n,
  "lowest reward": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity), "highest reward": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  longest: (a, b) => b.num_tokens - a.num_tokens,
};
let actors = [], listed = [], numShown = 100, matches = null, current = null, mode = "one", coloured = "";
const filter = (name) => $(`#talks form [name=${name}]`);

function fillFilters() {
  const all = runs.flatMap((run) => run.entries);
  actors = [...new Set(all.map((e) => e.actor))].sort();
  const fill = (name, values, any) => {
    const select = filter(name), options = [...(any ? [["", any]] : []), ...values];
    if (select.dataset.filled === JSON.stringify(options)) return;
    const value = select.value;
    select.dataset.filled = JSON.stringify(options);
    select.replaceChildren(...options.map(([key, text]) => el("option", { value: key }, text)));
    select.value = options.some(([key]) => String(key) === value) ? value : options[0][0];
  };
  fill("run", runs.map((run) => [run.n, run.short]), runs.length > 1 ? "all" : undefined);
  for (const name of ["kind", "env", "actor", "status"]) fill(name, [...new Set(all.map((e) => e[name]))].sort().map((value) => [value, value]), "all");
  fill("sort", Object.keys(SORTS).map((name) => [name, name]));
}

function chosen() {
  const at = Object.fromEntries([...$("#talks form").elements].map((input) => [input.name, input.value]));
  const has = (text, part) => text.toLowerCase().includes(part.toLowerCase());
  return runs.flatMap((run) => run.entries).filter((e) =>
    (at.run === "" || e.run.n === +at.run) && ["kind", "env", "actor", "status"].every((name) => !at[name] || e[name] === at[name]) &&
    (at.step === "" || e.step === +at.step) && ["task", "group", "error"].every((name) => !at[name] || has(e[name], at[name])) &&
    (at.low === "" || (e.reward !== null && e.reward >= +at.low)) && (at.high === "" || (e.reward !== null && e.reward <= +at.high)) &&
    (!matches || matches.has(e))).sort(SORTS[at.sort]);
}

function showList() {
  fillFilters();
  listed = chosen();
  const rewards = listed.map((e) => e.reward).filter((r) => r !== null), total = runs.reduce((sum, run) => sum + run.entries.length, 0);
  const mean = rewards.length ? `, mean reward ${short(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
  $("#count").textContent = total ? `${short(listed.length)} of ${short(total)} trajectories${mean}` : "No trajectories: the run has none yet, or was made with --rollout.save false.";
  const focused = document.activeElement?.closest?.("#list") ? document.activeElement.dataset.key : null;
  $("#list").replaceChildren(...listed.slice(0, numShown).map((e) => el("li", {}, el("button", { type: "button", "data-key": `${e.run.n}/${e.n}`, "aria-current": e === current ? "true" : undefined, onclick: () => open(e) },
    el("span", { class: "meta" }, tinted(el("span", { class: "dot" }), actors.indexOf(e.actor)), `${runs.length > 1 ? `${e.run.short} ` : ""}step ${e.step}${e.kind === "train" ? "" : ` ${e.kind}`}  ${e.task} #${e.index}  ${e.actor}${e.seat && ` ${e.seat}`}`),
    el("span", { class: `reward ${e.status === "failed" ? "failed" : ""}` }, e.status === "failed" ? "failed" : short(e.reward)),
    el("span", { class: "said" }, e.error || e.preview || "(nothing said)")))),
  ...(listed.length > numShown ? [el("li", {}, el("button", { type: "button", onclick: () => { numShown += 200; showList(); } }, "Show more"))] : []));
  if (focused) $(`#list [data-key="${focused}"]`)?.focus();
}

let searching = 0;
async function search() {
  const q = filter("q").value.trim(), own = ++searching;
  matches = q ? new Set() : null;
  for (const run of q ? runs : []) {
    for (let first = 0; first !== null; ) {
      const { found, next } = await ask(run, "search", { q, first });
      if (own !== searching) return;
      found.forEach((n) => matches.add(run.entries[n]));
      first = next;
      showList();
      if (first !== null) $("#count").textContent += `; searched ${short(first)} of ${short(run.entries.length)}`;
    }
  }
  showList();
}

const loaded = new Map();
async function episodeOf(e) {
  const key = `${e.run.n}/${e.run.revision}/${e.n}`;
  if (!loaded.has(key)) loaded.set(key, await ask(e.run, "episode", { number: e.n, revision: e.run.revision }));
  if (loaded.size > 200) loaded.delete(loaded.keys().next().value);
  return { e, ...loaded.get(key) };
}

const sameGroup = (a, b) => a.run === b.run && ["kind", "step", "env", "group"].every((name) => a[name] === b[name]);
async function open(e, keepMode) {
  current = e;
  if (!keepMode) history.replaceState(null, "", `#talks/${e.run.n}/${e.n}`);
  $("#talks").classList.add("reading");
  for (const button of document.querySelectorAll("#list button")) button.toggleAttribute("aria-current", button.dataset.key === `${e.run.n}/${e.n}`);
  const group = e.run.entries.filter((other) => sameGroup(e, other)), episode = group.filter((other) => other.index === e.index);
  const columns = mode === "one" ? [[e]] : mode === "all" ? [episode] : [...new Set(group.map((o) => o.index))].sort((a, b) => a - b).map((i) => group.filter((o) => o.index === i));
  try {
    const read = await Promise.all(columns.map((column) => Promise.all(column.map(episodeOf))));
    if (current === e) showReader(e, read, group, episode);
  } catch (error) { note(error.message); }
}

function showReader(e, columns, group, episode) {
  const modes = [["one", "This actor"], ...(episode.length > 1 ? [["all", "All actors"]] : []), ["group", `Group of ${new Set(group.map((o) => o.index)).size}`]];
  const at = listed.indexOf(e), step = (by) => { if (listed[at + by]) open(listed[at + by]); };
  const flat = columns.flat(), names = [...new Set(flat.flatMap((t) => t.turns.flatMap((turn) => Object.keys(turn.values))))];
  const hasTokens = flat.some((t) => t.turns.length), missing = Object.keys(VALUES).filter((name) => name !== "mask" && !names.includes(name));
  const mine = flat.find((t) => t.e === e), fact = (name, value) => el("span", {}, `${name} `, el("b", {}, typeof value === "number" ? short(value) : value));
  const select = el("select", { onchange: (event) => { coloured = event.target.value; open(e, true); } }, el("option", { value: "" }, "off"),
    Object.entries(VALUES).map(([name, { label }]) => el("option", { value: name, selected: name === coloured, disabled: !hasTokens || missing.includes(name) }, label)));
  $("#reader").replaceChildren(
    el("div", { class: "bar" }, el("button", { type: "button", class: "back", onclick: () => $("#talks").classList.remove("reading") }, "Back to the list"),
      el("button", { type: "button", disabled: at < 1, onclick: () => step(-1) }, "Previous"), el("button", { type: "button", disabled: at < 0 || at + 1 >= listed.length, onclick: () => step(1) }, "Next"),
      el("span", { role: "group", "aria-label": "What is shown" }, modes.map(([name, text]) => el("button", { type: "button", "aria-pressed": String(mode === name), onclick: () => { mode = name; open(e, true); } }, text))),
      el("label", {}, "Colour tokens by ", select)),
    el("h2", {}, `${e.task} #${e.index}, step ${e.step}${e.kind === "train" ? "" : ` ${e.kind}`}`),
    el("p", { class: "facts" }, fact("environment", e.env), fact("actor", e.actor + (e.seat && ` as ${e.seat}`)), fact("reward", e.reward ?? "none"),
      Object.entries(mine.reward_parts).map(([name, value]) => fact(name, value)), fact("status", e.status), fact("turns", e.num_turns), fact("tokens", e.num_tokens), Object.entries(mine.metrics).map(([name, value]) => fact(name, value))),
    ...[e.error && el("p", { class: "failed" }, `Failed: ${e.error}`), mine.note && el("p", { class: "empty" }, mine.note),
      coloured && missing.length && el("p", { class: "empty" }, `Not recorded: ${missing.map((name) => VALUES[name].label).join(", ")}. `, ...(e.kind === "train" ? [el("code", {}, `rl-core replay ${e.run.name} --step ${e.step} --tokens`), " records them."] : ["They are of training steps."])), coloured && scaleOf(flat)].filter(Boolean),
    el("div", { class: "columns" }, columns.map((column) => el("section", {}, columns.length > 1 && el("h3", {}, `#${column[0].e.index}  reward ${[...new Set(column.map((t) => short(t.e.reward)))].join(", ")}${column[0].e.status === "ok" ? "" : `, ${column[0].e.status}`}`),
      coloured ? column.map((t) => tokensOf(t, flat)) : (column.length > 1 ? merged(column) : ownChat(column[0])).map(bubble)))));
}

const contentOf = (message) => Object.entries(message).filter(([key, value]) => !["role", "name"].includes(key) && value && !(Array.isArray(value) && !value.length)).map(([key, value]) => (key === "content" ? "" : `${key}: `) + (typeof value === "string" ? value : JSON.stringify(value, null, 1))).join("\n");
const ownChat = (t) => t.messages.map((m) => ({ who: m.role === "assistant" ? m.name || t.e.actor : m.role, text: contentOf(m), actor: m.role === "assistant" ? m.name || t.e.actor : null }));
const bubble = ({ who, text, actor, to }) => {
  const box = el("div", { class: "says" }, el("div", { class: "who" }, who + (to ? ` to ${to}` : "")), el("p", {}, text));
  return actor === null ? box : tinted(box, actors.indexOf(actor));
};

// One conversation out of each actor's own view, in which the replies of the others are a user's. Nobody records the order of
// speakers, but a reply comes after what its actor had heard.
function merged(column) {
  const views = column.map((t) => ({ t, at: 0, said: t.messages.filter((m) => m.role === "assistant").map(contentOf) }));
  const chat = [], done = [];
  const waits = (view, text) => views.some((other) => other !== view && other.said.some((said, i) => i >= (other.spoke || 0) && said && text.includes(said) && !done.includes(said)));
  const advance = (view, isForced) => {
    const message = view.t.messages[view.at], text = contentOf(message);
    if (message.role === "assistant") {
      chat.push({ who: view.t.e.actor, text, actor: view.t.e.actor }), done.push(text), view.spoke = (view.spoke || 0) + 1;
    } else {
      if (message.role === "user" && !isForced && waits(view, text)) return false;
      const rest = done.reduce((left, said) => (said ? left.replace(said, "") : left), message.role === "user" ? text : "").replace(/\w+ says: */g, "").trim();
      if (message.role !== "user" || (rest && !chat.some((c) => c.text.includes(rest)))) chat.push({ who: message.role, text: message.role === "user" ? rest : text, actor: null, to: view.t.e.actor });
    }
    view.at += 1;
    return true;
  };
  for (;;) {
    const open = views.filter((view) => view.at < view.t.messages.length);
    if (!open.length) return chat;
    if (!open.some((view) => advance(view, false))) advance(open[0], true);
  }
}

// Tokens. A value's scale: one colour, two around a middle, or one for each value.

const VALUES = {
  mask: { label: "mask (what is trained)", kind: "each" }, advantage: { label: "advantage", kind: "around", middle: 0 }, logprob: { label: "logprob (nats)", kind: "low" },
  ratio: { label: "ratio new / old", kind: "around", middle: 1 }, gap: { label: "engine-learner gap (nats)", kind: "around", middle: 0 }, entropy: { label: "entropy (nats)", kind: "high" }, version: { label: "policy version", kind: "each" },
};
const valuesOf = (flat) => flat.flatMap((t) => t.turns.flatMap((turn) => turn.values[coloured] || [])).filter((v) => v !== null);
function paint(flat) {
  const { kind, middle } = VALUES[coloured], all = valuesOf(flat), each = [...new Set(all)].sort((a, b) => a - b);
  const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity), far = Math.max(high - middle, middle - low) || 1;
  const shade = (name, share) => `rgb(${css(name).replaceAll(" ", ",")},${(0.04 + 0.46 * share).toFixed(3)})`;
  if (coloured === "mask") return { each: [0, 1], of: (v) => (v ? shade("--cool", 0.7) : "transparent") };
  if (kind === "each") return { each, of: (v) => css(colour(each.indexOf(v))) + "55" };
  if (kind === "around") return { low: middle - far, high: middle + far, of: (v) => shade(v < middle ? "--cool" : "--warm", Math.abs(v - middle) / far) };
  return { low, high, of: (v) => shade("--warm", ((kind === "low" ? high - v : v - low) / (high - low || 1)) ** 0.7) };
}

function scaleOf(flat) {
  const { each, low, high, of } = paint(flat);
  const swatch = (v, text) => { const box = el("i", { class: "swatch" }); box.style.background = of(v); return [box, text]; };
  if (each) return el("p", { class: "scale" }, coloured === "mask" ? [swatch(1, "sampled and trained"), swatch(0, "context")] : each.slice(0, 12).map((v) => swatch(v, String(v))));
  const bar = el("i");
  bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((s) => of(low + s * (high - low))).join()})`;
  return el("p", { class: "scale" }, short(low), bar, short(high));
}

function tokensOf(t, flat) {
  const { of } = paint(flat), facts = [];
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `Tokens of ${t.e.actor}; arrow keys show their values` });
  for (const turn of t.turns) {
    turn.ids.forEach((id, i) => {
      const at = i - turn.num_new, text = turn.texts ? turn.texts[i] : `${id} `, values = Object.entries(turn.values).filter(([, list]) => at >= 0 && list[at] !== null).map(([name, list]) => [name, list[at]]);
      const span = el("span", { class: at < 0 ? "context" : undefined }, text === "" ? "\u00b7" : text.replaceAll("\n", "\u21b5\n"));
      const value = coloured === "mask" ? Number(at >= 0) : at < 0 ? null : turn.values[coloured]?.[at] ?? null;
      if (value !== null) span.style.background = of(value);
      facts.push([`${JSON.stringify(text)}  id ${id}`, at < 0 ? "context, not trained" : "sampled", ...values.map(([name, v]) => `${VALUES[name]?.label || name}  ${short(v)}`)].join("\n"));
      span.dataset.n = facts.length - 1;
      box.append(span);
    });
  }
  let at = -1;
  const tell = (span) => {
    $(".at", box)?.classList.remove("at");
    at = +span.dataset.n, span.classList.add("at");
    const place = span.getBoundingClientRect(), tip = $("#tip");
    tip.textContent = facts[at], tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${place.bottom + 6 + tip.offsetHeight > innerHeight ? place.top - tip.offsetHeight - 6 : place.bottom + 6}px`;
  };
  const hide = () => { $("#tip").hidden = true, $(".at", box)?.classList.remove("at"); };
  box.addEventListener("mouseover", (event) => event.target.dataset.n && tell(event.target));
  box.addEventListener("mouseleave", hide), box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -facts.length, End: facts.length }[event.key];
    if (event.key === "Escape") hide();
    if (!move || !facts.length) return;
    event.preventDefault();
    tell(box.children[Math.min(facts.length - 1, Math.max(0, at + move))]);
  });
  const who = el("div", { class: "who" }, t.e.actor + (t.e.seat && ` as ${t.e.seat}`));
  return tinted(el("div", { class: "says" }, who, box), actors.indexOf(t.e.actor));
}

// Configuration

function showConfig() {
  const flags = [...new Set(runs.flatMap((run) => Object.keys(run.config)))], text = (v) => (v === undefined || v === null ? "" : typeof v === "string" ? v : JSON.stringify(v));
  const find = $("#config [name=find]").value.toLowerCase(), only = $("#config [name=differ]").checked;
  $("#config thead").replaceChildren(el("tr", {}, el("th", { scope: "col" }, "flag"), runs.map((run) => el("th", { scope: "col" }, run.short))));
  $("#config tbody").replaceChildren(...flags.flatMap((flag) => {
    const values = runs.map((run) => text(run.config[flag])), differs = new Set(values).size > 1;
    if ((only && !differs) || !flag.toLowerCase().includes(find)) return [];
    return [el("tr", { class: differs ? "differs" : undefined }, el("th", { scope: "row" }, flag), values.map((value) => el("td", {}, value)))];
  }));
}

// The page

const VIEWS = { curves: showCurves, talks: showList, config: showConfig };
function show() {
  const [view, run, n] = location.hash.slice(1).split("/"), name = VIEWS[view] ? view : "curves";
  for (const key of Object.keys(VIEWS)) $(`#${key}`).hidden = key !== name;
  for (const link of document.querySelectorAll("nav a")) link.toggleAttribute("aria-current", link.getAttribute("href") === `#${name}`);
  $("#tip").hidden = true;
  VIEWS[name]();
  const asked = n !== undefined && runs[run]?.entries[n];
  if (asked && asked !== current) open(asked);
}
addEventListener("hashchange", show);
$("#curves form").addEventListener("input", showCurves);
$("#others").addEventListener("toggle", showCurves);
$("#config form").addEventListener("input", showConfig);
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
$("#talks form").addEventListener("input", (event) => {
  numShown = 100;
  if (event.target.name === "q") clearTimeout(search.timer), (search.timer = setTimeout(search, 250));
  else showList();
});
$("#list").addEventListener("keydown", (event) => {
  const move = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const next = move && event.target.closest("li")?.[move]?.firstChild;
  if (next) event.preventDefault(), next.focus();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plots.forEach(({ plot }) => plot.destroy()), plots.clear(), show(); });
let width = innerWidth;
addEventListener("resize", () => { if (width !== innerWidth) (width = innerWidth), plots.forEach(({ plot, area }) => plot.setSize({ width: Math.max(200, area.parentNode.clientWidth - 24), height: 190 })); });
$("#config [name=differ]").checked = runs.length > 1;
$(".more").open = innerWidth > 800;
note(data.note || "");
poll();
