// The server's page in a real browser: page.mjs URL URL_OF_A_MODEL_WITHOUT_A_CHAT_TEMPLATE
//
// Pictures of all views go to the folder `pictures` beside this file.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [, , url, plain] = process.argv;
const pictures = join(dirname(fileURLToPath(import.meta.url)), "pictures");
mkdirSync(pictures, { recursive: true });
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await puppeteer.launch({
  // Its own arguments are for one page in one process.
  args: [...chromium.args.filter((name) => !/single-process|no-zygote/.test(name)), "--no-sandbox"],
  executablePath: process.env.CHROMIUM ?? (await chromium.executablePath()),
  headless: "shell",
});
const wrong = [];
const TIMEOUT = { timeout: 120000 };

/** Server-sent events of an answer. */
function events(text, { thought = "", reason = "stop", usage = { prompt_tokens: 310, completion_tokens: 412, total_tokens: 722 } } = {}) {
  const chunk = (delta, finish_reason = null) => ({ choices: [{ index: 0, delta, finish_reason }] });
  const all = [...(thought ? [chunk({ reasoning_content: thought })] : []), ...text.match(/[^]{1,40}/g).map((content) => chunk({ content })), chunk({}, reason), { choices: [], usage }];
  return [...all.map((event) => `data: ${JSON.stringify(event)}`), "data: [DONE]", ""].join("\n\n");
}

/** A new tab in a profile of its own. `templates`: the model knows system prompts and thoughts, as the bundled one does not; `says()` is what it answers, or nothing for what it really does. */
async function open(url, { templates = false, says = () => null, phone = false, dark = false } = {}) {
  const context = await browser.createBrowserContext(), page = await context.newPage();
  await page.setViewport(phone ? { width: 390, height: 844, isMobile: true, hasTouch: true } : { width: 1360, height: 860 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }, { name: "prefers-reduced-motion", value: "reduce" }]);
  page.on("pageerror", (error) => wrong.push(error.message));
  page.on("console", (message) => message.type() === "error" && !/status of 40[01]/.test(message.text()) && wrong.push(message.text()));
  await page.setRequestInterception(true);
  page.on("request", (request) => {
    if (!request.url().startsWith(url)) wrong.push(`asks ${request.url()}`);
    const path = new URL(request.url()).pathname, body = request.postData() ? JSON.parse(request.postData()) : null, answer = path === "/v1/chat/completions" && says(body);
    if (answer) return request.respond({ contentType: "text/event-stream", body: answer });
    if (templates && path === "/apply-template") return request.respond({ contentType: "application/json", body: JSON.stringify({ prompt: body.messages.map((m) => m.content).join(" ") + (body.enable_thinking ? "<think>" : "") }) });
    return request.continue();
  });
  await page.goto(url);
  const tab = {
    page,
    close: () => context.close(),
    until: (test, ...args) => page.waitForFunction(test, TIMEOUT, ...args),
    text: (selector) => page.$eval(selector, (element) => element.textContent),
    all: (selector) => page.$$eval(selector, (all) => all.map((element) => element.textContent)),
    // A click by the page itself: an element that is redrawn meanwhile has no place.
    press: (selector) => page.$eval(selector, (element) => element.click()),
    type: async (selector, text) => { await page.$eval(selector, (field) => { field.value = ""; field.dispatchEvent(new Event("input")); field.focus(); }); await page.keyboard.type(text); },
    asks: async (path, action) => {
      const [asked] = await Promise.all([page.waitForRequest((request) => request.url().endsWith(path) && request.method() === "POST", TIMEOUT), action()]);
      return JSON.parse(asked.postData());
    },
    answered: (count) => tab.until((count) => !document.getElementById("send").hidden && document.querySelectorAll("article.assistant .does").length === count, count),
    // The field for the key appears with the first answer that wants one.
    unlock: async () => { await page.waitForSelector("#unlock:not([hidden])", TIMEOUT); await tab.type("#key", "secret"); await page.keyboard.press("Enter"); await tab.ready(); },
    ready: () => tab.until(() => document.getElementById("notice").hidden && !["…", ""].includes(document.getElementById("model-name").textContent)),
    attach: (...files) => page.evaluate((files) => {
      const all = new DataTransfer(), input = document.getElementById("files");
      for (const [name, bytes] of files) all.items.add(new File([new Uint8Array(bytes)], name));
      input.files = all.files;
      input.dispatchEvent(new Event("change"));
    }, files.map(([name, content]) => [name, [...Buffer.from(content)]])),
    // A picture of the view, and what axe finds in it.
    look: async (name) => {
      await page.screenshot({ path: join(pictures, `${phone ? "phone" : "desktop"}-${dark ? "dark" : "light"}-${name}.png`) });
      await page.evaluate(axe);
      const found = await page.evaluate(async () => (await window.axe.run(document)).violations.map(({ id, impact, nodes }) => `${impact} ${id}: ${nodes.map((node) => node.html).join(" ").slice(0, 300)}`));
      assert.deepEqual(found, [], `${name}, ${phone ? "phone" : "desktop"}, ${dark ? "dark" : "light"}`);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth), `${name} is wider than the window`);
    },
  };
  return tab;
}

