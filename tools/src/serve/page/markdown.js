// Renders Markdown as DOM nodes. Text becomes text nodes, never HTML; links must be http, https or mailto;
// images become links.
const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

const LINK = /!?\[([^\[\]\n]{1,300})\]\(\s*<?(https?:\/\/[^\s<>]{1,2000}?|mailto:[^\s<>]{1,300}?)>?(?:\s+"[^"\n]{0,300}")?\s*\)/y;
const BARE = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const link = (url, ...children) => element("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, ...children);
const isWord = letter => letter !== undefined && /[\p{L}\p{N}]/u.test(letter);

// The next `mark` at or after `from`, outside of code.
function closing(text, mark, from) {
  for (let at = text.indexOf(mark, from); at > 0; at = text.indexOf(mark, at + 1)) {
    const single = mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark);
    if (!/\s/.test(text[at - 1]) && !single && !(mark[0] === "_" && isWord(text[at + mark.length]))) return at;
  }
  return -1;
}

function inline(text, depth = 0) {
  const nodes = [], open = new Set();
  let plain = "", at = 0;
  const put = node => { if (plain) nodes.push(plain); plain = ""; nodes.push(node); };
  const find = (pattern, from) => { pattern.lastIndex = from; return pattern.exec(text); };
  scan: while (at < text.length) {
    const letter = text[at];
    if (letter === "\\" && /[!-\/:-@[-`{-~]/.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; continue; }
    if (letter === "\n") { put(element("br")); at++; continue; }
    if (letter === "`") {
      const ticks = find(/`+/y, at)[0], end = open.has(ticks) ? -1 : text.indexOf(ticks, at + ticks.length);
      if (end > 0) { put(element("code", {}, text.slice(at + ticks.length, end).replace(/^ (.*) $/s, "$1"))); at = end + ticks.length; continue; }
      open.add(ticks); plain += ticks; at += ticks.length; continue;
    }
    if (letter === "[" || (letter === "!" && text[at + 1] === "[")) {
      const found = find(LINK, at);
      if (found) { put(link(found[2], ...(depth < 6 ? inline(found[1], depth + 1) : [found[1]]))); at += found[0].length; continue; }
    }
    if (letter === "h" && !isWord(text[at - 1])) {
      const found = find(BARE, at);
      if (found) { const url = found[0].replace(/[.,;:!?)\]*_]+$/, ""); put(link(url, url)); at += url.length; continue; }
    }
    for (const [mark, name] of MARKS) {
      // If a mark is not closed once, it is not closed later either.
      if (!text.startsWith(mark, at) || open.has(mark) || depth > 6 || /\s|^$/.test(text[at + mark.length] ?? "")) continue;
      if (mark[0] === "_" && isWord(text[at - 1])) continue;
      const end = closing(text, mark, at + mark.length + 1);
      if (end < 0) { open.add(mark); continue; }
      put(element(name, {}, ...inline(text.slice(at + mark.length, end), depth + 1)));
      at = end + mark.length;
      continue scan;
    }
    plain += letter; at++;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API needs a secure context (TLS or localhost).
    const box = element("textarea", { style: "position:fixed;opacity:0" });
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  const was = button.textContent;
  if (was !== "Copied") { button.textContent = "Copied"; setTimeout(() => { button.textContent = was; }, 1200); }
}

function codeBlock(language, code) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copy(code, button));
  return element("div", { class: "code" }, element("header", {}, element("span", {}, language), button),
    element("pre", {}, element("code", {}, code)));
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/, ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const HEAD = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/, QUOTE = /^ {0,3}> ?(.*)$/, DASHES = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
const begins = line => FENCE.test(line) || ITEM.test(line) || RULE.test(line) || HEAD.test(line) || QUOTE.test(line);

function fenced(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]), code = [];
  const ends = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
  for (at++; at < lines.length && !ends.test(lines[at]); at++) code.push(lines[at]);
  return [codeBlock(language, code.join("\n")), at + 1];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]), numbered = /\d/.test(mark);
  const made = element(numbered ? "ol" : "ul", numbered && parseInt(mark) !== 1 ? { start: parseInt(mark) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== numbered) break;
    const inner = [item[3]], within = indent.length + 2;
    for (at++; at < lines.length; at++) {
      const line = lines[at], deep = /^\s*/.exec(line)[0].length;
      if (line.trim() ? deep < within : !(lines[at + 1]?.trim() && /^\s*/.exec(lines[at + 1])[0].length >= within)) break;
      inner.push(line.slice(Math.min(deep, indent.length + item[2].length + 1)));
    }
    const blocks = markdown(inner.join("\n"), depth + 1);
    // A single paragraph needs no margins.
    if (blocks[0]?.tagName === "P") blocks.splice(0, 1, ...blocks[0].childNodes);
    made.append(element("li", {}, ...blocks));
    let next = at;
    while (next < lines.length && !lines[next].trim()) next++;
    if (next < lines.length && ITEM.exec(lines[next])?.[1].length === indent.length) at = next;
  }
  return [made, at];
}

function table(lines, at) {
  const row = (line, name) => element("tr", {}, ...cells(line).map(cell => element(name, {}, ...inline(cell))));
  const made = element("table", {}, row(lines[at], "th"));
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) made.append(row(lines[at], "td"));
  return [made, at];
}

// The blocks of a text, which may be incomplete.
function markdown(text, depth = 0) {
  const lines = text.split(/\r\n?|\n/), blocks = [];
  if (depth > 8) return [element("p", {}, text)];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let block, found;
    if (!line.trim()) { at++; continue; }
    if (FENCE.test(line)) [block, at] = fenced(lines, at);
    else if (RULE.test(line)) { block = element("hr"); at++; }
    else if ((found = HEAD.exec(line))) { block = element("h" + Math.min(5, 2 + found[1].length), {}, ...inline(found[2])); at++; }
    else if (QUOTE.test(line)) {
      const inner = [];
      for (; at < lines.length && (found = QUOTE.exec(lines[at])); at++) inner.push(found[1]);
      block = element("blockquote", {}, ...markdown(inner.join("\n"), depth + 1));
    } else if (ITEM.test(line)) [block, at] = list(lines, at, depth);
    else if (line.includes("|") && lines[at + 1]?.includes("-") && DASHES.test(lines[at + 1])) [block, at] = table(lines, at);
    else {
      const inner = [line];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++) inner.push(lines[at]);
      block = element("p", {}, ...inline(inner.join("\n").trim()));
    }
    blocks.push(block);
  }
  return blocks;
}
