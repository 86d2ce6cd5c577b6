// The panel that shows how fast the engine is, and why.

import { $, bytes, drawing, element } from "./dom.js";

// What the engine calls the parts of its memory, and what they are. Parts of one name are added up.
const MEMORY = {
  process: "program", kernel: "program", margin: "reserve", fixed: "always needed weights", scales: "always needed weights", gates: "always needed weights", embedding: "always needed weights",
  predictor: "predictors", kv: "conversations", scratch: "work space", stream: "work space", device: "other processors", hot: "most used weights", cold: "recently used weights", tiles: "recently used weights",
};
const TIME = ["attention", "feed-forward", "waiting for the disk", "choosing words", "predicting what is needed", "other"];
const NAMES = { memory: ["most used weights", "recently used weights", "always needed weights", "predictors", "conversations", "work space", "program", "reserve", "other processors", "other"], time: TIME };
const COVERS = matchMedia("(max-width: 75rem)");
const WINDOW = 120;
const LEFT = 34, RIGHT = 352, TOP = 8, BOTTOM = 88;

const colour = (chart, name) => `c${NAMES[chart].indexOf(name) % 12}`;

function bar(chart, parts) {
  const sum = parts.reduce((all, part) => all + part.value, 0) || 1;
  $(chart).replaceChildren(...parts.map(part => { const made = element("i", { class: colour(chart, part.name), title: `${part.name}: ${part.text}` }); made.style.width = `${100 * part.value / sum}%`; return made; }));
  $(`${chart}-key`).replaceChildren(...parts.map(part => element("li", {}, element("i", { class: colour(chart, part.name) }), `${part.name} `, element("b", {}, part.text))));
}

/** The smallest of 1, 2, 5 times a power of ten that is at least `value`. */
function nice(value) { const power = 10 ** Math.floor(Math.log10(value)); return [1, 2, 5, 10].find(step => step * power >= value * 0.999999) * power; }

/** Axes with ticks: positions from 0 to 1, and their labels. */
function axes(x, y) {
  const across = at => LEFT + at * (RIGHT - LEFT), up = at => BOTTOM - at * (BOTTOM - TOP);
  return [...y.flatMap(([at, text]) => [drawing("line", { x1: LEFT, x2: RIGHT, y1: up(at), y2: up(at) }), drawing("text", { x: LEFT - 4, y: up(at) + 3, "text-anchor": "end" }, text)]),
    ...x.map(([at, text]) => drawing("text", { x: across(at), y: BOTTOM + 13, "text-anchor": at === 1 ? "end" : "middle" }, text))];
}

export class Performance {
  #last = null;
  /** Times in seconds, and tokens per second. */
  #rates = [];

  constructor(changed) {
    const show = open => {
      $("performance").hidden = !open; 
      $("performance-open").setAttribute("aria-expanded", String(open));
      this.#cover();
      changed();
    };
    COVERS.addEventListener("change", () => this.#cover());
    $("performance-open").addEventListener("click", () => { show(!this.isOpen); if (this.isOpen) $("performance-close").focus(); });
    for (const id of ["performance-close", "performance-shade"]) $(id).addEventListener("click", () => { show(false); $("performance-open").focus(); });
  }

  /** What the panel covers takes no focus. */
  #cover() {
    const covers = this.isOpen && COVERS.matches;
    for (const covered of [document.querySelector("main"), $("side")]) covered.inert = covers;
    $("performance-shade").hidden = !covers;
  }

  get isOpen() { return !$("performance").hidden; }

  toggle() { $("performance-open").click(); }

  /** Takes what the server counts, from time to time. */
  take(now) {
    const last = this.#last;
    this.#last = now;
    const counts = name => now.totals[name] >= last.totals[name];
    if (last && now.uptime_s > last.uptime_s && counts("pass_ns") && counts("predicted_tokens")) this.#since(last, now);
    else this.#rates = [];
    if (!this.isOpen) return;
    this.#speed(now.uptime_s);
    this.#memory(now.memory);
    this.#layers(now.layers ?? []);
    this.#requests(now);
  }

