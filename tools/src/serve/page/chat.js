// Chats, stored in the browser's localStorage.
const $ = id => document.getElementById(id);
const headers = () => { const all = { "content-type": "application/json" }; if ($("key").value) all.authorization = "Bearer " + $("key").value; return all; };
const STORE = "emberflow";
// Field, label, minimum, step. Empty fields use the model's default.
const KNOBS = [["temperature", "Temperature", 0, 0.1], ["top_k", "Top-k", 0, 1], ["top_p", "Top-p", 0, 0.05], ["min_p", "Min-p", 0, 0.01],
  ["repeat_penalty", "Repetition penalty", 0, 0.05], ["max_tokens", "Max tokens", 1, 1], ["seed", "Seed", 0, 1]];
// `talks`: whether the model has a chat template.
let talks = true, running = null, kept = load(), talk = null, defaults = {}, model = "";
// First messages to choose from; the bundled models know Rust's documentation only.
const FIRST = ["Why is the sky blue?", "Explain gravity in two sentences.", "Give me three ideas for dinner."];
const FIRST_OF_RUST = ["What is a trait?", "What is ownership?", "How does a vector grow?"];

function load() {
  try {
    const read = JSON.parse(localStorage.getItem(STORE));
    const whole = chat => typeof chat?.id === "string" && Array.isArray(chat.messages) && chat.messages.every(m => typeof m?.content === "string" && typeof m.role === "string");
    return { chats: read.chats.filter(whole), current: read.current, settings: { ...read.settings } };
  } catch { return { chats: [], current: null, settings: {} }; }
}
function save() {
  const write = () => localStorage.setItem(STORE, JSON.stringify({ ...kept, chats: kept.chats.filter(chat => chat.messages.length || chat.system) }));
  // Merge the chats of other tabs. If storage is full, drop the oldest chat.
  for (const other of load().chats) if (!kept.chats.some(chat => chat.id === other.id) && !gone.has(other.id)) kept.chats.push(other);
  for (;;) {
    try { return write(); } catch (error) {
      const oldest = error.name === "QuotaExceededError" && kept.chats.findLastIndex(chat => chat !== talk);
      if (oldest === false || oldest < 0) return;
      kept.chats.splice(oldest, 1);
    }
  }
}
const gone = new Set();
const titled = chat => (chat.messages[0]?.content || "New conversation").replace(/\s+/g, " ").slice(0, 40);
function choose(chat) {
  talk = chat;
  kept.current = chat.id;
  $("system").value = chat.system ?? "";
  list_chats();
  render();
}
function fresh() {
  let empty = kept.chats.find(chat => !chat.messages.length);
  if (!empty) kept.chats.unshift(empty = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] });
  empty.system ??= talk?.system ?? "";
  choose(empty);
}
function list_chats() {
  $("chats").replaceChildren(...kept.chats.map(chat => { const option = element("option", { value: chat.id }, titled(chat)); option.selected = chat === talk; return option; }));
  $("forget").hidden = !talk.messages.length;
}