// A text that tries all that Markdown has, and what must not happen: everything that is no Markdown is text.
const HOSTILE = `# A *title*

**bold**, snake_case_name, \`1 < 2\`, [good](https://example.com/a), [bad](javascript:hacked()), ![picture](https://example.com/p.png)
<img src=x onerror="hacked=1"><script>hacked=2</script><b>not bold</b> [x](https://a"onmouseover="hacked=3) &lt;i&gt; $5 and $10

$\\href{javascript:hacked()}{x} \\includegraphics{https://example.com/q.png}$ and \\(x^2\\)

1. one
   - [x] two
   - [ ] three

| a | b |
|:--|--:|
| <i>1</i> | 2 |

\`\`\`html
<script>hacked=4</script>
\`\`\`
> quoted

$$\\frac{1}{2}$$

${"[".repeat(20000)}${"*_`".repeat(7000)}${"> ".repeat(3000)}

\`\`\`js
unfinished`;

async function markdown() {
  const { page, close } = await open(url);
  const shown = await page.evaluate(async (text) => {
    const { markdown } = await import("/page/render.js");
    const at = document.createElement("div"), began = performance.now();
    at.append(...markdown(text));
    document.body.append(at);
    const count = (selector) => at.querySelectorAll(selector).length, attributes = new Set([...at.querySelectorAll("*")].flatMap((e) => e.getAttributeNames()));
    return { counts: Object.fromEntries(["h2", "strong", "ol", "ul", "input", "table", "td.right", "pre", "blockquote", ".katex", ".formula.wide", "script", "img", "b", "i", "p a, li a"].map((name) => [name, count(name)])),
      attributes: [...attributes], ms: performance.now() - began, links: [...at.querySelectorAll("a")].map((a) => a.href),
      code: [...at.querySelectorAll("pre")].map((pre) => pre.textContent), hacked: typeof hacked, text: at.textContent };
  }, HOSTILE);
  assert.equal(shown.hacked, "undefined");
  assert.deepEqual(shown.counts, { h2: 1, strong: 1, ol: 1, ul: 1, input: 2, table: 1, "td.right": 1, pre: 2, blockquote: 1, ".katex": 3, ".formula.wide": 1, script: 0, img: 0, b: 0, i: 0, "p a, li a": 3 });
  assert.deepEqual(shown.links.filter((link) => !/^https:\/\/(example\.com|a)/.test(link)), []);
  assert.deepEqual(shown.attributes.filter((name) => name.startsWith("on") || name === "src"), []);
  assert.deepEqual(shown.code, ["<script>hacked=4</script>", "unfinished"]);
  for (const text of ["<b>not bold</b>", "snake_case_name", "[bad](javascript:hacked())", "<i> $5 and $10"]) assert.ok(shown.text.includes(text), text);
  assert.ok(shown.ms < 5000, `${shown.ms} ms`);
  // Code, lists and formulas in long texts and in code.
  const divided = await page.evaluate(async (pad) => {
    const { markdown } = await import("/page/render.js"), tags = (text) => markdown(text).map((made) => made.className.split(" ")[0] || made.tagName.toLowerCase()).join(" ");
    const program = `\`\`\`js\n${"let a = 1;\n\nlet b = 2;\n\n".repeat(300)}\`\`\``;
    return [tags(`- \`\`\`sh\n  ls\n  \`\`\`\n\n${pad}\n\n${program}\n\nend`), tags(`${pad}\n\n1. one\n\n\n   more\n2. two`), tags("The regex `\\[a-z\\]` and `$$` or `echo $$`."), tags(`a\n\n${program.replace(/```$/, "x\n".repeat(20000))}\n\`\`\``), tags("&toString; &amp;")];
  }, "word ".repeat(2000));
  assert.deepEqual(divided, ["ul p code p", "p ol", "p", "p code", "p"]);
  // An answer that arrives in pieces ends as one that is shown at once.
  const [grown, whole] = await page.evaluate(async (text) => {
    const { Growing, markdown } = await import("/page/render.js"), at = document.createElement("div"), other = document.createElement("div"), growing = new Growing(at);
    for (let end = 1; end < text.length; end += 7) growing.update(text.slice(0, end));
    growing.update(text);
    other.append(...markdown(text));
    return [at.innerHTML, other.innerHTML];
  }, HOSTILE.replace(/^.*(\[){20000}.*$/m, "").replace(/.*onerror.*/, ""));
  assert.equal(grown, whole);
  // Texts on which parsers and browsers choke: nested formulas, unclosed formulas, many blocks, long lines.
  for (const [name, text] of Object.entries({ braces: `$$${"x^{".repeat(300)}x${"}".repeat(300)}$$`, roots: `$$${"\\sqrt{".repeat(300)}x${"}".repeat(300)}$$`, chain: `$$${"\\sqrt ".repeat(3000)}x$$`, open: "\\[ a\n".repeat(20000), inline: "\\(".repeat(40000), dollars: "$$a ".repeat(60000), spans: "`a` ".repeat(40000), lines: "a\n".repeat(80000), mails: "a.".repeat(100000) + "@", lists: "- ".repeat(100000), quotes: "> ".repeat(50000), blocks: "a\n\n".repeat(20000) })) {
    const ms = await page.evaluate(async (text) => { const { markdown } = await import("/page/render.js"), began = performance.now(), at = document.createElement("div"); for (const node of markdown(text)) at.append(node); document.body.append(at); at.getBoundingClientRect(); at.remove(); return performance.now() - began; }, text);
    assert.ok(ms < 5000, `${name}: ${ms} ms`);
  }
  await close();
}

