// The page: connects its parts and the server.

import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { $, composing, toast } from "./dom.js";
import { Performance } from "./performance.js";
import { ask, learn, unlock } from "./server.js";
import { paint, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";

paint();
const { chats, saved } = await store.open();
const CURRENT = "emberflow-shown";

let refused = null;
async function save(...list) {
  const failed = await store.save(...list);
  const again = failed === refused;
  refused = failed;
  // An answer is saved each second.
  if (failed && !again) toast(`This could not be saved: ${failed}.`);
}
const page = {
  chats,
  save,
  get shown() { return conversation.chat; },
  restored(list) {
    store.undelete(...list);
    for (const chat of list) {
      const here = chats.find(other => other.id === chat.id);
      if (here) store.merge(here, chat); else chats.push(chat);
    }
    save(...list.map(chat => chats.find(other => other.id === chat.id)));
    conversation.render(true);
    sidebar.list();
  },
  cleared() {
    store.remove(...chats.splice(0));
    choose(null);
  },
};

function changed(chat) {
  sidebar.list();
  title();
  return save(chat);
}
function title() {
  const { chat } = conversation, name = store.titleOf(chat);
  $("title").textContent = chat.messages.length ? name : "New conversation";
  document.title = chat.messages.length ? `${name} – Emberflow` : "Emberflow";
}

/** Shows a conversation, a new one if it is `null`. */
function choose(chat) {
  let next = chat ?? chats.find(other => !other.messages.length && !other.system);
  if (!next) chats.unshift(next = store.fresh());
  if (next !== conversation.chat) conversation.show(next);
  store.ofTab(CURRENT, next.id);
  sidebar.show(next);
  settings.show(next);
  title();
}

const settings = new Settings(page);
const conversation = new Conversation(() => settings.options(), changed, () => { known = null; poll(); });
const sidebar = new Sidebar(chats, choose, changed);
const performance = new Performance(() => poll());
const composer = new Composer((text, files) => {
  const { chat } = conversation;
  if (!known) { toast("The server is not ready yet."); return false; }
  if (conversation.running && text) toast("The answer is still being written. Esc stops it.");
  if (conversation.running || !(text || files.length || (!known.talks && chat.messages.length))) return false;
  conversation.ask(text, files);
  // A phone's keyboard would cover the answer.
  if (!matchMedia("(pointer: coarse)").matches) $("text").focus();
  return true;
}, () => conversation.editLast());

store.watch(all => {
  for (const [id, now] of all) {
    const at = chats.findIndex(other => other.id === id), here = chats[at];
    if (now && here) { store.merge(here, now); here.title = now.title; if (document.activeElement !== $("system")) here.system = now.system; }
    else if (now) chats.push(now);
    else if (here) chats.splice(at, 1);
    if (id !== conversation.chat.id) continue;
    if (!now && here?.messages.length) choose(null); else { conversation.render(true); settings.show(conversation.chat); title(); }
  }
  sidebar.list();
});

const apple = /Mac|iPhone|iPad/.test(navigator.platform);
document.addEventListener("keydown", event => {
  // An open dialog has the keys.
  if (composing(event) || $("settings").open) return;
  const held = apple ? event.metaKey : event.ctrlKey, key = event.key.toLowerCase();
  const act = held && ((key === "k" && !event.shiftKey && (() => sidebar.search())) || (key === "o" && event.shiftKey && (() => sidebar.fresh())));
  if (act) {
    event.preventDefault();
    // It would cover what is opened.
    if (!$("performance-shade").hidden) performance.toggle();
    act();
  }
  if (event.key !== "Escape" || (event.target === $("search") && $("search").value)) return;
  if (!$("shade").hidden) sidebar.open(false);
  else if (conversation.running) { conversation.stop(); composer.focus(); }
  else if (performance.isOpen) performance.toggle();
});

// The server: `known` is what is known of its model, `seen` when it was last asked.
let known = null, seen = null, timer = 0, failures = 0, tried = false;
function notice(text) { $("notice").hidden = !text; $("notice-text").textContent = text; }
async function poll() {
  clearTimeout(timer);
  try {
    const response = await ask("/stats");
    const locked = response.status === 401, focused = $("unlock").contains(document.activeElement);
    $("unlock").hidden = !locked;
    if (focused && !locked) composer.focus();
    notice(locked ? tried ? "This API key is not accepted." : "This server needs an API key." : response.ok ? "" : "The model is being loaded …");
    tried &&= locked;
    if (response.ok) {
      const stats = await response.json();
      // A server that has started again may have another model.
      const born = Date.now() / 1000 - stats.uptime_s;
      if (!known || !seen || stats.model !== seen.model || Math.abs(born - seen.born) > 5) await meet(stats);
      seen = { model: stats.model, born };
      performance.take(stats);
    } else known = null;
    failures = 0;
  } catch {
    // One failure may be a moment of sleep.
    if (++failures > 1) { known = null; notice("The server does not answer. Is it still running?"); }
  }
  clearTimeout(timer);
  timer = setTimeout(poll, performance.isOpen || !known ? 1000 : 5000);
}
async function meet(stats) {
  const model = await learn();
  settings.use(model, stats.memory.budget_bytes);
  composer.use(model);
  known = model;
  conversation.use(model);
}
$("unlock").addEventListener("submit", event => {
  event.preventDefault();
  if (!unlock($("key").value)) { notice("An API key has no such characters."); return; }
  tried = true;
  poll();
});
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else poll(); });

choose(chats.find(chat => chat.id === store.ofTab(CURRENT)) ?? null);
if (!saved) toast("This browser saves no conversations for this page: they are lost when the tab is closed. Settings can save them as a file.");
poll();
composer.focus();
