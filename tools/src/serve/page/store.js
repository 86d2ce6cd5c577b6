// Conversations, one record each in the browser's IndexedDB; settings in localStorage.
//
// A conversation is a tree: a message names the one before it, and `current` is the last message of the branch that is
// shown. Another answer, or an edited question, is a new branch; the old one stays. A message stands after its parent, so
// there are no circles. Messages are only added, and an answer only grows: what two tabs know of a conversation is merged.

const OLD = "emberflow", SETTINGS = "emberflow-settings";
const id = () => crypto.getRandomValues(new Uint32Array(2)).join("-");
let database = null, channel = null, persists = false;
// Deleted conversations: an answer that ends after the deletion does not bring them back.
const gone = new Set();

/** A value of the tab or the browser that may be unavailable: site data can be blocked. */
function stored(area, key, value) {
  try {
    if (value === undefined) return window[area].getItem(key);
    window[area].setItem(key, value);
  } catch { /* it lasts as long as the page */ }
  return null;
}
export const ofTab = (key, value) => stored("sessionStorage", key, value);

const answer = request => new Promise((resolve, reject) => { request.onsuccess = () => resolve(request.result); request.onerror = () => reject(request.error); });
/** Runs `work(chats)`; ends when its writes are on disk. */
async function transaction(mode, work) {
  const all = database.transaction("chats", mode), ended = new Promise((resolve, reject) => {
    all.oncomplete = resolve;
    all.onabort = () => reject(all.error ?? new Error("the browser has stopped it"));
  });
  const [result] = await Promise.all([work(all.objectStore("chats")), ended]);
  return result;
}

