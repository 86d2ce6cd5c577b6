// Engine statistics.
const show = bytes => { const units = ["B", "KiB", "MiB", "GiB"]; let n = bytes, u = 0; while (n >= 1024 && u < 3) { n /= 1024; u++; } return n.toFixed(u && n < 100 ? 1 : 0) + " " + units[u]; };
let last = null, rates = [], known = false;

// A name always has the same colour; no two names of a chart share one.
const COLOURS = { memory: ["hot", "cold"], time: ["FFN", "attention", "head", "waiting for reads", "predicting", "other"] };
function colour(chart, name) {
  const names = COLOURS[chart];
  if (!names.includes(name)) names.push(name);
  return `var(--c${names.indexOf(name) % 12})`;
}
const swatch = (chart, name) => element("i", { style: `background:${colour(chart, name)}` });
function bar(id, parts) {
  const sum = parts.reduce((all, part) => all + part.value, 0) || 1;
  $(id).replaceChildren(...parts.map(part => element("i", { style: `width:${100 * part.value / sum}%;background:${colour(id, part.name)}`, title: `${part.name} ${part.text}` })));
  $(id + "key").replaceChildren(...parts.map(part => element("span", {}, swatch(id, part.name), `${part.name} ${part.text}`)));
}
function rows(id, all) { $(id).replaceChildren(...all.map((row, at) => element("tr", {}, ...row.map(cell => element(at ? "td" : "th", {}, cell))))); }

// The smallest of 1, 2, 5 times a power of ten that is at least `value`.
function nice(value) { const power = 10 ** Math.floor(Math.log10(value)); return [1, 2, 5, 10].find(step => step * power >= value * 0.999999) * power; }
const drawn = (name, attributes, ...children) => { const made = document.createElementNS("http://www.w3.org/2000/svg", name); for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value); made.append(...children); return made; };
const LEFT = 38, RIGHT = 342, TOP = 6, BOTTOM = 84;
// Axes with ticks: positions from 0 to 1, and their labels.
function axes(x, y) {
  const across = at => LEFT + at * (RIGHT - LEFT), up = at => BOTTOM - at * (BOTTOM - TOP);
  return [...y.flatMap(([at, text]) => [drawn("line", { x1: LEFT, x2: RIGHT, y1: up(at), y2: up(at) }), drawn("text", { x: LEFT - 4, y: up(at) + 3, "text-anchor": "end" }, text)]),
    ...x.map(([at, text]) => drawn("text", { x: across(at), y: BOTTOM + 13, "text-anchor": "middle" }, text))];
}
function speed() {
  const step = nice(Math.max(...rates, 0.1) / 2), top = step * Math.ceil(Math.max(...rates, 0.1) / step - 1e-9), ticks = [];
  for (let i = 0; i * step <= top * 1.0001; i++) ticks.push([i * step / top, String(+(i * step).toPrecision(3))]);
  const seconds = [[0, "−120 s"], [0.25, "−90 s"], [0.5, "−60 s"], [0.75, "−30 s"], [1, "now"]];
  const points = rates.map((rate, at) => `${RIGHT - (rates.length - 1 - at) * (RIGHT - LEFT) / 120},${BOTTOM - rate / top * (BOTTOM - TOP)}`).join(" ");
  $("line").replaceChildren(...axes(seconds, ticks), drawn("polyline", { points, fill: "none", stroke: colour("time", "FFN"), "stroke-width": 1.5 }));
}
function layers(all) {
  $("layersbox").hidden = !all.length;
  if (!all.length) return;
  const wide = (RIGHT - LEFT) / all.length, every = nice(all.length / 8 || 1), ticks = [];
  for (let i = 0; i < all.length; i += Math.max(1, every)) ticks.push([(i + 0.5) / all.length, String(i)]);
  const rect = (at, from, share, fill) => drawn("rect", { x: LEFT + (at + 0.08) * wide, y: BOTTOM - (from + share) * (BOTTOM - TOP), width: 0.84 * wide, height: share * (BOTTOM - TOP), fill });
  $("layers").replaceChildren(...axes(ticks, [[0, "0 %"], [0.5, "50 %"], [1, "100 %"]]),
    ...all.flatMap((layer, at) => { const hot = layer.hot / layer.neurons, cold = layer.cold / layer.neurons; return [rect(at, 0, 1, "var(--line)"), rect(at, 0, hot, colour("memory", "hot")), rect(at, hot, cold, colour("memory", "cold"))]; }));
  $("layerskey").replaceChildren(element("span", {}, swatch("memory", "hot"), "hot"), element("span", {}, swatch("memory", "cold"), "cold"), element("span", {}, element("i", { style: "background:var(--line)" }), "on flash"));
}
function draw(now) {
  $("model").textContent = now.model;
  const total = now.totals, memory = now.memory;
  if (last && now.uptime_s > last.uptime_s) {
    const seconds = now.uptime_s - last.uptime_s, before = last.totals, diff = name => total[name] - before[name];
    const tokens = diff("predicted_tokens"), rate = tokens / seconds, needed = diff("hits") + diff("hot_hits") + diff("misses");
    $("rate").textContent = rate.toFixed(1);
    $("read").textContent = show(diff("bytes_read") / seconds);
    $("reads").textContent = Math.round(diff("commands") / seconds);
    if (needed) $("hits").textContent = (100 - 100 * diff("misses") / needed).toFixed(1) + " %";
    const spent = diff("pass_ns"), ffn = diff("ffn_ns"), wait = diff("wait_ns"), predict = diff("predict_ns");
    const parts = [["FFN", ffn - wait - predict], ["attention", diff("attention_ns")], ["head", diff("head_ns")], ["predictors", predict], ["I/O wait", wait]];
    parts.push(["other", Math.max(0, spent - parts.reduce((all, part) => all + part[1], 0))]);
    if (spent > 0) {
      $("timebox").hidden = false;
      bar("time", parts.filter(part => part[1] > 0).map(part => ({ name: part[0], value: part[1], text: tokens ? (part[1] / 1e6 / tokens).toFixed(2) + " ms" : (100 * part[1] / spent).toFixed(0) + " %" })));
    }
    rates = [...rates, rate].slice(-121);
  }
  speed();
  bar("memory", Object.entries(memory.parts).filter(([, bytes]) => bytes > 0).map(([name, value]) => ({ name, value, text: show(value) })));
  $("peak").textContent = `peak ${show(memory.peak_rss_bytes)} of ${show(memory.budget_bytes)}`;
  layers(now.layers ?? []);
  rows("queue", [["", "run", "wait", "done", "first token", "per token"], ...["reactive", "proactive"].map(name => { const c = now.classes[name]; return [name, c.running, c.waiting, c.ended, c.first_token_s ? c.first_token_s.toFixed(3) + " s" : "–", c.token_s ? (1000 * c.token_s).toFixed(1) + " ms" : "–"]; })]);
  $("slotsbox").hidden = !now.slots.length;
  rows("slots", [["text", "class", "prompt", "tokens", "state"], ...now.slots.map(slot => [slot.id, slot.class, slot.prompt_tokens, slot.tokens, slot.state])]);
  last = now;
}
async function look() {
  try {
    const response = await fetch("/stats", { headers: headers() });
    $("key").hidden = response.status !== 401 && !$("key").value;
    $("state").textContent = response.status === 401 ? "API key required" : response.ok ? "" : "loading";
    if (response.ok) {
      draw(await response.json());
      if (!known) { known = true; await learn(); }
    }
  } catch { $("state").textContent = "the server is not responding"; known = false; }
  setTimeout(look, 1000);
}
look();
