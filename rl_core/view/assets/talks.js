// Conversations: the list with its filters, and the one that is read.
const SORTS = {
  "newest first": (a, b) => b.step - a.step || a.run.n - b.run.n || a.n - b.n,
  "oldest first": (a, b) => a.step - b.step || a.run.n - b.run.n || a.n - b.n,
  "lowest reward": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "highest reward": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  longest: (a, b) => b.num_tokens - a.num_tokens,
};
let actors = []; // names; their places give them a colour
let listed = [], numShown = 100, current = null;
let matches = null; // of the search
let mode = "all"; // of an episode's actors, "one" of them, or the "group" of episodes
const filter = (name) => $(`#talks form [name=${name}]`);
const nameOf = (e) => (e.seat ? `${e.actor} as ${e.seat}` : e.actor);
const keyOf = (e) => `${e.run.n}/${e.n}`; // as long as the page is open
// What finds a trajectory again, however many have come since and in whatever order they were read.
const ADDRESS = ["step", "kind", "env", "task", "group", "index", "actor", "seat"];

function addressOf(e) {
  const values = ADDRESS.filter((name) => e[name] !== "").map((name) => [name, e[name]]);
  const at = e.run.entries.filter((other) => ADDRESS.every((name) => other[name] === e[name])).indexOf(e);
  if (at > 0) values.push(["conversation", at + 1]); // of an episode that returned several of this actor
  return `#talks?${new URLSearchParams([["run", e.run.name], ...values])}`;
}

function entryAt(query) {
  const { conversation = 1, ...wanted } = Object.fromEntries(new URLSearchParams(query));
  const is = (e) => ([name, value]) => (name === "run" ? e.run.name : String(e[name])) === value;
  return runs.flatMap((run) => run.entries).filter((e) => Object.entries(wanted).every(is(e)))[conversation - 1];
}

function fillFilters() {
  const all = runs.flatMap((run) => run.entries);
  const fill = (name, values, any) => {
    const select = filter(name), options = [...(any ? [["", any]] : []), ...values], value = select.value;
    if (select.dataset.filled === JSON.stringify(options)) return;
    select.dataset.filled = JSON.stringify(options);
    select.replaceChildren(...options.map(([key, text]) => el("option", { value: key }, text)));
    select.value = options.some(([key]) => String(key) === value) ? value : options[0][0];
  };
  fill("run", runs.map((run) => [run.n, run.short]), runs.length > 1 && "all");
  for (const name of ["kind", "env", "actor", "status"]) {
    fill(name, unique(all.map((e) => e[name])).sort().map((value) => [value, value]), "all");
  }
  fill("sort", Object.keys(SORTS).map((name) => [name, name]));
  actors = unique(all.map((e) => e.actor)).sort();
}

function chosen() {
  const at = Object.fromEntries([...$("#talks form").elements].map((input) => [input.name, input.value]));
  const lower = (text) => text.toLowerCase();
  const tests = [
    ...["kind", "env", "actor", "status"].filter((name) => at[name]).map((name) => (e) => e[name] === at[name]),
    ...["task", "group"].filter((name) => at[name]).map((name) => (e) => lower(e[name]).includes(lower(at[name]))),
    at.error && ((e) => lower(`${e.error}\n${reasonOf(e)}`).includes(lower(at.error))),
    at.run !== "" && ((e) => e.run.n === +at.run),
    at.step !== "" && ((e) => e.step === +at.step),
    at.low !== "" && ((e) => e.reward !== null && e.reward >= +at.low),
    at.high !== "" && ((e) => e.reward !== null && e.reward <= +at.high),
    matches && ((e) => matches.has(e)),
  ].filter(Boolean);
  return runs.flatMap((run) => run.entries).filter((e) => tests.every((test) => test(e))).sort(SORTS[at.sort]);
}

// Of each episode the mean over its conversations.
function episodeRewards(entries) {
  const episodes = new Map();
  for (const e of entries.filter((entry) => entry.reward !== null)) {
    const key = JSON.stringify([e.run.n, e.kind, e.step, e.env, e.group, e.index, e.actor, e.seat]);
    episodes.set(key, [...(episodes.get(key) ?? []), e.reward]);
  }
  return [...episodes.values()].map((rewards) => rewards.reduce((a, b) => a + b) / rewards.length);
}

// Why an episode failed, in the same words for all tasks.
const reasonOf = (e) => e.error.replace(` for task ${e.task}`, "");
const numberOf = (e) => JSON.stringify([e.run.n, e.kind, e.step, e.env, e.group, e.index]);

