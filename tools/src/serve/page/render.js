// Markdown as DOM nodes. marked only splits it into tokens; text becomes text nodes, never HTML. Links are http, https or
// mailto; images become links, so nothing is loaded from other hosts. KaTeX sets formulas, highlight.js colours code.

import { copy, element, iconButton } from "./dom.js";

const { marked, katex, hljs } = window;

// Delimiters of formulas: those of LaTeX, and dollars by pandoc's rule: no space inside, no digit after the closing one.
const BLOCKS = [/^ {0,3}\$\$((?:[^$\\]|\\[^])+?)\$\$/, /^ {0,3}\\\[([^]+?)\\\]/];
const INLINES = [/^\$\$((?:[^$\\]|\\[^])+?)\$\$/, /^\\\[([^]+?)\\\]/, /^\\\(([^]+?)\\\)/, /^\$(?![\s$])((?:[^$\\\n]|\\[^])*?[^\s$\\])\$(?!\d)/];
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
lexer.use({ extensions: [formula("formula", "block", BLOCKS, /\$\$|\\\[/), formula("formula_in_text", "inline", INLINES, /\$|\\[([]/)] });

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–", copy: "©", times: "×", rarr: "→", deg: "°" };
const plain = text => text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,8}));/gi, (all, decimal, hex, name) => {
  if (name) return ENTITIES[name] ?? all;
  const code = parseInt(decimal ?? hex, decimal ? 10 : 16);
  return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : all;
});

function link(href, ...children) {
  return /^(https?:|mailto:)/i.test(href) ? element("a", { href, rel: "noopener noreferrer", target: "_blank" }, ...children) : null;
}

function math(text, displayMode) {
  const made = element("span", { class: displayMode ? "formula wide" : "formula", ...(displayMode && { tabindex: "0", role: "group", "aria-label": "Formula" }) });
  try {
    katex.render(text, made, { displayMode, throwOnError: true, strict: "ignore", maxExpand: 200, maxSize: 50 });
  } catch {
    made.replaceChildren(element("code", {}, text));
  }
  return made;
}

function code(token) {
  const language = /^[\w+#.-]+/.exec(token.lang ?? "")?.[0] ?? "", shown = element("code");
  // The library's output is HTML with everything escaped but its own spans.
  if (hljs.getLanguage(language) && token.text.length < 100000) shown.innerHTML = hljs.highlight(token.text, { language, ignoreIllegals: true }).value;
  else shown.textContent = token.text;
  const button = iconButton("copy", "Copy code", () => copy(token.text, button));
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

// Texts are split up to here; what is longer is shown as it is.
const LONGEST = 1 << 19;

function split(text) {
  if (text.length > LONGEST) return null;
  // Quotes and lists in each other are split by recursion.
  try {
    const tokens = lexer.lexer(text);
    top = tokens.find(token => token.type === "heading")?.depth ?? 1;
    return tokens;
  } catch { return null; }
}

/** The nodes of a text. */
export function markdown(text) {
  const tokens = split(text);
  return tokens ? nodes(tokens) : [element("p", { class: "raw" }, text)];
}

/** Shows a text that grows in `into`: only its last blocks are made again. */
export class Growing {
  #into;
  #shown = [];

  constructor(into) { this.#into = into; }

  update(text) {
    const tokens = (split(text) ?? [{ type: "paragraph", raw: text, tokens: [{ type: "text", raw: text, text }] }]).filter(token => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (same < this.#shown.length && same < tokens.length && this.#shown[same].raw === tokens[same].raw) same++;
    for (const old of this.#shown.splice(same)) old.made.remove();
    for (const token of tokens.slice(same)) {
      const made = node(token), block = made instanceof Node ? made : element("p", {}, made ?? "");
      this.#into.append(block);
      this.#shown.push({ raw: token.raw, made: block });
    }
  }
}
