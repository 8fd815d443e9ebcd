// The table of flags, which view is shown, and what the page listens to.
function showConfig() {
  const find = $("#config [name=find]").value.toLowerCase(), only = $("#config [name=differ]").checked;
  const text = (value) => (value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value));
  const rows = unique(runs.flatMap((run) => Object.keys(run.config))).flatMap((flag) => {
    const values = runs.map((run) => text(run.config[flag])), differs = unique(values).length > 1;
    if ((only && !differs) || !flag.toLowerCase().includes(find)) return [];
    return [el("tr", { class: differs && "differs" }, el("th", { scope: "row" }, flag), values.map((value) => el("td", {}, value)))];
  });
  const head = ["flag", ...runs.map((run) => run.short)].map((name) => el("th", { scope: "col" }, name));
  $("#config thead").replaceChildren(el("tr", {}, head));
  $("#config tbody").replaceChildren(...rows);
}

const setCurrent = (node, is) => (is ? node.setAttribute("aria-current", "true") : node.removeAttribute("aria-current"));
const VIEWS = { curves: showCurves, talks: showList, config: showConfig };
function show() {
  const [view, query] = location.hash.slice(1).split("?"), name = VIEWS[view] ? view : Object.keys(VIEWS)[0];
  for (const key of Object.keys(VIEWS)) $(`#${key}`).hidden = key !== name;
  for (const link of $$("nav a")) setCurrent(link, link.getAttribute("href") === `#${name}`);
  $("#tip").hidden = true;
  VIEWS[name]();
  const asked = query && entryAt(query);
  if (asked && asked !== current) read(asked);
  if (query && !asked && runs.every((run) => run.isComplete)) note("The conversation of this address is not here.");
}

addEventListener("hashchange", show);
addEventListener("resize", resizeCurves);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  plots.forEach(({ plot }) => plot.destroy());
  plots.clear();
  show();
});
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
$("#curves form").addEventListener("input", showCurves);
$("#others").addEventListener("toggle", showCurves);
$("#config form").addEventListener("input", showConfig);
let typing;
$("#talks form").addEventListener("input", (event) => {
  numShown = 100;
  if (event.target.name === "q") clearTimeout(typing), (typing = setTimeout(search, 250));
  else showList();
});
$("#list").addEventListener("keydown", (event) => {
  const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const item = next && event.target.closest("li")?.[next];
  if (item) event.preventDefault(), item.firstChild.focus();
});
$("#config [name=differ]").checked = runs.length > 1;
$(".more").open = innerWidth > 800;
note(data.note || "");
runs.forEach((run) => poll(run));
