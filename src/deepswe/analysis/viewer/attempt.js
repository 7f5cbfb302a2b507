// One attempt as a conversation, its diff beside the gold patch, its tests; and one task with all its attempts.

const TABS = [["conversation", "Conversation"], ["diff", "Diff"], ["tests", "Tests"], ["tokens", "Tokens"]];
const OPEN_LINES = 40;

function folded(title, text, open, paint) {
  const lines = text.split("\n").length;
  return make("details", { open }, make("summary", {}, `${title}, ${count(lines)} ${lines === 1 ? "line" : "lines"}`), longText(text, paint, { "aria-label": title }));
}

function callNodes(turn) {
  const nodes = [];
  for (const [name, value] of turn.arguments) {
    if (value.includes("\n") || value.length > 90 || name === "cmd") nodes.push(make("p", { cls: "argument" }, name), longText(value, paintCode, { "aria-label": name }));
    else nodes.push(make("p", { cls: "argument" }, `${name} `, make("code", {}, value)));
  }
  return nodes;
}

function turnNode(attempt, turn, place) {
  const action = classOf(attempt.classes[place] ?? "l");
  const number = place + 1;
  const [model, environment] = turn.seconds;
  return make("article", { cls: "turn", id: `turn-${number}`, tabindex: -1, "aria-label": `Turn ${number}`, style: { "--class": colourOf(action) } },
    make("header", {}, make("h2", {}, make("a", { href: `#/attempt/${attempt.link}?turn=${number}` }, `Turn ${number}`), turn.tool ? ` · ${turn.tool}` : ""),
      make("span", { cls: "chip", title: `${turn.rule}${turn.evidence ? `: ${turn.evidence}` : ""}` }, words(store.actions[action])),
      make("span", {}, `model ${seconds(model)}, environment ${seconds(environment)}`), turn.error ? make("span", { cls: "badge unsolved" }, words(turn.error)) : null),
    turn.thought ? (turn.thought.length > 900 ? folded("Thought", turn.thought, true) : make("p", { cls: "thought" }, turn.thought)) : null,
    turn.said ? longText(turn.said, undefined, { "aria-label": "What the model wrote" }) : null,
    ...callNodes(turn),
    turn.answer ? folded("What came back", turn.answer, turn.answer.length < 6000 && turn.answer.split("\n").length <= OPEN_LINES, paintCode) : null,
    make("details", { cls: "why" }, make("summary", {}, `Why “${words(store.actions[action])}”`), make("p", { cls: "soft" }, turn.rule + (turn.evidence ? `: ${turn.evidence}` : ""))));
}

function conversation(attempt, detail) {
  const box = make("div");
  if (detail.opening) box.append(folded("What the agent was told", detail.opening, false));
  if (detail.error) box.append(make("p", { cls: "note" }, detail.error));
  detail.turns.forEach((turn, place) => box.append(turnNode(attempt, turn, place)));
  if (!detail.turns.length) box.append(make("p", { cls: "soft" }, "No turns."));
  if (detail.reason) box.append(make("h2", {}, "Verdict"), make("p", {}, badge(attempt.verdict), " ", detail.reason));
  return box;
}

async function diffs(attempt, detail) {
  const [, gold] = await taskText(attempt.task);
  const box = make("div", { cls: "diffs" });
  if (gold) box.append(diffPane("Gold patch", gold));
  box.append(diffPane(`Attempt ${attempt.attempt}: ${attempt.verdict}`, detail.diff));
  return gold ? box : make("div", {}, make("p", { cls: "soft" }, "The gold patch is not known here; deepswe view --gold names where it is."), box);
}

