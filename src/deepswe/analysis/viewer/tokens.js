// The token view: every token of the stream, and what is known of it.

const PAGE = 3000;
const MODES = [["mask", "trained or not"], ["logprob", "log-prob"], ["ratio", "ratio"], ["advantage", "advantage"], ["version", "policy version"]];
const tint = (variable, share) => `color-mix(in srgb, var(${variable}) ${Math.round(100 * share)}%, transparent)`;

function flatTokens(attempt, detail) {
  const names = new Map(detail.names);
  const starts = new Set(detail.starts);
  const trained = detail.role === "trained";
  const tokens = [];
  detail.spans.forEach(([sampled, version, turn, ids, logprobs, ratios], place) => {
    ids.forEach((id, i) => tokens.push({
      id, text: names.get(id), sampled: sampled === 1, version, turn, logprob: logprobs[i], ratio: ratios[i], first: i === 0 && starts.has(place),
      advantage: sampled ? detail.advantages[turn] : undefined, trained: sampled === 1 && trained,
    }));
  });
  return tokens;
}

const PAINTERS = {
  mask: (token) => (!token.sampled ? "" : token.trained ? tint("--c2", 0.35) : tint("--c4", 0.3)),
  logprob: (token) => (token.sampled ? tint("--c1", Math.min(0.55, -token.logprob / 6)) : ""),
  ratio: (token) => (token.ratio === undefined ? "" : tint(token.ratio > 1 ? "--c0" : "--c1", Math.min(0.55, Math.abs(Math.log(token.ratio)) * 2))),
  advantage: (token, most) => (token.advantage ? tint(token.advantage > 0 ? "--c2" : "--c1", 0.15 + (0.4 * Math.abs(token.advantage)) / most) : ""),
  version: (token, _, versions) => (token.sampled ? tint(`--c${versions.indexOf(token.version) % 6}`, 0.4) : ""),
};
const LEGENDS = {
  mask: "Green: sampled and trained. Yellow: sampled, not trained. Plain: prompt and answers of the environment.",
  logprob: "The redder, the less likely the sampler found the token that it drew.",
  ratio: "Blue: the checkpoint finds the token likelier than the sampler did. Red: less likely.",
  advantage: "Green: pushed up. Red: pushed down.", version: "One colour for each version of the policy that sampled.",
};

function tokenDetail(token, at) {
  const number = (value, digits = 4) => (value === undefined ? "–" : String(+value.toFixed(digits)));
  const rows = [["place", count(at)], ["id", token.id], ["text", token.text === undefined || token.text === "" ? "–" : JSON.stringify(token.text)], ["sampled", token.sampled ? "yes" : "no"], ["trained", token.trained ? "yes" : "no"],
    ["log-prob", number(token.logprob)], ["probability", token.logprob === undefined ? "–" : number(Math.exp(token.logprob))], ["ratio", number(token.ratio)], ["advantage", number(token.advantage)], ["version", token.sampled ? token.version : "–"], ["turn", token.turn < 0 ? "–" : token.turn + 1]];
  return rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
}

function tokenView(attempt, detail) {
  if (!detail.spans) return make("p", { cls: "soft" }, "The token streams were left out of this file (--no-tokens).");
  const tokens = flatTokens(attempt, detail);
  const most = Math.max(1e-9, ...detail.advantages.map(Math.abs));
  const versions = [...new Set(tokens.filter((token) => token.sampled).map((token) => token.version))];
  let mode = "mask", page = 0, at = -1;
  const box = make("div", { cls: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys go from one to the next" });
  const facts = make("dl", { cls: "detail", "aria-live": "polite" });
  const legend = make("p", { cls: "soft" });
  const where = make("span", { cls: "count" });
  const select = (place) => {
    box.querySelector(".at")?.classList.remove("at");
    at = Math.max(0, Math.min(tokens.length - 1, place));
    if (Math.floor(at / PAGE) !== page) { page = Math.floor(at / PAGE); draw(); }
    box.querySelector(`[data-at="${at}"]`)?.classList.add("at");
    facts.replaceChildren(...tokenDetail(tokens[at], at));
  };
  const draw = () => {
    const nodes = [];
    for (let place = page * PAGE; place < Math.min(tokens.length, (page + 1) * PAGE); place++) {
      const token = tokens[place];
      if (token.first) nodes.push(make("p", { cls: "soft" }, "The history was shortened here; a new sequence begins."));
      const node = make("b", { "data-at": place }, token.text === undefined || token.text === "" ? `[${token.id}]` : token.text);
      node.style.background = PAINTERS[mode](token, most, versions);
      if (!token.sampled) node.style.color = "var(--soft)";
      nodes.push(node);
    }
    box.replaceChildren(...nodes);
    legend.textContent = mode === "ratio" && !tokens.some((token) => token.ratio !== undefined) ? "No ratios are recorded; deepswe view --ratios computes them with the newest checkpoint." : LEGENDS[mode];
    where.textContent = tokens.length > PAGE ? `tokens ${count(page * PAGE + 1)} to ${count(Math.min(tokens.length, (page + 1) * PAGE))} of ${count(tokens.length)}` : `${count(tokens.length)} tokens`;
  };
  const turnPage = (by) => { page = Math.max(0, Math.min(Math.ceil(tokens.length / PAGE) - 1, page + by)); draw(); };
  for (const kind of ["mouseover", "click"]) box.addEventListener(kind, (event) => { if (event.target.dataset.at) select(+event.target.dataset.at); });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
    if (by) { select(at + by); event.preventDefault(); }
  });
  const choose = make("select", { onchange: (event) => { mode = event.target.value; draw(); } }, ...MODES.map(([name, label]) => make("option", { value: name }, label)));
  draw();
  return make("div", {}, make("div", { cls: "filters" }, make("label", {}, "Colour by", choose), make("button", { type: "button", onclick: () => turnPage(-1) }, "Earlier"), make("button", { type: "button", onclick: () => turnPage(1) }, "Later"), where),
    legend, facts, box);
}
