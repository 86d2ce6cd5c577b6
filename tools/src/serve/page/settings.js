// The sheet with the model, how it answers, and what is stored.

import { $, bytes, count, download, element, toast } from "./dom.js";
import * as store from "./store.js";

// Field of requests, label, its usual name, explanation, smallest, largest, step. An empty field uses the model's default.
const FIELDS = [
  ["temperature", "Creativity", "temperature", "0 always gives the most likely answer, and always the same one. Higher is more varied; above 1 it is often nonsense.", 0, 2, 0.1],
  ["max_tokens", "Longest answer", "max tokens", "In tokens. A token is about three quarters of an English word.", 1, undefined, 1],
  ["repeat_penalty", "Avoid repetition", "repetition penalty", "1 is off, 1.1 is usual.", 0.01, 2, 0.05],
];
const MORE = [
  ["top_p", "Only likely words", "top-p", "Chooses among the most likely words that have this probability together. 1 is all words.", 0.01, 1, 0.05],
  ["top_k", "Words to choose from", "top-k", "Chooses among this many of the most likely words. 0 is all words.", 0, undefined, 1],
  ["min_p", "No unlikely words", "min-p", "Leaves out words that are less likely than this share of the most likely one.", 0, 1, 0.01],
  ["presence_penalty", "New subjects", "presence penalty", "Above 0, words that were used before become less likely.", -2, 2, 0.1],
  ["seed", "Seed", "seed", "The same number gives the same answer to the same question.", 0, undefined, 1],
];
const KEYS = [["Send", "Enter"], ["New line", "Shift Enter"], ["Stop the answer", "Esc"], ["Edit the last message", "↑ in an empty box"], ["New chat", "Ctrl Shift O"], ["Search", "Ctrl K"]];

