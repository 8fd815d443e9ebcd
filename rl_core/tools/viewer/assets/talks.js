// Conversations: the table with its filters, and the one that is read.
let actors = []; // names; their places give them a colour
let listed = [], numShown = 100, current = null;
let matches = null; // of the search
const filter = (name) => $(`#talks form [name=${name}]`);
const nameOf = (e) => (e.player ? `${e.actor} as ${e.player}` : e.actor);
const keyOf = (e) => `${e.run.n}/${e.n}`; // as long as the page is open
// What finds a trajectory again, however many have come since and in whatever order they were read.
const ADDRESS = ["step", "kind", "env", "task", "group", "index", "actor", "player"];

// The fields of a conversation's address, in which "conversation" counts those that one actor has in an episode.
function placeOf(e) {
  const values = Object.fromEntries(ADDRESS.filter((name) => e[name] !== "").map((name) => [name, e[name]]));
  const at = e.run.entries.filter((other) => ADDRESS.every((name) => other[name] === e[name])).indexOf(e);
  return at > 0 ? { ...values, conversation: at + 1 } : values;
}
const noteKey = (e) => String(new URLSearchParams(placeOf(e)));
const noteOf = (e) => (Object.keys(e.run.notes).length ? e.run.notes[noteKey(e)] : undefined);

function entryAt(at) {
  const wanted = ["run", ...ADDRESS].filter((name) => at.has(name)).map((name) => [name, at.get(name)]);
  if (!wanted.some(([name]) => name !== "run")) return undefined;
  const is = (e) => ([name, value]) => (name === "run" ? e.run.name : String(e[name])) === value;
  return runs.flatMap((run) => run.entries).filter((e) => wanted.every(is(e)))[(+at.get("conversation") || 1) - 1];
}

function fill(select, values, any) {
  const options = [...(any ? [["", any]] : []), ...values], value = params().get(fieldOf(select));
  if (select.dataset.filled !== JSON.stringify(options)) select.replaceChildren(...options.map(([key, text]) => el("option", { value: key }, text)));
  select.dataset.filled = JSON.stringify(options);
  select.value = options.some(([key]) => String(key) === value) ? value : options[0]?.[0] ?? "";
}

function fillFilters() {
  const all = runs.flatMap((run) => run.entries);
  fill(filter("run"), runs.map((run) => [run.name, run.short]), runs.length > 1 && "all");
  const kinds = unique(all.map((e) => e.kind)).sort((a, b) => (b === "train") - (a === "train") || a.localeCompare(b));
  fill(filter("kind"), [...kinds, ...(kinds.length > 1 ? ["all"] : [])].map((kind) => [kind, kind])); // Training and evaluations are apart at first.
  for (const name of ["env", "actor", "status"]) {
    fill(filter(name), unique(all.map((e) => e[name])).sort().map((value) => [value, value]), "all");
  }
  actors = unique(all.map((e) => e.actor)).sort();
}

function chosen() {
  const at = Object.fromEntries([...$("#talks form").elements].map((input) => [input.name, input.value]));
  const lower = (text) => text.toLowerCase();
  const tests = [
    at.kind !== "all" && ((e) => e.kind === at.kind),
    ...["env", "actor", "status"].filter((name) => at[name]).map((name) => (e) => e[name] === at[name]),
    ...["task", "group"].filter((name) => at[name]).map((name) => (e) => lower(e[name]).includes(lower(at[name]))),
    at.error && ((e) => lower(`${e.error}\n${reasonOf(e)}`).includes(lower(at.error))),
    at.run && runs.length > 1 && ((e) => e.run.name === at.run),
    at.step !== "" && ((e) => e.step === +at.step),
    at.low !== "" && ((e) => e.reward !== null && e.reward >= +at.low),
    at.high !== "" && ((e) => e.reward !== null && e.reward <= +at.high),
    at.noted && ((e) => (at.noted === "star" ? noteOf(e)?.star : noteOf(e)?.text)),
    matches && ((e) => matches.has(e)),
  ].filter(Boolean);
  return runs.flatMap((run) => run.entries).filter((e) => tests.every((test) => test(e)));
}

