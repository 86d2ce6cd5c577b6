// The box for a message, with text files that go with it.

import { $, announce, bytes, composing, count, element, icon, iconButton, toast } from "./dom.js";
import { json } from "./server.js";

// What a browser's page can hold easily; contexts are smaller.
const LARGEST = 4 << 20;

/** The text of a file; an error says why there is none. */
async function read(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} has ${bytes(file.size)}; a file may have ${bytes(LARGEST)}`);
  const data = new Uint8Array(await file.arrayBuffer()), wide = { "255,254": "utf-16le", "254,255": "utf-16be" }[String(data.slice(0, 2))];
  let text;
  try { text = new TextDecoder(wide ?? "utf-8", { fatal: true }).decode(data); } catch { /* no text */ }
  if (text === undefined || text.includes("\0")) throw new Error(`${file.name} is no text file. Only text can be attached: notes, code, tables (CSV), web pages.`);
  if (!text.trim()) throw new Error(`${file.name} is empty`);
  return text;
}

export class Composer {
  #files = [];
  #model = null;
  #send;

  /** `send(text, files)` takes a message; `false` if it cannot now. `editLast()` edits the last one. */
  constructor(send, editLast) {
    this.#send = send;
    const text = $("text");
    $("ask").addEventListener("submit", event => { event.preventDefault(); this.#submit(); });
    text.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !composing(event)) { event.preventDefault(); this.#submit(); }
      if (event.key === "ArrowUp" && !text.value) { event.preventDefault(); editLast(); }
    });
    text.addEventListener("input", () => this.#grow());
    text.addEventListener("paste", event => this.#dropped(event, event.clipboardData));
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", async () => { await this.attach([...$("files").files]); $("files").value = ""; });
    for (const name of ["dragover", "dragenter"]) document.addEventListener(name, event => { if (event.dataTransfer?.types.includes("Files")) { event.preventDefault(); document.body.classList.add("dropping"); } });
    document.addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
    document.addEventListener("drop", event => { document.body.classList.remove("dropping"); this.#dropped(event, event.dataTransfer); });
  }

  #dropped(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.attach([...data.files]);
  }

  use(model) {
    this.#model = model;
    const { talks } = model;
    $("text").placeholder = talks ? "Write a message" : "Write a text to continue; this model has no chat template";
    $("text").setAttribute("aria-label", talks ? "Message" : "Text");
    $("send").setAttribute("aria-label", talks ? "Send" : "Continue");
    $("send").title = talks ? "Send (Enter)" : "Continue the text (Enter)";
    $("attach").hidden = !talks;
  }

  focus() { $("text").focus(); }

  #grow() {
    const text = $("text");
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight + 2, window.innerHeight * 0.4)}px`;
  }

  async attach(list) {
    if (!this.#model?.talks) return;
    for (const file of list) {
      try {
        const made = { name: file.name || "text.txt", text: await read(file) };
        this.#files.push(made);
        this.#list();
        announce(`${made.name} attached`);
        this.#measure(made);
      } catch (error) { toast(error.message); }
    }
    this.focus();
  }

  /** Says how many tokens a file has, and if these are more than the context. */
  async #measure(file) {
    try {
      file.tokens = (await json("/tokenize", { content: file.text })).tokens.length;
    } catch {
      // A token has at most some dozen bytes: so long a text is longer than the context.
      if (file.text.length > 64 * this.#model.context) file.tokens = Infinity;
    }
    if (this.#files.includes(file)) this.#list();
  }

  #list() {
    $("attached").hidden = !this.#files.length;
    $("attached").replaceChildren(...this.#files.map(file => {
      const long = this.#isLong(file), tokens = Number.isFinite(file.tokens) ? `${count(file.tokens)} tokens` : "";
      const size = long ? `${tokens || "far too long"}: more than the server's context of ${count(this.#model.context)}` : tokens;
      const remove = () => { this.#files = this.#files.filter(other => other !== file); this.#list(); this.focus(); };
      return element("li", { class: long && "long" }, icon("file"), element("span", {}, file.name), element("small", {}, size), iconButton("close", `Remove ${file.name}`, remove));
    }));
  }

  #isLong(file) { return file.tokens > this.#model.context; }

  #submit() {
    const long = this.#files.find(file => this.#isLong(file));
    if (long) { toast(`${long.name} is longer than the server's context: remove it, or start the server with a larger --context.`); return; }
    const text = this.#model?.talks ? $("text").value.trim() : $("text").value;
    const files = this.#files.map(({ name, text }) => ({ name, text }));
    if (!this.#send(text, files)) return;
    $("text").value = "";
    this.#files = [];
    this.#list();
    this.#grow();
  }
}