// All views at two sizes, light and dark.
const RICH = "## Quadratic equations\n\nAn equation $ax^2 + bx + c = 0$ has the **solutions**\n\n$$x_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$$\n\n- [x] read\n- [ ] check\n\n| Discriminant | Solutions |\n|:--|--:|\n| negative | 0 |\n| positive | 2 |\n\n```python\ndef solve(a, b, c):\n    d = b * b - 4 * a * c  # the discriminant\n    return \"none\" if d < 0 else [(-b + s * d ** 0.5) / (2 * a) for s in (1, -1)]\n```\n\n> See [a page](https://example.com/).";
async function views(phone, dark) {
  let answer = events(RICH, { thought: "What is asked?\nA formula." });
  const { page, unlock, look, type, until, answered, press, attach, text, close } = await open(url, { templates: true, says: () => answer, phone, dark });
  await page.waitForSelector("#unlock:not([hidden])", TIMEOUT);
  await look("key");
  await unlock();
  await look("welcome");
  await type("#text", "Explain quadratic equations.");
  await page.keyboard.press("Enter");
  await answered(1);
  assert.match(await text(".facts"), /^412 tokens · [\d.]+ tokens\/s/);
  assert.equal(await text("#context"), "722 of 1,024 tokens");
  assert.equal(await page.$eval(".thought", (details) => details.open), false, "thoughts are folded");
  await look("answer");
  await press(".thought summary");
  await page.$eval("#talk", (area) => { area.scrollTop = 0; });
  await look("thought");
  await attach(["notes.md", "Text with ```fences```.\n"], ["numbers.csv", "1,2\n".repeat(2000)]);
  await until(() => [...document.querySelectorAll("#attached small")].filter((size) => /^[\d,]+ tokens/.test(size.textContent)).length === 2);
  await look("attached");
  // One that is longer than the context is not sent.
  await page.$eval("#ask", (form) => form.requestSubmit());
  assert.match(await text(".toast"), /numbers\.csv is longer/);
  await press(".toast [aria-label=Dismiss]");
  await press("[aria-label='Remove numbers.csv']");
  answer = events("Yes.", { reason: "length" });
  await type("#text", "What do they say?");
  await page.keyboard.press("Enter");
  await answered(2);
  await look("files");
  await press("#performance-open");
  await until(() => document.querySelectorAll("#memory i").length > 2 && document.querySelectorAll("#line polyline").length === 1);
  await look("performance");
  await press("#performance-close");
  await press("#settings-open");
  await look("settings");
  await press("#settings details summary");
  await page.$eval("#settings", (sheet) => { sheet.scrollTop = 9999; });
  await look("settings-end");
  await press("#settings-close");
  await press("#new");
  await type("#text", "Another one");
  await page.keyboard.press("Enter");
  await answered(1);
  if (phone) await press("#side-open");
  await type("#search", "quadratic");
  await until(() => document.querySelector("#chats h2")?.textContent === "Found");
  await look("search");
  await until(() => document.querySelector("#chats h2").textContent === "Found");
  await type("#search", "nothing has this");
  await until(() => document.querySelector("#chats .none"));
  await look("search-none");
  await type("#search", "");
  await until(() => document.querySelectorAll("#chats li").length === 2);
  await press("#chats li.shown [aria-label^=Rename]");
  await look("rename");
  await page.keyboard.press("Escape");
  await press("#chats li.shown [aria-label^=Delete]");
  await until(() => document.querySelectorAll("#chats li").length === 1);
  await look("deleted");
  await close();
}