// The groups of a run's episodes, until others come. An advantage is a reward less the mean of its group, as in tokens.py.
const groupKey = (e) => `${e.kind}\0${e.step}\0${e.env}\0${e.group}`;
function groupsIn(run) {
  if (run.groups?.entries === run.entries && run.groups.num === run.entries.length) return run.groups;
  const found = groupsOf(run.entries, groupKey);
  for (const group of found.values()) {
    group.num = unique(group.map((e) => e.index)).length; // episodes
    group.isOneTask = group.every((e) => e.task === group[0].task);
    for (const e of group) e.advantage = null;
    for (const side of groupsOf(group.filter((e) => e.reward !== null), nameOf).values()) {
      const baseline = meanOf([...groupsOf(side, (e) => e.index).values()].map((episode) => meanOf(episode.map((e) => e.reward))));
      if (side[0].kind === "train" && side.length > 1) for (const e of side) e.advantage = e.reward - baseline;
    }
  }
  run.groups = { entries: run.entries, num: run.entries.length, of: (e) => found.get(groupKey(e)) };
  return run.groups;
}

// A value on a colour between low (warm) and high (cool), whose middle has none.
function shaded(node, value, low, high) {
  const share = high > low && value !== null && value !== undefined ? (2 * (value - low)) / (high - low) - 1 : 0;
  if (share) node.style.background = `rgb(${css(share < 0 ? "--warm" : "--cool")} / ${(0.3 * Math.min(1, Math.abs(share))).toFixed(2)})`;
  return node;
}

// Of each episode the mean over its conversations.
function episodeRewards(entries) {
  const scored = entries.filter((e) => e.reward !== null);
  return [...groupsOf(scored, (e) => `${numberOf(e)}\0${e.actor}\0${e.player}`).values()].map((episode) => meanOf(episode.map((e) => e.reward)));
}

// Why an episode failed, in the same words for all tasks.
const reasonOf = (e) => e.error.replace(` for task ${e.task}`, "");
const numberOf = (e) => `${e.run.n}\0${e.kind}\0${e.step}\0${e.env}\0${e.group}\0${e.index}`;

// A row for each reason: how many episodes failed for it, and in which steps. A click lists them.
function showReasons() {
  const all = runs.flatMap((run) => run.entries), failed = all.filter((e) => e.status === "failed"), found = new Map();
  for (const e of failed) {
    const row = found.get(reasonOf(e)) ?? { episodes: new Set(), first: e.step, last: e.step };
    row.episodes.add(numberOf(e));
    Object.assign(row, { first: Math.min(row.first, e.step), last: Math.max(row.last, e.step) });
    found.set(reasonOf(e), row);
  }
  const list = (reason) => go({ only_kind: "all", only_status: "failed", only_error: reason }, true);
  const rows = [...found].sort(([, a], [, b]) => b.episodes.size - a.episodes.size).map(([reason, { episodes, first, last }]) =>
    el("tr", {}, el("td", {}, String(episodes.size)), el("td", {}, first === last ? String(first) : `${first} to ${last}`),
      el("td", {}, button(reason, () => list(reason)))));
  $("#why").hidden = !rows.length;
  $("#why summary").textContent = `Why ${new Set(failed.map(numberOf)).size} of ${new Set(all.map(numberOf)).size} episodes failed`;
  if (rows.length !== $("#why tbody").children.length || $("#why").dataset.num !== String(all.length)) {
    $("#why").dataset.num = all.length;
    $("#why tbody").replaceChildren(...rows);
  }
}

