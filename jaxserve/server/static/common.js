// What both pages need: the key, requests that carry it, and the facts in the header.

const KEY = "jaxserve-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (options.body) headers["Content-Type"] = "application/json";
  return fetch(path, { ...options, headers });
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  return body.error?.message || `The server answered ${response.status}.`;
}

export async function showFacts(place) {
  const response = await ask("/v1/models").catch(() => null);
  place.replaceChildren();
  if (!response) place.append(element("span", "bad", "The server does not answer."));
  else if (!response.ok) place.append(element("span", "bad", await errorOf(response)));
  else {
    const model = (await response.json()).data[0];
    place.append(`${model.id} · ${model.max_model_len.toLocaleString()} tokens of context`);
    return model;
  }
}
