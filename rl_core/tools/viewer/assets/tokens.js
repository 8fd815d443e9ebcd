// Tokens, coloured by a value. Scales are fixed, so that two conversations compare: one colour from 0 to `far`, two `far` to
// both sides of a middle, or one for each value. Values beyond a scale have the colour of its end.
const VALUES = {
  mask: { label: "mask (what is trained)", kind: "each" },
  advantage: { label: "advantage", kind: "around", middle: 0, above: "--cool", below: "--warm" }, // its far is a power of ten
  logprob: { label: "logprob (nats)", kind: "from", far: -5 },
  ratio: { label: "ratio new / old", kind: "around", middle: 1, far: 0.5 },
  gap: { label: "engine-learner gap (nats)", kind: "around", middle: 0, far: 0.1 },
  entropy: { label: "entropy (nats)", kind: "from", far: 3 },
  version: { label: "policy version", kind: "each" },
};

function missing(shown) {
  const there = new Set(shown.flatMap((t) => t.turns.flatMap((turn) => Object.keys(turn.values))));
  return Object.keys(VALUES).filter((name) => name !== "mask" && !there.has(name));
}

function chooseColour(shown, coloured) {
  const isOff = (name) => !shown.some((t) => t.turns.length) || missing(shown).includes(name);
  const option = ([name, { label }]) => el("option", { value: name, selected: name === coloured, disabled: isOff(name) }, isOff(name) ? `${label}: not recorded` : label);
  const onchange = (event) => { go({ colour: event.target.value, token: null }); read(current); };
  return el("select", { onchange }, el("option", { value: "" }, "off"), Object.entries(VALUES).map(option));
}

function howToRecord(e, shown) {
  const names = missing(shown).map((name) => VALUES[name].label).join(", ");
  const command = el("code", {}, `rl-core replay ${e.run.name} --step ${e.step} --tokens`);
  const how = e.kind === "train" ? [command, " records them."] : ["They are of training steps."];
  return names && el("p", { class: "soft" }, `Not recorded: ${names}. `, how);
}

// The scale of what is shown: { each: values } or { low, high }, and of(value) -> its colour.
function scale(shown, coloured) {
  const { kind, middle, far, above = "--warm", below = "--cool" } = VALUES[coloured];
  const all = shown.flatMap((t) => t.turns.flatMap((turn) => turn.values[coloured] || [])).filter((value) => value !== null);
  const shade = (name, share) => `rgb(${css(name).replaceAll(" ", ",")},${(0.04 + 0.46 * Math.min(1, share)).toFixed(3)})`;
  if (coloured === "mask") return { each: [0, 1], of: (value) => (value ? shade("--cool", 0.7) : "transparent") };
  if (kind === "each") {
    const each = unique(all).sort((a, b) => a - b);
    return { each, of: (value) => `${css(hue(each.indexOf(value)))}55` };
  }
  if (kind === "around") {
    const most = all.reduce((a, b) => Math.max(a, Math.abs(b - middle)), 0);
    const width = far ?? 10 ** Math.ceil(Math.log10(most || 1) - 1e-9);
    const of = (value) => shade(value < middle ? below : above, Math.abs(value - middle) / width);
    return { low: middle - width, high: middle + width, of };
  }
  const of = (value) => shade("--warm", Math.max(0, value / far) ** 0.7);
  return { low: Math.min(0, far), high: Math.max(0, far), of };
}

function scaleOf(shown, coloured) {
  const { each, low, high, of } = scale(shown, coloured), painted = (background, name) => {
    const box = el("i", { class: name });
    box.style.background = background;
    return box;
  };
  if (each) {
    const names = coloured === "mask" ? ["context", "sampled and trained"] : each.map(String);
    return el("p", { class: "scale" }, each.slice(0, 12).map((value, i) => [painted(of(value), "swatch"), names[i]]));
  }
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => of(low + share * (high - low)));
  return el("p", { class: "scale" }, short(low), painted(`linear-gradient(90deg, ${stops.join()})`), short(high));
}

function tokensOf(t, shown, coloured) {
  const { of } = scale(shown, coloured), told = [];
  const label = `Tokens of ${nameOf(t.e)}; arrow keys show their values`;
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": label });
  for (const { ids, texts, num_new, values } of t.turns) {
    ids.forEach((id, n) => {
      const i = n - num_new, text = texts ? texts[n] : `${id} `, isSampled = i >= 0;
      const seen = text === "" ? "\u00b7" : text.replaceAll("\n", "\u21b5\n");
      const span = el("span", { class: !isSampled && "context", "data-n": told.length }, seen);
      const value = coloured === "mask" ? Number(isSampled) : isSampled ? values[coloured]?.[i] ?? null : null;
      if (value !== null) span.style.background = of(value);
      const lines = Object.entries(values).filter(([, own]) => isSampled && own[i] !== null);
      told.push([`${JSON.stringify(text)}  id ${id}`, isSampled ? "sampled" : "context, not trained",
        ...lines.map(([name, own]) => `${VALUES[name].label}  ${short(own[i])}`)].join("\n"));
      box.append(span);
    });
  }
  tellOnHover(box, told);
  return tinted(el("div", { class: "says" }, el("div", { class: "who" }, nameOf(t.e)), box), actors.indexOf(t.e.actor));
}

function tellOnHover(box, told) {
  let at = -1;
  const asked = +(params().get("token") ?? -1);
  if (told[asked] !== undefined) setTimeout(() => box.isConnected && (box.children[asked].scrollIntoView({ block: "center" }), tell(box.children[asked])));
  const hide = () => { $("#tip").hidden = true; $(".at", box)?.classList.remove("at"); };
  const tell = (span) => {
    hide();
    at = +span.dataset.n, span.classList.add("at");
    const place = span.getBoundingClientRect(), tip = $("#tip");
    tip.textContent = told[at], tip.hidden = false;
    const isBelow = place.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${isBelow ? place.bottom + 6 : place.top - tip.offsetHeight - 6}px`;
  };
  box.addEventListener("mouseover", (event) => event.target.dataset.n && tell(event.target));
  box.addEventListener("click", (event) => event.target.dataset.n && go({ token: event.target.dataset.n }));
  box.addEventListener("mouseleave", hide), box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -told.length, End: told.length }[event.key];
    if (event.key === "Escape") hide();
    if (!by || !told.length) return;
    event.preventDefault();
    tell(box.children[Math.min(told.length - 1, Math.max(0, at + by))]);
  });
}
