// The server's page in a real browser: page.mjs URL

import assert from "node:assert/strict";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const url = process.argv[2];
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"],
  executablePath: await chromium.executablePath(),
  headless: "shell",
});
try {
  const page = await browser.newPage();
  const wrong = [];
  page.on("pageerror", (error) => wrong.push(error.message));
  page.on("request", (request) => request.url().startsWith(url) || wrong.push(`asks ${request.url()}`));
  await page.goto(url);
  const text = (selector) => page.$eval(selector, (element) => element.textContent);
  const until = (test, ...args) => page.waitForFunction(test, { timeout: 20000 }, ...args);

  // It wants the key, and then shows what the engine does.
  await until(() => document.getElementById("state").textContent === "needs a key");
  await page.type("#key", "secret");
  await until(() => document.getElementById("model").textContent === "demo");
  await until(() => document.querySelectorAll("#memory i").length > 2);
  assert.match(await text("#peak"), /MiB at most of .*MiB/);
  assert.equal(await page.$$eval("#layers rect", (all) => all.length), 24, "8 layers: all, hot, cold");

  // A chat, and the numbers that move with it.
  await page.type("#text", "What is a vector?");
  await page.keyboard.press("Enter");
  await until(() => document.querySelector(".assistant")?.textContent.length > 20);
  await until(() => parseFloat(document.getElementById("rate").textContent) > 0);
  await until(() => document.querySelectorAll("#time i").length > 1);
  await until(() => document.getElementById("send").hidden === false);
  assert.equal(await text(".user"), "What is a vector?");
  await until(() => [...document.querySelectorAll("#queue td")].some((cell) => cell.textContent.endsWith(" ms") && cell.textContent !== "0.0 ms"));

  // A second message goes with the first ones; a long answer can be stopped.
  await page.type("#text", "And a trait?");
  await page.click("#send");
  await until(() => document.querySelectorAll(".assistant").length === 2);
  await page.$eval("#stop", (button) => button.click());
  await until(() => document.getElementById("send").hidden === false);

  // A new chat does not know the old one, even while that is being answered.
  await page.type("#text", "And a slice?");
  await page.click("#send");
  await until(() => document.querySelectorAll(".assistant").length === 3);
  await page.$eval("#clear", (button) => button.click());
  const [asked] = await Promise.all([
    page.waitForRequest((request) => request.url().endsWith("/completions")),
    page.type("#text", "What is a box?").then(() => page.keyboard.press("Enter")),
  ]);
  assert.deepEqual(JSON.parse(asked.postData()).messages, [{ role: "user", content: "What is a box?" }]);
  assert.deepEqual(wrong.filter((what) => !what.includes("401")), []);
} finally {
  await browser.close();
}
console.log("the page works");