// A row for each reason: how many episodes failed for it, and in which steps. A click lists them.
function showReasons() {
  const all = runs.flatMap((run) => run.entries), failed = all.filter((e) => e.status === "failed"), found = new Map();
  for (const e of failed) {
    const row = found.get(reasonOf(e)) ?? { episodes: new Set(), first: e.step, last: e.step };
    row.episodes.add(numberOf(e));
    Object.assign(row, { first: Math.min(row.first, e.step), last: Math.max(row.last, e.step) });
    found.set(reasonOf(e), row);
  }
  const list = (reason) => { filter("status").value = "failed"; filter("error").value = reason; showList(); };
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

function showList() {
  fillFilters();
  showReasons();
  listed = chosen();
  const rewards = episodeRewards(listed);
  const total = runs.reduce((sum, run) => sum + run.entries.length, 0);
  const mean = rewards.length ? `, mean reward ${short(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
  $("#count").textContent = total ? `${short(listed.length)} of ${short(total)} trajectories${mean}`
    : "No trajectories: the run has none yet, was made with --rollout.save false, or learns from rows (sft, dpo, rm).";
  const focused = document.activeElement?.closest?.("#list") && document.activeElement.dataset.key;
  const more = button("Show more", () => { numShown += 200; showList(); });
  const rows = [...listed.slice(0, numShown).map(row), ...(listed.length > numShown ? [more] : [])];
  $("#list").replaceChildren(...rows.map((node) => el("li", {}, node)));
  if (focused) $(`#list [data-key="${focused}"]`)?.focus();
}

function row(e) {
  const run = runs.length > 1 ? `${e.run.short} ` : "", kind = e.kind === "train" ? "" : ` ${e.kind}`;
  const node = button([], () => read(e), { "data-key": keyOf(e), "aria-current": e === current && "true" });
  node.append(
    el("span", { class: "meta" }, tinted(el("span", { class: "dot" }), runs.length > 1 ? e.run.n : actors.indexOf(e.actor)),
      `${run}step ${e.step}${kind}  ${e.task} #${e.index}  ${e.actor} ${e.seat}`),
    el("span", { class: e.status === "failed" ? "reward failed" : "reward" }, e.status === "failed" ? "failed" : short(e.reward)),
    el("span", { class: "said" }, e.error || e.preview || "(nothing said)"),
  );
  return node;
}

let searches = 0;
async function search() {
  const q = filter("q").value.trim(), own = ++searches;
  matches = q ? new Set() : null;
  for (const run of q ? runs : []) {
    for (let first = 0; first !== null; ) {
      const asked = ask(run, "search", { q, first, revision: run.revision });
      const { found, next } = await asked.catch((error) => (note(error.message), { found: [], next: null }));
      if (own !== searches) return;
      found.forEach((n) => matches.add(run.entries[n]));
      first = next;
      showList();
      if (first !== null) $("#count").textContent += `; searched ${short(first)} of ${short(run.entries.length)}`;
    }
  }
  showList();
}

const loaded = new Map(); // the last ones that were read
async function episodeOf(e) {
  const key = `${keyOf(e)}/${e.run.revision}`;
  if (!loaded.has(key)) loaded.set(key, await ask(e.run, "episode", { number: e.n, revision: e.run.revision }));
  if (loaded.size > 200) loaded.delete(loaded.keys().next().value);
  return { e, ...loaded.get(key) };
}

let reads = 0;
async function read(e) {
  const own = ++reads;
  current = e;
  history.replaceState(null, "", addressOf(e));
  $("#talks").classList.add("reading");
  for (const node of $$("#list button")) setCurrent(node, node.dataset.key === keyOf(e));
  const isNear = (other) => ["kind", "step", "env", "group"].every((name) => e[name] === other[name]);
  const group = e.run.entries.filter(isNear), indices = unique(group.map((other) => other.index)).sort((a, b) => a - b);
  const episode = group.filter((other) => other.index === e.index);
  const columns = { one: [[e]], all: [episode], group: indices.map((i) => group.filter((other) => other.index === i)) }[mode];
  try {
    let found = await Promise.all(columns.map((column) => Promise.all(column.map(episodeOf))));
    if (own !== reads) return;
    if (mode === "all" && !hearEachOther(found[0])) found = found[0].map((t) => [t]);
    const modes = [["all", episode.length > 1 ? "All actors" : "Episode"], ["group", `Group of ${indices.length}`]];
    showReader(e, found, episode.length > 1 ? [["one", "This actor"], ...modes] : modes);
  } catch (error) {
    note(error.message);
  }
}

function showReader(e, columns, modes) {
  const shown = columns.flat(), own = shown.find((t) => t.e === e), at = listed.indexOf(e);
  const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, typeof value === "number" ? short(value) : value));
  const facts = (values) => Object.entries(values).map(([name, value]) => fact(name, value));
  const step = (text, by) => button(text, () => read(listed[at + by]), { disabled: at < 0 || !listed[at + by] });
  const isPressed = ([name, text]) => button(text, () => { mode = name; read(e); }, { "aria-pressed": String(mode === name) });
  const parts = [
    el("div", { class: "bar" }, button("Back to the list", () => $("#talks").classList.remove("reading"), { class: "back" }),
      step("Previous", -1), step("Next", 1), el("span", { role: "group", "aria-label": "What is shown" }, modes.map(isPressed)),
      el("label", {}, "Colour tokens by ", chooseColour(e, shown))),
    el("h2", {}, `${e.task} #${e.index}, step ${e.step}${e.kind === "train" ? "" : ` ${e.kind}`}`),
    el("p", { class: "facts" }, fact("environment", e.env), fact("actor", nameOf(e)),
      fact("reward", e.reward ?? "none"), facts(own.reward_parts), fact("status", e.status), fact("turns", e.num_turns),
      fact("tokens", e.num_tokens), facts(own.metrics)),
    e.error && el("p", { class: "failed" }, `Failed: ${e.error}`),
    own.note && el("p", { class: "soft" }, own.note),
    Object.keys(own.columns || {}).length > 0 && el("section", { class: "row" }, el("h3", {}, "Row"),
      el("dl", {}, Object.entries(own.columns).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]))),
    coloured && [howToRecord(e, shown), scaleOf(shown)],
    el("div", { class: "columns" }, columns.map((column) => el("section", {}, columns.length > 1 && headOf(column),
      coloured ? column.map((t) => tokensOf(t, shown)) : chatOf(column).map(bubble)))),
    own.log && el("section", {}, el("h3", {}, "Log"), el("pre", {}, own.log)),
  ];
  note(data.note || "");
  $("#reader").replaceChildren(...parts.flat().filter(Boolean));
  $("#tip").hidden = true;
}