const MOST_COLUMNS = 8; // of reward parts, and of metrics
const MARKS = { failed: ["failed", "failed"], truncated: ["cut", "cut"], ok: ["ok", "soft"] };
const isReward = (e, [, value]) => value === e.reward;
const groupOf = (e) => e && groupsIn(e.run).of(e);
// The group's row is above its first row of several.
const isUnderGroup = (e, n, all) => groupOf(e).num > 1 && [all[n - 1], all[n + 1]].map(groupOf).includes(groupOf(e));
function talkColumns(entries, order) {
  const names = (key) => unique(entries.flatMap((e) => Object.keys(e[key]))).sort();
  const hasParts = entries.some((e) => Object.entries(e.parts).length > 1 || Object.entries(e.parts).some((part) => !isReward(e, part)));
  const value = (key) => (name) => ({ name, key, of: (e) => e[key][name] ?? null });
  const ranges = rewardRanges(entries), spread = (e) => { const [low, high] = ranges.get(e.env) ?? [0, 0]; return high - low; };
  const columns = [
    { name: "task", isLeft: true, of: (e) => `${e.task} #${String(e.index).padStart(4, " ")}`, node: (e, n, all) => [
      (runs.length > 1 || actors.length > 1) && tinted(el("span", { class: "dot" }), runs.length > 1 ? e.run.n : actors.indexOf(e.actor)),
      button(`${isGrouped(order) && groupOf(e).isOneTask && isUnderGroup(e, n, all) ? "" : `${e.task} `}#${e.index}`, () => read(e, true), { "data-key": keyOf(e) }),
      noteOf(e)?.star && el("span", { class: "star", title: "starred" }, " \u2605"), noteOf(e)?.text && el("span", { title: noteOf(e).text }, " \u270e")] },
    { name: "step", isDown: true, of: (e) => e.step, node: (e) => `${short(e.step)}${e.kind === "train" ? "" : ` ${e.kind}`}` },
    ...(runs.length > 1 ? [{ name: "run", isLeft: true, of: (e) => e.run.short, node: (e) => el("span", { title: e.run.name }, e.run.short) }] : []),
    ...(actors.length > 1 || entries.some((e) => e.player) ? [{ name: "actor", isLeft: true, of: nameOf, node: nameOf }] : []),
    { name: "reward", of: (e) => e.reward, node: (e) => shaded(el("span", { class: "reward" }, short(e.reward)), e.reward, ...(ranges.get(e.env) ?? [0, 0])) },
    ...(entries.some((e) => e.rescored !== null) ? [
      { name: "rescored", title: "reward by rl-core rescore", of: (e) => e.rescored, node: (e) => shaded(el("span", { class: "reward" }, short(e.rescored)), e.rescored, ...(ranges.get(e.env) ?? [0, 0])) },
      { name: "change", title: "rescored less reward", of: change, node: (e) => shaded(el("span", { class: "reward" }, change(e) > 0 ? "+" : "", short(change(e))), change(e), -spread(e), spread(e)) },
    ] : []),
    { name: "advantage", title: "reward less the mean of its group", of: (e) => e.advantage, node: (e) => shaded(el("span", { class: "reward" }, e.advantage > 0 ? "+" : "", short(e.advantage)), e.advantage, -spread(e), spread(e)) },
    { name: "status", isLeft: true, of: (e) => e.status, node: (e) => el("span", { class: MARKS[e.status]?.[1], title: e.error }, MARKS[e.status]?.[0] ?? e.status) },
    { name: "turns", of: (e) => e.num_turns }, { name: "tokens", of: (e) => e.num_tokens },
    ...(hasParts ? names("parts").map(value("parts")) : []),
    { name: "reply", isLeft: true, of: (e) => e.preview, node: (e) => el("span", { class: "said" }, e.error || e.preview || "(no text)") },
    ...names("metrics").map(value("metrics")),
  ];
  // Columns with one value are a line above the table.
  const isSame = ({ of }) => { const first = of(entries[0]); return entries.every((e) => of(e) === first); };
  const stay = ["task", "reward", "reply", order.replace(/^-/, "")];
  const same = columns.filter((column) => entries.length > 1 && !stay.includes(column.name) && isSame(column)), rest = columns.filter((column) => !same.includes(column));
  const isShown = ({ key }, n) => !key || rest.slice(0, n).filter((column) => column.key === key).length < MOST_COLUMNS;
  const told = ({ name, of }) => { const value = of(entries[0]) ?? ""; return value === "" ? [] : [`${name} ${typeof value === "number" ? short(value) : value}`]; };
  return { columns: rest.filter(isShown), same: same.flatMap(told) };
}

