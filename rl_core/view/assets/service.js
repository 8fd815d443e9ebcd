// The service of environments: its problems, environments, workers, owners and sessions.
const [ASK_AGAIN_MS, SLOW_MS] = [3000, 5000];
const openedMs = Date.now();
let served = null, heardMs = null, firstSession = 0, asking = 0;

function span(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const perSecond = (rate) => (rate === null ? "-" : `${+rate.toPrecision(2)}/s`);

async function pollService() {
  clearTimeout(asking);
  const field = (name) => $(`#service form [name=${name}]`).value;
  const query = { first: firstSession, find: field("find"), order: field("order") };
  const slow = setTimeout(() => heard(whyOld(`${data.service} has not answered for 5 s.`)), SLOW_MS);
  try {
    const response = await fetch(`api/service?${new URLSearchParams(query)}`);
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    const isOld = query.first !== firstSession || query.find !== field("find") || query.order !== field("order");
    if (!isOld) served = found, showService();
  } catch {
    heard("The viewer does not answer; trying again.");
  }
  clearTimeout(slow);
  clearTimeout(asking);
  asking = setTimeout(pollService, ASK_AGAIN_MS);
}

// Why there are no newer numbers; "" if there are. Those that were heard last stay, greyed.
function heard(why) {
  const isAway = Boolean(why);
  if ($("#heard").textContent !== why) $("#heard").textContent = why;
  $("#heard").classList.toggle("failed", isAway);
  $("#news").classList.toggle("old", isAway);
  const num = served?.problems.length ?? 0;
  $("nav a[href='#service']").textContent = isAway ? "Service (away)" : num ? `Service (${num})` : "Service";
}

function whyOld(error) {
  if (!error) return "";
  const since = heardMs === null ? `this page was opened at ${clock(openedMs)}` : clock(heardMs);
  return `Nothing heard since ${since}. ${error}`;
}

function fill(table, head, rows) {
  const cells = (tag, texts, more = {}) => texts.map((text) => el(tag, more, text));
  const body = rows.map(([texts, kind]) => el("tr", { class: kind }, el("th", { scope: "row" }, texts[0]), cells("td", texts.slice(1))));
  table.replaceChildren(el("thead", {}, el("tr", {}, cells("th", head, { scope: "col" }))), el("tbody", {}, body));
  table.parentNode.hidden = !rows.length;
}

function showService() {
  if (!served) return;
  if (served.heard_s !== null) heardMs = Date.now() - 1000 * served.heard_s;
  heard(whyOld(served.error));
  $("#news").hidden = served.heard_s === null;
  const selection = getSelection();
  if (!selection.isCollapsed && $("#news").contains(selection.anchorNode)) return; // somebody copies a name
  $("#problems").replaceChildren(...served.problems.map((text) => el("li", {}, text)));
  $("#problems").hidden = !served.problems.length;
  const sum = (name) => served.envs.reduce((total, env) => total + env[name], 0);
  const facts = {
    service: data.service, up: span(served.uptime_s), workers: short(served.workers.length), sessions: short(served.num_sessions),
    waiting: short(sum("queued")), "turns now": perSecond(served.between_s && sum("turns_per_s")),
    "last look": served.between_s === null ? "the first" : `${served.between_s.toFixed(1)} s after the one before`,
  };
  $("#facts").replaceChildren(...Object.entries(facts).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value))));
  fill($("#envs"), ["environment", "sessions", "room for", "waiting", "turns", "turns now", "ended"], served.envs.map((env) => {
    const ended = env.ended.map(([status, num, rate]) => `${short(num)} ${status.replaceAll("_", " ")}${rate ? ` (${perSecond(rate)})` : ""}`);
    return [[env.env, short(env.sessions), short(env.capacity), short(env.queued), short(env.turns), perSecond(env.turns_per_s), ended.join(", ")]];
  }));
  fill($("#workers"), ["worker", "host", "PID", "MiB", "state", "sessions", "room for", "turns now", "errors"], served.workers.map((worker) => {
    const state = worker.draining ? "draining" : worker.silent_s < 5 ? "here" : `silent for ${span(worker.silent_s)}`;
    const numbers = [short(worker.sessions), short(worker.capacity), perSecond(worker.turns_per_s), short(worker.errors)];
    return [[worker.name, worker.host, worker.pid, worker.memory_mib.toFixed(0), state, ...numbers], worker.draining && "draining"];
  }));
  $("#nobody").hidden = served.workers.length > 0;
  showSessions();
}

function showSessions() {
  fill($("#owners"), ["owner", "environment", "sessions", "oldest", "longest idle", "turns"], served.owners.map((row) => [
    [row.owner === null ? "others" : row.owner || "(no name)", row.env, short(row.sessions), span(row.oldest_s), span(row.idle_s), short(row.turns)],
  ]));
  fill($("#sessions"), ["session", "environment", "owner", "task", "age", "idle", "turns", "state"], served.sessions.map((row) => [
    [row.session, row.env, row.owner || "(no name)", row.task, span(row.age_s), span(row.idle_s), short(row.turns), row.state],
  ]));
  const { num_found: num, num_sessions: all, sessions } = served, last = firstSession + sessions.length;
  const which = sessions.length ? `${short(firstSession + 1)} to ${short(last)} of ${short(num)}` : "none";
  $("#range").textContent = !all ? "No session runs." : num < all ? `${which}, of ${short(all)} in all` : which;
  const [before, next] = ["before", "next"].map((name) => $(`#service form [name=${name}]`));
  before.disabled = firstSession === 0, next.disabled = last >= num;
  if (!sessions.length && firstSession) turn(-firstSession); // fewer are left than were passed over
}

function turn(by) {
  firstSession = Math.max(0, firstSession + by);
  pollService();
}

if (data.service) {
  $("nav a[href='#service']").hidden = false;
  $("#service form [name=before]").addEventListener("click", () => turn(-data.page));
  $("#service form [name=next]").addEventListener("click", () => turn(data.page));
  $("#service form").addEventListener("input", () => { clearTimeout(asking), (asking = setTimeout(turn, 250, -firstSession)); });
  pollService();
}
