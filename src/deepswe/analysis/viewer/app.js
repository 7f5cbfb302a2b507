// Addresses, keys and the theme.

const VIEWS = ["overview", "attempts", "tasks", "task", "attempt"];
const KEYS = [["/", "search"], ["g then o, a or t", "overview, attempts, tasks"], ["j / k", "next and previous row or turn"], ["Enter", "open the row"], ["n / p", "next and previous attempt of the list"],
  ["c d s t", "conversation, diff, tests (statuses), tokens of an attempt"], ["x", "open or close all texts"], ["u", "back to the list, or up to the task"], ["?", "these keys"]];
const views = {};
let current = "overview";

function drawClasses() {
  const totals = new Array(store.actions.length).fill(0);
  let all = 0;
  for (const attempt of store.attempts) for (const letter of attempt.classes) { totals[classOf(letter)]++; all++; }
  $("classes").replaceChildren(...store.actions.flatMap((action, place) => {
    const share = all ? totals[place] / all : 0;
    return [make("a", { href: `#/attempts?does=${action}` }, words(action)), make("div", { cls: "track" }, make("div", { cls: "fill", style: { width: `${100 * share}%`, background: colourOf(place) } })), make("span", { cls: "n" }, `${(100 * share).toFixed(1)}%`)];
  }));
}

async function route() {
  if (location.hash && !location.hash.startsWith("#/")) return;
  const [path, query] = location.hash.slice(2).split("?");
  const [name, ...rest] = path.split("/");
  const wanted = new URLSearchParams(query || "");
  const task = name === "task" && store.tasks.find((one) => one.id === decodeURIComponent(rest.join("/")));
  const attempt = name === "attempt" && store.byKey.get(rest.join("/"));
  const view = VIEWS.includes(name) && !(name === "task" && !task) && !(name === "attempt" && !attempt) ? name : "overview";
  if (name && view === "overview" && name !== "overview") say("There is nothing at this address; this is the overview.");
  if (current === "attempts" && view !== "attempts") views.attempts.top = views.attempts.list.view.scrollTop;
  for (const other of VIEWS) $(`view-${other}`).hidden = other !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view || link.dataset.view === `${view}s`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  current = view;
  try {
    if (view === "attempts" || view === "tasks") views[view].show(wanted);
    if (view === "task") await showTask($("view-task"), task, wanted);
    if (view === "attempt") await showAttempt($("view-attempt"), attempt, wanted);
  } catch (error) {
    $(`view-${view}`).replaceChildren(make("p", { cls: "note" }, `This cannot be shown: ${error.message}`));
  }
  document.title = `${$(`view-${view}`).querySelector("h1")?.textContent || ""} – deepswe viewer`;
  document.body.dataset.ready = location.hash;
}

function neighbour(by) {
  const here = store.byKey.get($("view-attempt").dataset.link);
  const list = views.attempts.kept?.includes(here) ? views.attempts.kept : store.attempts;
  const next = list[list.indexOf(here) + by];
  const query = location.hash.split("?")[1];
  const tab = new URLSearchParams(query || "").get("tab");
  if (next) location.hash = `#/attempt/${next.link}${tab ? `?tab=${tab}` : ""}`;
}

function step(by) {
  if (current === "attempts" || current === "tasks") { views[current].list.move(by); return; }
  const turns = [...document.querySelectorAll("#view-attempt .turn")];
  const at = turns.findIndex((turn) => turn.classList.contains("here"));
  if (turns.length) goToTurn(Math.max(0, Math.min(turns.length - 1, at + by)) + 1);
}

function toggleAll() {
  const all = [...document.querySelectorAll("#view-attempt details:not(.why)")];
  const open = !all.every((one) => one.open);
  for (const one of all) one.open = open;
}

const JUMPS = { o: "#/", a: "#/attempts", t: "#/tasks" };
const tabKey = (tab) => () => { if (current === "attempt") location.hash = `#/attempt/${$("view-attempt").dataset.link}${tab ? `?tab=${tab}` : ""}`; };
const ACTIONS_OF_KEYS = {
  "/": () => {
    if (current === "tasks") $("task-query").focus();
    else if (current === "attempts") $("query").focus();
    else { addEventListener("hashchange", () => $("query").focus(), { once: true }); location.hash = "#/attempts"; }
  },
  "?": () => $("help").showModal(), j: () => step(1), k: () => step(-1), n: () => neighbour(1), p: () => neighbour(-1), x: toggleAll,
  c: tabKey(""), d: tabKey("diff"), s: tabKey("tests"), t: tabKey("tokens"),
  u: () => { location.hash = current === "attempt" ? `#/task/${encodeURIComponent(store.byKey.get($("view-attempt").dataset.link).task.id)}` : "#/attempts"; },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  const jump = onKey.went && JUMPS[event.key];
  onKey.went = event.key === "g";
  if (jump) location.hash = jump;
  else if (ACTIONS_OF_KEYS[event.key]) ACTIONS_OF_KEYS[event.key]();
  else return;
  event.preventDefault();
}

function remembered(value) {
  try {
    if (value !== undefined) localStorage.setItem("deepswe-theme", value);
    return localStorage.getItem("deepswe-theme") || "";
  } catch { return ""; } // a file may not keep anything
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  $("theme").textContent = `Theme: ${theme || "system"}`;
}

async function start() {
  setTheme(remembered());
  $("theme").addEventListener("click", () => {
    const next = { "": "dark", dark: "light", light: "" }[document.documentElement.dataset.theme || ""];
    remembered(next);
    setTheme(next);
  });
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  $("keys").append(...KEYS.flatMap(([keys, what]) => [make("dt", {}, make("kbd", {}, keys)), make("dd", {}, what)]));
  document.addEventListener("keydown", onKey);
  await openIndex();
  views.attempts = new AttemptsView($("view-attempts"));
  views.tasks = new TasksView($("view-tasks"));
  drawClasses();
  addEventListener("hashchange", route);
  await route();
  document.body.dataset.started = performance.now().toFixed(0);
}

start();
