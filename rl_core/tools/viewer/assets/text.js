// Messages as people read them: Markdown, code, formulas, calls of tools. Only elements made here and text nodes reach the page.
const MAX_MARKDOWN = 50_000, MAX_CODE = 20_000, MAX_FORMULA = 2000; // characters; longer texts stay as they are
const LONG = 24; // lines beyond which a text is folded
const FORMULAS = [
  [/^\$\$([^]+?)\$\$/, true], [/^\\\[([^]+?)\\\]/, true], [/^\\\(([^]+?)\\\)/, false], [/^\$(?![\s$])([^$\n]*[^\s$\\])\$(?![\d$])/, false],
];
marked.use({ gfm: true, extensions: [{
  name: "formula", level: "inline", start: (text) => text.match(/\$|\\[[(]/)?.index,
  tokenizer(text) {
    for (const [pattern, isBlock] of FORMULAS) {
      const match = pattern.exec(text);
      if (match) return { type: "formula", raw: match[0], tex: match[1], isBlock };
    }
  },
}] });

function formula({ raw, tex, isBlock }) {
  const box = el(isBlock ? "div" : "span", { class: "formula", title: raw });
  if (tex.length > MAX_FORMULA) return raw;
  try {
    temml.render(tex, box, { displayMode: isBlock, throwOnError: true, trust: false, maxExpand: 100, maxSize: [10, 10] });
  } catch {
    box.textContent = raw;
  }
  return box;
}

const LANGUAGES = { py: "python", js: "javascript", sh: "bash", shell: "bash", console: "bash", html: "markup", xml: "markup", "c++": "cpp" };
function code(text, name = "") {
  const language = name.trim().split(/\s/)[0].toLowerCase(), key = LANGUAGES[language] ?? language;
  const grammar = Object.hasOwn(Prism.languages, key) && text.length <= MAX_CODE ? Prism.languages[key] : null;
  const nodes = (piece) => (typeof piece === "string" ? piece : Array.isArray(piece) ? piece.map(nodes)
    : el("span", { class: `t-${piece.type}` }, nodes(piece.content)));
  return el("pre", {}, grammar && typeof grammar === "object" ? nodes(Prism.tokenize(text, grammar)) : text);
}

// Inline and block tokens of Markdown. Where a token is not known here, its source is shown.
const cells = (tag, row, align) => row.map((cell, i) => el(tag, { class: align[i] && `to-${align[i]}` }, inline(cell.tokens)));
const INLINE = {
  strong: (t) => el("strong", {}, inline(t.tokens)), em: (t) => el("em", {}, inline(t.tokens)), del: (t) => el("del", {}, inline(t.tokens)),
  codespan: (t) => el("code", {}, t.text), br: () => "\n", formula, escape: (t) => t.text,
  text: (t) => (t.tokens ? inline(t.tokens) : t.text),
  link: (t) => (t.raw.startsWith("[") ? [inline(t.tokens), ` (${t.href})`] : t.raw), // never a link that a click follows
};
const BLOCKS = {
  space: () => null, hr: () => el("hr"), code: (t) => (t.codeBlockStyle === "indented" ? el("p", {}, t.raw) : code(t.text, t.lang)),
  heading: (t) => el("p", { class: `h h${t.depth}` }, inline(t.tokens)), paragraph: (t) => el("p", {}, inline(t.tokens)),
  blockquote: (t) => el("blockquote", {}, blocks(t.tokens)), text: (t) => (t.tokens ? el("p", {}, inline(t.tokens)) : t.text),
  list: (t) => el(t.ordered ? "ol" : "ul", { start: t.ordered && t.start !== 1 && t.start }, t.items.map((item) => el("li", {}, blocks(item.tokens)))),
  table: (t) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, cells("th", t.header, t.align))), el("tbody", {}, t.rows.map((row) => el("tr", {}, cells("td", row, t.align)))))),
};
const inline = (tokens) => tokens.map((t) => (INLINE[t.type] ?? ((other) => other.raw))(t));
const blocks = (tokens) => tokens.map((t) => (BLOCKS[t.type] ?? ((other) => el("p", {}, other.raw.trimEnd())))(t));

function markdown(text) {
  if (text.length > MAX_MARKDOWN) return el("p", {}, text);
  try {
    return blocks(marked.lexer(text));
  } catch {
    return el("p", {}, text);
  }
}

// A long text shows its beginning, until "more" is pressed.
function folded(nodes, text) {
  const lines = text.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / 100), 0), box = el("div", { class: "body" }, nodes);
  if (lines <= LONG) return box;
  box.classList.add("short");
  const more = button(`more (${short(lines)} lines)`, () => { box.classList.remove("short"); more.remove(); }, { class: "more" });
  return [box, more];
}

