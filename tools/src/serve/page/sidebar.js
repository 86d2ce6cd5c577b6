// The list of conversations, with search.

import { $, composing, element, iconButton, toast } from "./dom.js";
import * as store from "./store.js";

const NARROW = matchMedia("(max-width: 60rem)");
const DAY = 86400000;

/** In which part of the list a conversation stands. */
function age(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last seven days" : "Older";
}

/** The place of the first match in a conversation, with some words around it. */
function excerpt(chat, words) {
  for (const { content } of chat.messages) {
    const at = content.toLowerCase().indexOf(words);
    if (at >= 0) return `${at > 20 ? "… " : ""}${content.slice(Math.max(0, at - 20), at + 60)}`.replace(/\s+/g, " ");
  }
  return "";
}

export class Sidebar {
  #chats;
  #shown = null;
  #choose;
  #renamed;
  #pressed = false;

  /** `choose(chat)` shows a conversation, a new one if it is `null`; `renamed(chat)` is called when one must be saved. */
  constructor(chats, choose, renamed) {
    this.#chats = chats;
    this.#choose = choose;
    this.#renamed = renamed;
    $("new").addEventListener("click", () => this.fresh());
    $("search").addEventListener("input", () => this.list());
    $("side-open").addEventListener("click", () => this.open(!this.isOpen));
    $("side-close").addEventListener("click", () => this.open(false));
    $("shade").addEventListener("click", () => this.open(false));
    // An item that is pressed stays until it is released: the list changes while an answer arrives.
    $("chats").addEventListener("pointerdown", () => { this.#pressed = true; });
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { if (this.#pressed) { this.#pressed = false; setTimeout(() => this.list()); } });
    NARROW.addEventListener("change", () => this.#adapt());
    this.#adapt();
  }

  get isOpen() { return !$("side").hidden; }

  #adapt() { this.open(!NARROW.matches && store.settings.side !== false); }

  open(open) {
    const moved = open !== this.isOpen;
    $("side").hidden = !open;
    $("shade").hidden = !(open && NARROW.matches);
    // What the list covers takes no focus.
    document.querySelector("main").inert = open && NARROW.matches;
    $("side-open").setAttribute("aria-expanded", String(open));
    if (!moved) return;
    if (!NARROW.matches) { store.settings.side = open; store.saveSettings(); }
    if (open) { if (NARROW.matches) $("search").focus(); } else if (document.activeElement === document.body || $("side").contains(document.activeElement)) $("side-open").focus();
  }

  search() {
    this.open(true);
    $("search").select();
    $("search").focus();
  }

  fresh() {
    this.#choose(null);
    if (NARROW.matches) this.open(false);
    $("text").focus();
  }

  show(chat) {
    this.#shown = chat;
    this.list();
  }

  #listing = 0;
  /** Lists all conversations, once for all changes up to the next frame. */
  list() {
    cancelAnimationFrame(this.#listing);
    this.#listing = requestAnimationFrame(() => this.#list());
  }

  #list() {
    if (this.#pressed) return;
    const active = document.activeElement, within = $("chats").contains(active);
    // A name that is being changed stays.
    if (within && active.matches("input")) return;
    const place = within && [active.closest("li")?.dataset.id, active.getAttribute("aria-label")];
    const words = $("search").value.trim().toLowerCase(), parts = new Map();
    for (const chat of store.sorted(this.#chats)) {
      const found = words && !store.titleOf(chat).toLowerCase().includes(words) ? excerpt(chat, words) : "";
      if (!chat.messages.length || (words && !found && !store.titleOf(chat).toLowerCase().includes(words))) continue;
      const part = words ? "Found" : age(chat.changed);
      if (!parts.has(part)) parts.set(part, []);
      parts.get(part).push(this.#item(chat, found));
    }
    const all = [...parts].map(([name, items]) => element("section", {}, element("h2", {}, name), element("ul", {}, ...items)));
    $("chats").replaceChildren(...(all.length ? all : [element("p", { class: "none" }, words ? "No conversation has these words." : "Your conversations will be listed here.")]));
    if (!place) return;
    const item = [...$("chats").querySelectorAll("li")].find(item => item.dataset.id === place[0]) ?? $("chats").querySelector("li");
    ([...item?.querySelectorAll("button") ?? []].find(button => button.getAttribute("aria-label") === place[1]) ?? item?.querySelector("button") ?? $("new")).focus();
  }

  #item(chat, found) {
    const title = store.titleOf(chat), choose = () => { this.#choose(chat); if (NARROW.matches) this.open(false); };
    const shown = chat === this.#shown, item = element("li", { class: shown && "shown", "data-id": chat.id });
    item.append(element("button", { type: "button", class: "chat", "aria-current": shown && "true", click: choose }, element("span", {}, title), found && element("small", {}, found)));
    if (shown) item.append(iconButton("edit", "Rename this conversation", () => this.#rename(item, chat)), iconButton("delete", "Delete this conversation", () => this.#remove(chat)));
    return item;
  }

  #rename(item, chat) {
    const field = element("input", { "aria-label": "New name" });
    field.value = store.titleOf(chat);
    let ended = false;
    const end = (save, back) => {
      // Removing the field takes the focus from it.
      if (ended) return;
      ended = true;
      if (save) {
        const title = field.value.trim().slice(0, 200);
        if (title) chat.title = title; else delete chat.title;
        this.#renamed(chat);
      }
      if (!back) { this.list(); return; }
      field.blur();
      this.#list();
      $("chats").querySelector("[aria-label^=Rename]")?.focus();
    };
    field.addEventListener("keydown", event => {
      if (composing(event)) return;
      // The key would press the button that gets the focus.
      if (event.key === "Enter") { event.preventDefault(); end(true, true); }
      if (event.key === "Escape") { event.stopPropagation(); end(false, true); }
    });
    field.addEventListener("blur", () => end(true, false));
    item.replaceChildren(field);
    field.select();
  }

  #remove(chat) {
    this.#chats.splice(this.#chats.indexOf(chat), 1);
    this.#choose(store.sorted(this.#chats).find(other => other.messages.length) ?? null);
    store.remove(chat);
    toast(`“${store.titleOf(chat)}” is deleted.`, () => { store.undelete(chat); this.#chats.push(chat); this.#renamed(chat); this.#choose(chat); });
  }
}
