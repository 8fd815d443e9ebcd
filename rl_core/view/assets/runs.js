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

const brief = withoutCommon(data.runs.map((run) => run.name));
const runs = data.runs.map((run, n) => ({
  ...run, n, short: brief(run.name), revision: -1, numRows: 0, steps: new Map(), entries: [], warnings: [], panels: {},
  about: {},
}));

// From the server, or out of the report.
async function ask(run, path, query) {
  if (data.report) return inReport[path](data.report[run.n], query);
  const response = await fetch(`api/${run.n}/${path}?${new URLSearchParams(query)}`);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}
const inReport = {
  new: (run) => run.news,
  episode: (run, { number }) => run.episodes[number],
  search: (run, { q }) => {
    const has = (episode) => episode.messages.some((m) => contentOf(m).toLowerCase().includes(q.toLowerCase()));
    return { found: run.episodes.flatMap((episode, n) => (has(episode) ? [n] : [])), next: null };
  },
};

// True if anything is new.
async function refresh(run) {
  const query = { revision: run.revision, rows: run.numRows, entries: run.entries.length, ...(run.revision < 0 && { metrics: 1 }) };
  const found = await ask(run, "new", query);
  const state = () => [run.revision, run.numRows, run.entries.length, run.warnings.length, run.isLive].join();
  const before = state();
  if (found.revision !== run.revision) {
    if (run.revision >= 0) setTimeout(search); // what is read stays until it is found again
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
  Object.assign(run, { revision: found.revision, numRows: found.num_rows, panels: found.panels, about: found.about });
  Object.assign(run, { isLive: found.is_live, isComplete: found.is_complete, warnings: found.warnings, lost: found.lost });
  return before !== state();
}

// Each run by itself: the disk of one may be slow.
async function poll(run) {
  try {
    if (await refresh(run)) draw();
  } catch {
    Object.assign(run, { isComplete: true, lost: "The viewer does not answer; trying again." });
  }
  const told = unique(runs.map((one) => one.lost)).filter(Boolean).join(" ");
  if (told !== ($("#note").dataset.lost || "")) $("#note").dataset.lost = told, note(told);
  if (!data.report) setTimeout(poll, run.isComplete ? 2000 : 0, run);
}

let drawing = 0;
function draw() { // once for what comes together
  drawing ||= setTimeout(() => { drawing = 0; showRuns(); show(); });
}

function showRuns() {
  const focused = document.activeElement?.dataset.run;
  $("#runs").replaceChildren(...runs.map((run) => {
    const parts = [tinted(el("span", { class: "dot" }), run.n), `${run.short} `, run.isLive && el("span", { class: "live" }, "live "),
      `step ${short([...run.steps.keys()].at(-1) ?? 0)}`];
    const toggle = () => { run.isHidden = !run.isHidden; showRuns(); show(); };
    const state = { type: "button", onclick: toggle, "data-run": run.n, "aria-pressed": String(!run.isHidden) };
    return el("li", { title: run.name }, runs.length > 1 ? el("button", state, parts) : parts);
  }));
  if (focused) $(`#runs [data-run="${focused}"]`)?.focus();
}
