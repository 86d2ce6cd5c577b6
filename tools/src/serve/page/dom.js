// Elements.

export const $ = id => document.getElementById(id);

/** A new element with these attributes and children; an attribute that is `undefined` or `false` is left out. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  // One by one: a call has no room for ten thousands of arguments.
  for (const child of children) if (child !== null && child !== undefined && child !== false) made.append(child);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
/** As [element], of a drawing. */
export function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** One of the symbols in index.html. */
export const icon = name => drawing("svg", { class: "icon", "aria-hidden": "true" }, drawing("use", { href: "#i-" + name }));

/** A button with an icon; its name is for screen readers and the tooltip. */
export const iconButton = (name, label, click) => element("button", { type: "button", class: "quiet", "aria-label": label, title: label, click }, icon(name));

/** Makes `nodes` the children of `parent`; those that are there already are not touched. */
export function sync(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, at) => { if (parent.childNodes[at] !== node) parent.insertBefore(node, parent.childNodes[at] ?? null); });
}

/** Whether a key belongs to an input method, which composes a character. Safari says so by the key's number only. */
export const composing = event => event.isComposing || event.keyCode === 229;

let saying = 0;
/** Says `text` to screen readers. */
export function announce(text) {
  $("live").textContent = "";
  clearTimeout(saying);
  // The same text again is a change only after the empty one was seen.
  saying = setTimeout(() => { $("live").textContent = text; }, 50);
}

// Milliseconds for which a message is shown, at least.
const SHOWN = 10000;
/** Shows a message at the bottom, with a button that undoes what happened. */
export function toast(text, undo) {
  const shown = element("div", { class: "toast" }, element("span", {}, text), undo && element("button", { type: "button", click: () => { shown.remove(); undo(); } }, "Undo"), iconButton("close", "Dismiss", () => shown.remove()));
  const leave = () => { if (shown.matches(":hover, :focus-within")) setTimeout(leave, 1000); else shown.remove(); };
  // What is behind an open dialog cannot be seen or used.
  ($("settings").open ? $("settings") : document.body).append($("toasts"));
  $("toasts").append(shown);
  announce(text);
  setTimeout(leave, SHOWN);
}

/** Copies a text and says so on the button. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API needs a secure context (TLS or localhost).
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1200);
}

/** Offers a text as a file to save. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
/** A number of bytes for people. */
export function bytes(count) {
  let n = count, unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) { n /= 1024; unit++; }
  return `${n.toFixed(unit && n < 100 ? 1 : 0)} ${UNITS[unit]}`;
}
/** A number with separators of thousands. */
export const count = n => n.toLocaleString("en");
