// The list of conversations, with search.

import { $, element, iconButton, toast } from "./dom.js";
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

  /** `choose(chat)` shows a conversation, a new one if it is `null`. */
  constructor(chats, choose) {
    this.#chats = chats;
    this.#choose = choose;
    $("new").addEventListener("click", () => this.fresh());
    $("search").addEventListener("input", () => this.list());
    $("side-open").addEventListener("click", () => this.open(!this.isOpen));
    $("side-close").addEventListener("click", () => this.open(false));
    $("shade").addEventListener("click", () => this.open(false));
    NARROW.addEventListener("change", () => this.#adapt());
    this.#adapt();
  }

  get isOpen() { return !$("side").hidden; }

  #adapt() { this.open(!NARROW.matches && store.settings.side !== false); }

  open(open) {
    const moved = open !== this.isOpen;
    $("side").hidden = !open;
    $("shade").hidden = !(open && NARROW.matches);
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

  list() {
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
  }

  #item(chat, found) {
    const title = store.titleOf(chat), choose = () => { this.#choose(chat); if (NARROW.matches) this.open(false); };
    const item = element("li", { class: chat === this.#shown && "shown" });
    item.append(element("button", { type: "button", class: "chat", "aria-current": chat === this.#shown && "true", click: choose }, element("span", {}, title), ...(found ? [element("small", {}, found)] : [])),
      iconButton("edit", `Rename “${title}”`, () => this.#rename(item, chat)), iconButton("delete", `Delete “${title}”`, () => this.#remove(chat)));
    return item;
  }

  #rename(item, chat) {
    const field = element("input", { "aria-label": "New name" });
    field.value = store.titleOf(chat);
    let ended = false;
    const end = save => {
      // Removing the field takes the focus from it.
      if (ended) return;
      ended = true;
      if (save) { const title = field.value.trim().slice(0, 200); if (title) chat.title = title; else delete chat.title; store.save(chat); }
      this.list();
      this.#choose(this.#shown);
    };
    field.addEventListener("keydown", event => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }

  #remove(chat) {
    this.#chats.splice(this.#chats.indexOf(chat), 1);
    store.remove(chat);
    if (chat === this.#shown) this.#choose(this.#chats.find(other => other.messages.length) ?? null); else this.list();
    toast(`“${store.titleOf(chat)}” is deleted.`, () => { this.#chats.push(chat); store.save(chat); this.#choose(chat); });
  }
}
