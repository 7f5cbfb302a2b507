// Long lists: only the rows in sight are elements, and these are used again while scrolling.

const ROW = 40;

class LongList {
  constructor(fill, label) {
    this.fill = fill;
    this.items = [];
    this.rows = [];
    this.box = make("ol", { role: "list" });
    this.view = make("div", { cls: "list", tabindex: 0, role: "region", "aria-label": label }, this.box);
    this.view.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.view);
  }

  show(items, top = 0) {
    this.items = items;
    this.box.style.height = `${items.length * ROW}px`;
    this.rows.forEach((row) => { row.at = -1; });
    this.view.scrollTop = top;
    this.draw();
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - 8);
    const last = Math.min(this.items.length, first + Math.ceil(this.view.clientHeight / ROW) + 16);
    while (this.rows.length < last - first) {
      const element = make("li");
      this.rows.push({ element, at: -1 });
      this.box.append(element);
    }
    const wanted = new Set();
    for (let at = first; at < last; at++) wanted.add(at);
    const free = this.rows.filter((row) => !wanted.delete(row.at));
    for (const at of wanted) {
      const row = free.pop();
      row.at = at;
      row.element.hidden = false;
      row.element.style.transform = `translateY(${at * ROW}px)`;
      row.element.setAttribute("aria-setsize", this.items.length);
      row.element.setAttribute("aria-posinset", at + 1);
      this.fill(row.element, this.items[at], at);
    }
    for (const row of free) { row.at = -1; row.element.hidden = true; }
  }

  // Moves the focus by so many rows; the first press enters the list.
  move(by) {
    const here = this.rows.find((row) => row.at >= 0 && row.element.contains(document.activeElement));
    const at = Math.max(0, Math.min(this.items.length - 1, here ? here.at + by : Math.ceil(this.view.scrollTop / ROW)));
    const top = at * ROW;
    if (top < this.view.scrollTop) this.view.scrollTop = top;
    if (top + ROW > this.view.scrollTop + this.view.clientHeight) this.view.scrollTop = top + ROW - this.view.clientHeight;
    this.draw();
    this.rows.find((row) => row.at === at)?.element.querySelector("a").focus({ preventScroll: true });
  }
}

// A row is made once and then only gets new text.
function cells(element, kinds, href) {
  let row = element.firstChild;
  if (!row) {
    row = make("a", { cls: `row ${kinds.includes("tasks") ? "tasks" : ""}` }, ...kinds.filter((kind) => kind !== "tasks").map((kind) => make("span", { cls: kind })));
    element.append(row);
  }
  row.setAttribute("href", href);
  return row.children;
}

function strip(box, letters) {
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${letters.length} turns: ${[...letters].slice(0, 40).map((letter) => words(store.actions[classOf(letter)])).join(", ") || "none"}`);
  while (box.childElementCount > letters.length) box.lastChild.remove();
  for (let i = 0; i < letters.length; i++) {
    const mark = box.children[i] || box.appendChild(make("i"));
    mark.style.background = colourOf(classOf(letters[i]));
  }
}

function fillAttempt(element, attempt) {
  const [task, phase, verdict, ending, turns, tokens, classes] = cells(element, ["first", "", "", "", "n", "n", "strip"], `#/attempt/${attempt.link}`);
  task.textContent = `${attempt.task.id} · ${attempt.attempt}`;
  phase.textContent = attempt.step ? `${attempt.phase}, ${attempt.step}` : attempt.phase;
  if (verdict.textContent !== attempt.verdict) verdict.replaceChildren(badge(attempt.verdict));
  ending.textContent = words(attempt.ending) + (attempt.signs ? " ⚑" : "");
  turns.textContent = attempt.turns;
  tokens.textContent = count(attempt.tokens);
  strip(classes, attempt.classes.slice(0, 60));
}

function fillTask(element, task) {
  const [name, repo, kind, tried, solved] = cells(element, ["tasks", "first", "", "", "n", ""], `#/task/${encodeURIComponent(task.id)}`);
  const graded = task.attempts.filter((attempt) => attempt.reward !== null);
  name.textContent = task.id;
  repo.textContent = task.repo;
  kind.textContent = task.kind;
  tried.textContent = count(task.attempts.length);
  solved.textContent = graded.length ? `${count(graded.filter((attempt) => attempt.reward >= 1).length)} of ${count(graded.length)} solved` : "no verdict";
}

const ORDERS = {
  task: (a, b) => a.task.place - b.task.place || a.place - b.place, phase: (a, b) => a.place - b.place,
  verdict: (a, b) => (b.reward ?? -1) - (a.reward ?? -1) || a.place - b.place, ending: (a, b) => (a.ending < b.ending ? -1 : a.ending > b.ending ? 1 : a.place - b.place),
  turns: (a, b) => b.turns - a.turns || a.place - b.place, tokens: (a, b) => b.tokens - a.tokens || a.place - b.place,
};

