"use strict";
// The runs, and what the page has read of them. Texts of models reach the page as text nodes alone.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

function el(tag, props = {}, ...kids) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...kids.flat(Infinity).filter((kid) => kid !== null && kid !== undefined && kid !== false));
  return node;
}
const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hue = (n) => `--c${((n % 8) + 8) % 8}`; // of an actor, a run, a curve
const tinted = (node, n) => (node.style.setProperty("--c", `var(${hue(n)})`), node);
const unique = (values) => [...new Set(values)];
const asText = (value) => (value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value));

function groupsOf(values, keyOf) { // key -> the values that have it
  const groups = new Map();
  for (const value of values) {
    const key = keyOf(value);
    if (groups.has(key)) groups.get(key).push(value);
    else groups.set(key, [value]);
  }
  return groups;
}

// Replaces elements below `root`. The focus returns to the element with the same name, and tables stay where they were scrolled.
function redraw(root, change) {
  const name = (node) => node.dataset.key ?? node.getAttribute("aria-label") ?? node.textContent;
  const before = document.activeElement, hadFocus = root.contains(before), wanted = hadFocus && name(before);
  const tops = $$(".scroll, .columns", root).map((node) => [node.scrollTop, node.scrollLeft]);
  change();
  $$(".scroll, .columns", root).forEach((node, n) => { if (tops[n]) [node.scrollTop, node.scrollLeft] = tops[n]; });
  if (hadFocus && !before.isConnected) $$(before.tagName, root).find((node) => name(node) === wanted)?.focus({ preventScroll: true });
}
const note = (text) => { $("#note").textContent = text; };

function short(value) {
  if (value === null || value === undefined) return "-";
  const isShort = Number.isInteger(value) && Math.abs(value) < 1e15;
  return isShort ? (value || 0).toLocaleString("en") : String(+value.toPrecision(4)); // 0 for -0
}

function withoutCommon(names) { // the first words, where all names begin with them
  const parts = names.map((name) => name.split(/(?<=[ /])/));
  let num = 0;
  while (names.length > 1 && parts.every((p) => p.length > num + 1 && p[num] === parts[0][num])) num += 1;
  return (name) => name.split(/(?<=[ /])/).slice(num).join("");
}

const MOST_SHOWN = 8; // runs that are shown at first; the table of runs chooses others
// The last folders of a run's path, as many as tell it apart.
function brief(path) {
  const parts = path.split("/").filter(Boolean), last = (num) => parts.slice(-num).join("/");
  const others = data.runs.filter((run) => run.name !== path).map((run) => `/${run.name}`);
  for (let num = 1; num < parts.length; num += 1) if (!others.some((other) => other.endsWith(`/${last(num)}`))) return last(num);
  return path;
}
const runs = []; // shown: their data is read
const known = data.runs.map((run, n) => ({
  ...run, n, short: brief(run.name), revision: -1, numRows: 0, steps: new Map(), entries: [], warnings: [], panels: {},
  about: {}, units: {}, notes: {}, isPolled: false,
}));

// Reads the data of these runs from now on, and no other's.
function choose(chosen) {
  runs.splice(0, runs.length, ...known.filter((run) => chosen.includes(run)));
  for (const run of runs.filter((one) => !one.isPolled)) run.isPolled = true, poll(run);
}

// From the server, or out of the report.
async function ask(run, path, query, options) {
  if (data.report) return inReport[path](data.report[run.n], query);
  const response = await fetch(`api/${run.n}/${path}?${new URLSearchParams(query)}`, options);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}
const searchable = (message) => Object.entries(message).map(([key, value]) => (key === "role" ? "" : textOf(value))).join("\n");
const pictures = new Map(); // Name of an image, which is a hash of its content -> URL.
const keepPictures = ({ images }) => Object.entries(images).forEach(([name, url]) => pictures.set(name, url));
const inReport = {
  new: (run) => run.news,
  episode: (run, { number }) => {
    run.episodes.forEach(keepPictures); // An image is in the first episode that shows it.
    return run.episodes[number];
  },
  search: (run, { q }) => {
    const has = (episode) => episode.messages.some((m) => searchable(m).toLowerCase().includes(q.toLowerCase()));
    return { found: run.episodes.flatMap((episode, n) => (has(episode) ? [n] : [])), next: null };
  },
};

