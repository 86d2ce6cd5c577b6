// The conversation that is shown, and the answer that is being generated.

import { $, announce, composing, copy, count, element, icon, iconButton, sync, toast } from "./dom.js";
import { Growing, markdown } from "./render.js";
import { stream } from "./server.js";
import * as store from "./store.js";

// First messages to choose from; the bundled models know Rust's documentation only.
const FIRST = ["Why is the sky blue?", "Explain gravity in two sentences.", "Give me three ideas for dinner."];
const FIRST_OF_RUST = ["What is a trait?", "What is ownership?", "How does a vector grow?"];
// Pixels from the end of a text within which the view follows it.
const NEAR = 80;

/** Files as the model reads them: each in a fence that its text does not have. */
function withFiles(message) {
  const files = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(run => run.length)), fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return files.join("") + message.content;
}

export class Conversation {
  chat = null;
  #model = null;
  #options;
  #changed;
  /** The answer that is being generated. */
  #running = null;
  /** Articles that are shown, by message: what they were made of, and the element. */
  #articles = new Map();
  /** The message that is being edited. */
  #editing = null;
  /** Why there is no answer to the last message. */
  #failure = null;

  /** `options()` are the fields of requests that the user chose; `changed(chat)` is called when it must be saved, `failed()` when the server may have changed. */
  constructor(options, changed, failed) {
    this.#options = options;
    this.#changed = changed;
    this.failed = failed;
    $("stop").addEventListener("click", () => this.stop());
    $("talk").addEventListener("scroll", () => { $("latest").hidden = this.#atEnd(); });
    $("latest").addEventListener("click", () => this.#toEnd());
    document.addEventListener("visibilitychange", () => { if (document.hidden && this.running) this.#running.save(); });
  }

  get running() { return this.#running !== null; }

  /** Whether an answer can be asked for; if the server is not known yet, the page says so. */
  #ready() {
    if (!this.#model) toast("The server is not ready yet.");
    return this.#model !== null && !this.running;
  }

  /** Uses what is known of the server's model. */
  use(model) {
    this.#model = model;
    this.render(true);
  }

  show(chat) {
    this.stop();
    this.chat = chat;
    this.#editing = null;
    this.#failure = null;
    this.#articles.clear();
    this.render();
  }

  /** Ends the answer; what there is of it stays. */
  stop() {
    this.#running?.abort.abort();
    this.#busy(null);
  }

  #busy(now) {
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    this.#running = now;
    $("send").hidden = now !== null;
    $("stop").hidden = now === null;
    if (focused) $(now === null ? "send" : "stop").focus();
  }

  #atEnd() { const area = $("talk"); return area.scrollHeight - area.scrollTop - area.clientHeight < NEAR; }
  #toEnd() { $("talk").scrollTop = $("talk").scrollHeight; }

  /** Draws all messages; those that have not changed stay as they are. `stays` leaves the view where it is. */
  render(stays = false) {
    const path = store.path(this.chat), active = document.activeElement, within = $("messages").contains(active);
    const shown = path.map((message, index) => this.#shown(message, index === path.length - 1));
    const running = this.#running;
    if (running?.chat === this.chat && !running.message) shown.push(running.article);
    if (this.#failure) shown.push(this.#failure);
    if (!shown.length && this.#model?.talks) shown.push(this.#welcome());
    sync($("messages"), shown);
    if (this.#editing && !path.includes(this.#editing)) this.#editing = null;
    for (const id of this.#articles.keys()) if (!path.some(message => message.id === id)) this.#articles.delete(id);
    if (!stays) this.#toEnd();
    $("latest").hidden = this.#atEnd();
    this.#context(path);
    if (!within || active.isConnected) return;
    // The focus goes to the same button of what took the article's place, or to the box for messages.
    const label = active.getAttribute("aria-label"), same = label && [...$("messages").querySelectorAll("article:last-child button")].find(button => button.getAttribute("aria-label") === label && !button.disabled);
    (same || $("text")).focus();
  }

  /** The article of a message. */
  #shown(message, last) {
    if (this.#running?.message === message) return this.#running.article;
    const all = store.siblings(this.chat, message);
    const made = JSON.stringify([message.content.length, message.thought?.length, message.note, message.tokens, message.unfinished, all.indexOf(message), all.length, last, this.#model?.talks]);
    const old = this.#articles.get(message.id);
    if (old && (old.made === made || this.#editing === message)) return old.article;
    const article = this.#article(message, last);
    // What was unfolded stays so.
    const open = [...old?.article.querySelectorAll("details") ?? []].map(details => details.open);
    article.querySelectorAll("details").forEach((details, at) => { details.open = open[at] ?? false; });
    this.#articles.set(message.id, { made, article });
    return article;
  }

  /** How full the context is, from the last answer. */
  #context(path) {
    const used = path.findLast(message => message.used)?.used, all = this.#model?.context;
    $("context").hidden = !used || !all;
    if (!used || !all) return;
    $("context").textContent = `${count(Math.min(used, all))} of ${count(all)} tokens`;
    $("context").classList.toggle("full", used > 0.9 * all);
    $("context").title = "How much of this conversation the model can remember: its context";
  }

  #welcome() {
    const { name } = this.#model, does = element("div", { class: "first" });
    for (const text of /^demo(-moe)?$/.test(name) ? FIRST_OF_RUST : FIRST) does.append(element("button", { type: "button", click: () => { if (!this.running) this.ask(text, []); } }, text));
    return element("div", { class: "welcome" }, element("h2", {}, `Chat with ${name}`), element("p", {}, "It runs on this machine, and what you write stays here."), does);
  }

  #article(message, last) {
    const mine = message.role === "user", text = element("div", { class: "text" }), bubble = element("div", { class: "bubble" });
    const made = element("article", { class: `said ${message.role}`, "aria-label": mine ? "You" : "Answer" }, bubble);
    if (message.thought) bubble.append(this.#thought(message.thought, message.thinking));
    for (const file of message.files ?? []) bubble.append(element("details", { class: "file" }, element("summary", {}, icon("file"), file.name), element("pre", { tabindex: "0", role: "group", "aria-label": file.name }, file.text)));
    if (mine || this.#model?.talks === false) { text.textContent = message.content; text.classList.add("raw"); } else text.append(...markdown(message.content));
    bubble.append(text);
    const note = message.note ?? (message.unfinished && "This answer is not finished.");
    if (note) made.append(element("p", { class: "note" }, note));
    made.append(this.#actions(made, message, last));
    return made;
  }

  #thought(text, seconds) {
    const name = seconds === undefined ? "Thinking …" : `Thought for ${seconds < 1 ? "less than a second" : seconds < 1.5 ? "1 second" : `${Math.round(seconds)} seconds`}`;
    return element("details", { class: "thought" }, element("summary", {}, name), element("div", { class: "raw" }, text));
  }

  #actions(made, message, last) {
    const mine = message.role === "user", does = element("div", { class: "does" });
    const all = store.siblings(this.chat, message), at = all.indexOf(message);
    if (all.length > 1) {
      const go = step => () => { if (this.running) return; store.follow(this.chat, all[at + step]); this.#changed(this.chat); this.render(true); };
      const [back, forth] = [iconButton("left", "Previous version", go(-1)), iconButton("right", "Next version", go(1))];
      back.disabled = at === 0;
      forth.disabled = at === all.length - 1;
      does.append(back, element("small", {}, `${at + 1} of ${all.length}`), forth);
    }
    const copies = iconButton("copy", "Copy", () => copy(message.content, copies));
    does.append(copies);
    if (mine) does.append(iconButton("edit", "Edit", () => { if (!this.running) this.#edit(made, message); }));
    if (!mine && message.parent !== null) does.append(iconButton("again", "Answer again (the same answer if creativity is 0)", () => this.#again(message.parent)));
    if (mine && last) does.append(iconButton("again", "Ask again", () => this.#again(message.id)));
    const facts = [message.tokens > 0 && `${count(message.tokens)} token${message.tokens === 1 ? "" : "s"}`, message.rate > 0 && `${message.rate.toFixed(1)} tokens/s`, message.first >= 0.05 && `first word after ${message.first.toFixed(1)} s`].filter(Boolean);
    if (facts.length) does.append(element("small", { class: "facts" }, facts.join(" · ")));
    return does;
  }

  #edit(made, message) {
    const open = $("messages").querySelector(".editing textarea");
    if (open) { open.focus(); return; }
    const area = element("textarea", { rows: "4", dir: "auto", "aria-label": "Edited message" });
    area.value = message.content;
    this.#editing = message;
    const end = () => { this.#editing = null; this.#articles.delete(message.id); };
    const send = () => {
      const text = area.value.trim();
      if (!text || !this.#ready()) return;
      end();
      const before = this.chat.current;
      store.add(this.chat, message.parent, { role: "user", content: text, ...(message.files && { files: message.files }) });
      this.#answer(before);
    };
    const cancel = () => { end(); this.render(true); };
    made.classList.add("editing");
    made.replaceChildren(area, element("div", { class: "does" }, element("button", { type: "button", class: "main", click: send }, "Send"), element("button", { type: "button", click: cancel }, "Cancel")));
    area.addEventListener("keydown", event => {
      if (composing(event)) return;
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
    });
    area.focus();
  }

  /** Edits the last message of the user. */
  editLast() {
    const message = store.path(this.chat).findLast(it => it.role === "user");
    if (message && !this.running) this.#edit(this.#articles.get(message.id).article, message);
  }

  /** Generates another answer to a message. */
  #again(id) {
    if (!this.#ready()) return;
    const before = this.chat.current;
    this.chat.current = id;
    this.#answer(before);
  }

  ask(text, files) {
    // Without a chat template, an empty input continues the text.
    if (text || files.length) store.add(this.chat, this.chat.current, { role: "user", content: text, ...(files.length && { files }) });
    this.#changed(this.chat);
    this.#answer(this.chat.current);
  }

  #request(path) {
    const common = { ...this.#options(), stream: true, stream_options: { include_usage: true }, return_progress: true };
    if (!this.#model.talks) return ["/v1/completions", { max_tokens: 256, ...common, prompt: path.map(withFiles).join("") }];
    const system = this.chat.system && this.#model.system ? [{ role: "system", content: this.chat.system }] : [];
    return ["/v1/chat/completions", { ...common, messages: [...system, ...path.map(message => ({ role: message.role, content: withFiles(message) }))] }];
  }

  /** Generates text after the last message of the branch. If nothing comes, `before` is shown again. */
  async #answer(before) {
    const chat = this.chat, path = store.path(chat), parent = chat.current;
    const running = new Answer(!this.#model.talks);
    const shown = () => chat === this.chat;
    running.chat = chat;
    // The first words make the answer part of the conversation, so that a tab that is closed loses little.
    running.begin = message => { const added = store.add(chat, parent, message); this.#changed(chat); return added; };
    running.save = () => { if (running.message) this.#changed(chat); };
    running.draws = draw => { if (!shown()) return; const follow = this.#atEnd(); draw(); if (follow) this.#toEnd(); $("latest").hidden = this.#atEnd(); };
    this.#failure = null;
    this.#busy(running);
    this.render();
    const [url, request] = this.#request(path);
    const failed = await running.receive(url, request);
    if (this.#running === running) this.#busy(null);
    if (!running.message && chat.current === parent) chat.current = before;
    this.#changed(chat);
    if (failed) this.failed();
    if (!shown() || this.running) return;
    const stays = !this.#atEnd();
    // What was unfolded in it stays so.
    if (running.message) this.#articles.set(running.message.id, { made: "", article: running.article });
    if (failed && !running.message) this.#failure = element("p", { class: "failed" }, failed);
    this.render(stays);
    announce(failed ?? `Answer: ${running.spoken.slice(0, 2000)}`);
  }
}

// Milliseconds between two saves of an answer that arrives.
const SAVES = 1000;

/** An answer while it arrives. Its owner sets `chat`, `begin`, `save` and `draws`. */
class Answer {
  abort = new AbortController();
  /** The message, as soon as there is something of it. */
  message = null;
  article = element("article", { class: "said assistant running", "aria-label": "Answer", "aria-busy": "true" });
  #content = "";
  #thought = "";
  #reason = null;
  #loops = null;
  #usage = null;
  #pieces = 0;
  #note;
  #began = performance.now();
  #first = 0;
  #thinking;
  #state = element("p", { class: "state" }, "Reading …");
  #thoughts = element("details", { class: "thought", hidden: true }, element("summary", {}, "Thinking …"), element("div", { class: "raw" }));
  #text = element("div", { class: "text" });
  #growing;
  #drawing = 0;
  #saving = 0;

  /** `plain` texts are shown as they are. */
  constructor(plain) {
    if (plain) this.#text.classList.add("raw");
    this.#growing = plain ? { update: text => { this.#text.textContent = text; } } : new Growing(this.#text);
    this.article.append(element("div", { class: "bubble" }, this.#thoughts, this.#text), this.#state);
  }

  /** The text as it is read aloud. */
  get spoken() { this.#growing.update(this.#content); return this.#text.textContent; }

  /** Receives the whole answer; what went wrong, if anything did. */
  async receive(url, request) {
    announce("The model is answering");
    let failed = null;
    try {
      for await (const chunk of stream(url, request, this.abort.signal)) this.#take(chunk);
    } catch (error) {
      if (error.name === "AbortError") this.#note = "Stopped.";
      else { failed = error instanceof TypeError ? "The connection to the server broke off." : error.message; this.#note = failed; }
    }
    clearTimeout(this.#drawing);
    clearTimeout(this.#saving);
    if (this.message) this.#finish(request.max_tokens);
    return failed;
  }

  #take(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    const { prompt_progress: progress } = chunk, choice = chunk.choices?.[0];
    if (progress?.total > progress?.processed) this.#state.textContent = `Reading ${count(progress.total)} tokens … ${Math.floor(100 * progress.processed / progress.total)} %`;
    const text = choice?.delta?.content ?? choice?.text ?? "", thought = choice?.delta?.reasoning_content ?? "";
    this.#reason = choice?.finish_reason ?? this.#reason;
    this.#loops = choice?.repetition ?? this.#loops;
    if (!text && !thought) return;
    this.#first ||= performance.now();
    if (text && this.#thought && this.#thinking === undefined) this.#thinking = (performance.now() - this.#first) / 1000;
    this.#pieces++;
    this.#content += text;
    this.#thought += thought;
    const so = { role: "assistant", content: this.#content, ...(this.#thought && { thought: this.#thought }), unfinished: true };
    if (this.message) Object.assign(this.message, so); else this.message = this.begin(so);
    this.#drawing ||= setTimeout(() => this.#draw(), 30);
    this.#saving ||= setTimeout(() => { this.#saving = 0; this.save(); }, SAVES);
  }

  #draw() {
    const began = performance.now(), drawn = this.#pieces;
    this.draws(() => {
      this.#state.textContent = "";
      this.#thoughts.hidden = !this.#thought;
      if (this.#thoughts.lastChild.textContent.length !== this.#thought.length) this.#thoughts.lastChild.textContent = this.#thought;
      if (this.#thinking !== undefined) this.#thoughts.firstChild.textContent = "Thoughts";
      this.#growing.update(this.#content);
    });
    // Long texts are drawn more rarely, so that they take at most a fifth of the time.
    const pause = Math.max(30, 4 * (performance.now() - began));
    this.#drawing = setTimeout(() => { this.#drawing = 0; if (this.#pieces > drawn) this.#draw(); }, pause);
  }

  /** Completes the message. */
  #finish(most) {
    const seconds = (performance.now() - this.#first) / 1000, tokens = this.#usage?.completion_tokens ?? this.#pieces;
    const made = { first: (this.#first - this.#began) / 1000, tokens, ...(this.#usage && { used: this.#usage.total_tokens }), ...(this.#thought && { thinking: this.#thinking ?? seconds }) };
    if (tokens > 1 && seconds > 0) made.rate = (tokens - 1) / seconds;
    const notes = [this.#note];
    if (this.#reason === "length") notes.push(tokens >= most ? `It was cut after ${count(tokens)} tokens, the longest answer in the settings.` : "The context is full: the model can read no more of this conversation. Start a new one.");
    if (this.#loops) notes.push(`The text repeats its last ${this.#loops.period} tokens: another answer with more creativity or less repetition may help.`);
    const note = notes.filter(Boolean).join(" ");
    Object.assign(this.message, made, note && { note });
    delete this.message.unfinished;
  }
}