function tests(detail) {
  if (!detail.tests.length) return make("p", { cls: "soft" }, "No test has a status.");
  const rows = detail.tests.slice(0, 500).map(([name, status]) => make("tr", {}, make("td", {}, make("code", {}, name)), make("td", {}, badge(status))));
  return make("div", {}, make("p", { cls: "soft" }, `${count(detail.tests.length)} hidden tests, those that did not pass first.`),
    make("div", { cls: "scroll", tabindex: 0, role: "region", "aria-label": "Hidden tests" }, make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Test"), make("th", { scope: "col" }, "Status"))), make("tbody", {}, ...rows))));
}

async function showAttempt(section, attempt, wanted) {
  const tab = TABS.some(([name]) => name === wanted.get("tab")) ? wanted.get("tab") : "conversation";
  const detail = await detailOf(attempt);
  const here = store.byKey.get(section.dataset.link);
  const siblings = attempt.task.attempts.filter((one) => one.phase === attempt.phase && one.step === attempt.step);
  const link = (name) => `#/attempt/${attempt.link}${name === "conversation" ? "" : `?tab=${name}`}`;
  const body = tab === "diff" ? await diffs(attempt, detail) : tab === "tests" ? tests(detail) : tab === "tokens" ? tokenView(attempt, detail) : conversation(attempt, detail);
  const facts = [badge(attempt.verdict), `ended: ${words(attempt.ending)}`, `${attempt.phase}${attempt.step ? `, step ${attempt.step}` : ""}`, `${attempt.turns} turns`, `${count(attempt.tokens)} tokens, ${count(attempt.sampled)} sampled`,
    seconds(attempt.seconds), `seed ${detail.seed}`, detail.role && `training: ${detail.role}${detail.advantages.length ? `, advantage ${detail.advantages[0]}` : ""}`, attempt.signs && `signs: ${attempt.signs}`];
  section.replaceChildren(
    make("h1", { id: "attempt-title" }, make("a", { cls: "quiet", href: `#/task/${encodeURIComponent(attempt.task.id)}` }, attempt.task.id), `, attempt ${attempt.attempt}`),
    make("ul", { cls: "facts" }, ...facts.filter(Boolean).map((fact) => make("li", {}, fact))),
    make("div", { cls: "tabs" }, ...TABS.map(([name, label]) => make("a", { href: link(name), "aria-current": name === tab ? "page" : false }, label)),
      make("span", { cls: "steps" }, ...siblings.map((one) => make("a", { href: `#/attempt/${one.link}${tab === "conversation" ? "" : `?tab=${tab}`}`, "aria-current": one === attempt ? "true" : false, "aria-label": `Attempt ${one.attempt}, ${one.verdict}` }, `${one.attempt}`)))), body);
  section.dataset.link = attempt.link;
  if (here !== attempt) scrollTo({ top: 0, behavior: "instant" });
  if (wanted.get("turn")) goToTurn(+wanted.get("turn"));
}

function goToTurn(number) {
  const turn = $(`turn-${number}`);
  if (!turn) return;
  document.querySelectorAll(".turn.here").forEach((other) => other.classList.remove("here"));
  turn.classList.add("here");
  turn.scrollIntoView({ block: "start", behavior: "instant" });
  turn.focus({ preventScroll: true });
}

async function showTask(section, task, wanted) {
  const [issue, gold] = await taskText(task);
  const shown = task.attempts.find((attempt) => String(attempt.place) === wanted.get("with")) || task.attempts.find((attempt) => attempt.reward >= 1) || task.attempts[0];
  const detail = await detailOf(shown);
  const choose = make("select", { "aria-label": "Candidate", onchange: (event) => { location.hash = `#/task/${encodeURIComponent(task.id)}?with=${event.target.value}`; } },
    ...task.attempts.slice(0, 400).map((attempt) => make("option", { value: attempt.place, selected: attempt === shown }, `${attempt.phase}${attempt.step ? `, step ${attempt.step}` : ""}, attempt ${attempt.attempt}: ${attempt.verdict}`)));
  const list = make("ol", { cls: "attempts" }, ...task.attempts.slice(0, 400).map((attempt) => {
    const item = make("li");
    fillAttempt(item, attempt);
    return item;
  }));
  list.style.cssText = "list-style: none; padding: 0";
  section.replaceChildren(
    make("h1", { id: "task-title" }, task.id),
    make("ul", { cls: "facts" }, ...[task.repo, task.kind, `${count(task.attempts.length)} attempts`].filter(Boolean).map((fact) => make("li", {}, fact))),
    make("h2", {}, "Issue"), issue ? longText(issue, undefined, { "aria-label": "Issue" }) : make("p", { cls: "soft" }, "The issue is not recorded."),
    make("h2", {}, gold ? "Gold patch and candidate" : "Candidate"), make("p", {}, choose, " ", make("a", { href: `#/attempt/${shown.link}` }, "read this attempt")),
    make("div", { cls: "diffs" }, gold ? diffPane("Gold patch", gold) : null, diffPane(`Attempt ${shown.attempt}: ${shown.verdict}`, detail.diff)),
    make("h2", {}, "Attempts"), list);
}
