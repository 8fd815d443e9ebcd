// One task over all steps: its attempts, its reward, and which tasks are solved, never solved or forgotten.
const STATES = {
  solved: "all of the last step's attempts earn the most",
  learning: "some, not all, of the last step's attempts earn the most",
  forgotten: "earlier attempts earned the most, none of the last step's",
  never: "no attempt earned the most",
};
let compared = []; // two attempts of the task that is open

const meanOf = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const taskKey = (e) => JSON.stringify([e.run.n, e.env, e.task]);

// The attempts that the fields choose, of one run.
function attempts() {
  const at = params(), run = runs.find((one) => one.name === at.get("run")) ?? runs[0];
  const kinds = unique((run?.entries ?? []).map((e) => e.kind)).sort((a, b) => (a === "train") - (b === "train")); // Evaluations first.
  fill($("#tasks [name=run]"), runs.map((one) => [one.name, one.short]));
  fill($("#tasks [name=kind]"), kinds.map((kind) => [kind, kind]));
  const names = unique((run?.entries ?? []).map((e) => e.actor)).sort(); // One at a time: a game's winner always earns the most.
  fill($("#tasks [name=actor]"), names.map((name) => [name, name]));
  fill($("#tasks [name=state]"), Object.entries(STATES).map(([name, text]) => [name, `${name}: ${text}`]), "all");
  $("#tasks [name=run]").closest("label").hidden = runs.length < 2;
  const [kind, actor] = [at.get("kind") ?? kinds[0], at.get("actor") ?? names[0]];
  return (run?.entries ?? []).filter((e) => e.kind === kind && e.actor === actor);
}

function rewardRanges(entries) { // environment -> its smallest and largest reward
  const ranges = new Map();
  for (const { env, reward } of entries.filter((e) => e.reward !== null)) {
    const [low, high] = ranges.get(env) ?? [reward, reward];
    ranges.set(env, [Math.min(low, reward), Math.max(high, reward)]);
  }
  return ranges;
}

function tasksOf(entries) {
  const ranges = rewardRanges(entries);
  const earnsMost = ({ env, reward }) => { // Where all rewards are 0, nobody does.
    const [low, high] = ranges.get(env) ?? [0, 0];
    return reward !== null && reward >= high - 1e-6 && (high > low || high > 0);
  };
  return [...groupsOf(entries, taskKey).values()].map((all) => {
    const steps = [...groupsOf(all, (e) => e.step)].sort(([a], [b]) => a - b);
    const means = steps.flatMap(([step, at]) => { const scored = at.filter((e) => e.reward !== null); return scored.length ? [[step, meanOf(scored.map((e) => e.reward))]] : []; });
    const last = steps.at(-1)[1], share = last.filter(earnsMost).length / last.length;
    const state = share === 1 ? "solved" : share > 0 ? "learning" : all.some(earnsMost) ? "forgotten" : "never";
    return { env: all[0].env, task: all[0].task, all, means, state, first: means[0]?.[1] ?? null, last: means.at(-1)?.[1] ?? null };
  });
}

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, props, ...kids) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  node.append(...kids.flat());
  return node;
}

// Points (step, value) in a box of this size; circles are attempts, the line their means.
function scatter(points, line, width, height, label) {
  const all = [...points, ...line], [pad, xs, ys] = [4, all.map(([x]) => x), all.map(([, y]) => y)];
  const range = (values) => [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const [[x0, x1], [y0, y1]] = [range(xs), range(ys)];
  const share = (value, low, high) => (high > low ? (value - low) / (high - low) : 0.5);
  const at = ([x, y]) => [pad + share(x, x0, x1) * (width - 2 * pad), height - pad - share(y, y0, y1) * (height - 2 * pad)];
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label, class: "scatter" },
    line.length > 1 ? svg("polyline", { points: line.map((point) => at(point).map((v) => v.toFixed(1)).join()).join(" ") }) : [],
    points.slice(0, 2000).map((point) => svg("circle", { cx: at(point)[0].toFixed(1), cy: at(point)[1].toFixed(1), r: 3 })));
  return { picture, low: y0, high: y1, x0, x1 };
}

