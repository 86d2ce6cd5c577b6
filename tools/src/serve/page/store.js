// Conversations, one record each in the browser's IndexedDB, so that two tabs do not overwrite each other's; settings
// in localStorage.
//
// A conversation is a tree: a message names the one before it, and `current` is the last message of the branch that is
// shown. Another answer, or an edited question, is a new branch; the old one stays. A message stands after its parent, so
// there are no circles.

const OLD = "emberflow", SETTINGS = "emberflow-settings";
const channel = new BroadcastChannel("emberflow");
const id = () => crypto.getRandomValues(new Uint32Array(2)).join("-");
let database = null;

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
const chats = mode => database.transaction("chats", mode).objectStore("chats");

/** Opens the store: all conversations, newest first, and whether they are saved (some private windows save nothing). */
export async function open() {
  try {
    const request = indexedDB.open("emberflow", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    database = await done(request);
    // Another tab may need a newer version.
    database.onversionchange = () => database.close();
    await takeOver();
    return { chats: sorted(await done(chats("readonly").getAll())), saved: true };
  } catch {
    database = null;
    return { chats: [], saved: false };
  }
}

/** Conversations of an earlier version of this page, which had them in localStorage. */
async function takeOver() {
  let old;
  try { old = JSON.parse(localStorage.getItem(OLD)); } catch { /* nothing that could be read */ }
  for (const chat of accepted(old?.chats)) await done(chats("readwrite").put(chat));
  localStorage.removeItem(OLD);
}

/** Those of `list` that are conversations, from a file or an earlier version, as this version has them. */
export function accepted(list) {
  const text = value => typeof value === "string";
  const whole = chat => text(chat?.id) && Array.isArray(chat.messages) && chat.messages.every(m => text(m?.content) && ["user", "assistant"].includes(m.role));
  return (Array.isArray(list) ? list.filter(whole) : []).map(chat => {
    const made = { id: chat.id, changed: Number(chat.changed) || 0, messages: [], current: null };
    for (const name of ["title", "system"]) if (text(chat[name])) made[name] = chat[name];
    const known = new Set();
    for (const m of chat.messages) {
      // Without names of messages, each follows the one before it.
      const message = { id: text(m.id) && !known.has(m.id) ? m.id : id(), parent: known.has(m.parent) || (m.parent === null && m.id) ? m.parent : made.messages.at(-1)?.id ?? null, role: m.role, content: m.content };
      for (const name of ["thought", "note"]) if (text(m[name])) message[name] = m[name];
      for (const name of ["tokens", "used", "rate", "first", "thinking"]) if (Number.isFinite(m[name])) message[name] = m[name];
      if (Array.isArray(m.files)) message.files = m.files.filter(file => text(file?.name) && text(file.text)).map(({ name, text }) => ({ name, text }));
      known.add(message.id);
      made.messages.push(message);
    }
    made.current = known.has(chat.current) ? chat.current : made.messages.at(-1)?.id ?? null;
    return made;
  });
}

export const sorted = list => list.sort((a, b) => b.changed - a.changed);

/** Saves a conversation; `false` if it could not be saved. */
export async function save(chat) {
  if (!database || !(chat.messages.length || chat.system)) return true;
  try {
    await done(chats("readwrite").put(chat));
    channel.postMessage(chat.id);
    return true;
  } catch { return false; }
}
export async function remove(chat) {
  if (!database) return;
  await done(chats("readwrite").delete(chat.id));
  channel.postMessage(chat.id);
}
/** Calls `changed` with the id of a conversation that another tab has changed, and what it is now. */
export function watch(changed) {
  channel.onmessage = async ({ data }) => { if (database) changed(data, await done(chats("readonly").get(data))); };
}

export const fresh = system => ({ id: id(), changed: Date.now(), messages: [], current: null, ...(system && { system }) });

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

export const titleOf = chat => chat.title || (path(chat)[0]?.content || path(chat)[0]?.files?.[0]?.name || "New conversation").replace(/\s+/g, " ").slice(0, 60);

export const settings = (() => {
  try { return { ...JSON.parse(localStorage.getItem(SETTINGS)) }; } catch { return {}; }
})();
export function saveSettings() {
  try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* a private window: they last as long as it */ }
}