/** Opens the store: all conversations, newest first, and whether they are saved (some private windows save nothing). */
export async function open() {
  try {
    const request = indexedDB.open("emberflow", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    database = await answer(request);
    // Another tab may need a newer version.
    database.onversionchange = () => database.close();
    channel = new BroadcastChannel("emberflow");
    await takeOver();
    return { chats: sorted(await transaction("readonly", chats => answer(chats.getAll()))), saved: true };
  } catch {
    database = null;
    return { chats: [], saved: false };
  }
}

/** Conversations of an earlier version of this page, which had them in localStorage. */
async function takeOver() {
  const old = stored("localStorage", OLD);
  if (!old) return;
  let list;
  try { list = accepted(JSON.parse(old).chats); } catch { return; }
  await transaction("readwrite", chats => { for (const chat of list) chats.put(chat); });
  localStorage.removeItem(OLD);
}

/** Those of `list` that are conversations, from a file or an earlier version, as this version has them. */
export function accepted(list) {
  const text = value => typeof value === "string", whole = m => text(m?.content) && ["user", "assistant"].includes(m.role);
  return (Array.isArray(list) ? list : []).filter(chat => text(chat?.id) && Array.isArray(chat.messages)).map(chat => {
    const made = { id: chat.id, changed: Number(chat.changed) || 0, messages: [], current: null };
    for (const name of ["title", "system"]) if (text(chat[name])) made[name] = chat[name];
    const known = new Set();
    for (const m of chat.messages.filter(whole)) {
      const own = text(m.id) && !known.has(m.id);
      // Without names of messages, each follows the one before it.
      const parent = known.has(m.parent) || (own && m.parent === null) ? m.parent : made.messages.at(-1)?.id ?? null;
      const message = { id: own ? m.id : id(), parent, role: m.role, content: m.content };
      for (const name of ["thought", "note"]) if (text(m[name])) message[name] = m[name];
      for (const name of ["tokens", "used", "rate", "first", "thinking"]) if (Number.isFinite(m[name])) message[name] = m[name];
      if (Array.isArray(m.files)) message.files = m.files.filter(file => text(file?.name) && text(file.text)).map(({ name, text }) => ({ name, text }));
      known.add(message.id);
      made.messages.push(message);
    }
    made.current = known.has(chat.current) ? chat.current : made.messages.at(-1)?.id ?? null;
    return made;
  }).filter(chat => chat.messages.length);
}

const length = message => message.content.length + (message.thought ?? "").length;
/** Adds what `other` has of a conversation and `chat` has not. */
export function merge(chat, other) {
  const mine = new Map(chat.messages.map((message, at) => [message.id, at]));
  for (const message of other.messages) {
    const at = mine.get(message.id);
    if (at === undefined) chat.messages.push(message);
    else if (length(message) > length(chat.messages[at]) || (chat.messages[at].unfinished && !message.unfinished)) Object.assign(chat.messages[at], message, { unfinished: message.unfinished });
  }
  chat.changed = Math.max(chat.changed, other.changed);
}

export const sorted = list => list.sort((a, b) => b.changed - a.changed);

/** Saves conversations, with what other tabs have added; why they could not be saved, if they could not. */
export async function save(...list) {
  const kept = list.filter(chat => !gone.has(chat.id));
  if (!database || !kept.length) return null;
  // The browser may clear what is not persistent when the disk is full.
  if (!persists) { persists = true; navigator.storage?.persist?.().catch(() => {}); }
  try {
    await transaction("readwrite", async chats => {
      for (const chat of kept) {
        if (!chat.messages.length && !chat.system) { chats.delete(chat.id); continue; }
        const saved = await answer(chats.get(chat.id));
        if (saved) merge(chat, saved);
        chats.put(chat);
      }
    });
    channel.postMessage(kept.map(chat => chat.id));
    return null;
  } catch (error) {
    return error.name === "QuotaExceededError" ? "the browser's storage is full: delete old conversations, or save them as a file in the settings" : error.message;
  }
}
export async function remove(...list) {
  const ids = list.map(chat => chat.id);
  for (const id of ids) gone.add(id);
  if (!database) return;
  try {
    await transaction("readwrite", chats => { for (const id of ids) chats.delete(id); });
    channel.postMessage(ids);
  } catch { /* they are back when the page is loaded again, and can be deleted then */ }
}
/** Lets deleted conversations be saved again. */
export function undelete(...list) { for (const chat of list) gone.delete(chat.id); }

/** Calls `changed(id, chat)` for conversations that another tab has changed; `chat` is missing if it was deleted. */
export function watch(changed) {
  if (!channel) return;
  channel.onmessage = async ({ data }) => {
    const found = await transaction("readonly", chats => Promise.all(data.map(id => answer(chats.get(id)))));
    data.forEach((id, at) => { if (!found[at]) gone.add(id); else gone.delete(id); });
    changed(data.map((id, at) => [id, found[at]]));
  };
}

export const fresh = () => ({ id: id(), changed: Date.now(), messages: [], current: null });

/** Adds a message after `parent` and shows its branch. */
export function add(chat, parent, message) {
  const made = { id: id(), parent, ...message };
  chat.messages.push(made);
  chat.current = made.id;
  chat.changed = Date.now();
  return made;
}
/** The messages of the branch that is shown, oldest first. */
export function path(chat) {
  const by = new Map(chat.messages.map(message => [message.id, message])), found = [];
  for (let at = by.get(chat.current); at; at = by.get(at.parent)) found.push(at);
  return found.reverse();
}
/** A message and its alternatives. */
export const siblings = (chat, message) => chat.messages.filter(other => other.parent === message.parent && other.role === message.role);
/** Shows the newest branch through `message`. */
export function follow(chat, message) {
  let at = message, next;
  while ((next = chat.messages.findLast(other => other.parent === at.id))) at = next;
  chat.current = at.id;
}

export function titleOf(chat) {
  const [first] = chat.messages;
  return chat.title || (first?.content || first?.files?.[0]?.name || "New conversation").slice(0, 200).replace(/\s+/g, " ").slice(0, 60);
}

export const settings = (() => {
  try { return { ...JSON.parse(stored("localStorage", SETTINGS)) }; } catch { return {}; }
})();
export function saveSettings() { stored("localStorage", SETTINGS, JSON.stringify(settings)); }
