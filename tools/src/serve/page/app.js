// The page: connects its parts and the server.

import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { $, toast } from "./dom.js";
import { Performance } from "./performance.js";
import { ask, learn, unlock } from "./server.js";
import { paint, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";

paint();
const { chats, saved } = await store.open();
const CURRENT = "emberflow-shown";

const page = {
  chats,
  get shown() { return conversation.chat; },
  restored(list) {
    for (const chat of list) {
      const at = chats.findIndex(other => other.id === chat.id);
      // What is here and newer stays.
      if (at >= 0 && chats[at].changed >= chat.changed) continue;
      if (at >= 0) chats.splice(at, 1);
      chats.push(chat);
      store.save(chat);
    }
    choose(chats.find(chat => chat.id === conversation.chat.id) ?? null);
  },
  cleared() {
    for (const chat of chats.splice(0)) store.remove(chat);
    choose(null);
  },
};

async function changed(chat) {
  sidebar.list();
  title();
  if (!await store.save(chat)) toast("This conversation could not be saved: the browser's storage is full. Delete old ones, or save them as a file (Settings).");
}
function title() {
  const { chat } = conversation, name = store.titleOf(chat);
  $("title").textContent = chat.messages.length ? name : "New conversation";
  document.title = chat.messages.length ? `${name} – Emberflow` : "Emberflow";
}

/** Shows a conversation, a new one if it is `null`. */
function choose(chat) {
  let next = chat;
  if (!next) {
    next = chats.find(other => !other.messages.length);
    if (!next) chats.unshift(next = store.fresh(conversation.chat?.system));
  }
  if (next !== conversation.chat) conversation.show(next); else conversation.render(true);
  try { sessionStorage.setItem(CURRENT, next.id); } catch { /* forgotten with the tab */ }
  sidebar.show(next);
  settings.show(next);
  title();
}

const settings = new Settings(page);
const conversation = new Conversation(() => settings.options(), changed);
const sidebar = new Sidebar(chats, choose);
const performance = new Performance(() => poll());
const composer = new Composer((text, files) => {
  const { chat } = conversation;
  if (!known) { toast("The server is not ready yet."); return false; }
  if (conversation.running || !(text || files.length || (!known.talks && chat.messages.length))) return false;
  conversation.ask(text, files);
  return true;
}, () => conversation.editLast());

store.watch((id, chat) => {
  const at = chats.findIndex(other => other.id === id);
  // What runs here is newer than what another tab has.
  if (conversation.running && id === conversation.chat.id) return;
  if (at >= 0) chats.splice(at, 1);
  if (chat) chats.push(chat);
  if (id === conversation.chat.id) choose(chat ?? null); else sidebar.list();
});

document.addEventListener("keydown", event => {
  const held = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
  const act = { k: held && !event.shiftKey && (() => sidebar.search()), o: held && event.shiftKey && (() => sidebar.fresh()), p: held && event.shiftKey && (() => performance.toggle()) }[key];
  if (act) { event.preventDefault(); act(); }
  if (event.key === "Escape" && !$("settings").open) {
    if (conversation.running) { conversation.stop(); composer.focus(); }
    else if (!$("shade").hidden) sidebar.open(false);
    else if (performance.isOpen) performance.toggle();
  }
});

// The server: `known` is what is known of its model.
let known = null, timer = 0, failures = 0;
function notice(text) { $("notice").hidden = !text; $("notice-text").textContent = text; }
async function poll() {
  clearTimeout(timer);
  try {
    // What the server counts is only asked for while it is shown, or as long as nothing is known.
    const wanted = performance.isOpen || !known, response = await ask(wanted ? "/stats" : "/health");
    failures = 0;
    $("unlock").hidden = response.status !== 401;
    notice(response.status === 401 ? "This server needs an API key." : response.ok ? "" : "The model is being loaded …");
    if (response.ok && wanted) {
      const stats = await response.json();
      if (!known) await meet(stats);
      performance.draw(stats);
    }
  } catch {
    // One failure may be a moment of sleep.
    if (++failures > 1) { known = null; notice("The server does not answer. Is it still running?"); }
  }
  timer = setTimeout(poll, performance.isOpen || !known ? 1000 : 5000);
}
async function meet(stats) {
  const model = await learn();
  settings.use(model, stats.memory.budget_bytes);
  composer.use(model);
  known = model;
  conversation.use(model);
}
$("unlock").addEventListener("submit", event => { event.preventDefault(); unlock($("key").value); poll(); });
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else poll(); });

let last = null;
try { last = sessionStorage.getItem(CURRENT); } catch { /* a new tab */ }
choose(chats.find(chat => chat.id === last) ?? null);
if (!saved) toast("This browser saves no conversations for this page: they are lost when the tab is closed. Settings can save them as a file.");
poll();
composer.focus();
