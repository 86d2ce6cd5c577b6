// Markdown as DOM nodes. marked only splits it into tokens; text becomes text nodes, never HTML. Links are http, https or
// mailto; images become links, so nothing is loaded from other hosts. KaTeX sets formulas, highlight.js colours code.

import { copy, element, iconButton } from "./dom.js";

const { marked, katex, hljs } = window;

// Most characters of a formula, and of braces in each other: a longer one takes seconds, a deeper one overflows the stack.
const FORMULA = 4000, NESTED = 50;
// Delimiters of formulas: those of LaTeX, and dollars by pandoc's rule: no space inside, no digit after the closing one.
const BLOCKS = [/^ {0,3}\$\$((?:[^$\\]|\\[^]){1,4000}?)\$\$/, /^ {0,3}\\\[([^]{1,4000}?)\\\]/];
const INLINES = [/^\$\$((?:[^$\\]|\\[^]){1,4000}?)\$\$/, /^\\\[([^]{1,4000}?)\\\]/, /^\\\(([^]{1,4000}?)\\\)/, /^\$(?![\s$])((?:[^$\\\n]|\\[^]){0,1000}?[^\s$\\])\$(?!\d)/];
function formula(name, level, patterns, start) {
  const tokenizer = text => {
    for (const pattern of patterns) {
      const found = pattern.exec(text);
      if (found) return { type: name, raw: found[0], text: found[1].trim(), wide: /^\s*(\$\$|\\\[)/.test(found[0]) };
    }
    return undefined;
  };
  return { name, level, start: text => { const at = text.search(start); return at < 0 ? undefined : at; }, tokenizer };
}
const lexer = new marked.Marked({ gfm: true, breaks: true });
lexer.use({ extensions: [formula("formula", "block", BLOCKS, /(?<=\n) {0,3}(?:\$\$|\\\[)/), formula("formula_in_text", "inline", INLINES, /\$|\\[([]/)] });

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–", copy: "©", times: "×", rarr: "→", deg: "°" };
const plain = text => text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,8}));/gi, (all, decimal, hex, name) => {
  if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
  const code = parseInt(decimal ?? hex, decimal ? 10 : 16);
  return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : all;
});

function link(href, ...children) {
  return /^(https?:|mailto:)/i.test(href) ? element("a", { href, rel: "noopener noreferrer", target: "_blank" }, ...children) : null;
}

/** Braces and `\\left`s that are in each other. */
function nesting(text) {
  let depth = 0, most = 0;
  for (const [mark] of text.matchAll(/\\left|\\right|\\begin|\\end|[{}]/g)) {
    depth += ["{", "\\left", "\\begin"].includes(mark) ? 1 : -1;
    most = Math.max(most, depth);
  }
  return most;
}
// Without braces, these nest too.
const chained = text => /(?:[\^_]\s*|\\(?:sqrt|frac|overline|mathrm|text\w*)\s*){12}/.test(text);

function math(text, displayMode) {
  const made = element("span", { class: displayMode ? "formula wide" : "formula", ...(displayMode && { tabindex: "0", role: "group", "aria-label": "Formula" }) });
  try {
    if (text.length > FORMULA || nesting(text) > NESTED || chained(text)) throw new Error("too large");
    katex.render(text, made, { displayMode, throwOnError: true, strict: "ignore", maxExpand: 200, maxSize: 50 });
  } catch {
    made.replaceChildren(element("code", {}, text));
  }
  return made;
}

function colour(shown, { text, lang }) {
  const language = /^[\w+#.-]+/.exec(lang ?? "")?.[0] ?? "";
  // The library's output is HTML with everything escaped but its own spans.
  if (hljs.getLanguage(language) && text.length < 50000) shown.innerHTML = hljs.highlight(text, { language, ignoreIllegals: true }).value;
  else shown.textContent = text;
  return language;
}

function code(token) {
  const shown = element("code"), language = colour(shown, token);
  const button = iconButton("copy", "Copy code", () => copy(shown.textContent, button));
  return element("div", { class: "code" }, element("div", { class: "head" }, element("span", {}, language || "text"), button),
    element("pre", { tabindex: "0", role: "group", "aria-label": language ? `Code in ${language}` : "Code" }, shown));
}

function table(token) {
  const cell = (name, it) => element(name, { ...(it.align && { class: it.align }), ...(name === "th" && { scope: "col" }) }, ...nodes(it.tokens));
  const row = (name, cells) => element("tr", {}, ...cells.map(it => cell(name, it)));
  return element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    element("table", {}, element("thead", {}, row("th", token.header)), element("tbody", {}, ...token.rows.map(cells => row("td", cells)))));
}

// Blocks below this depth are text: thousands of nested quotes would overflow the stack.
const DEEPEST = 16;
let depth = 0;
// The depth of the text's first heading, which is one below that of the page.
let top = 1;
function nodes(tokens) {
  if (depth >= DEEPEST) return [tokens.map(token => token.raw).join("")];
  depth++;
  try { return tokens.map(node).filter(made => made !== null); } finally { depth--; }
}

