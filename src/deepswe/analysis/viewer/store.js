"use strict";
// The records: an index of all attempts, and chunks that are inflated when they are asked for.

const $ = (id) => document.getElementById(id);

async function inflate(base64OrBytes) {
  let bytes = base64OrBytes;
  if (typeof bytes === "string") {
    const raw = atob(bytes.trim());
    bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const store = { attempts: [], tasks: [], actions: [], byKey: new Map() };
const keptChunks = new Map(); // number -> promise; the last few stay

async function openIndex() {
  const { columns, tasks, actions } = await inflate($("index").textContent);
  store.actions = actions;
  store.tasks = tasks.map(([id, repo, kind, at], place) => ({ id, repo, kind, at, place, attempts: [] }));
  const names = Object.keys(columns);
  store.attempts = columns.phase.map((_, i) => {
    const attempt = { place: i };
    for (const name of names) attempt[name] = columns[name][i];
    attempt.task = store.tasks[attempt.task];
    attempt.task.attempts.push(attempt);
    attempt.verdict = attempt.reward === null ? "no verdict" : attempt.reward >= 1 ? "solved" : "unsolved";
    attempt.link = [attempt.phase, attempt.step, attempt.task.id, attempt.attempt].map(encodeURIComponent).join("/");
    attempt.words = `${attempt.task.id} ${attempt.task.repo} ${attempt.task.kind} ${attempt.ending} ${attempt.signs}`.toLowerCase();
    store.byKey.set(attempt.link, attempt);
    return attempt;
  });
}

// A chunk stands at the end of the page and may not be there yet.
function elementOf(number) {
  return new Promise((found) => {
    const look = () => {
      const element = $(`chunk-${number}`);
      const next = $(`chunk-${number + 1}`);
      if (element && (next || document.readyState !== "loading")) found(element);
      else setTimeout(look, 30);
    };
    look();
  });
}

async function readChunk(number) {
  if ("served" in document.body.dataset) {
    const answer = await fetch(`chunk/${number}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}; is deepswe view still running?`);
    return inflate(new Uint8Array(await answer.arrayBuffer()));
  }
  return inflate((await elementOf(number)).textContent);
}

function chunk(number) {
  const kept = keptChunks.get(number) || readChunk(number);
  keptChunks.delete(number);
  keptChunks.set(number, kept);
  if (keptChunks.size > 12) keptChunks.delete(keptChunks.keys().next().value);
  return kept;
}

const detailOf = async (attempt) => (await chunk(attempt.chunk[0]))[attempt.chunk[1]];
const taskText = async (task) => (await chunk(task.at[0]))[task.at[1]];
const classOf = (letter) => letter.charCodeAt(0) - 97;