// What the page does with the bundled model.
async function works() {
  const { page, asks, text, all, until, unlock, press, answered, type, ready, attach, close } = await open(url, { templates: true });
  await unlock();
  assert.equal(await text("#model-name"), "demo");
  await until(() => document.querySelectorAll(".welcome .first button").length === 3);

  // What the engine does, while it is shown.
  await press("#performance-open");
  await until(() => document.querySelectorAll("#memory i").length > 2);
  assert.match(await text("#peak"), /at most .*MiB of the .*MiB/);
  assert.equal(await page.$$eval("#layers rect", (all) => all.length), 24, "8 layers: all, most used, recently used");
  // In one step: the page replaces these elements every second, and a removed one has no style.
  const colours = await page.evaluate(() => [...document.querySelectorAll("#memory-key i")].map((i) => getComputedStyle(i).backgroundColor));
  assert.equal(new Set(colours).size, colours.length, "parts of the memory share a colour");

  // A chat, and the numbers that move with it. The seed is given: a random one ends some answers before their limit.
  await press("#settings-open");
  await press("#settings details summary");
  await type("#field-seed", "1");
  await type("#field-max_tokens", "80");
  await press("#settings-close");
  await type("#text", "What is a vector?");
  await page.keyboard.press("Enter");
  await until(() => document.querySelector("article.assistant")?.textContent.length > 20);
  await until(() => document.querySelectorAll("#time i").length > 1);
  await answered(1);
  assert.equal(await text("article.user .text"), "What is a vector?");
  assert.match(await text("article.assistant .facts"), /^\d+ tokens · [\d.]+ tokens\/s/);
  assert.match(await text("#title"), /What is a vector/);
  await until(() => parseFloat(document.querySelector("#requests tbody td:last-child").textContent) > 0);
  await page.keyboard.press("Escape");
  assert.equal(await page.$eval("#performance", (panel) => panel.hidden), true);

  // What is chosen is asked for, and nothing else; the instructions go first.
  await press("#settings-open");
  await type("#system", "Be short.");
  await type("#field-temperature", "0.5");
  await type("#field-max_tokens", "12");
  await press("#settings-close");
  await type("#text", "And a trait?");
  const chosen = await asks("/completions", () => press("#send"));
  assert.deepEqual({ ...chosen, messages: chosen.messages.map((m) => m.role) }, {
    temperature: 0.5, max_tokens: 12, seed: 1, stream: true, stream_options: { include_usage: true }, return_progress: true, messages: ["system", "user", "assistant", "user"] });
  assert.equal(chosen.messages[0].content, "Be short.");
  await answered(2);
  assert.match(await text("#messages"), /cut after 12 tokens/);

  // Another answer is asked for in the same way, and the first one stays.
  const first = (await all("article.assistant .text"))[1];
  assert.deepEqual(await asks("/completions", () => press("article:last-child [aria-label^='Answer again']")), chosen);
  await answered(2);
  await until(() => document.querySelector("article:last-child .does small")?.textContent === "2 of 2");
  await press("article:last-child [aria-label='Previous version']");
  assert.equal((await all("article.assistant .text"))[1], first);
  assert.match(await text("article:last-child .does"), /1 of 2/);

  // An edited message is a new branch; the old one can be chosen.
  await press("article:nth-child(3) [aria-label='Edit']");
  await type("article textarea", "And a slice?");
  const edited = await asks("/completions", () => page.keyboard.press("Enter"));
  assert.equal(edited.messages.at(-1).content, "And a slice?");
  assert.equal(edited.messages.length, 4);
  await answered(2);
  assert.match(await text("article:nth-child(3) .does"), /2 of 2/);
  await press("article:nth-child(3) [aria-label='Previous version']");
  assert.equal(await text("article:nth-child(3) .text"), "And a trait?");
  assert.equal((await all("article.assistant")).length, 2);

  // Copying a message takes its text.
  await page.evaluate(() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; });
  await press("article:nth-child(3) [aria-label='Copy']");
  assert.equal(await page.evaluate(() => window.copied), "And a trait?");

  // Thoughts can be left out.
  await press("#settings-open");
  await press("#thinks");
  await press("#settings-close");
  assert.equal((await asks("/completions", () => press("article:last-child [aria-label^='Answer again']"))).enable_thinking, false);
  await answered(2);

  // A conversation survives a reload; another one does not know it; both can be chosen.
  const before = await all("#messages .text");
  await page.reload();
  await ready();
  assert.deepEqual(await all("#messages .text"), before);
  assert.equal(await page.$eval("#system", (area) => area.value), "Be short.");
  assert.equal(await page.$eval("#field-max_tokens", (input) => input.value), "12");
  await press("#new");
  await press("#settings-open");
  await press("#reset");
  await press("#thinks");
  await type("#system", "");
  await press("#settings-close");
  await type("#text", "What is a box?");
  const other = await asks("/completions", () => page.keyboard.press("Enter"));
  assert.deepEqual(other, { stream: true, stream_options: { include_usage: true }, return_progress: true, messages: [{ role: "user", content: "What is a box?" }] });
  await answered(1);
  await until(() => document.querySelectorAll("#chats li").length === 2);

  // Search looks into the texts; names can be changed; deleting can be undone.
  await type("#search", "trait?");
  await until(() => document.querySelectorAll("#chats li").length === 1);
  await press("#chats .chat");
  assert.deepEqual(await all("#messages .text"), before);
  await type("#search", "");
  await until(() => document.querySelectorAll("#chats li").length === 2);
  await press("#chats li.shown [aria-label^=Rename]");
  await type("#chats li input", "About vectors");
  await page.keyboard.press("Enter");
  await until(() => document.getElementById("title").textContent === "About vectors");
  await press("#chats li.shown [aria-label^=Delete]");
  await until(() => document.querySelectorAll("#chats li").length === 1);
  assert.match(await text("article.user .text"), /box/);
  await press(".toast button");
  await until(() => document.querySelectorAll("#chats li").length === 2);
  assert.deepEqual(await all("#messages .text"), before);

  // Another tab sees it; a backup brings back what was deleted.
  const second = await page.browserContext().newPage();
  await second.goto(url);
  await second.waitForFunction(() => document.querySelectorAll("#chats li").length === 2, TIMEOUT);
  await second.close();
  const backup = await page.evaluate(async () => {
    const made = new Promise((resolve) => { URL.createObjectURL = (blob) => { resolve(blob.text()); return "#"; }; });
    document.getElementById("save-all").click();
    return made;
  });
  page.once("dialog", (dialog) => dialog.accept());
  await press("#clear");
  await until(() => document.querySelectorAll("#chats li").length === 0);
  await page.evaluate((backup) => {
    const all = new DataTransfer(), input = document.getElementById("loaded");
    all.items.add(new File([backup], "backup.json"));
    input.files = all.files;
    input.dispatchEvent(new Event("change"));
  }, backup);
  await until(() => document.querySelectorAll("#chats li").length === 2);
  await page.reload();
  await ready();
  await page.evaluate(() => [...document.querySelectorAll("#chats .chat")].find((chat) => chat.textContent === "About vectors").click());
  assert.deepEqual(await all("#messages .text"), before);

  // Text files go with a message; what is no text does not.
  await press("#new");
  await attach(["picture.png", Buffer.from([0x89, 0x50, 0x4e, 0x47, 0, 0xff])], ["notes.md", "Fences: ```` and ```."]);
  await until(() => document.querySelectorAll("#attached li").length === 1);
  assert.match(await text(".toast:last-child"), /picture\.png is no text file/);
  await type("#text", "Read this.");
  const files = await asks("/completions", () => page.keyboard.press("Enter"));
  assert.equal(files.messages.at(-1).content, "notes.md:\n`````\nFences: ```` and ```.\n`````\n\nRead this.");
  await page.keyboard.press("Escape");
  await until(() => !document.getElementById("send").hidden);
  assert.equal((await all("#attached li")).length, 0);

  // Keys: search, a new chat, the last message.
  await page.keyboard.down("Control");
  await page.keyboard.press("k");
  assert.equal(await page.evaluate(() => document.activeElement.id), "search");
  await page.keyboard.down("Shift");
  await page.keyboard.press("o");
  await page.keyboard.up("Shift");
  await page.keyboard.up("Control");
  assert.equal(await page.evaluate(() => document.activeElement.id), "text");
  assert.equal((await all("article")).length, 0);

  // A question to a server that has an error stays, to be asked again.
  await page.$eval("#text", (field) => { field.value = "word ".repeat(3000); });
  await page.$eval("#ask", (form) => form.requestSubmit());
  await page.waitForSelector(".failed", TIMEOUT);
  assert.match(await text(".failed"), /context/);
  // It stays when the page has asked what the server is now.
  await new Promise((resolve) => setTimeout(resolve, 1500));
  assert.match(await text(".failed"), /context/);
  assert.equal((await all("article.user")).length, 1);
  await close();
}

