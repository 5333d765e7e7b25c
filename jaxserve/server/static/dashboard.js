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
  ["Step time", stepTime, (value) => value.toFixed(1), (now, before) => `ms · ${rate("steps")(now, before).toFixed(1)} steps a second`],
];

function stepTime(now, before) {
  const steps = before ? now.engine.steps - before.engine.steps : 0;
  return steps ? (1000 * (now.engine.step_seconds - before.engine.step_seconds)) / steps : 0;
}

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
  const { color: accent, borderTopColor: faint } = getComputedStyle(canvas);
  const top = Math.max(...values, 1e-9);
  const shown = Math.max(30, values.length);
  const x = (i) => width * (1 - (values.length - 1 - i) / (shown - 1));
  const y = (value) => height - 2 - (height - 6) * (value / top);
  pen.strokeStyle = faint;
  pen.lineWidth = scale;
  pen.strokeRect(-scale, y(0), width + 2 * scale, height); // nothing, so that heights can be read
  const line = new Path2D();
  values.forEach((value, i) => line.lineTo(x(i), y(value)));
  const area = new Path2D(line);
  area.lineTo(width, y(0));
  area.lineTo(x(0), y(0));
  pen.fillStyle = accent;
  pen.globalAlpha = 0.14;
  pen.fill(area);
  pen.globalAlpha = 1;
  pen.strokeStyle = accent;
  pen.lineWidth = 1.5 * scale;
  pen.lineJoin = "round";
  pen.stroke(line);
}

const cards = CARDS.map(([title]) => makeCard(title));
const series = CARDS.map(() => []);
const slots = element("div", "slots");
cards[2].querySelector("canvas").replaceWith(slots); // says more than a line
const tenants = element("section", "card");
const guard = element("section", "card");
const counts = element("section", "card wide");
board.append(tenants, guard, counts);

function show(now, before) {
  CARDS.forEach(([, read, write, beside], i) => {
    const value = read(now, before);
    series[i].push(value);
    if (series[i].length > KEPT) series[i].shift();
    const place = cards[i].querySelector(".now");
    place.replaceChildren(write(value), element("small", "", beside(now, before)));
    const canvas = cards[i].querySelector("canvas");
    if (canvas) draw(canvas, series[i]);
  });
  slots.replaceChildren(
    ...Array.from({ length: Math.min(now.engine.slots, 256) }, (_, i) =>
      element("i", i < now.engine.running ? "busy" : ""),
    ),
  );
  showTenants(now.tenants);
  showGuard(now.engine);
  const list = element("dl");
  for (const [name, value] of Object.entries(now.engine)) {
    if (name.startsWith("guard")) continue;
    const pair = element("div");
    pair.append(element("dt", "", name.replaceAll("_", " ")), element("dd", "", count(value)));
    list.append(pair);
  }
  counts.replaceChildren(element("h2", "", `Engine: ${now.health.status}`), list);
}

// Service is what fair scheduling weighs: tokens above the least that anybody here has had.
function showTenants(standings) {
  const table = element("table");
  const cells = (tag, texts) => {
    const row = element("tr");
    row.append(...texts.map((text) => element(tag, "", text)));
    table.append(row);
  };
  cells("th", ["Tenant", "Running", "Waiting", "Service"]);
  for (const one of standings) {
    const name = one.tenant.slice(0, 8) || "everybody";
    cells("td", [one.you && one.tenant ? `${name} (you)` : name, count(one.running), count(one.waiting), `+${count(one.service)}`]);
  }
  const none = element("p", "none", "Nobody has a request here.");
  tenants.replaceChildren(element("h2", "", "Tenants"), standings.length ? table : none);
}

function showGuard(engine) {
  const changes = `${count(engine.guard_changes)} changes since the start`;
  const state = element("div", "now", engine.guard_actions.length ? "Acts" : "At rest");
  state.append(element("small", "", changes));
  const actions = engine.guard_actions.map((action) => element("li", "", action));
  const list = element("ul");
  list.append(...actions);
  guard.replaceChildren(element("h2", "", "Guard"), state, list);
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