// The view of all attempts: filters in the address, so that a link shows the same.
class AttemptsView {
  constructor(section) {
    const choose = (name, label, values) => make("label", {}, label, make("select", { id: `by-${name}`, onchange: () => this.go(name) },
      make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, words(value)))));
    const distinct = (name) => [...new Set(store.attempts.map((attempt) => attempt[name]))].sort();
    this.list = new LongList(fillAttempt, "List of attempts");
    this.count = make("p", { cls: "count", role: "status" });
    this.query = make("input", { id: "query", type: "search", placeholder: "task, repository, kind, ending, sign", oninput: () => this.go("q") });
    this.deep = make("button", { type: "button", onclick: () => this.searchTexts() }, "Search inside the texts");
    this.order = make("div", { cls: "columns" }, ...[["task", "Task · attempt"], ["phase", "Phase, step"], ["verdict", "Verdict"], ["ending", "Ended"], ["turns", "Turns"], ["tokens", "Tokens"]].map(([name, label]) =>
      make("button", { type: "button", "data-order": name, "aria-label": `Sort by ${label}`, onclick: () => { this.set("sort", name === "phase" ? "" : name); } }, label)), make("span", {}, "What it did, turn by turn"));
    section.append(make("h1", { id: "attempts-title" }, "Attempts"),
      make("div", { cls: "filters" }, make("label", { cls: "grow" }, "Search", this.query), choose("phase", "Phase", distinct("phase")),
        choose("verdict", "Verdict", ["solved", "unsolved", "no verdict"]), choose("ending", "Ending", distinct("ending")),
        choose("does", "Does", store.actions), this.deep), this.count, this.order, this.list.view);
  }

  parameters() { return new URLSearchParams(location.hash.split("?")[1] || ""); }

  set(name, value) {
    const wanted = this.parameters();
    if (value) wanted.set(name, value); else wanted.delete(name);
    history.replaceState(null, "", `#/attempts?${wanted}`);
    this.show(wanted);
  }

  go(name) { this.hits = null; this.set(name, name === "q" ? this.query.value : $(`by-${name}`).value); }

  show(wanted) {
    const get = (name) => wanted.get(name) || "";
    if (document.activeElement !== this.query) this.query.value = get("q");
    for (const name of ["phase", "verdict", "ending", "does"]) $(`by-${name}`).value = get(name);
    const sort = get("sort") || "phase";
    for (const button of this.order.querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.order === sort);
    const parts = get("q").toLowerCase().split(/\s+/).filter(Boolean);
    const letter = get("does") ? String.fromCharCode(97 + store.actions.indexOf(get("does"))) : "";
    const kept = store.attempts.filter((attempt) => ["phase", "verdict", "ending"].every((name) => !get(name) || attempt[name] === get(name)) &&
      attempt.classes.includes(letter) && (this.hits ? this.hits.has(attempt.place) : parts.every((part) => attempt.words.includes(part))));
    kept.sort(ORDERS[sort] || ORDERS.phase);
    this.kept = kept;
    this.count.textContent = `${count(kept.length)} of ${count(store.attempts.length)} attempts${this.hits ? " whose texts hold the words" : ""}`;
    this.list.show(kept, this.top || 0);
    this.top = 0;
  }

  // Goes through every chunk once; what was found so far is shown on the way.
  async searchTexts() {
    const wanted = this.query.value.toLowerCase();
    if (!wanted) { this.query.focus(); return; }
    this.deep.disabled = true;
    const hits = new Set(), byChunk = new Map();
    for (const attempt of store.attempts) byChunk.set(attempt.chunk[0], [...(byChunk.get(attempt.chunk[0]) || []), attempt]);
    let done = 0;
    for (const [number, attempts] of byChunk) {
      const details = await readChunk(number);
      for (const attempt of attempts) {
        const { turns, diff, reason, opening } = details[attempt.chunk[1]];
        const texts = [diff, reason, opening, ...turns.flatMap((turn) => [turn.thought, turn.said, turn.answer, ...turn.arguments.flat()])];
        if (texts.some((text) => text.toLowerCase().includes(wanted))) hits.add(attempt.place);
      }
      this.count.textContent = `${count(hits.size)} found, ${Math.round((100 * ++done) / byChunk.size)}% searched`;
    }
    this.deep.disabled = false;
    this.hits = hits;
    this.show(this.parameters());
  }
}

class TasksView {
  constructor(section) {
    this.list = new LongList(fillTask, "List of tasks");
    this.count = make("p", { cls: "count", role: "status" });
    this.query = make("input", { id: "task-query", type: "search", placeholder: "id, repository, kind", oninput: () => {
      history.replaceState(null, "", `#/tasks?q=${encodeURIComponent(this.query.value)}`);
      this.show(new URLSearchParams({ q: this.query.value }));
    } });
    section.append(make("h1", { id: "tasks-title" }, "Tasks"), make("div", { cls: "filters" }, make("label", { cls: "grow" }, "Search", this.query)), this.count,
      make("div", { cls: "columns tasks" }, ...["Task", "Repository", "Kind", "Attempts", "Solved"].map((label) => make("span", {}, label))), this.list.view);
  }

  show(wanted) {
    const parts = (wanted.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
    if (document.activeElement !== this.query) this.query.value = wanted.get("q") || "";
    const kept = store.tasks.filter((task) => parts.every((part) => `${task.id} ${task.repo} ${task.kind}`.toLowerCase().includes(part)));
    this.count.textContent = `${count(kept.length)} of ${count(store.tasks.length)} tasks`;
    this.list.show(kept);
  }
}