function node(token) {
  switch (token.type) {
    case "space": case "def": return null;
    case "raw": return element("p", { class: "raw" }, token.raw);
    case "heading": return element("h" + Math.min(6, Math.max(2, 2 + token.depth - top)), {}, ...nodes(token.tokens));
    case "paragraph": return element("p", {}, ...nodes(token.tokens));
    case "blockquote": return element("blockquote", {}, ...nodes(token.tokens));
    case "hr": return element("hr");
    case "code": return code(token);
    case "table": return table(token);
    case "list": {
      const start = token.ordered && token.start !== 1 ? token.start : undefined;
      return element(token.ordered ? "ol" : "ul", { start }, ...token.items.map(item => element("li", { class: item.task && "task" }, ...nodes(item.tokens))));
    }
    case "checkbox": return element("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": token.checked ? "done" : "open" });
    case "formula": case "formula_in_text": return math(token.text, token.wide);
    case "strong": case "em": case "del": return element(token.type, {}, ...nodes(token.tokens));
    case "codespan": return element("code", {}, token.text);
    case "br": return element("br");
    case "link": return link(token.href, ...nodes(token.tokens)) ?? token.raw;
    case "image": return link(token.href, `🖼 ${token.text || token.href}`) ?? token.raw;
    case "html": return /^<br\s*\/?>$/i.test(token.raw.trim()) ? element("br") : token.block ? element("p", {}, token.raw.trim()) : token.raw;
    case "escape": return token.text;
    case "text": return token.tokens ? element("span", {}, ...nodes(token.tokens)) : plain(token.text);
    default: return token.raw;
  }
}

// Texts are parsed in pieces that end at a blank line, because some patterns take quadratic time; a longer piece is shown as it
// is.
const PIECE = 8 << 10, LONGEST = 32 << 10;

/** The pieces of a text. Code and lists are not divided. */
function* pieces(text) {
  // The end of the last piece, and of the last block that could end one.
  let from = 0, block = 0, fence = null, column = 0;
  for (const found of text.matchAll(/^[ \t]*(?:(?:[-*+]|\d{1,9}[.)]|>)[ \t]+)*(`{3,}|~{3,})(.*)|\n[ \t]*\n(?!\s|[-*+] |\d+[.)] )/gm)) {
    const at = found.index + found[0].length;
    if (found[1]) {
      const begins = found[0].indexOf(found[1]), [, marks, rest] = found;
      if (fence === null) {
        if (marks[0] === "~" || !rest.includes("`")) { fence = marks; column = begins; }
      } else if (marks.startsWith(fence) && !rest.trim() && begins < column + 4) fence = null;
    }
    if (found[1] || fence !== null) continue;
    // A block that is too long stands alone.
    if (at - from > LONGEST && block > from) { yield text.slice(from, block); from = block; }
    if (at - from > PIECE) { yield text.slice(from, at); from = at; }
    block = at;
  }
  if (text.length - from > LONGEST && block > from) { yield text.slice(from, block); from = block; }
  yield text.slice(from);
}

const raw = text => ({ type: "raw", raw: text });
let parsed = new Map();
/** The blocks of a text. Pieces that the last text had too are not parsed again. */
function blocks(text) {
  const now = new Map(), all = [];
  for (const piece of pieces(text)) {
    let tokens = parsed.get(piece);
    if (!tokens) {
      // Quotes and lists in each other are parsed by recursion.
      try { tokens = piece.length > LONGEST && !/^ {0,3}(?:`{3}|~{3})/.test(piece) ? [raw(piece)] : lexer.lexer(piece); } catch { tokens = [raw(piece)]; }
    }
    now.set(piece, tokens);
    for (const token of tokens) if (token.type !== "space" && token.type !== "def") all.push(token);
  }
  parsed = now;
  top = all.find(token => token.type === "heading")?.depth ?? 1;
  return all;
}

function block(token) {
  try {
    const made = node(token);
    return made instanceof Node ? made : element("p", {}, made ?? "");
  } catch { return element("p", { class: "raw" }, token.raw); }
}

/** The nodes of a text. */
export const markdown = text => blocks(text).map(block);

/** Shows a text that grows in `into`: only its last blocks are made again. */
export class Growing {
  #into;
  #shown = [];

  constructor(into) { this.#into = into; }

  update(text) {
    const tokens = blocks(text);
    let same = 0;
    while (same < this.#shown.length && same < tokens.length && this.#shown[same].raw === tokens[same].raw) same++;
    const [old, next] = [this.#shown[same], tokens[same]];
    // Code that grows keeps its elements, so that its button can be pressed.
    if (old?.lang !== undefined && next?.type === "code" && old.lang === (next.lang ?? "") && this.#shown.length === same + 1) {
      colour(old.made.querySelector("code"), next);
      old.raw = next.raw;
      same++;
    }
    for (const gone of this.#shown.splice(same)) gone.made.remove();
    for (const token of tokens.slice(same)) {
      const made = block(token);
      this.#into.append(made);
      this.#shown.push({ raw: token.raw, made, lang: token.type === "code" ? token.lang ?? "" : undefined });
    }
  }
}