// A scatter() with the ends of its axes; nothing if all points have one x.
function framed({ picture, low, high, x0, x1 }, nameOfX) {
  if (!(x1 > x0)) return "";
  return el("div", { class: "histogram" }, el("span", {}, short(high)), el("span", {}, short(low)), picture, el("span", { class: "x" }, nameOfX(x0)), el("span", { class: "x end" }, nameOfX(x1)));
}

// Shares of values over steps: a column for each step (or span of steps), a row for each of 20 intervals.
function histogram(title, entries, valueOf) {
  const values = entries.flatMap((e) => (valueOf(e) === null ? [] : [[e.step, valueOf(e)]]));
  if (!values.length) return null;
  const [low, high] = values.reduce(([a, b], [, v]) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const steps = unique(values.map(([step]) => step)).sort((a, b) => a - b), columns = Math.min(60, steps.length), rows = 20;
  const columnOf = new Map(steps.map((step, i) => [step, Math.floor((i * columns) / steps.length)]));
  const counts = Array.from({ length: columns }, () => new Array(rows).fill(0)), totals = new Array(columns).fill(0);
  for (const [step, value] of values) {
    const column = columnOf.get(step), row = Math.min(rows - 1, Math.floor(((value - low) / (high - low || 1)) * rows));
    counts[column][row] += 1, totals[column] += 1;
  }
  const bars = counts.flatMap((column, i) => column.flatMap((count, j) => (count
    ? [svg("rect", { x: i, y: rows - 1 - j, width: 1.02, height: 1.02, opacity: (0.15 + 0.85 * (count / totals[i]) ** 0.6).toFixed(2) })] : [])));
  const means = steps.map((step) => meanOf(values.filter(([at]) => at === step).map(([, v]) => v)));
  const label = `${title}: mean ${short(means[0])} at step ${steps[0]}, ${short(means.at(-1))} at step ${steps.at(-1)}`;
  return el("div", { class: "chart" }, el("h2", {}, title), el("div", { class: "histogram" }, el("span", {}, short(high)), el("span", {}, short(low)),
    svg("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, bars),
    el("span", { class: "x" }, `step ${short(steps[0])}`), el("span", { class: "x end" }, short(steps.at(-1)))));
}

function showTasks() {
  const at = params(), entries = attempts(), all = tasksOf(entries), find = $("#tasks [name=find]").value.toLowerCase();
  if (!actors.length) actors = unique(runs.flatMap((run) => run.entries).map((e) => e.actor)).sort();
  const count = (state) => all.filter((task) => task.state === state).length;
  $("#states").textContent = all.length ? `${short(all.length)} tasks: ${Object.keys(STATES).map((name) => `${short(count(name))} ${name}`).join(", ")}` : withoutTalks();
  $("#spread").replaceChildren(...[histogram("reward over steps", entries, (e) => e.reward), histogram("length over steps (tokens)", entries, (e) => e.num_tokens)].filter(Boolean));
  const shown = all.filter((task) => (!at.get("state") || task.state === at.get("state")) && `${task.env} ${task.task}`.toLowerCase().includes(find));
  const open = ({ env, task }) => { compared = []; go({ env, task }, true); };
  const columns = [
    { name: "task", isLeft: true, of: ({ task }) => task, node: (row) => button(row.task, () => open(row)) },
    ...(unique(all.map(({ env }) => env)).length > 1 ? [{ name: "environment", isLeft: true, of: ({ env }) => env, node: ({ env }) => env }] : []),
    { name: "state", isLeft: true, of: ({ state }) => state, node: ({ state }) => el("span", { class: state, title: STATES[state] }, state) },
    { name: "attempts", isDown: true, of: (row) => row.all.length }, { name: "first", of: ({ first }) => first }, { name: "last", of: ({ last }) => last },
    { name: "gain", isDown: true, of: ({ first, last }) => (first === null || last === null ? null : last - first) },
    { name: "trend", of: ({ means }) => means.length, node: ({ means }) => (means.length > 1 ? scatter([], means, 90, 20, `mean reward from ${short(means[0][1])} to ${short(means.at(-1)[1])}`).picture : "") },
  ];
  const isOpen = (row) => row.task === at.get("task") && row.env === (at.get("env") ?? row.env);
  let sorted;
  redraw($("#tasklist"), () => {
    const table = sortable($("#tasklist table"), columns, shown, at.get("sort") ?? "-attempts", (sort) => go({ sort }), (row) => ({ "aria-current": isOpen(row) && "true" }));
    sorted = table.sorted;
    table.fill(sorted.slice(0, numShown));
    $("#tasklist > button")?.remove();
    if (sorted.length > numShown) $("#tasklist").append(button("Show more", () => { numShown += 200; showTasks(); }));
  });
  const asked = all.find(isOpen) ?? (at.has("task") ? null : sorted[0]);
  if (asked) redraw($("#task"), () => showTask(asked));
  else $("#task").replaceChildren(el("p", { class: "soft" }, at.has("task") ? "The task of this address is not here." : ""));
}

function showTask(row) {
  const { env, task, all, means, state } = row;
  compared = compared.filter((e) => all.includes(e)); // A resumed run's are others.
  const scored = all.filter((e) => e.reward !== null).map((e) => [e.step, e.reward]);
  const plot = scatter(scored, means, 460, 150, `reward of ${all.length} attempts over steps`);
  const toggle = (e) => { compared = compared.includes(e) ? compared.filter((one) => one !== e) : [...compared, e].slice(-2); redraw($("#task"), () => showTask(row)); };
  const rows = [...all].sort((a, b) => a.step - b.step || a.index - b.index).slice(0, 300).map((e) => el("tr", { "aria-current": compared.includes(e) && "true" },
    el("td", {}, el("input", { type: "checkbox", "aria-label": `Compare step ${e.step} #${e.index}`, checked: compared.includes(e), onchange: () => toggle(e) })),
    el("td", {}, short(e.step)), el("td", { class: "left" }, button(`#${e.index}`, () => { kept.talks = ""; go({ run: e.run.name, only_kind: e.kind, ...placeOf(e) }, true, "talks"); })),
    el("td", {}, short(e.reward)), el("td", { class: "left" }, el("span", { class: "said" }, e.error || e.preview || "(no text)"))));
  const before = $("#differences"), pair = compared.length === 2 ? compared.map((e) => `${keyOf(e)}/${e.run.revision}`).join() : "";
  const isSame = pair && before?.dataset.pair === pair; // New steps leave the differences that are read.
  const differences = isSame ? before : el("div", { id: "differences", "data-pair": pair }, el("p", { class: "soft" }, pair ? "reading" : "Check two attempts to see where their replies differ."));
  $("#task").replaceChildren(el("h2", {}, `${task} of ${env}`), el("p", { class: "facts" }, el("span", {}, "state ", el("b", { class: state }, state)), el("span", {}, `attempts ${short(all.length)}`)),
    framed(plot, (step) => `step ${short(step)}`), differences, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attempts" }, el("table", {}, el("thead", {}, el("tr", {}, ["", "step", "attempt", "reward", "reply"].map((name) => el(name ? "th" : "td", { scope: name ? "col" : undefined, class: /attempt|reply/.test(name) && "left" }, name)))), el("tbody", {}, rows))));
  if (pair && !isSame) compareReplies(compared, differences);
}

// The words of two attempts' replies: those of one alone are marked.
async function compareReplies(pair, box) {
  try {
    const [a, b] = await Promise.all(pair.map(episodeOf));
    const reply = (t) => t.messages.filter((m) => m.role === "assistant").map((m) => [textOf(m.reasoning_content), textOf(m.content), Array.isArray(m.tool_calls) ? JSON.stringify(m.tool_calls) : ""].filter(Boolean).join("\n")).join("\n\n").slice(0, 20_000);
    const parts = Diff.diffWordsWithSpace(reply(a), reply(b), { timeout: 1000 });
    const name = (t) => `step ${t.e.step} #${t.e.index}, reward ${short(t.e.reward)}`;
    const side = (t, omitted) => el("section", {}, el("h3", {}, name(t)), el("pre", {}, parts ? parts.filter((part) => !part[omitted]).map((part) => el(part.added ? "ins" : part.removed ? "del" : "span", {}, part.value)) : reply(t)));
    box.replaceChildren(el("div", { class: "columns" }, side(a, "added"), side(b, "removed")));
  } catch (error) {
    box.replaceChildren(el("p", { class: "failed" }, error.message));
  }
}