  #since(last, now) {
    const seconds = now.uptime_s - last.uptime_s, diff = name => now.totals[name] - last.totals[name];
    const tokens = diff("predicted_tokens"), rate = tokens / seconds, needed = diff("hits") + diff("hot_hits") + diff("misses");
    this.#rates = [...this.#rates.filter(([at]) => at > now.uptime_s - WINDOW), [now.uptime_s, rate]];
    $("rate").textContent = rate.toFixed(1);
    $("read").textContent = `${bytes(diff("bytes_read") / seconds)}/s`;
    if (needed) $("hits").textContent = `${(100 - 100 * diff("misses") / needed).toFixed(1)} %`;
    const spent = diff("pass_ns"), wait = diff("wait_ns"), predict = diff("predict_ns");
    if (spent <= 0) return;
    const parts = { attention: diff("attention_ns"), "feed-forward": diff("ffn_ns") - wait - predict, "waiting for the disk": wait, "choosing words": diff("head_ns"), "predicting what is needed": predict };
    parts.other = spent - Object.values(parts).reduce((all, part) => all + part, 0);
    const shown = Object.entries(parts).filter(([, value]) => value > 0);
    $("time-box").hidden = false;
    bar("time", shown.map(([name, value]) => ({ name, value, text: tokens ? `${(value / 1e6 / tokens).toFixed(1)} ms` : `${(100 * value / spent).toFixed(0)} %` })));
  }

  #speed(now) {
    const most = Math.max(...this.#rates.map(([, rate]) => rate), 0.1), step = nice(most / 2), top = step * Math.ceil(most / step - 1e-9), ticks = [];
    for (let i = 0; i * step <= top * 1.0001; i++) ticks.push([i * step / top, String(+(i * step).toPrecision(3))]);
    const seconds = [[0, "2 min ago"], [0.5, "1 min ago"], [1, "now"]];
    const points = this.#rates.map(([at, rate]) => `${RIGHT - (now - at) * (RIGHT - LEFT) / WINDOW},${BOTTOM - rate / top * (BOTTOM - TOP)}`).join(" ");
    $("line").replaceChildren(...axes(seconds, ticks), drawing("polyline", { points, class: "speed" }));
  }

  #memory(memory) {
    const parts = new Map();
    for (const [name, value] of Object.entries(memory.parts)) if (value > 0) { const shown = MEMORY[name] ?? "other"; parts.set(shown, (parts.get(shown) ?? 0) + value); }
    bar("memory", [...parts].sort(([a], [b]) => NAMES.memory.indexOf(a) - NAMES.memory.indexOf(b)).map(([name, value]) => ({ name, value, text: bytes(value) })));
    $("peak").textContent = `The server has used at most ${bytes(memory.peak_rss_bytes)} of the ${bytes(memory.budget_bytes)} it may use. It has divided them so:`;
  }

  #layers(layers) {
    // Layers whose weights are read as rows have no neurons.
    const all = layers.filter(layer => layer.neurons > 0);
    $("layers-box").hidden = !all.length;
    if (!all.length) return;
    const wide = (RIGHT - LEFT) / all.length, every = Math.max(1, nice(all.length / 8)), ticks = [];
    for (let i = 0; i < all.length; i += every) ticks.push([(i + 0.5) / all.length, String(i + 1)]);
    const rect = (at, from, share, name) => drawing("rect", { x: LEFT + (at + 0.08) * wide, y: BOTTOM - (from + share) * (BOTTOM - TOP), width: 0.84 * wide, height: share * (BOTTOM - TOP), class: name });
    $("layers").replaceChildren(...axes(ticks, [[0, "0 %"], [0.5, "50 %"], [1, "100 %"]]),
      ...all.flatMap(({ neurons, hot, cold }, at) => [rect(at, 0, 1, "rest"), rect(at, 0, hot / neurons, colour("memory", MEMORY.hot)), rect(at, hot / neurons, cold / neurons, colour("memory", MEMORY.cold))]));
    $("layers-key").replaceChildren(...[[colour("memory", MEMORY.hot), "in memory, most used"], [colour("memory", MEMORY.cold), "in memory, recently used"], ["rest", "on disk"]].map(([name, text]) => element("li", {}, element("i", { class: name }), text)));
  }

  #requests(now) {
    const names = [["reactive", "Chats"], ["proactive", "In the background"]];
    const row = ([name, shown]) => { const c = now.classes[name]; return [shown, c.running, c.waiting, c.ended, c.first_token_s ? `${c.first_token_s.toFixed(1)} s` : "–", c.token_s ? `${(1 / c.token_s).toFixed(1)}` : "–"]; };
    const head = ["", "running", "waiting", "done", "first word after", "tokens/s"];
    $("requests").replaceChildren(element("thead", {}, element("tr", {}, ...head.map(cell => cell ? element("th", { scope: "col" }, cell) : element("td")))),
      element("tbody", {}, ...names.map(name => element("tr", {}, ...row(name).map((cell, at) => element(at ? "td" : "th", { scope: !at && "row" }, String(cell)))))));
  }
}