const words = (text) => text.split(/\s+/).filter(Boolean).length;
const thought = (text) => text.trim() && el("details", { class: "thought" }, el("summary", {}, `Thoughts, ${short(words(text))} words`), folded(markdown(text), text));

// A reply's thoughts are folded. A chat template may have opened <think> in the prompt.
function spoken(text) {
  const end = text.indexOf("</think>"), begin = text.indexOf("<think>");
  if (end < 0 && begin < 0) return folded(markdown(text), text);
  const [head, inner] = begin < 0 || (end >= 0 && end < begin) ? ["", text.slice(0, end)] : [text.slice(0, begin), text.slice(begin + 7, end < 0 ? undefined : end)];
  const rest = end < 0 ? "" : text.slice(end + 8);
  return [head.trim() && folded(markdown(head), head), thought(inner), rest.trim() && folded(markdown(rest), rest)];
}

const isImage = (piece) => piece?.type === "image" && typeof piece.image === "string";
const imagesIn = (content) => (Array.isArray(content) ? content.filter(isImage) : []);
const imageName = ({ image }) => `[image ${image.slice(0, 80)}]`;
const PICTURE = /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]+$/;
// Only thumbnails that rl_core made: an image of another name stays text.
function picture(piece) {
  const url = pictures.get(piece.image) ?? "";
  const name = piece.image.split("/").at(-1).replace(/\w+$/, PICTURE.exec(url)?.[1]); // of a thumbnail, which may have another format
  return PICTURE.test(url) ? el("a", { href: url, download: name, title: `Save ${name}` }, el("img", { src: url, alt: imageName(piece) })) : el("p", { class: "soft" }, imageName(piece));
}

const textOf = (content) => (typeof content === "string" ? content : content === null || content === undefined ? ""
  : Array.isArray(content) ? content.map((piece) => (isImage(piece) ? imageName(piece) : typeof piece?.text === "string" ? piece.text : JSON.stringify(piece))).join("\n") : JSON.stringify(content));

// The parts of a text of textOf(), with images instead of their names.
function withPictures(text, images) {
  let parts = [{ text }];
  for (const image of images) parts = parts.flatMap((one) => (isImage(one) ? [one] : one.text.split(imageName(image)).flatMap((text, n) => (n ? [image, { text }] : [{ text }]))));
  return images.length ? parts.filter((one) => isImage(one) || one.text.trim()) : text;
}

// weight(name="cat") -> 8
function call({ function: named, ...rest }, result) {
  const f = named && typeof named === "object" ? named : {};
  let args = f.arguments ?? rest.arguments ?? {};
  if (typeof args === "string") try { args = JSON.parse(args); } catch { /* shown as it is */ }
  const isObject = args && typeof args === "object" && !Array.isArray(args);
  const listed = isObject ? Object.entries(args).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ") : textOf(args);
  const output = result && textOf(result.content), cut = (text, most) => (text.length > most ? `${text.slice(0, most)} ...` : text);
  const line = `${f.name ?? rest.name ?? "?"}(${cut(listed, 300)})${result ? ` -> ${cut(output.split("\n")[0], 200)}${output.includes("\n") ? " ..." : ""}` : ""}`;
  return el("details", { class: "call" }, el("summary", {}, line), el("pre", {}, JSON.stringify({ function: named, ...rest }, null, 1)),
    result && folded(el("pre", {}, output), output), imagesIn(result?.content).map(picture));
}

const KNOWN = ["role", "name", "content", "tool_calls", "reasoning_content", "tool_call_id", "thinking"];
function shownText(role, text) {
  if (!text) return null;
  return role === "tool" ? folded(el("pre", {}, text), text) : role === "assistant" ? spoken(text) : folded(markdown(text), text);
}

// The nodes of a message; `results`: of its calls, by their place.
function shownMessage(message, results = []) {
  const { role, content, tool_calls: calls, reasoning_content: reasoning, thinking } = message;
  const pieces = imagesIn(content).length ? content : [content];
  const others = Object.entries(message).filter(([key, value]) => !KNOWN.includes(key) && value && !(Array.isArray(value) && !value.length));
  return [
    thought(textOf(reasoning || thinking || "")),
    pieces.map((piece) => (isImage(piece) ? picture(piece) : shownText(role, textOf(typeof piece?.text === "string" ? piece.text : piece)))),
    (Array.isArray(calls) ? calls : []).map((one, i) => call(one && typeof one === "object" ? one : { arguments: one }, results[i])),
    others.map(([key, value]) => el("p", { class: "soft" }, `${key}: ${textOf(value)}`)),
  ];
}