const change = (e) => (e.rescored === null || e.reward === null ? null : e.rescored - e.reward);
const isGrouped = (order) => /^-?step$/.test(order);
// The row above the episodes of a group; a click shows them next to each other.
function groupRow(e, n, all, numColumns) {
  const group = groupOf(e), rewards = episodeRewards(group);
  if (!isUnderGroup(e, n, all) || groupOf(all[n - 1]) === group) return null;
  const low = rewards.reduce((a, b) => Math.min(a, b), Infinity), high = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
  const text = rewards.length ? `, reward ${short(meanOf(rewards))}${high > low ? ` (${short(low)} to ${short(high)})` : ""}` : "";
  const open = () => { go({ mode: "group" }); read(e, true); };
  return el("tr", { class: "group" }, el("td", { colspan: numColumns }, el("span", {},
    button(group.isOneTask ? e.task : `group ${e.group}`, open, { "data-key": `group ${keyOf(e)}` }), ` ${short(group.num)} episodes${text}`)));
}

const OF_ROWS = ["sft", "dpo", "rm"]; // algorithms of runs that sample no episodes
function withoutTalks() {
  if (runs.every((run) => OF_ROWS.includes(run.config.algorithm))) return "No conversations: runs of --algorithm sft, dpo and rm learn from rows and play no episodes.";
  return runs.some((run) => run.isLive) ? "No conversations yet, or the run has --rollout.save false." : "No conversations: the run ended before its first, or had --rollout.save false.";
}

function showTalks() {
  fillFilters();
  showReasons();
  const entries = chosen(), rewards = episodeRewards(entries), at = params(), order = at.get("sort") ?? "-step";
  runs.forEach(groupsIn);
  const { columns, same } = talkColumns(entries, order);
  $("#same").textContent = same.length ? `Equal in all: ${same.join(", ")}` : "";
  const total = runs.reduce((sum, run) => sum + run.entries.length, 0), asks = `${at.get("q") ?? ""}/${total}`;
  if (asks !== searched && runs.every((run) => run.isComplete)) searched = asks, setTimeout(search);
  const mean = rewards.length ? `, mean reward ${short(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
  $("#count").textContent = total ? `${short(entries.length)} of ${short(total)} trajectories${mean}`
    : runs.every((run) => run.isComplete) ? withoutTalks() : "Loading the conversations ...";
  const props = (e) => ({ "data-key": keyOf(e), "aria-current": e === current && "true", onclick: (event) => event.target.tagName !== "BUTTON" && read(e, true) });
  entries.sort((a, b) => a.run.n - b.run.n || a.n - b.n);
  redraw($(".side"), () => {
    const head = isGrouped(order) ? (...row) => groupRow(...row, columns.length) : undefined;
    const table = sortable($("#list table"), columns, entries, order, (sort) => go({ sort }), props, head);
    listed = table.sorted;
    table.fill(listed.slice(0, numShown));
    $("#list > button")?.remove();
    if (listed.length > numShown) $("#list").append(button("Show more", () => { numShown += 200; showTalks(); }));
  });
  if (!listed.length && !current) $("#reader").replaceChildren(el("p", { class: "soft" }, total ? "No conversation is open." : $("#count").textContent));
  const asked = entryAt(at), isAddressed = ADDRESS.some((name) => at.has(name));
  if (asked && asked !== current) read(asked);
  else if (isAddressed && !asked && runs.length && runs.every((run) => run.isComplete)) note("The conversation of this address is not here.");
  else if (!isAddressed && innerWidth <= 800) $("#talks").classList.remove("reading");
  else if (!isAddressed && listed.length) read(listed[0]);
}

function move(by) {
  const at = listed.indexOf(current), next = listed[at < 0 ? 0 : at + by];
  if (next) read(next), $(`#list tr[data-key="${keyOf(next)}"]`)?.scrollIntoView({ block: "nearest" });
}