// True if anything is new.
async function refresh(run) {
  const query = { revision: run.revision, rows: run.numRows, entries: run.entries.length, ...(run.revision < 0 && { metrics: 1 }) };
  const found = await ask(run, "new", query);
  const state = () => [run.revision, run.numRows, run.entries.length, run.warnings.length, run.isLive, run.isComplete, JSON.stringify(run.notes), run.facts.state, run.facts.num_steps, run.facts.failure, JSON.stringify(run.sessions)].join();
  const before = state();
  if (found.revision !== run.revision) {
    if (run.revision >= 0) setTimeout(search); // The open conversation stays until it is found again.
    Object.assign(run, { steps: new Map(), entries: [] });
  }
  for (const [step, ...values] of found.rows) {
    const at = run.steps.get(step) || {};
    values.forEach((value, i) => { if (value !== null) at[found.names[i]] = value; });
    run.steps.set(step, at);
  }
  for (const values of found.entries) {
    const entry = { run, n: run.entries.length };
    data.fields.forEach((name, i) => { entry[name] = values[i]; });
    run.entries.push(entry);
  }
  Object.assign(run, { revision: found.revision, numRows: found.num_rows, panels: found.panels, about: found.about, units: found.units });
  Object.assign(run, { isLive: found.is_live, isComplete: found.is_complete, warnings: found.warnings, lost: found.lost });
  Object.assign(run, { facts: found.facts, notes: found.notes, sessions: found.sessions });
  return before !== state();
}

// Each run by itself: the disk of one may be slow.
async function poll(run) {
  if (!runs.includes(run)) return void (run.isPolled = false);
  try {
    if (await refresh(run)) draw();
  } catch {
    Object.assign(run, { isComplete: true, lost: "The viewer does not answer; trying again." });
  }
  const messages = unique(runs.map((one) => one.lost)).filter(Boolean).join(" ");
  if (messages !== ($("#note").dataset.lost || "")) $("#note").dataset.lost = messages, note(messages);
  if (!data.report) setTimeout(poll, run.isComplete ? 2000 : 0, run);
}

let drawing = 0;
function draw() { // once for what comes together
  drawing ||= setTimeout(() => { drawing = 0; show(); });
}

function showChips() {
  const chip = (run) => el("li", { title: run.name }, tinted(el("span", { class: "dot" }), run.n), `${run.short} `,
    run.isLive && el("span", { class: "live" }, "live "), `step ${short([...run.steps.keys()].at(-1) ?? 0)}`);
  $("#chips").replaceChildren(...runs.map(chip));
  const line = runs.length === 1 ? factsOf(runs[0]) : "";
  if ($("#facts").textContent !== line) $("#facts").textContent = line;
  $("#facts").hidden = !line;
  const ended = runs.map((run) => [endOf(run), run.facts.state !== "stopped" && "failed"]).filter(([text]) => text);
  if ($("#ended").textContent !== ended.map(([text]) => text).join("")) $("#ended").replaceChildren(...ended.map(([text, kind]) => el("p", { class: kind }, text)));
}

// Why a run ended before its last step; "" for others.
function endOf(run) {
  const { state, failure, signal, step, num_steps: num } = run.facts, of = runs.length > 1 ? `${run.short}: ` : "", at = `step ${short(step)}${num ? ` of ${short(num)}` : ""}`;
  if (state === "failed") return `${of}The run failed at ${at}: ${failure} The traceback is in ${run.name}/failure.txt.`;
  if (state === "stopped") return `${of}Stopped by ${signal} after ${at}, saved; continue with --resume.`;
  if (state !== "ended early") return "";
  return `${of}The run ended at ${at} and recorded no error: it was stopped or killed, perhaps for want of memory. The output of its command may say more${run.facts.engine_logs ? `, and so may ${run.name}/engine_*.log` : ""}.`;
}

const hours = (seconds) => (seconds === null || seconds === undefined ? "-" : seconds < 90 ? `${Math.round(seconds)} s`
  : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);
