// The conversation that is shown, and the answer that is being generated.

import { $, announce, copy, count, element, icon, iconButton } from "./dom.js";
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
  #running = null;

  /** `options()` are the fields of requests that the user chose; `changed(chat)` is called when it must be saved. */
  constructor(options, changed) {
    this.#options = options;
    this.#changed = changed;
    $("stop").addEventListener("click", () => this.stop());
    $("talk").addEventListener("scroll", () => { $("latest").hidden = this.#atEnd(); });
    $("latest").addEventListener("click", () => this.#toEnd());
  }

  get running() { return this.#running !== null; }

  /** Uses what is known of the server's model. */
  use(model) {
    this.#model = model;
    if (!this.running) this.render();
  }

  show(chat) {
    this.stop();
    this.chat = chat;
    this.render();
  }

  stop() {
    this.#running?.abort.abort();
    this.#busy(null);
  }

  #busy(now) {
    this.#running = now;
    $("send").hidden = now !== null;
    $("stop").hidden = now === null;
  }

  #atEnd() { const area = $("talk"); return area.scrollHeight - area.scrollTop - area.clientHeight < NEAR; }
  #toEnd() { $("talk").scrollTop = $("talk").scrollHeight; }

  /** Draws all messages; `stays` leaves the view where it is. */
  render(stays = false) {
    const path = store.path(this.chat), at = $("talk").scrollTop;
    const all = path.map((message, index) => this.#article(message, index === path.length - 1));
    if (!all.length && this.#model?.talks) all.push(this.#welcome());
    $("messages").replaceChildren(...all);
    if (stays) $("talk").scrollTop = at; else this.#toEnd();
    this.#context(path);
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
    if (mine || !this.#model?.talks) { text.textContent = message.content; text.classList.add("raw"); } else text.append(...markdown(message.content));
    bubble.append(text);
    if (message.note) made.append(element("p", { class: "note" }, message.note));
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
    const area = element("textarea", { rows: "4", "aria-label": "Edited message" });
    area.value = message.content;
    const send = () => {
      const text = area.value.trim();
      if (this.running || !text) return;
      store.add(this.chat, message.parent, { role: "user", content: text, ...(message.files && { files: message.files }) });
      this.#answer();
    };
    const cancel = () => { this.render(true); };
    made.classList.add("editing");
    made.replaceChildren(area, element("div", { class: "does" }, element("button", { type: "button", class: "main", click: send }, "Send"), element("button", { type: "button", click: cancel }, "Cancel")));
    area.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    area.focus();
  }

  /** Edits the last message of the user. */
  editLast() {
    const articles = [...$("messages").querySelectorAll("article.user")], message = store.path(this.chat).findLast(it => it.role === "user");
    if (message && !this.running) this.#edit(articles.at(-1), message);
  }

  /** Generates another answer to a message. */
  #again(id) {
    if (this.running) return;
    this.chat.current = id;
    this.#answer();
  }

  ask(text, files) {
    // Without a chat template, an empty input continues the text.
    if (text || files.length) store.add(this.chat, this.chat.current, { role: "user", content: text, ...(files.length && { files }) });
    this.#answer();
  }

  #request(path) {
    const common = { ...this.#options(), stream: true, stream_options: { include_usage: true }, return_progress: true };
    if (!this.#model.talks) return ["/v1/completions", { max_tokens: 256, ...common, prompt: path.map(withFiles).join("") }];
    const system = this.chat.system && this.#model.system ? [{ role: "system", content: this.chat.system }] : [];
    return ["/v1/chat/completions", { ...common, messages: [...system, ...path.map(message => ({ role: message.role, content: withFiles(message) }))] }];
  }

  /** Generates text after the last message of the branch. */
  async #answer() {
    const chat = this.chat, path = store.path(chat), parent = chat.current;
    this.#changed(chat);
    this.render();
    const running = { abort: new AbortController() }, answer = new Answer(running.abort.signal, !this.#model.talks);
    this.#busy(running);
    $("messages").append(answer.article);
    this.#toEnd();
    const seen = () => chat === this.chat;
    answer.onDraw = draw => { if (!seen()) return; const follow = this.#atEnd(); draw(); if (follow) this.#toEnd(); };
    const [url, request] = this.#request(path);
    const failed = await answer.receive(url, request);
    const message = answer.message(request.max_tokens);
    if (this.#running === running) this.#busy(null);
    // If there is no answer, the question stays so that it can be sent again.
    if (message.content || message.thought) {
      const shown = chat.current;
      store.add(chat, parent, message);
      // Another branch was begun while the answer stopped.
      if (shown !== parent) chat.current = shown;
      this.#changed(chat);
    }
    if (!seen() || this.running) return;
    this.render(!this.#atEnd());
    if (failed) { $("messages").append(element("p", { class: "failed", role: "alert" }, failed)); this.#toEnd(); }
    announce(failed ? failed : `Answer: ${message.content.slice(0, 2000)}`);
  }
}

/** An answer while it arrives. */
class Answer {
  onDraw = draw => draw();
  article = element("article", { class: "said assistant running", "aria-label": "Answer", "aria-busy": "true" });
  #signal;
  #content = "";
  #thought = "";
  #reason = null;
  #loops = null;
  #usage = null;
  #note;
  #began = performance.now();
  #first = 0;
  #thinking;
  #state = element("p", { class: "state" }, "Reading …");
  #thoughts = element("details", { class: "thought", hidden: true }, element("summary", {}, "Thinking …"), element("div", { class: "raw" }));
  #text = element("div", { class: "text" });
  #growing = new Growing(this.#text);
  #timer = 0;

  /** `plain` texts are shown as they are. */
  constructor(signal, plain) {
    this.#signal = signal;
    if (plain) {
      this.#text.classList.add("raw");
      this.#growing = { update: text => { this.#text.textContent = text; } };
    }
    this.article.append(this.#thoughts, this.#text, this.#state);
  }

  /** Receives the whole answer; what went wrong, if anything did. */
  async receive(url, request) {
    announce("The model is answering");
    try {
      for await (const chunk of stream(url, request, this.#signal)) this.#take(chunk);
    } catch (error) {
      if (error.name === "AbortError") this.#note = "Stopped.";
      else return error instanceof TypeError ? "The connection to the server broke off." : error.message;
    } finally {
      clearTimeout(this.#timer);
    }
    return null;
  }

  #take(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    const { prompt_progress: progress } = chunk, choice = chunk.choices?.[0];
    if (progress?.total > progress?.processed) this.#state.textContent = `Reading ${count(progress.total)} tokens … ${Math.floor(100 * progress.processed / progress.total)} %`;
    const text = choice?.delta?.content ?? choice?.text ?? "", thought = choice?.delta?.reasoning_content ?? "";
    if (text || thought) this.#first ||= performance.now();
    if (text && this.#thought && this.#thinking === undefined) this.#thinking = (performance.now() - this.#first) / 1000;
    this.#content += text;
    this.#thought += thought;
    this.#reason = choice?.finish_reason ?? this.#reason;
    this.#loops = choice?.repetition ?? this.#loops;
    if ((text || thought) && !this.#timer) this.#timer = setTimeout(() => this.onDraw(() => this.#draw()), 30);
  }

  #draw() {
    const began = performance.now();
    this.#state.textContent = "";
    this.#thoughts.hidden = !this.#thought;
    this.#thoughts.lastChild.textContent = this.#thought;
    if (this.#thinking !== undefined) this.#thoughts.firstChild.textContent = "Thoughts";
    this.#growing.update(this.#content);
    // Long texts are drawn more rarely, so that they take at most a fifth of the time.
    const pause = Math.max(30, 4 * (performance.now() - began)), drawn = this.#content.length + this.#thought.length;
    this.#timer = setTimeout(() => { this.#timer = 0; if (this.#content.length + this.#thought.length > drawn) this.onDraw(() => this.#draw()); }, pause);
  }

  /** The message, with what is said about it. */
  message(most) {
    const seconds = (performance.now() - this.#first) / 1000, tokens = this.#usage?.completion_tokens;
    const made = { role: "assistant", content: this.#content, ...(this.#thought && { thought: this.#thought, thinking: this.#thinking ?? seconds }) };
    if (this.#usage) Object.assign(made, { tokens, used: this.#usage.total_tokens });
    if (this.#first) made.first = (this.#first - this.#began) / 1000;
    if (tokens > 1 && seconds > 0) made.rate = (tokens - 1) / seconds;
    const notes = [this.#note];
    if (this.#reason === "length") notes.push(tokens >= most ? `It was cut after ${count(tokens)} tokens, the longest answer in the settings.` : "The context is full: the model can read no more of this conversation. Start a new one.");
    if (this.#loops) notes.push(`The text repeats its last ${this.#loops.period} tokens: answering again with more creativity or less repetition may help.`);
    const note = notes.filter(Boolean).join(" ");
    return { ...made, ...(note && { note }) };
  }
}