let searches = 0, searched = "/0"; // text and number of trajectories of the last search
async function search() {
  const q = (params("talks").get("q") ?? "").trim(), number = ++searches;
  matches = q ? new Set() : null;
  for (const run of q ? runs : []) {
    for (let first = 0; first !== null; ) {
      const asked = ask(run, "search", { q, first, revision: run.revision });
      const { found, next } = await asked.catch((error) => (note(error.message), { found: [], next: null }));
      if (number !== searches) return;
      found.forEach((n) => matches.add(run.entries[n]));
      first = next;
      if (view === "talks") showTalks();
      if (first !== null) $("#count").textContent += `; searched ${short(first)} of ${short(run.entries.length)}`;
    }
  }
  if (view === "talks") showTalks();
}

const loaded = new Map(); // the last ones that were read
async function episodeOf(e) {
  const key = `${keyOf(e)}/${e.run.revision}`;
  if (!loaded.has(key)) {
    const { images, ...episode } = await ask(e.run, "episode", { number: e.n, revision: e.run.revision });
    keepPictures({ images });
    loaded.set(key, episode);
  }
  if (loaded.size > 200) loaded.delete(loaded.keys().next().value);
  return { e, ...loaded.get(key) };
}

const MODES = ["all", "one", "group"]; // all actors of the episode, one of them, or the group's episodes
let reads = 0;
// `isNew`: Back returns to the conversation before.
async function read(e, isNew = false) {
  const number = ++reads, before = current;
  current = e;
  if (before !== e || isNew) {
    const place = { ...Object.fromEntries([...ADDRESS, "conversation", "turn", "token"].map((name) => [name, null])), ...placeOf(e) };
    const at = params(), keeps = entryAt(at) === e ? { turn: at.get("turn"), token: at.get("token") } : {};
    write({ run: e.run.name, ...place, ...keeps }, isNew && before !== e);
    setLinks();
    $("#talks").classList.add("reading");
  }
  for (const node of $$("#list tr[data-key]")) setCurrent(node, node.dataset.key === keyOf(e));
  const mode = MODES.includes(params().get("mode")) ? params().get("mode") : "all";
  const isNear = (other) => ["kind", "step", "env", "group"].every((name) => e[name] === other[name]);
  const group = e.run.entries.filter(isNear), indices = unique(group.map((other) => other.index)).sort((a, b) => a - b);
  const episode = group.filter((other) => other.index === e.index);
  const columns = { one: [[e]], all: [episode], group: indices.map((i) => group.filter((other) => other.index === i)) }[mode];
  try {
    let found = await Promise.all(columns.map((column) => Promise.all(column.map(episodeOf))));
    if (number !== reads) return;
    if (mode === "all" && !hearEachOther(found[0])) found = found[0].map((t) => [t]);
    const modes = [["all", episode.length > 1 ? "All actors" : "Episode"], ["group", `Group of ${indices.length}`]];
    showReader(e, found, mode, episode.length > 1 ? [["one", "This actor"], ...modes] : modes);
  } catch (error) {
    note(error.message);
  }
}

async function writeNote(e, change) {
  const { star = false, text = "" } = { ...noteOf(e), ...change };
  e.run.notes = { ...e.run.notes, [noteKey(e)]: { star, text } }; // at once: a star may follow a note before the answer
  try {
    e.run.notes = await ask(e.run, "note", { key: noteKey(e), star, text }, { method: "POST", headers: { "X-Rl-Core": "note" } });
    note("");
  } catch (error) {
    note(`The note was not written: ${error.message}`);
  }
  showTalks();
  if ("star" in change) read(e); // A note's field stays: the click that left it may still be on its way.
}

async function copy(text, name) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyOfField(text); // Pages of http:// addresses of other machines have no clipboard.
    note(`Copied the ${name}.`);
  } catch {
    note(`The browser refused; the ${name}: ${text}`);
  }
}
function copyOfField(text) {
  const field = el("textarea", { "aria-hidden": "true" }), before = document.activeElement;
  field.value = text;
  document.body.append(field), field.select();
  const isCopied = document.execCommand("copy");
  field.remove(), before?.focus();
  if (!isCopied) throw new Error("refused");
}
// A report, and a server that others reach, take no notes.
const takesNotes = () => !data.report && /^(localhost|127\.0\.0\.1|\[::1\])$/.test(location.hostname);

