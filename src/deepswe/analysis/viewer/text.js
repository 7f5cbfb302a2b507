// Text into the page, always as text: elements, long texts, colours of code, diffs.

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, set] of Object.entries(value)) element.style.setProperty(key, set);
    else element.setAttribute(name === "cls" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const words = (name) => name.replaceAll("_", " ");
const count = (value) => value.toLocaleString("en");
const seconds = (value) => (value >= 90 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${+value.toFixed(2)} s`);
const colourOf = (place) => `var(--a${place})`;
const say = (text) => { $("said").textContent = text; };

const FIRST = 8000, STEP = 40000;

// A text of any length: the beginning, and a button for more.
function longText(text, paint = (part) => [part], properties = {}) {
  const pre = make("pre", { tabindex: 0, role: properties["aria-label"] ? "group" : null, ...properties });
  let shown = Math.min(text.length, FIRST);
  pre.append(...paint(text.slice(0, shown)));
  if (shown === text.length) return pre;
  const button = make("button", { type: "button", cls: "more" });
  const label = () => { button.textContent = `Show ${count(Math.min(STEP, text.length - shown))} more of ${count(text.length)} characters`; };
  button.addEventListener("click", () => {
    pre.append(...paint(text.slice(shown, shown + STEP)));
    shown = Math.min(text.length, shown + STEP);
    if (shown === text.length) button.remove(); else label();
  });
  label();
  return make("div", {}, pre, button);
}

const KEYWORDS = new Set(("and as assert async await break case catch class const continue def del do elif else enum except export " +
  "false finally fn for from func function global if impl import in interface is lambda let match mut new nil None nonlocal " +
  "not null or package pass pub raise return self static struct super switch this throw True False true try type use var " +
  "void while with yield").split(" "));
const PIECES = /("""[\s\S]*?"""|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|(#.*|\/\/.*)|\b(\d[\w.]*)\b|\b([A-Za-z_]\w*)\b/g;

// Code as nodes: strings, comments, numbers and key words coloured, whatever the language. Very long lines stay plain.
function paintCode(text) {
  if (text.length > 60000 || /[^\n]{3000}/.test(text)) return [text];
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(PIECES)) {
    const kind = found[1] ? "s" : found[2] ? "o" : found[3] ? "m" : KEYWORDS.has(found[4]) ? "k" : "";
    if (!kind) continue;
    if (found.index > from) nodes.push(text.slice(from, found.index));
    nodes.push(make("span", { cls: kind }, found[0]));
    from = found.index + found[0].length;
  }
  nodes.push(text.slice(from));
  return nodes;
}

const MOST_LINES = 3000;

function diffLines(diff) {
  const lines = [];
  let before = 0, after = 0, left = 0, right = 0;
  for (const line of diff.split("\n")) {
    const hunk = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@/.exec(line);
    if (left > 0 || right > 0) {
      const sign = line[0] === "+" || line[0] === "-" || line[0] === "\\" ? line[0] : " ";
      if (sign === "\\") { lines.push(["full o", "", "", "", line]); continue; }
      if (sign !== "+") left--;
      if (sign !== "-") right--;
      lines.push([sign === "+" ? "add" : sign === "-" ? "del" : "", sign === "+" ? "" : before++, sign === "-" ? "" : after++, sign, line.slice(1)]);
    } else if (hunk) {
      before = +hunk[1]; after = +hunk[3]; left = +(hunk[2] ?? 1); right = +(hunk[4] ?? 1);
      lines.push(["hunk", "", "", "", line]);
    } else if (line.startsWith("diff --git ")) lines.push(["file", "", "", "", line.replace(/^diff --git a\/.* b\//, "")]);
    else if (line && !/^(index|---|\+\+\+|\\)/.test(line)) lines.push(["hunk", "", "", "", line]);
  }
  return lines;
}

function diffPane(title, diff) {
  const pane = make("section", { cls: "diff" }, make("h2", {}, title));
  if (!diff.trim()) { pane.append(make("p", { cls: "soft" }, "No diff.")); return pane; }
  const lines = diffLines(diff);
  const box = make("div", { cls: "lines", tabindex: 0, role: "region", "aria-label": `${title}, diff` });
  for (const [kind, before, after, sign, text] of lines.slice(0, MOST_LINES)) {
    const shown = text.length > 2000 ? `${text.slice(0, 2000)} … ${count(text.length - 2000)} more characters` : text;
    if (kind === "file") box.append(make("div", { cls: "file" }, shown));
    else if (kind === "hunk" || kind.startsWith("full")) box.append(make("div", { cls: kind }, make("span"), make("span"), make("span", { cls: "full" }, shown)));
    else box.append(make("div", { cls: kind }, make("span", { cls: "no" }, String(before)), make("span", { cls: "no" }, String(after)), make("span", {}, sign), make("span", {}, ...paintCode(shown))));
  }
  pane.append(box);
  if (lines.length > MOST_LINES) pane.append(make("p", { cls: "soft" }, `${count(lines.length - MOST_LINES)} more lines are not shown.`));
  return pane;
}

const badge = (text) => make("span", { cls: `badge ${text === "solved" || text === "unsolved" || text === "passed" ? text : ""}` }, text);