/** A stand-in for the server's answer that arrives when `feed` is called; the page's own `fetch` waits for it. */
const FEED = () => {
  const own = window.fetch;
  window.feeds = [];
  window.fetch = (path, options) => {
    if (path !== "/v1/chat/completions") return own(path, options);
    return new Promise((resolve, reject) => {
      const chunk = (delta) => new TextEncoder().encode(`data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] })}\n\n`);
      const body = new ReadableStream({ start(to) { window.feeds.push({ say: (content) => to.enqueue(chunk({ content })), end: () => to.close() }); options.signal.addEventListener("abort", () => { const error = new DOMException("stopped", "AbortError"); try { to.error(error); } catch { } reject(error); }); } });
      resolve(new Response(body));
    });
  };
};

// Nothing that was said is lost, and nothing that was deleted comes back.
async function keeps() {
  const first = await open(url);
  await first.unlock();
  const feeding = async (tab) => { await tab.page.evaluate(FEED); return { say: (text, at = -1) => tab.page.evaluate((text, at) => window.feeds.at(at).say(text), text, at), end: (at = -1) => tab.page.evaluate((at) => window.feeds.at(at).end(), at) }; };
  const asks = async (tab, text) => { await tab.type("#text", text); await tab.page.keyboard.press("Enter"); await tab.until(() => window.feeds.length > 0); };
  const saved = (tab) => tab.page.evaluate(() => new Promise((resolve) => { indexedDB.open("emberflow").onsuccess = (event) => { event.target.result.transaction("chats").objectStore("chats").getAll().onsuccess = ({ target }) => resolve(target.result.map((chat) => chat.messages.map((m) => m.content))); }; }));

  // The tab is closed in the middle of an answer.
  let feed = await feeding(first);
  await asks(first, "q1");
  await feed.say("half an ans");
  await first.until(() => document.querySelector("article.assistant .text")?.textContent === "half an ans");
  await new Promise((resolve) => setTimeout(resolve, 1500));
  await first.page.reload();
  await first.ready();
  assert.deepEqual(await first.all("#messages .text"), ["q1", "half an ans"]);
  assert.match(await first.text("article.assistant .note"), /not finished/);

  // Another answer that does not come: the first one is shown again.
  feed = await feeding(first);
  await first.press("article.assistant [aria-label^='Answer again']");
  await first.until(() => window.feeds.length === 1);
  await first.page.keyboard.press("Escape");
  await first.until(() => document.querySelectorAll("article.assistant:not(.running)").length === 1);
  assert.deepEqual(await first.all("#messages .text"), ["q1", "half an ans"]);

  // An answer is stopped: what was said so far stays.
  await first.press("#new");
  await asks(first, "q2");
  await first.until(() => window.feeds.length === 2);
  await feed.say("some words");
  await first.until(() => document.querySelector(".running .text")?.textContent === "some words");
  await first.page.keyboard.press("Escape");
  await first.answered(1);
  assert.deepEqual(await first.all("#messages .text"), ["q2", "some words"]);
  assert.match(await first.text("article.assistant .note"), /Stopped/);
  assert.match(await first.text("article.assistant .facts"), /^1 token/);
  await first.press("#chats li.shown [aria-label^=Delete]");
  await first.until(() => document.querySelectorAll("#chats li").length === 1 && document.querySelector("article.user .text")?.textContent === "q1");

  // Two tabs go on with one conversation.
  const second = await first.page.browserContext().newPage(), other = { ...first, page: second, until: (test, ...args) => second.waitForFunction(test, TIMEOUT, ...args), type: async (selector, text) => { await second.focus(selector); await second.keyboard.type(text); } };
  await second.goto(url);
  await other.until(() => document.getElementById("unlock").hidden === false);
  await other.type("#key", "secret");
  await second.keyboard.press("Enter");
  await other.until(() => document.getElementById("notice").hidden && document.getElementById("model-name").textContent === "demo" && document.querySelectorAll("#chats .chat").length === 1);
  await second.$eval("#chats .chat", (chat) => chat.click());
  const theirs = await feeding(other);
  await asks(other, "from B");
  await first.page.bringToFront();
  await asks(first, "from A");
  await first.until(() => window.feeds.length === 3);
  await theirs.say("B's answer");
  await feed.say("A's answer");
  await theirs.end();
  await feed.end();
  await first.until(() => document.querySelector("article:last-child .text")?.textContent === "A's answer" && !document.querySelector(".running"));
  await other.until(() => !document.querySelector(".running"));
  const wanted = ["A's answer", "B's answer", "from A", "from B", "half an ans", "q1"];
  for (let tries = 0; tries < 50 && (await saved(first))[0].length < 6; tries++) await new Promise((resolve) => setTimeout(resolve, 100));
  assert.deepEqual((await saved(first)).map((all) => all.sort()), [wanted]);
  await second.close();

  // A conversation that is deleted while it is answered stays deleted.
  await asks(first, "q3");
  await first.until(() => window.feeds.length === 4);
  await feed.say("never");
  await first.until(() => document.querySelector(".running .text")?.textContent === "never");
  await first.press("#chats li.shown [aria-label^=Delete]");
  await new Promise((resolve) => setTimeout(resolve, 1500));
  assert.deepEqual(await saved(first), []);
  assert.deepEqual(await first.all("#chats li"), []);

  // A value that the server refuses is not sent, and the page says so.
  await first.press("#settings-open");
  await first.type("#field-max_tokens", "1.5");
  assert.equal(await first.page.$eval("#field-max_tokens", (input) => input.getAttribute("aria-invalid") === "true" && !input.closest(".field").querySelector(".wrong").hidden), true);
  assert.equal(await first.page.evaluate(() => JSON.parse(localStorage.getItem("emberflow-settings")).max_tokens), undefined);
  await first.close();
}

