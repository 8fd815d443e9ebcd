// The address holds what is shown: the view, its fields, and which runs.
const VIEWS = { curves: showCurves, talks: showTalks, tasks: showTasks, sessions: showSessions, config: showConfig, runs: showRuns };
const kept = Object.fromEntries(Object.keys(VIEWS).map((name) => [name, ""])); // view -> its fields, as they were when it was left
let view = "curves", chosenNames = ""; // names of shown runs; "" for the first ones
const params = (name = view) => new URLSearchParams(kept[name]);
const namesOf = (chosen) => (chosen.length === known.length ? "" : chosen.map((run) => run.name).join("|"));
const withRuns = (name, values = params(name)) => {
  if (chosenNames) values.set("runs", chosenNames);
  return `#${name}${values.size ? `?${values}` : ""}`;
};

// Changes fields of the address; null or "" removes one. go() also shows what it names. `isNew`: Back returns to what was shown before.
function write(changes, isNew = false, name = view) {
  const values = params(name);
  for (const [key, value] of Object.entries(changes)) {
    if (key === "runs") chosenNames = value;
    else if (value === "" || value === null || value === undefined || value === false) values.delete(key);
    else values.set(key, value);
  }
  kept[name] = String(values);
  history[isNew ? "pushState" : "replaceState"](null, "", withRuns(name));
}
function go(changes, isNew = false, name = view) {
  write(changes, isNew, name);
  readAddress();
}

function readAddress() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s), values = new URLSearchParams(query ?? "");
  view = VIEWS[name] ? name : known.length > MOST_SHOWN || (data.is_folder && known.length > 1) ? "runs" : "curves";
  chosenNames = values.get("runs") ?? "", values.delete("runs");
  kept[view] = String(values);
  const asked = ["talks", "tasks"].includes(view) && known.find((run) => run.name === values.get("run"));
  const names = [...chosenNames.split("|"), chosenNames && asked?.name];
  const chosen = known.filter((run) => names.includes(run.name)), newest = [...known].sort((a, b) => (b.facts.started ?? 0) - (a.facts.started ?? 0));
  choose(chosen.length ? chosen : asked && known.length > MOST_SHOWN ? [asked] : newest.slice(0, MOST_SHOWN));
  fillForm(document.forms.length && $(`#${view} form`));
  show();
}

// Fields of a form have the names of the address; those of conversations begin with "only_".
const fieldOf = (input) => (input.form.closest("#talks") && input.name !== "q" ? `only_${input.name}` : input.name);
function fillForm(form) {
  if (!form) return;
  for (const input of form.elements) {
    if (!input.name) continue;
    const value = params().get(fieldOf(input)) ?? "";
    if (input === document.activeElement && input.type !== "checkbox") continue;
    if (input.type === "checkbox") input.checked = value !== "" && value !== "0";
    else if (input.tagName === "SELECT" && value && ![...input.options].some((option) => option.value === value)) input.append(el("option", { value }, value));
    if (input.type !== "checkbox") input.value = input.type === "range" ? value || 0 : value;
  }
}

const setLinks = () => $$("nav a").forEach((link) => link.setAttribute("href", withRuns(link.getAttribute("href").slice(1).split("?")[0])));
const setCurrent = (node, is) => (is ? node.setAttribute("aria-current", "true") : node.removeAttribute("aria-current"));
function show() {
  for (const key of Object.keys(VIEWS)) $(`#${key}`).hidden = key !== view;
  for (const link of $$("nav a")) {
    const name = link.getAttribute("href").slice(1).split("?")[0];
    setCurrent(link, name === view);
  }
  setLinks();
  $("nav a:last-child").hidden = known.length < 2;
  $("nav a[href^='#sessions']").hidden = !runs.some((run) => run.sessions?.length);
  if (view !== "talks") $("#tip").hidden = true;
  showChips();
  VIEWS[view]();
}

