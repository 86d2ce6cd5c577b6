// The `openai` package of npm against a running server: openai_client.mjs URL

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "secret", maxRetries: 0 });
const messages = [{ role: "user", content: "What is a vector?" }];
const greedy = { model: "demo", max_tokens: 16, temperature: 0 };

const whole = await client.chat.completions.create({ messages, ...greedy });
const text = whole.choices[0].message.content;
assert.ok(text.length > 0);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ messages, stream: true, ...greedy })) {
  streamed += chunk.choices[0].delta.content ?? "";
}
assert.equal(streamed, text);

// The client's own helper puts the chunks together again.
const helped = client.chat.completions.stream({ messages, ...greedy });
assert.equal((await helped.finalMessage()).content, text);

// One that is given up takes nobody's place.
const given_up = await client.completions.create({ model: "demo", prompt: "A", max_tokens: 900, stream: true });
for await (const _ of given_up) {
  given_up.controller.abort();
}
const after = await client.completions.create({ prompt: "A vector is", ...greedy });
assert.equal(after.usage.completion_tokens, 16);

// A text that is valid against a schema.
const schema = {
  type: "object",
  properties: { count: { type: "integer", minimum: 1, maximum: 9 }, kind: { enum: ["struct", "trait"] } },
  required: ["count", "kind"],
  additionalProperties: false,
};
const held = await client.chat.completions.parse({
  messages,
  model: "demo",
  max_tokens: 100,
  seed: 3,
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
});
assert.ok(held.choices[0].message.parsed.count >= 1);

// A tool that must be called, whole and as a stream.
const call = {
  messages,
  model: "demo",
  max_tokens: 100,
  seed: 3,
  tools: [{ type: "function", function: { name: "look_up", parameters: schema } }],
  tool_choice: "required",
  parallel_tool_calls: false,
};
const called = (await client.chat.completions.create(call)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const wanted = called.message.tool_calls[0].function;
assert.equal(wanted.name, "look_up");
const pieces = await client.chat.completions.stream(call).finalChatCompletion();
assert.equal(pieces.choices[0].message.tool_calls[0].function.arguments, wanted.arguments);
assert.ok(JSON.parse(wanted.arguments).count >= 1);

await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
console.log("the JavaScript client is content");
