// The server's page in a real browser: page.mjs URL URL_OF_A_MODEL_WITHOUT_A_CHAT_TEMPLATE

import assert from "node:assert/strict";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [, , url, plain] = process.argv;
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"],
  executablePath: process.env.CHROMIUM ?? (await chromium.executablePath()),
  headless: "shell",
});
const wrong = [];
// With `system` as if the model's template had system messages, which the bundled one has not.
async function open(url, system = false) {
  const page = await browser.newPage();
  await page.setViewport({ width: 1280, height: 900 });
  if (system) {
    await page.setRequestInterception(true);
    page.on("request", (request) => {
      const prompt = request.url().endsWith("/apply-template") && JSON.parse(request.postData()).messages.map((m) => m.content).join(" ");
      return prompt ? request.respond({ contentType: "application/json", body: JSON.stringify({ prompt }) }) : request.continue();
    });
  }
  page.on("pageerror", (error) => wrong.push(error.message));
  page.on("request", (request) => request.url().startsWith(url) || wrong.push(`asks ${request.url()}`));
  await page.goto(url);
  const asks = async (path, action) => {
    const [asked] = await Promise.all([page.waitForRequest((request) => request.url().endsWith(path)), action()]);
    return JSON.parse(asked.postData());
  };
  return {
    page,
    asks,
    text: (selector) => page.$eval(selector, (element) => element.textContent),
    all: (selector) => page.$$eval(selector, (all) => all.map((element) => element.textContent)),
    until: (test, ...args) => page.waitForFunction(test, { timeout: 120000 }, ...args),
    // The field for the key appears with the first answer that wants one; before, it takes no keys.
    unlock: async () => {
      await page.waitForFunction(() => document.getElementById("state").textContent === "API key required", { timeout: 120000 });
      await page.type("#key", "secret");
    },
    press: (name) => page.evaluate((name) => [...document.querySelectorAll("#talk button")].findLast((button) => button.textContent === name).click(), name),
    answered: (count) => page.waitForFunction((count) => !document.getElementById("send").hidden && document.querySelectorAll(".assistant .does").length === count, { timeout: 120000 }, count),
  };
}

// A text that tries all that Markdown has, and what must not happen: everything that is no Markdown is text.
const HOSTILE = `# A *title*

**bold**, snake_case_name, \`1 < 2\`, [good](https://example.com/a), [bad](javascript:hacked()), ![picture](https://example.com/p.png)
<img src=x onerror="hacked=1"><script>hacked=2</script><b>not bold</b> [x](https://a"onmouseover="hacked=3)

1. one
   - two

| a | b |
|---|---|
| <i>1</i> | 2 |

\`\`\`html
<script>hacked=4</script>
\`\`\`
> quoted

${"[".repeat(20000)}${"*_`".repeat(7000)}${"> ".repeat(3000)}

\`\`\`js
unfinished`;

async function markdown() {
  const { page } = await open(url);
  const shown = await page.evaluate((text) => {
    const at = document.createElement("div"), began = performance.now();
    at.append(...markdown(text));
    document.body.append(at);
    const names = {};
    for (const { tagName } of at.querySelectorAll("*")) names[tagName] = (names[tagName] ?? 0) + 1;
    const attributes = new Set([...at.querySelectorAll("*")].flatMap((e) => e.getAttributeNames()));
    return { names, attributes: [...attributes], ms: performance.now() - began, links: [...at.querySelectorAll("a")].map((a) => a.href),
      code: [...at.querySelectorAll("pre")].map((pre) => pre.textContent), hacked: typeof hacked, text: at.textContent };
  }, HOSTILE);
  assert.equal(shown.hacked, "undefined");
  for (const [name, count] of Object.entries({ H3: 1, STRONG: 1, OL: 1, UL: 1, TABLE: 1, TD: 2, PRE: 2, BLOCKQUOTE: 1 })) assert.equal(shown.names[name] ?? 0, count, name);
  for (const name of ["SCRIPT", "IMG", "B", "I"]) assert.equal(shown.names[name] ?? 0, 0, name);
  assert.deepEqual(shown.links.filter((link) => !/^https:\/\/(example\.com|a)/.test(link)), []);
  assert.deepEqual(shown.attributes.filter((name) => name.startsWith("on") || name === "src"), []);
  assert.deepEqual(shown.code, ["<script>hacked=4</script>", "unfinished"]);
  assert.ok(shown.text.includes("<b>not bold</b>") && shown.text.includes("snake_case_name") && shown.text.includes("[bad](javascript:hacked())"));
  assert.ok(shown.ms < 3000, `${shown.ms} ms`);
  await page.close();
}

