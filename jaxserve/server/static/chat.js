// A conversation with the served model over the server's own OpenAI API.

import { ask, element, errorOf, key, showFacts } from "/static/common.js";

const turns = document.getElementById("turns");
const settings = document.getElementById("settings").elements;
const form = document.getElementById("ask");
const send = document.getElementById("send");
const messages = [];
let running = null; // AbortController of the reply that streams

function requestBody() {
  const system = settings.system.value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"]) {
    if (settings[name].value !== "") body[name] = Number(settings[name].value);
  }
  if (settings.shading.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const schema = settings.schema.value.trim();
  if (schema) {
    const json_schema = { name: "answer", schema: JSON.parse(schema) };
    body.response_format = { type: "json_schema", json_schema };
  }
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

// Green for tokens the model was sure of, through amber to red for ones it was not.
function shade(logprob) {
  const probability = Math.exp(logprob);
  return `hsl(${Math.round(120 * probability)} 70% 50% / ${0.08 + 0.3 * (1 - probability)})`;
}

function tokenSpan(entry, text) {
  const span = element("span", "token", text);
  span.style.background = shade(entry.logprob);
  const percent = (logprob) => (100 * Math.exp(logprob)).toFixed(1);
  const lines = entry.top_logprobs.map((t) => `${percent(t.logprob)} %  ${JSON.stringify(t.token)}`);
  span.title = [`${percent(entry.logprob)} %`, ...lines].join("\n");
  return span;
}

function addTurn(role) {
  turns.querySelector(".empty")?.remove();
  const turn = element("article", `turn ${role}`);
  turn.append(element("div", "who", role === "user" ? "You" : "Model"));
  const text = element("div", "text");
  turn.append(text);
  turns.append(turn);
  return { turn, text };
}

class Reply {
  constructor() {
    Object.assign(this, addTurn("assistant"));
    this.content = "";
    this.decoder = new TextDecoder(); // characters may span tokens
    this.started = performance.now();
    this.first = null;
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content = "", reasoning_content: thought } = choice.delta;
    if ((content || thought) && this.first === null) this.first = performance.now();
    if (thought) this.think(thought);
    this.content += content;
    if (choice.logprobs) choice.logprobs.content.forEach((entry) => this.shade(entry));
    else if (content) this.text.append(content);
    if (choice.finish_reason) this.end(choice.finish_reason);
  }

  shade(entry) {
    const text = this.decoder.decode(new Uint8Array(entry.bytes), { stream: true });
    this.text.append(tokenSpan(entry, text));
  }

  end(reason) {
    this.reason = reason;
    // The token that ended the answer has a probability but is no part of it.
    const last = this.text.lastElementChild;
    if (last && this.text.textContent.length > this.content.length) last.remove();
  }

  think(thought) {
    if (!this.thought) {
      this.thought = element("div", "thought");
      this.text.before(this.thought);
    }
    this.thought.append(thought);
  }

  showFigures() {
    if (this.first === null) return;
    const parts = [`first token after ${Math.round(this.first - this.started)} ms`];
    const count = this.usage?.completion_tokens;
    if (count > 1) {
      const rate = (count - 1) / ((performance.now() - this.first) / 1000);
      parts.unshift(`${count} tokens`, `${rate.toFixed(1)} tokens/s`);
    }
    if (this.reason && this.reason !== "stop") parts.push(`ended by ${this.reason}`);
    this.turn.append(element("div", "figures", parts.join(" · ")));
  }
}

async function stream(reply) {
  const body = JSON.stringify(requestBody());
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    body,
    signal: running.signal,
  });
  if (!response.ok) throw new Error(await errorOf(response));
  for await (const chunk of events(response)) {
    const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
    reply.add(chunk);
    if (atEnd) turns.scrollTop = turns.scrollHeight;
  }
}

async function converse(text) {
  messages.push({ role: "user", content: text });
  addTurn("user").text.textContent = text;
  const reply = new Reply();
  running = new AbortController();
  send.textContent = "Stop";
  turns.scrollTop = turns.scrollHeight;
  try {
    await stream(reply);
  } catch (error) {
    if (error.name === "AbortError") reply.reason = "you";
    else reply.turn.append(element("div", "error", error.message));
  }
  reply.showFigures();
  if (reply.content) messages.push({ role: "assistant", content: reply.content });
  else messages.pop(); // no answer: the question was not part of the conversation
  running = null;
  send.textContent = "Send";
  turns.scrollTop = turns.scrollHeight;
}

function startAfresh() {
  messages.length = 0;
  const hint = "Ask something. Hover over a shaded token to see what else it could have been.";
  turns.replaceChildren(element("p", "empty", hint));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const box = form.elements.text;
  if (running) return running.abort();
  if (!box.value.trim()) return;
  const text = box.value;
  box.value = "";
  converse(text);
});
form.elements.text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) form.requestSubmit();
});
document.getElementById("clear").addEventListener("click", startAfresh);
document.getElementById("toggle").addEventListener("click", ({ currentTarget }) => {
  const shown = document.getElementById("settings").classList.toggle("shown");
  currentTarget.setAttribute("aria-expanded", shown);
});
settings.key.value = key.get();
settings.key.addEventListener("change", () => {
  key.set(settings.key.value);
  showFacts(document.getElementById("facts"));
});
startAfresh();
showFacts(document.getElementById("facts"));