// The element of a message, with its buttons.
function box(message, at) {
  const mine = message.role === "user", text = element("div", { class: "text" });
  const made = element("div", { class: `said ${message.role}${talks ? "" : " plain"}` });
  if (message.thought) made.append(element("details", { class: "thought" }, element("summary", {}, "Thinking"), element("div", {}, message.thought)));
  if (mine || !talks) text.textContent = message.content; else text.append(...markdown(message.content));
  made.append(text);
  if (message.note) made.append(element("div", { class: "note" }, message.note));
  if (at === undefined) return made;
  const does = element("div", { class: "does" }), add = (name, action, title) => {
    const button = element("button", { type: "button", ...(title && { title }) }, name);
    button.addEventListener("click", () => action(button));
    does.append(button);
  };
  add("Copy", button => copy(message.content, button));
  if (mine) add("Edit", () => { if (!running) edit(made, at); });
  const last = at === talk.messages.length - 1;
  if (!mine && last && at > 0) add("Regenerate", () => again(at - 1), "Generate another answer. With temperature 0 it is the same answer.");
  if (mine && last) add("Ask again", () => again(at));
  if (message.speed) does.append(element("small", {}, message.speed));
  made.append(does);
  return made;
}
function welcome() {
  const does = element("div", { class: "does" });
  for (const message of /^demo(-moe)?$/.test(model) ? FIRST_OF_RUST : FIRST) {
    const button = element("button", { type: "button" }, message);
    button.addEventListener("click", () => { if (!running) ask(message); });
    does.append(button);
  }
  return element("div", { class: "welcome" }, element("p", {}, `Chat with ${model}. It runs on this machine, and what you write stays here.`), does);
}
function render() {
  const boxes = talk.messages.map(box);
  if (!boxes.length && talks && model) boxes.push(welcome());
  $("talk").replaceChildren(...boxes);
  $("talk").scrollTop = $("talk").scrollHeight;
}
function edit(made, at) {
  const area = element("textarea", { rows: "4", "aria-label": "Edited message" }), does = element("div", { class: "does" });
  area.value = talk.messages[at].content;
  const button = (name, action) => { const b = element("button", { type: "button" }, name); b.addEventListener("click", action); does.append(b); };
  button("Send", () => { if (!running && area.value.trim()) { talk.messages[at].content = area.value.trim(); again(at); } });
  button("Cancel", render);
  made.replaceChildren(area, does);
  area.focus();
}
// Drops everything after the message at `at` and generates a new answer.
function again(at) {
  if (running) return;
  talk.messages.length = at + 1;
  render();
  answer();
}
function tell(message) { $("talk").append(element("div", { class: "said error" }, message)); $("talk").scrollTop = $("talk").scrollHeight; }

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = rest.slice(0, end);
      rest = rest.slice(end + 2);
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}
const settings = () => Object.fromEntries(KNOBS.map(([field]) => [field, parseFloat(kept.settings[field])]).filter(([, value]) => Number.isFinite(value)));
function body(chat) {
  const common = { ...settings(), stream: true, stream_options: { include_usage: true } };
  if (!talks) return ["/v1/completions", { max_tokens: 256, ...common, prompt: chat.messages.map(m => m.content).join("") }];
  const system = chat.system && !$("systembox").hidden ? [{ role: "system", content: chat.system }] : [];
  return ["/v1/chat/completions", { ...common, messages: [...system, ...chat.messages.map(({ role, content }) => ({ role, content }))] }];
}
function busy(now) { running = now; $("send").hidden = !!now; $("stop").hidden = !now; }