function fileName(text) { return text.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation"; }

function asMarkdown(chat) {
  const said = store.path(chat).map(message => {
    const files = (message.files ?? []).map(({ name }) => `_Attached: ${name}_\n\n`).join("");
    return `## ${message.role === "user" ? "You" : "Answer"}\n\n${files}${message.content}\n`;
  });
  return `# ${store.titleOf(chat)}\n\n${chat.system ? `_Instructions: ${chat.system}_\n\n` : ""}${said.join("\n")}`;
}

/** Uses the chosen colours. */
export function paint() {
  const theme = store.settings.theme;
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
}

export class Settings {
  #model = null;
  #page;
  #number = new Map();

  /** `page` has the conversations (`chats`, `shown`), `save(chat)`, `restored(chats)` and `cleared()`. */
  constructor(page) {
    this.#page = page;
    const sheet = $("settings");
    $("settings-open").addEventListener("click", () => this.open());
    $("model").addEventListener("click", () => this.open());
    $("settings-close").addEventListener("click", () => sheet.close());
    // A click beside the sheet closes it.
    sheet.addEventListener("click", event => { if (event.target === sheet) sheet.close(); });
    $("fields").append(...FIELDS.map(field => this.#field(field)));
    $("more-fields").append(...MORE.map(field => this.#field(field)));
    $("reset").addEventListener("click", () => { for (const [name] of [...FIELDS, ...MORE]) delete store.settings[name]; this.#changed(); this.#fill(); });
    let saving = 0;
    $("system").addEventListener("input", () => {
      const { shown } = this.#page;
      shown.system = $("system").value;
      clearTimeout(saving);
      saving = setTimeout(() => this.#page.save(shown), 500);
      this.#marks();
    });
    $("system").addEventListener("change", () => this.#page.save(this.#page.shown));
    $("thinks").addEventListener("change", () => { if ($("thinks").checked) delete store.settings.thinks; else store.settings.thinks = false; this.#changed(); });
    for (const choice of document.getElementsByName("theme")) choice.addEventListener("change", () => { store.settings.theme = choice.value; this.#changed(); paint(); });
    $("save-one").addEventListener("click", () => { const { shown } = this.#page; download(`${fileName(store.titleOf(shown))}.md`, "text/markdown", asMarkdown(shown)); });
    $("save-all").addEventListener("click", () => download("emberflow-conversations.json", "application/json", JSON.stringify({ emberflow: 1, chats: this.#page.chats.filter(chat => chat.messages.length) })));
    $("load").addEventListener("click", () => $("loaded").click());
    $("loaded").addEventListener("change", () => this.#load());
    $("clear").addEventListener("click", () => this.#clear());
    $("keys").append(...KEYS.flatMap(([name, keys]) => [element("dt", {}, name), element("dd", {}, keys)]));
    this.#fill();
  }

  #field([name, label, term, about, min, max, step]) {
    const id = `field-${name}`, input = element("input", { id, type: "number", min, max, step: step === 1 ? 1 : "any", inputmode: "decimal", "aria-describedby": `${id}-about` });
    const wrong = element("p", { class: "wrong", role: "alert", hidden: true });
    const slider = max === undefined ? null : element("input", { type: "range", min: min > 0 ? step : min, max, step, "aria-label": label, tabindex: "-1" });
    const set = from => {
      const given = input.validity.valid && Number.isFinite(input.valueAsNumber);
      if (given) store.settings[name] = input.valueAsNumber; else delete store.settings[name];
      if (slider && from !== slider) slider.value = input.value === "" ? this.#model?.defaults[name] ?? 1 : input.value;
      wrong.hidden = input.validity.valid;
      wrong.textContent = input.validity.valid ? "" : `${input.validationMessage} Until then the usual value is used.`;
      if (input.validity.valid) input.removeAttribute("aria-invalid"); else input.setAttribute("aria-invalid", "true");
      this.#changed();
    };
    input.addEventListener("input", () => set(input));
    slider?.addEventListener("input", () => { input.value = slider.value; set(slider); });
    this.#number.set(name, { input, slider, wrong });
    return element("div", { class: "field" }, element("label", { for: id }, label, ...(term === name && label.toLowerCase() === term ? [] : [" ", element("small", {}, term)])), ...(slider ? [slider] : []), input, element("p", { id: `${id}-about` }, about), wrong);
  }

  /** Shows what is stored. */
  #fill() {
    for (const [name, { input, slider, wrong }] of this.#number) {
      wrong.hidden = true;
      input.removeAttribute("aria-invalid");
      input.value = store.settings[name] ?? "";
      const usual = name === "seed" ? "random" : this.#model?.defaults[name] ?? (name === "max_tokens" ? this.#model?.talks === false ? "256" : "auto" : "");
      input.placeholder = typeof usual === "number" ? String(+usual.toPrecision(4)) : usual;
      if (slider) slider.value = store.settings[name] ?? (typeof usual === "number" ? usual : 1);
    }
    $("thinks").checked = store.settings.thinks !== false;
    for (const choice of document.getElementsByName("theme")) choice.checked = choice.value === (store.settings.theme ?? "");
    this.#marks();
  }

  #changed() { store.saveSettings(); this.#marks(); }

  /** Marks that something differs from the model's defaults. */
  #marks() {
    const chosen = Object.keys(this.options()).length > 0;
    $("reset").hidden = !chosen;
    $("settings-open").classList.toggle("marked", chosen || Boolean(this.#model?.system && this.#page.shown?.system));
  }

  /** The fields of requests that the user chose. */
  options() {
    const given = [...this.#number.keys()].map(name => [name, store.settings[name]]).filter(([, value]) => Number.isFinite(value));
    return { ...Object.fromEntries(given), ...(this.#model?.thinks && store.settings.thinks === false && { enable_thinking: false }) };
  }

  /** Shows the server's model, and the bytes of memory that it may use. */
  use(model, budget) {
    this.#model = model;
    const facts = [["Name", model.name], ["Context", `${count(model.context)} tokens: as much of a conversation as it reads; the server's --context sets it`], ["Memory", `at most ${bytes(budget)}`]];
    $("facts").replaceChildren(...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
    $("model-name").textContent = model.name;
    $("system-box").hidden = !model.system;
    $("thinks-box").hidden = !model.thinks;
    $("advice").textContent = model.defaults.from === "recommended" ? "Empty fields use what the model's makers recommend." : "Empty fields use usual values; the model's makers recommend none.";
    $("address").textContent = `${location.origin}/v1`;
    this.#fill();
  }

  show(chat) { $("system").value = chat.system ?? ""; this.#marks(); }

  open() {
    $("save-one").disabled = !this.#page.shown.messages.length;
    $("settings").showModal();
  }

  async #load() {
    const [file] = $("loaded").files;
    $("loaded").value = "";
    if (!file) return;
    let chats = [], all = [];
    try { ({ chats: all } = JSON.parse(await file.text())); chats = store.accepted(all); } catch { /* no conversations */ }
    if (!chats.length) { toast(`${file.name} has no conversations of this page.`); return; }
    this.#page.restored(chats);
    const left = all.length - chats.length;
    toast(`${chats.length} conversation${chats.length === 1 ? "" : "s"} loaded.${left ? ` ${left} could not be read.` : ""}`);
  }

  #clear() {
    const chats = this.#page.chats.filter(chat => chat.messages.length);
    if (!chats.length || !confirm(`Delete ${chats.length === 1 ? "the conversation" : `all ${chats.length} conversations`}?`)) return;
    this.#page.cleared();
    $("settings").close();
    toast(`${chats.length} conversation${chats.length === 1 ? " is" : "s are"} deleted.`, () => this.#page.restored(chats));
  }
}