const day = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString("sv").slice(0, 16) : "-");
const leaf = (path) => String(path).split("/").filter(Boolean).slice(-2).join("/");
const modelsOf = ({ config }) => unique([config.model, ...Object.entries(config).filter(([key]) => /^actors\.[^.]+\.model$/.test(key)).map(([, value]) => value)].filter(Boolean));
const ofEval = (name) => name.replace(/^eval\//, "");
const ends = ({ points }) => unique([points[0][1], points.at(-1)[1]].map(short)).join(" \u2192 ");
function factsOf(run) {
  const { state, step, num_steps, started, duration_s, curves: { evaluation } } = run.facts, { config } = run;
  return [
    modelsOf(run).map(leaf).join(", "), config.algorithm, config.env_path && leaf(config.env_path), `started ${day(started)}`, hours(duration_s),
    `${state} at step ${step}${num_steps ? ` of ${num_steps}` : ""}`, evaluation && `${ofEval(evaluation.name)} ${ends(evaluation)}`,
  ].filter(Boolean).join(" \u00b7 ");
}

// A table that a click on a column's name sorts.
// columns: { name, of: row -> value, node: row -> what the cell shows, isLeft }.
// `headOf`: row, n, all rows -> a table row that stands before it, or null.
function sortable(table, columns, rows, order, onsort, rowProps = () => ({}), headOf = () => null) {
  const [by, sign] = order.startsWith("-") ? [order.slice(1), -1] : [order, 1], column = columns.find((one) => one.name === by);
  const rank = (value) => (value === null || value === undefined || value === "" ? null : value);
  const compare = (a, b) => {
    const [x, y] = [rank(column.of(a)), rank(column.of(b))];
    if (x === null || y === null) return (x === null) - (y === null); // empty ones last
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  };
  const sorted = column ? [...rows].sort(compare) : rows;
  const head = columns.map(({ name, title, isLeft }) => el("th", { scope: "col", class: isLeft && "left", title, "aria-sort": name === by && (sign > 0 ? "ascending" : "descending") },
    button(name, () => onsort(name === by && sign < 0 ? name : name === by ? `-${name}` : columns.find((c) => c.name === name).isDown ? `-${name}` : name))));
  const key = JSON.stringify([columns.map((c) => c.name), order]);
  if (table.dataset.key !== key) table.dataset.key = key, $("thead", table).replaceChildren(el("tr", {}, head));
  const cell = (row, n, all) => (c, i) => el(i || c.isPlain ? "td" : "th", { class: c.isLeft && "left", scope: !i && !c.isPlain && "row" }, c.node ? c.node(row, n, all) : short(c.of(row)));
  const drawn = (row, n, all) => [headOf(row, n, all), el("tr", rowProps(row), columns.map(cell(row, n, all)))];
  return { sorted, fill: (shown) => $("tbody", table).replaceChildren(...shown.flatMap(drawn).filter(Boolean)) };
}

// The table of runs.
const NOT_COMPARED = /(^|\.)(out|run_name|resume|config)$/;
function showRuns() {
  const find = $("#runs [name=find]").value.toLowerCase(), at = params();
  const flags = unique(known.flatMap((run) => Object.keys(run.config))).filter((flag) => !NOT_COMPARED.test(flag) && unique(known.map((run) => asText(run.config[flag]))).length > 1);
  const curve = (key, { facts: { curves } }) => curves[key] ?? { points: [], best: [] };
  const trend = (key, run) => {
    const { name, points } = curve(key, run);
    return points.length > 1 && [scatter([], points, 90, 20, `${name}: ${ends({ points })}`).picture, " "];
  };
  const toggle = (run) => {
    const chosen = runs.includes(run) ? runs.filter((one) => one !== run) : [...runs, run];
    if (chosen.length) go({ runs: namesOf(chosen) });
    else showRuns();
  };
  const columns = [
    { name: "run", isLeft: true, of: (run) => run.name, node: (run) => [
      el("input", { type: "checkbox", "aria-label": `Show ${run.short}`, "data-key": run.n, checked: runs.includes(run), onchange: () => toggle(run) }),
      tinted(el("span", { class: "dot" }), run.n), el("a", { title: run.name, href: `#curves?${new URLSearchParams({ runs: run.name })}` }, run.short)] },
    { name: "state", isLeft: true, of: (run) => run.facts.state, node: (run) => el("span", { class: { live: "live", done: "", stopped: "" }[run.facts.state] ?? "failed" }, run.facts.state) },
    { name: "step", of: (run) => run.facts.step, node: (run) => `${short(run.facts.step)}${run.facts.num_steps ? ` / ${short(run.facts.num_steps)}` : ""}` },
    { name: "best evaluation", isLeft: true, isDown: true, of: (run) => curve("evaluation", run).best[1], node: (run) => {
      const { name, best: [step, value] } = curve("evaluation", run);
      return name ? [trend("evaluation", run), el("b", {}, short(value)), el("span", { class: "soft" }, ` ${ofEval(name)}, step ${short(step)}`)] : "-";
    } },
    { name: "reward", isLeft: true, isDown: true, of: (run) => curve("reward", run).points.at(-1)?.[1], node: (run) => (curve("reward", run).name ? [trend("reward", run), ends(curve("reward", run))] : "-") },
    { name: "duration", of: (run) => run.facts.duration_s, node: (run) => hours(run.facts.duration_s), isDown: true },
    { name: "started", of: (run) => run.facts.started, node: (run) => day(run.facts.started), isDown: true },
    ...flags.map((flag) => ({ name: `--${flag}`, isLeft: true, of: (run) => asText(run.config[flag]), node: (run) => asText(run.config[flag]) })),
  ];
  const rows = known.filter((run) => `${run.name} ${flags.map((flag) => asText(run.config[flag])).join(" ")}`.toLowerCase().includes(find));
  const first = known.length > MOST_SHOWN && !chosenNames ? "newest " : "";
  $("#ticked").textContent = `The ${first}${runs.length} of ${known.length} runs that are ticked are shown on the other pages; tick others here.`;
  redraw($("#runs"), () => {
    const table = sortable($("#runs table"), columns, rows, at.get("sort") ?? "", (sort) => go({ sort }));
    table.fill(table.sorted);
  });
}

async function refreshFacts() {
  if (data.report || view !== "runs") return;
  const response = await fetch("api/facts").catch(() => null);
  if (response?.ok) (await response.json()).forEach((facts, n) => { if (known[n]) known[n].facts = facts; }), showRuns();
}
setInterval(refreshFacts, 5000);