// Generates text after the last message.
async function answer() {
  const chat = talk, mine = new AbortController(), said = { role: "assistant", content: "", thought: "" };
  const [path, asked] = body(chat);
  let shown = box(said), reason = null, loops = null, usage = null, first = 0, drawn = false;
  const seen = () => chat === talk && running === mine;
  // At most once per frame, however many tokens arrive.
  const draw = () => {
    drawn = false;
    if (!seen()) return;
    const area = $("talk"), follow = area.scrollHeight - area.scrollTop - area.clientHeight < 80, open = shown.querySelector("details")?.open;
    const next = box(said);
    if (open) next.querySelector("details").open = true;
    shown.replaceWith(next);
    shown = next;
    if (follow) area.scrollTop = area.scrollHeight;
  };
  $("talk").append(shown);
  $("talk").scrollTop = $("talk").scrollHeight;
  busy(mine);
  let failed = null;
  try {
    const response = await fetch(path, { method: "POST", headers: headers(), signal: mine.signal, body: JSON.stringify(asked) });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      first ||= performance.now();
      said.content += choice.delta?.content ?? choice.text ?? "";
      said.thought += choice.delta?.reasoning_content ?? "";
      reason = choice.finish_reason ?? reason;
      loops = choice.repetition ?? loops;
      if (!drawn) { drawn = true; requestAnimationFrame(draw); }
    }
  } catch (error) {
    if (error.name === "AbortError") said.note = "stopped"; else failed = error.message;
  }
  const seconds = (performance.now() - first) / 1000, tokens = usage?.completion_tokens;
  if (tokens > 1) said.speed = `${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
  if (reason === "length") said.note = tokens >= asked.max_tokens ? `Cut after ${tokens} tokens (Max tokens).` : "The context is full. Click New to start another chat.";
  if (loops) said.note = `${said.note ?? ""} The text repeats its last ${loops.period} tokens: Regenerate, or a higher temperature or repetition penalty, may help.`.trim();
  // If there is no answer, the question stays so that it can be sent again.
  if ((said.content || said.thought) && kept.chats.includes(chat)) chat.messages.push(said);
  const here = seen();
  if (running === mine) busy(null);
  if (here) { render(); if (failed) tell(failed); list_chats(); }
  save();
}
function ask(text) {
  // Without a chat template, an empty input continues the text.
  if (text) talk.messages.push({ role: "user", content: text });
  kept.chats = [talk, ...kept.chats.filter(chat => chat !== talk)];
  list_chats();
  render();
  save();
  answer();
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = talks ? $("text").value.trim() : $("text").value;
  if (running || !(text || (!talks && talk.messages.length))) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); } });
document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
function leave() { running?.abort(); busy(null); }
$("clear").addEventListener("click", () => { leave(); fresh(); save(); $("text").focus(); });
$("chats").addEventListener("change", () => { leave(); choose(kept.chats.find(chat => chat.id === $("chats").value)); save(); });
$("forget").addEventListener("click", () => {
  leave();
  gone.add(talk.id);
  kept.chats = kept.chats.filter(chat => chat !== talk);
  if (kept.chats.length) choose(kept.chats[0]); else fresh();
  save();
});
$("system").addEventListener("input", () => { talk.system = $("system").value; summary(); save(); });

// The settings in one line: the user's, else the server's defaults.
function summary() {
  const chosen = settings(), now = { ...defaults, ...chosen }, parts = [];
  if (Object.keys(defaults).length || Object.keys(chosen).length) {
    parts.push(now.temperature === 0 ? "greedy" : now.temperature === undefined ? "" : `temperature ${now.temperature}`);
    for (const [field, name, , ] of KNOBS.slice(1)) if (field in chosen || (now.temperature > 0 && field !== "seed" && field in defaults && now[field] !== { top_k: 0, top_p: 1, min_p: 0, repeat_penalty: 1 }[field])) parts.push(`${name.toLowerCase()} ${now[field]}`);
    parts.push(Object.keys(chosen).length ? "(custom)" : defaults.from === "recommended" ? "(recommended by the model)" : "(the model recommends nothing)");
  }
  if (talks && talk?.system && !$("systembox").hidden) parts.unshift("a system prompt,");
  $("settled").textContent = "Settings: " + parts.filter(Boolean).join(" ").replace(/ (top|min|rep|max|seed)/g, ", $1");
}
$("knobs").append(...KNOBS.map(([field, name, min, step]) => {
  const input = element("input", { type: "number", min, step, id: "knob-" + field });
  input.value = kept.settings[field] ?? "";
  input.addEventListener("input", () => { if (input.value === "") delete kept.settings[field]; else kept.settings[field] = input.value; summary(); save(); });
  return element("label", {}, name, input);
}));

// Adapts the page to the model.
async function learn() {
  const props = await (await fetch("/props", { headers: headers() })).json();
  talks = props.chat_template === true || typeof props.chat_template === "string" && props.chat_template !== "";
  model = props.model ?? "";
  const told = props.sampling ?? {};
  defaults = { ...told, repeat_penalty: told.repetition_penalty };
  for (const [field] of KNOBS) if (defaults[field] !== undefined && field !== "seed") $("knob-" + field).placeholder = defaults[field];
  $("knob-max_tokens").placeholder = talks ? "up to the context" : "256";
  $("knob-seed").placeholder = "random";
  $("text").placeholder = talks ? "Write a message" : "Write a text to continue; this model has no chat template";
  $("text").setAttribute("aria-label", talks ? "Message" : "Text");
  $("send").textContent = talks ? "Send" : "Continue";
  $("systembox").hidden = !(talks && await knows_system());
  summary();
  if (!running) render();
}
async function knows_system() {
  const word = "ssytem", messages = [{ role: "system", content: word }, { role: "user", content: "u" }];
  const response = await fetch("/apply-template", { method: "POST", headers: headers(), body: JSON.stringify({ messages }) });
  return response.ok && (await response.json()).prompt.includes(word);
}
{ const last = kept.chats.find(chat => chat.id === kept.current) ?? kept.chats[0]; if (last) choose(last); else fresh(); }