// Conversations of the page's first version, which had them in localStorage, are taken over.
async function taken_over() {
  const { page, unlock, all, until, close } = await open(url);
  await page.evaluate(() => localStorage.setItem("emberflow", JSON.stringify({ current: "1-2", settings: {}, chats: [
    { id: "1-2", messages: [{ role: "user", content: "Old question" }, { role: "assistant", content: "Old answer", speed: "5 tokens" }] }, { id: 7 }, { id: "x", messages: [{ role: "user" }] }] })));
  await page.reload();
  await unlock();
  await until(() => document.querySelectorAll("#chats li").length === 1);
  await page.$eval("#chats .chat", (chat) => chat.click());
  assert.deepEqual(await all("#messages .text"), ["Old question", "Old answer"]);
  await close();
}

// A model without a chat template is not shown one: it goes on with texts.
async function continues() {
  const { page, asks, until, answered, ready, type, all, close } = await open(plain);
  await ready();
  await until(() => document.getElementById("send").getAttribute("aria-label") === "Continue");
  assert.equal(await page.$eval("#system-box", (box) => box.hidden), true);
  assert.equal(await page.$eval("#attach", (button) => button.hidden), true);
  await type("#text", "tok1 tok2");
  const asked = await asks("/v1/completions", () => page.keyboard.press("Enter"));
  assert.equal(asked.prompt, "tok1 tok2");
  assert.ok(asked.max_tokens > 0 && !asked.messages);
  await answered(1);
  const [, said] = await all("#messages .text"), more = await asks("/v1/completions", () => page.keyboard.press("Enter"));
  assert.equal(more.prompt, `tok1 tok2${said}`);
  await answered(2);
  await close();
}

try {
  await markdown();
  {
    const { page, unlock, text, close } = await open(url);
    await unlock();
    assert.equal(await page.$eval("#system-box", (box) => box.hidden), true, "the bundled model knows no system messages");
    assert.equal(await page.$eval("#thinks-box", (box) => box.hidden), true, "nor thoughts");
    assert.equal(await page.$eval("#field-top_p", (input) => input.placeholder), "0.9");
    assert.match(await text("#advice"), /makers recommend/);
    await close();
  }
  for (const phone of [false, true]) for (const dark of [false, true]) await views(phone, dark);
  await works();
  await keeps();
  await taken_over();
  if (plain) await continues();
  assert.deepEqual(wrong, []);
} finally {
  await browser.close();
}
