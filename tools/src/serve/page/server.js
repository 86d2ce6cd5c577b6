// Requests to the server that serves this page.

import { ofTab } from "./store.js";

const KEY = "emberflow-key";
let key = ofTab(KEY) ?? "";

/** Uses this API key from now on, until the tab is closed; `false` if no key can be so. */
export function unlock(secret) {
  const trimmed = secret.trim();
  // Headers have these characters only.
  if (!/^[\x21-\x7e]*$/.test(trimmed)) return false;
  key = trimmed;
  ofTab(KEY, key);
  return true;
}

/** `fetch` with the API key; `body` is sent as JSON. */
export function ask(path, body, signal) {
  const headers = { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
  const more = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  return fetch(path, { headers, signal, ...more });
}

/** The server's answer as JSON; an error has the server's message. */
export async function json(path, body) {
  const response = await ask(path, body), answer = await response.json();
  if (!response.ok) throw new Error(answer.error?.message ?? response.statusText);
  return answer;
}

/** Server-sent events of a streamed answer. */
export async function* stream(path, body, signal) {
  const response = await ask(path, body, signal);
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = rest.slice(0, end);
      rest = rest.slice(end + 2);
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** What this page must know of a model. */
export async function learn() {
  const props = await json("/props");
  const { repetition_penalty: repeat_penalty, ...sampling } = props.sampling ?? {};
  const talks = props.chat_template === true || (typeof props.chat_template === "string" && props.chat_template !== "");
  const model = { name: props.model ?? "", context: props.context, defaults: { ...sampling, repeat_penalty }, talks, system: false, thinks: false };
  if (talks) {
    const prompt = async request => { try { return (await json("/apply-template", request)).prompt; } catch { return ""; } };
    // A word that no template has.
    const word = "ssytem", user = { role: "user", content: "u" };
    model.system = (await prompt({ messages: [{ role: "system", content: word }, user] })).includes(word);
    const [thinks, hurries] = await Promise.all([true, false].map(enable_thinking => prompt({ messages: [user], enable_thinking })));
    model.thinks = thinks !== hurries;
  }
  return model;
}