function showReader(e, columns, mode, modes) {
  const shown = columns.flat(), own = shown.find((t) => t.e === e), at = listed.indexOf(e), isRaw = params().has("raw");
  const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, typeof value === "number" ? short(value) : value));
  const facts = (values) => Object.entries(values).map(([name, value]) => fact(name, value));
  const step = (text, by) => button(text, () => move(by), { disabled: at < 0 || !listed[at + by], title: by > 0 ? "j" : "k" });
  const isPressed = ([name, text]) => button(text, () => { go({ mode: name === "all" ? null : name }); read(current); }, { "aria-pressed": String(mode === name) });
  const saved = noteOf(e) ?? { star: false, text: "" }, { turns, ...json } = own;
  const colour = VALUES[params().get("colour")] && !missing(shown).includes(params().get("colour")) ? params().get("colour") : "";
  const parts = [
    el("div", { class: "bar" }, button("Back to the list", () => $("#talks").classList.remove("reading"), { class: "back" }),
      step("Previous", -1), step("Next", 1), el("span", { role: "group", "aria-label": "What is shown" }, modes.map(isPressed)),
      el("label", {}, "Colour tokens by ", chooseColour(shown, colour)),
      button("Raw", () => { go({ raw: isRaw ? null : 1 }); read(current); }, { "aria-pressed": String(isRaw), title: "Messages as JSON" }),
      button("Copy link", () => copy(location.href, "link")), button("Copy JSON", () => copy(JSON.stringify({ ...json, e: undefined }, null, 1), "JSON")),
      takesNotes() ? button(saved.star ? "\u2605" : "\u2606", () => writeNote(e, { star: !saved.star }), { "aria-label": "Star", "aria-pressed": String(saved.star) })
        : saved.star && el("span", { class: "star" }, "\u2605")),
    el("h2", {}, `${e.task} #${e.index}, step ${e.step}${e.kind === "train" ? "" : ` ${e.kind}`}`),
    el("p", { class: "facts" }, fact("environment", e.env), fact("actor", nameOf(e)),
      fact("reward", e.reward ?? "none"), facts(own.reward_parts), fact("status", e.status), fact("turns", e.num_turns),
      fact("tokens", e.num_tokens), facts(own.metrics), el("a", { href: withRuns("tasks", new URLSearchParams({ run: e.run.name, task: e.task, env: e.env, kind: e.kind, actor: e.actor })) }, "this task in all steps")),
    takesNotes() ? el("input", { class: "noted", "aria-label": "Note", placeholder: "note", maxlength: 1000, value: saved.text, onchange: (event) => writeNote(e, { text: event.target.value }) })
      : saved.text && el("p", {}, `Note: ${saved.text}`),
    e.error && el("pre", { class: "failed" }, `Failed: ${e.error}`),
    own.note && el("p", { class: "soft" }, own.note),
    Object.keys(own.columns || {}).length > 0 && el("details", { class: "row", open: true }, el("summary", {}, "Row of the data"),
      el("dl", {}, Object.entries(own.columns).map(([name, text]) => [el("dt", {}, name), el("dd", {}, folded(text, text))]))),
    colour && [howToRecord(e, shown), scaleOf(shown, colour)],
    isRaw ? shown.map((t) => el("section", {}, el("h3", {}, nameOf(t.e)), el("pre", {}, JSON.stringify(t.messages, null, 1))))
      : colour ? el("div", { class: "columns" }, columns.map((column) => el("section", {}, columns.length > 1 && headOf(column, mode), column.map((t) => tokensOf(t, shown, colour)))))
        : [columns.length === 1 && outline(columns[0]), branches(columns.map((column) => ({ column, chat: chatOf(column) })), mode)],
    own.log && el("section", {}, el("h3", {}, "Log"), folded(el("pre", {}, own.log), own.log)),
  ];
  note(data.note || "");
  const isSame = $("#reader").dataset.key === keyOf(e), top = scrollY;
  $("#reader").dataset.key = keyOf(e);
  $("#talks").classList.toggle("grouped", mode === "group");
  $("#tip").hidden = true;
  redraw($("#reader"), () => $("#reader").replaceChildren(...parts.flat(Infinity).filter(Boolean)));
  const turn = $(`#reader [data-turn="${params().get("turn")}"]`);
  if (turn) turn.scrollIntoView({ block: "center" }), turn.classList.add("asked");
  else if (isSame) scrollTo(0, top);
}

