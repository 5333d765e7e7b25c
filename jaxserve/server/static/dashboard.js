// The engine as it is now, and its last minutes: /stats once a second.

import { ask, element, errorOf, showFacts } from "/static/common.js";

const PERIOD_MS = 1000;
const KEPT = 180; // readings
const board = document.getElementById("board");
const history = [];

const rate = (name) => (now, before) =>
  before ? ((now.engine[name] - before.engine[name]) * 1000) / (now.at - before.at) : 0;
const used = (now) => 1 - now.engine.pages_free / Math.max(1, now.engine.pages_total);
const percent = (value) => `${Math.round(100 * value)} %`;
const count = (value) => Math.round(value).toLocaleString();

// title, reading -> number, number -> text, what stands beside it
const CARDS = [
  ["Output", rate("generation_tokens"), count, () => "tokens/s"],
  ["Prompts", rate("prefix_query_tokens"), count, () => "tokens/s"],
  ["Running", (now) => now.engine.running, count, (now) => `of ${now.engine.slots} slots`],
  ["Waiting", (now) => now.engine.waiting, count, (now) => `${count(now.engine.waiting_tokens)} prompt tokens`],
  ["KV pages in use", used, percent, (now) => `of ${count(now.engine.pages_total)}`],
  ["Prompt tokens from the cache", hits, percent, () => "lately"],
  ["Steps", rate("steps"), (value) => value.toFixed(1), () => "a second"],
];

function hits() {
  const [first, last] = [history[0].engine, history[history.length - 1].engine];
  const asked = last.prefix_query_tokens - first.prefix_query_tokens;
  return asked ? (last.prefix_hit_tokens - first.prefix_hit_tokens) / asked : 0;
}

function makeCard(title) {
  const card = element("section", "card");
  const canvas = element("canvas");
  card.append(element("h2", "", title), element("div", "now"), canvas);
  board.append(card);
  return card;
}

function draw(canvas, values) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
  Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  const top = Math.max(...values, 1e-9);
  const shown = Math.max(30, values.length);
  const x = (i) => width * (1 - (values.length - 1 - i) / (shown - 1));
  const y = (value) => height - 2 - (height - 6) * (value / top);
  pen.strokeStyle = getComputedStyle(document.querySelector("header a[aria-current]")).color;
  pen.lineWidth = 1.5 * scale;
  pen.lineJoin = "round";
  pen.beginPath();
  values.forEach((value, i) => (i ? pen.lineTo(x(i), y(value)) : pen.moveTo(x(i), y(value))));
  pen.stroke();
}

const cards = CARDS.map(([title]) => makeCard(title));
const series = CARDS.map(() => []);
const slots = element("div", "slots");
cards[2].append(slots);
const counts = element("section", "card");
board.append(counts);

function show(now, before) {
  CARDS.forEach(([, read, write, beside], i) => {
    const value = read(now, before);
    series[i].push(value);
    if (series[i].length > KEPT) series[i].shift();
    const place = cards[i].querySelector(".now");
    place.replaceChildren(write(value), " ", element("small", "", beside(now)));
    draw(cards[i].querySelector("canvas"), series[i]);
  });
  slots.replaceChildren(
    ...Array.from({ length: Math.min(now.engine.slots, 256) }, (_, i) =>
      element("i", i < now.engine.running ? "busy" : ""),
    ),
  );
  const table = element("table");
  for (const [name, value] of Object.entries(now.engine)) {
    const text = Array.isArray(value) ? value.join(", ") || "none" : count(value);
    const row = element("tr");
    row.append(element("td", "", name.replaceAll("_", " ")), element("td", "", text));
    table.append(row);
  }
  counts.replaceChildren(element("h2", "", `Engine: ${now.health.status}`), table);
}

async function tick() {
  const response = await ask("/stats").catch(() => null);
  const facts = document.getElementById("facts");
  if (!response?.ok) {
    const text = response ? await errorOf(response) : "The server does not answer.";
    facts.replaceChildren(element("span", "bad", text));
    return;
  }
  if (facts.querySelector(".bad")) showFacts(facts);
  const now = { ...(await response.json()), at: performance.now() };
  const before = history[history.length - 1];
  history.push(now);
  if (history.length > 30) history.shift();
  show(now, before);
}

showFacts(document.getElementById("facts"));
tick();
setInterval(tick, PERIOD_MS);