try {
  await markdown();
  {
    const { page, until, unlock } = await open(url);
    await unlock();
    await until(() => document.getElementById("settled").textContent.includes("temperature 0.7, top-p 0.9 (recommended by the model)"));
    assert.equal(await page.$eval("#systembox", (box) => box.hidden), true, "the bundled model knows no system messages");
    await page.close();
  }
  const { page, asks, text, all, until, unlock, press, answered } = await open(url, true);

  // It wants the key, and then shows what the engine does.
  await unlock();
  await until(() => document.getElementById("model").textContent === "demo");
  await until(() => document.querySelectorAll("#memory i").length > 2);
  await until(() => document.querySelectorAll(".welcome button").length === 3);
  assert.match(await text("#peak"), /peak .*MiB of .*MiB/);
  assert.equal(await page.$$eval("#layers rect", (all) => all.length), 24, "8 layers: all, hot, cold");
  // In one step: the page replaces these elements every second, and a removed one has no style.
  const colours = await page.evaluate(() => [...document.querySelectorAll("#memorykey i")].map((i) => getComputedStyle(i).backgroundColor));
  assert.equal(new Set(colours).size, colours.length, "parts of the memory share a colour");

  // A chat, and the numbers that move with it. A first answer without an end would leave no room for a second one.
  // The seed is given: a random one ends some answers before their limit.
  await page.click("#settings summary");
  await page.type("#knob-seed", "1");
  await page.type("#knob-max_tokens", "80");
  await page.type("#text", "What is a vector?");
  await page.keyboard.press("Enter");
  await until(() => document.querySelector(".assistant")?.textContent.length > 20);
  await until(() => parseFloat(document.getElementById("rate").textContent) > 0);
  await until(() => document.querySelectorAll("#time i").length > 1);
  await answered(1);
  assert.equal(await text(".user .text"), "What is a vector?");
  await until(() => [...document.querySelectorAll("#queue td")].some((cell) => cell.textContent.endsWith(" ms") && cell.textContent !== "0.0 ms"));

  // What is chosen is asked for, and nothing else; the system prompt goes first.
  await until(() => !document.getElementById("systembox").hidden);
  await page.type("#system", "Be short.");
  await page.type("#knob-temperature", "0.5");
  await page.$eval("#knob-max_tokens", (input) => { input.value = ""; });
  await page.type("#knob-max_tokens", "12");
  await page.type("#text", "And a trait?");
  const chosen = await asks("/completions", () => page.click("#send"));
  assert.deepEqual({ ...chosen, messages: chosen.messages.map((m) => m.role) }, {
    temperature: 0.5, max_tokens: 12, seed: 1, stream: true, stream_options: { include_usage: true }, messages: ["system", "user", "assistant", "user"] });
  assert.equal(chosen.messages[0].content, "Be short.");
  await answered(2);
  assert.match(await text("#settled"), /temperature 0\.5/);
  assert.match(await text("#talk"), /Cut after 12 tokens/);

  // Regenerate asks the same again; edit replaces a message, and what came after it is gone.
  const again = await asks("/completions", () => press("Regenerate"));
  assert.deepEqual(again, chosen);
  await answered(2);
  await press("Edit");
  await page.$eval("#talk textarea", (area) => { area.value = "And a slice?"; });
  const edited = await asks("/completions", () => press("Send"));
  assert.equal(edited.messages.at(-1).content, "And a slice?");
  assert.equal(edited.messages.length, 4);
  await answered(2);

  // Copying a message takes its text.
  await page.evaluate(() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; });
  await press("Copy");
  assert.equal(await page.evaluate(() => window.copied), await page.evaluate(() => talk.messages.at(-1).content));

  // A conversation survives a reload; another one does not know it; both can be chosen.
  const before = await all("#talk .text");
  await page.reload();
  await unlock();
  await until(() => document.getElementById("model").textContent === "demo");
  assert.deepEqual(await all("#talk .text"), before);
  assert.equal(await page.$eval("#system", (area) => area.value), "Be short.");
  assert.equal(await page.$eval("#knob-max_tokens", (input) => input.value), "12");
  await page.click("#clear");
  await page.$eval("#system", (area) => { area.value = ""; area.dispatchEvent(new Event("input")); });
  await page.$eval("#knob-max_tokens", (input) => { input.value = ""; input.dispatchEvent(new Event("input")); });
  await page.type("#text", "What is a box?");
  const other = await asks("/completions", () => page.keyboard.press("Enter"));
  assert.deepEqual(other.messages, [{ role: "user", content: "What is a box?" }]);

  // A long answer can be stopped; what was said so far stays.
  await until(() => document.querySelector(".assistant .text")?.textContent.length > 0);
  await page.$eval("#stop", (button) => button.click());
  await answered(1);
  assert.equal((await all("#chats option")).length, 2);
  await page.select("#chats", await page.$eval("#chats option:not(:checked)", (option) => option.value));
  assert.deepEqual(await all("#talk .text"), before);
  await page.click("#forget");
  assert.equal((await all("#chats option")).length, 1);
  assert.match(await text(".user .text"), /box/);

  // A model without a chat template is not shown one: it goes on with texts.
  if (plain) {
    const { page, asks, until, answered, all } = await open(plain);
    await until(() => document.getElementById("send").textContent === "Continue");
    assert.equal(await page.$eval("#systembox", (box) => box.hidden), true);
    await page.type("#text", "tok1 tok2");
    const asked = await asks("/v1/completions", () => page.keyboard.press("Enter"));
    assert.equal(asked.prompt, "tok1 tok2");
    assert.ok(asked.max_tokens > 0 && !asked.messages);
    await answered(1);
    assert.deepEqual((await all("#talk button")).filter((name) => name === "Copy").length, 2);
  }
  assert.deepEqual(wrong.filter((what) => !what.includes("401")), []);
} finally {
  await browser.close();
}