function headOf(column, mode) {
  const rewards = unique(column.map((t) => short(t.e.reward))).join(", "), { index, status } = column[0].e;
  return el("h3", {}, `${mode === "group" ? `#${index}` : nameOf(column[0].e)}  reward ${rewards}${status === "ok" ? "" : `, ${status}`}`);
}

// The turns of a long episode: a click goes to one.
function outline(column) {
  const items = chatOf(column).filter((item) => item.turn);
  if (items.length < 4) return null;
  const numTokens = (item) => item.tokens ?? "";
  return el("details", { class: "outline", open: items.length < 30 }, el("summary", {}, `${items.length} turns`), el("ol", {}, items.map((item, n) =>
    el("li", {}, button(`${actors.length > 1 ? `${item.who}, ` : ""}${short(numTokens(item))} tokens${item.reward ? `, reward ${short(item.reward)}` : ""}`, () => {
      const node = $(`#reader [data-turn="${item.turn}"]`);
      node?.scrollIntoView({ block: "center" }), node?.classList.add("asked");
      go({ turn: item.turn });
    }, { "data-nth": n })))));
}

// Conversations next to each other. What all have in common comes once, before them; within an episode that is a tree.
function branches(chats, mode) {
  const same = (a, b) => a && b && a.who === b.who && JSON.stringify(a.message) === JSON.stringify(b.message);
  if (chats.length === 1) return chats[0].chat.map(bubble);
  let num = 0;
  const isCommon = (n) => chats.every(({ chat }) => same(chat[n], chats[0].chat[n])) && (mode !== "group" || !chats[0].chat[n]?.actor);
  while (num < Math.min(...chats.map(({ chat }) => chat.length)) && isCommon(num)) num += 1;
  const rests = chats.map(({ column, chat }) => ({ column, chat: chat.slice(num) })), groups = [];
  for (const rest of rests) {
    const group = mode === "group" || !rest.chat.length ? null : groups.find(([other]) => same(other.chat[0], rest.chat[0]));
    if (group) group.push(rest);
    else groups.push([rest]);
  }
  const section = (group) => el("section", {}, group.length === 1 && headOf(group[0].column, mode), branches(group, mode));
  return [num > 0 && el("div", { class: "common" }, chats[0].chat.slice(0, num).map(bubble)), el("div", { class: "columns" }, groups.map(section))];
}

function bubble({ who, actor, to, message, results, turn, reward }) {
  const head = [to ? `${who} to ${to}` : who, reward ? ` ${reward > 0 ? "+" : ""}${short(reward)}` : ""].join("");
  const isSystem = message.role === "system", nodes = shownMessage(message, results);
  const box = el("div", { class: "says", "data-turn": turn }, el("div", { class: "who" }, head),
    isSystem ? el("details", {}, el("summary", {}, `System prompt, ${short(words(textOf(message.content)))} words`), nodes) : nodes);
  return actor ? tinted(box, actors.indexOf(actor)) : box;
}

// The items of a chat: a call of a tool holds its result, which has no item then.
function chatOf(column) {
  if (column.length > 1) return mergedChat(column);
  const [{ e, messages }] = column, items = [], used = new Set();
  messages.forEach((message, n) => {
    if (used.has(n)) return;
    const isReply = message.role === "assistant", results = [];
    (isReply && Array.isArray(message.tool_calls) ? message.tool_calls : []).forEach((one, i) => {
      const at = messages.findIndex((m, k) => k > n && !used.has(k) && m.role === "tool" && (!m.tool_call_id || m.tool_call_id === one?.id) && messages.slice(n + 1, k).every((b) => b.role === "tool"));
      if (at >= 0) used.add(at), results[i] = messages[at];
    });
    items.push({ who: isReply ? message.name || e.actor : message.role === "tool" && message.name ? `tool ${message.name}` : message.role, actor: isReply ? message.name || e.actor : null, message, results, ...(isReply && turnOf(column[0], message)) });
  });
  return items;
}

// What others hear of a reply is a paragraph of a user message, without thoughts.
const repliesOf = ({ messages }) => messages.filter((m) => m.role === "assistant").map(heardOf);
const heardOf = ({ content }) => (typeof content === "string" ? content.split("</think>").at(-1).trim() : "");
const paragraphs = (text) => `\n${text.replace(/^\w+ says: /gm, "")}\n`;
const isHeard = (text, reply) => Boolean(reply) && paragraphs(text).includes(`\n${reply}\n`);

const hasPlaces = (column) => column.every((t) => t.message_indices?.length);

function hearEachOther(column) {
  if (column.length === 1 || hasPlaces(column)) return true;
  const hears = (t, other) => repliesOf(other).some((r) => t.messages.some((m) => m.role === "user" && isHeard(textOf(m.content), r)));
  return column.every((t) => column.some((other) => other !== t && (hears(t, other) || hears(other, t))));
}

// The number of a reply among its conversation's turns, its reward and its tokens. The task itself may hold replies.
function turnOf({ e, messages, turns, turn_rewards: rewards }, message) {
  const replies = messages.filter((m) => m.role === "assistant"), number = replies.indexOf(message) - (replies.length - e.num_turns);
  const turn = turns[number];
  return number < 0 ? {} : { turn: number + 1, reward: rewards?.[number], tokens: turn ? turn.ids.length - turn.num_new : undefined };
}

// One conversation out of each actor's own view. Where the order of speakers is not recorded, a reply comes after all that its
// actor had heard.
function mergedChat(column) {
  const views = column.map((t) => ({ ...t, at: 0, replies: repliesOf(t), num: 0 })), chat = [], replies = [];
  const waits = (view, text) => views.some((other) => other !== view &&
    other.replies.slice(other.num).some((reply) => isHeard(text, reply) && !replies.includes(reply)));
  const advance = (view, isForced) => {
    const message = view.messages[view.at], text = textOf(message.content), name = nameOf(view.e);
    if (message.role === "assistant") {
      replies.push(heardOf(message)), view.num += 1;
      const facts = turnOf(view, message);
      chat.push({ who: name, message, actor: view.e.actor, ...facts, turn: facts.turn && `${view.e.actor}-${facts.turn}` });
    } else if (message.role !== "user") {
      chat.push({ who: message.role, message, to: name });
    } else {
      if (!isForced && waits(view, text)) return false;
      const without = (part, reply) => (isHeard(part, reply) ? paragraphs(part).replace(`\n${reply}\n`, "\n") : part);
      const rest = replies.reduce(without, text).trim();
      const content = withPictures(rest, imagesIn(message.content));
      if (rest && !chat.some((said) => (said.rest ?? textOf(said.message.content)) === rest)) chat.push({ who: "user", message: { role: "user", content }, to: name, rest });
    }
    view.at += 1;
    return true;
  };
  const isReply = (message) => message.role === "assistant";
  for (const view of hasPlaces(column) ? views : []) { // the task itself may hold replies
    view.replyAt = view.messages.flatMap((message, at) => (isReply(message) ? [at] : [])).slice(-view.message_indices.length);
  }
  const turns = views.flatMap((view) => (view.replyAt || []).map((at, n) => ({ view, at, place: view.message_indices[n] })));
  for (const { view, at } of turns.sort((a, b) => a.place - b.place)) while (view.at <= at) advance(view, true);
  for (;;) {
    const open = views.filter((view) => view.at < view.messages.length).sort((a, b) => a.num - b.num);
    if (!open.length) return chat;
    if (!open.some((view) => advance(view, false))) advance(open[0], true);
  }
}