const MAX_SESSIONS = 500; // Rows of the table, which is drawn again with each change.
const [MAX_POINTS, MEAN_OF] = [2000, 20]; // Sessions of the picture, and of a point of its line.
// A run's sessions (--online): their rewards over time, and a table, the newest first.
function showSessions() {
  const rows = runs.flatMap((run) => (run.sessions ?? []).map((session) => ({ run, ...session }))).reverse();
  const counts = [...groupsOf(rows, ({ state }) => state.split(/ in |:/)[0])].map(([state, all]) => `${all.length} ${state}`);
  if (rows.length > MAX_SESSIONS) counts.push(`the first ${MAX_SESSIONS} are shown`);
  $("#sessions p").textContent = rows.length ? counts.join(", ") : "No sessions yet. The page updates by itself.";
  const column = (name, of) => ({ name, isLeft: true, of, node: (row) => el("span", { class: "said", title: of(row) }, of(row)) });
  const columns = [
    { name: "session", of: (row) => row.number },
    { ...column("state", (row) => row.state), node: ({ state }) => state },
    { name: "reward", of: (row) => row.reward },
    { name: "replies", of: (row) => row.replies },
    { name: "versions", of: (row) => row.versions.at(-1), node: ({ versions }) => unique([versions[0], versions.at(-1)]).join(" to ") },
    column("task", (row) => row.task),
    column("last reply", (row) => row.last_reply),
    column("feedback", (row) => row.feedback.join(" / ")),
  ];
  const rewards = rows.filter(({ reward }) => reward !== null).map((row) => [row.began_s, row.reward]).sort(([a], [b]) => a - b).slice(-MAX_POINTS);
  const means = rewards.map(([at], i) => [at, meanOf(rewards.slice(Math.max(0, i + 1 - MEAN_OF), i + 1).map(([, reward]) => reward))]);
  const label = `reward of ${short(rewards.length)} sessions over time, and the mean of ${MEAN_OF}`;
  const plot = rewards.length && framed(scatter(rewards, means, 460, 150, label), day);
  $("#rewards").replaceChildren(...(plot ? [el("h2", {}, "Reward over time"), plot] : []));
  redraw($("#sessions"), () => {
    const table = sortable($("#sessions table"), columns, rows, params().get("sort") ?? "", (sort) => go({ sort }));
    table.fill(table.sorted.slice(0, MAX_SESSIONS));
  });
}

// The table of flags.
function showConfig() {
  const find = $("#config [name=find]").value.toLowerCase(), only = $("#config [name=differ]").checked;
  const rows = unique(runs.flatMap((run) => Object.keys(run.config))).flatMap((flag) => {
    const values = runs.map((run) => asText(run.config[flag])), differs = unique(values).length > 1;
    if ((only && !differs) || !flag.toLowerCase().includes(find)) return [];
    return [el("tr", { class: differs && "differs" }, el("th", { scope: "row" }, flag), values.map((value) => el("td", {}, value)))];
  });
  const head = [["flag"], ...runs.map((run) => [run.short, run.name])].map(([name, title]) => el("th", { scope: "col", title }, name));
  $("#config thead").replaceChildren(el("tr", {}, head));
  $("#config tbody").replaceChildren(...rows);
}

addEventListener("hashchange", readAddress);
addEventListener("resize", resizeCurves);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  plots.forEach(({ plot }) => plot.destroy());
  plots.clear();
  show();
});
let typing;
for (const form of document.forms) {
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    const value = target.type === "checkbox" ? (target.checked ? "1" : "") : target.type === "range" && target.value === "0" ? "" : target.value;
    numShown = 100;
    if (target.name === "q") clearTimeout(typing), typing = setTimeout(go, 250, { q: value });
    else go({ [fieldOf(target)]: value });
  });
}
addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isTyping) return event.target.blur();
  if (isTyping || $("#keys").open) return;
  if (event.key === "?") $("#keys").showModal();
  if (view !== "talks") return;
  const by = { j: 1, k: -1 }[event.key];
  if (by) event.preventDefault(), move(by);
  if (event.key === "/") event.preventDefault(), filter("q").focus();
});
$("#help").addEventListener("click", () => $("#keys").showModal());
$("#keys button").addEventListener("click", () => $("#keys").close());
$("#constant").addEventListener("toggle", showCurves);
$("#others").addEventListener("toggle", showCurves);
$("#list").addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key], row = event.target.closest("tbody tr");
  if (by && row) event.preventDefault(), (by > 0 ? row.nextElementSibling : row.previousElementSibling)?.querySelector("button")?.focus();
});
$(".more").open = false;
if (known.length > 1 && !location.hash.startsWith("#config")) kept.config = "differ=1";
note(data.note || "");
readAddress();