function headOf(column) {
  const rewards = unique(column.map((t) => short(t.e.reward))).join(", "), { index, status } = column[0].e;
  return el("h3", {}, `${mode === "all" ? nameOf(column[0].e) : `#${index}`}  reward ${rewards}${status === "ok" ? "" : `, ${status}`}`);
}

function contentOf(message) {
  const isShown = ([key, value]) => key !== "role" && key !== "name" && value && !(Array.isArray(value) && !value.length);
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  const line = ([key, value]) => (key === "content" ? text(value) : `${key}: ${text(value)}`);
  return Object.entries(message).filter(isShown).map(line).join("\n");
}

function bubble({ who, text, actor, to }) {
  const box = el("div", { class: "says" }, el("div", { class: "who" }, to ? `${who} to ${to}` : who), el("p", {}, text));
  return actor ? tinted(box, actors.indexOf(actor)) : box;
}

function chatOf(column) {
  if (column.length > 1) return mergedChat(column);
  const [{ e, messages }] = column;
  const speaker = (m) => (m.role === "assistant" ? m.name || e.actor : null);
  return messages.map((m) => ({ who: speaker(m) || m.role, text: contentOf(m), actor: speaker(m) }));
}

// What others hear of a reply is a paragraph of a user message, without thoughts.
const repliesOf = ({ messages }) => messages.filter((m) => m.role === "assistant").map(heardOf);
const heardOf = ({ content }) => (typeof content === "string" ? content.split("</think>").at(-1).trim() : "");
const paragraphs = (text) => `\n${text.replace(/^\w+ says: /gm, "")}\n`;
const isHeard = (text, reply) => Boolean(reply) && paragraphs(text).includes(`\n${reply}\n`);

const hasPlaces = (column) => column.every((t) => t.places?.length);

function hearEachOther(column) {
  if (column.length === 1 || hasPlaces(column)) return true;
  const hears = (t, other) => repliesOf(other).some((r) => t.messages.some((m) => m.role === "user" && isHeard(contentOf(m), r)));
  return column.every((t) => column.some((other) => other !== t && (hears(t, other) || hears(other, t))));
}

// One conversation out of each actor's own view. Where the order of speakers is not recorded, a reply comes after all that its
// actor had heard.
function mergedChat(column) {
  const views = column.map((t) => ({ ...t, at: 0, replies: repliesOf(t), num: 0 })), chat = [], replies = [];
  const waits = (view, text) => views.some((other) => other !== view &&
    other.replies.slice(other.num).some((reply) => isHeard(text, reply) && !replies.includes(reply)));
  const advance = (view, isForced) => {
    const message = view.messages[view.at], text = contentOf(message), name = nameOf(view.e);
    if (message.role === "assistant") {
      replies.push(heardOf(message)), view.num += 1, chat.push({ who: name, text, actor: view.e.actor });
    } else if (message.role !== "user") {
      chat.push({ who: message.role, text, to: name });
    } else {
      if (!isForced && waits(view, text)) return false;
      const without = (part, reply) => (isHeard(part, reply) ? paragraphs(part).replace(`\n${reply}\n`, "\n") : part);
      const rest = replies.reduce(without, text).trim();
      if (rest && !chat.some((said) => said.text === rest)) chat.push({ who: "user", text: rest, to: name });
    }
    view.at += 1;
    return true;
  };
  const isReply = (message) => message.role === "assistant";
  for (const view of hasPlaces(column) ? views : []) { // the task itself may hold replies
    view.replyAt = view.messages.flatMap((message, at) => (isReply(message) ? [at] : [])).slice(-view.places.length);
  }
  const turns = views.flatMap((view) => (view.replyAt || []).map((at, n) => ({ view, at, place: view.places[n] })));
  for (const { view, at } of turns.sort((a, b) => a.place - b.place)) while (view.at <= at) advance(view, true);
  for (;;) {
    const open = views.filter((view) => view.at < view.messages.length).sort((a, b) => a.num - b.num);
    if (!open.length) return chat;
    if (!open.some((view) => advance(view, false))) advance(open[0], true);
  }
}
