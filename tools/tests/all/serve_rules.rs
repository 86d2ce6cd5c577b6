//! `emberflow serve`: texts constrained by schemas and grammars, and tool calls.

use std::time::Instant;

use crate::common::server::{HANGS, Reply, Server};
use crate::common::{call, emberflow, exported, succeed};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
            "kind": {"enum": ["struct", "trait"]},
        },
        "required": ["title", "count", "kind"],
        "additionalProperties": false,
    })
}

fn chat(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "What is a vector?"}],
        "max_tokens": 120, "temperature": 0.8, "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema()}},
    })
}

/// Whether a text is valid against [`schema`].
fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(value.as_object().unwrap().len(), 3, "{text}");
    assert!(value["title"].as_str().unwrap().chars().count() <= 24);
    assert!((1..100).contains(&value["count"].as_u64().unwrap()));
    assert!(["struct", "trait"].contains(&value["kind"].as_str().unwrap()));
}

fn content(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.body);
    let choice = &reply.json()["choices"][0];
    let text = choice["message"]["content"]
        .as_str()
        .or(choice["text"].as_str());
    text.unwrap().to_owned()
}

#[test]
fn answers_are_valid_and_do_not_depend_on_neighbours() {
    let server = Server::start(&[
        "--ffn-resident",
        "0.5",
        "--parallel",
        "4",
        "--grammars",
        "3",
    ]);
    let alone: Vec<String> = (0..6)
        .map(|seed| content(&server.post(CHAT, &chat(seed))))
        .collect();
    alone.iter().for_each(|text| check(text));
    let free = json!({"prompt": "A vector is", "max_tokens": 40, "temperature": 0});
    let plain = server.complete(&free);
    std::thread::scope(|scope| {
        for (seed, wanted) in (0u64..).zip(&alone) {
            let (server, free, plain) = (&server, &free, &plain);
            scope.spawn(move || {
                let mut body = chat(seed);
                body["stream"] = json!(seed % 2 == 0);
                body["priority"] = json!(seed % 3);
                let reply = server.post(CHAT, &body);
                let text = if body["stream"] == true {
                    reply.streamed()
                } else {
                    content(&reply)
                };
                assert_eq!(&text, wanted, "seed {seed}");
            });
            scope.spawn(move || assert_eq!(&server.complete(free), plain));
        }
    });
    // several texts of one request have consecutive seeds
    let mut several = chat(2);
    several["n"] = json!(3);
    let reply = server.post(CHAT, &several).json();
    for (at, wanted) in alone[2..5].iter().enumerate() {
        assert_eq!(&reply["choices"][at]["message"]["content"], wanted);
        assert_eq!(reply["choices"][at]["finish_reason"], "stop");
    }
    several["n"] = json!(4);
    assert_eq!(
        server.post(CHAT, &several).status,
        400,
        "three are the most"
    );
    let mut short = chat(0);
    short["max_tokens"] = json!(3);
    let reply = server.post(CHAT, &short).json();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
}

#[test]
fn all_fields_that_hold_a_text() {
    let server = Server::start(&[]);
    let with = |field: &str, value: Value| {
        let mut body =
            json!({"prompt": "A vector is", "max_tokens": 100, "seed": 4, "ignore_eos": true});
        body[field] = value;
        body
    };
    let path = "/v1/completions";
    for field in ["json_schema", "guided_json"] {
        check(&content(&server.post(path, &with(field, schema()))));
    }
    check(&content(&server.post(
        path,
        &with("structured_outputs", json!({"json": schema()})),
    )));
    let grammar = json!("start: \"<\" /[a-z]{3}/ \">\"");
    for field in ["grammar", "guided_grammar"] {
        let text = content(&server.post(path, &with(field, grammar.clone())));
        assert!(text.len() == 5 && text.starts_with('<'), "{text}");
    }
    let text = content(&server.post(path, &with("guided_regex", json!("[0-9]{4}"))));
    assert!(text.len() == 4 && text.parse::<u32>().is_ok(), "{text}");
    let text = content(&server.post(path, &with("guided_choice", json!(["yes", "no"]))));
    assert!(["yes", "no"].contains(&text.as_str()), "{text}");
    let object = with("response_format", json!({"type": "json_object"}));
    let text = content(&server.post(path, &object));
    assert!(text.starts_with('{'), "{text}");
    let body = json!({"input": "What is a vector?", "max_output_tokens": 120, "seed": 1,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema()}}});
    let reply = server.post("/v1/responses", &body).json();
    assert_eq!(reply["status"], "completed", "{reply}");
    check(reply["output"][0]["content"][0]["text"].as_str().unwrap());
    let none = with("response_format", json!({"type": "text"}));
    assert_eq!(server.post(path, &none).status, 200);
    for (field, value) in [
        ("response_format", json!({"type": "yaml"})),
        ("response_format", json!({"type": "json_schema"})),
        ("response_format", json!({})),
        ("json_schema", json!({"type": "no such type"})),
        ("grammar", json!("root ::= (\"a\"")),
        ("grammar", json!("start: nothing")),
        ("guided_regex", json!("(")),
    ] {
        let reply = server.post(path, &with(field, value));
        assert_eq!(reply.status, 400, "{field}: {}", reply.body);
    }
    let mut two = with("json_schema", schema());
    two["guided_regex"] = json!("a");
    assert_eq!(server.post(path, &two).status, 400);
    let none = Server::start(&["--grammars", "0"]);
    let reply = none.post(path, &with("json_schema", schema()));
    assert!(
        reply.status == 400 && reply.body.contains("--grammars"),
        "{}",
        reply.body
    );
}

/// A request that would cost too much, and its excessive part.
struct Bomb {
    what: &'static str,
    body: Value,
    /// Whether it may also run: its states are created as a text needs them, within the limits.
    may_run: bool,
}

fn bomb(what: &'static str, body: Value) -> Bomb {
    Bomb {
        what,
        body,
        may_run: what.contains("repetitions") || what.starts_with("states"),
    }
}

fn many(n: usize) -> serde_json::Map<String, Value> {
    let text = json!({"type": "string"});
    (0..n).map(|i| (format!("p{i}"), text.clone())).collect()
}

/// Schemas.
fn schemas() -> Vec<Bomb> {
    let deep = (0..100).fold(
        json!({"type": "string"}),
        |inner, _| json!({"items": inner}),
    );
    let both = |n: usize| json!({"anyOf": (0..n).map(|i| json!({"properties": {format!("p{i}"): {}}})).collect::<Value>()});
    let pattern = |pattern: &str| json!({"type": "string", "pattern": pattern});
    let all = [
        ("nested schemas", deep),
        (
            "alternatives that multiply",
            json!({"allOf": (0..20).map(|_| both(2)).collect::<Value>()}),
        ),
        (
            "large alternatives that multiply",
            json!({"allOf": (0..3).map(|_| both(100)).collect::<Value>()}),
        ),
        (
            "a union of 2500",
            json!({"anyOf": (0..2500).map(|i| json!({"const": i})).collect::<Value>()}),
        ),
        (
            "an enum of 8000",
            json!({"enum": (0..8000).collect::<Value>()}),
        ),
        (
            "long texts",
            json!({"type": "array", "items": {"minLength": 1_000_000_000}}),
        ),
        (
            "counted properties",
            json!({"properties": many(1000), "minProperties": 1}),
        ),
        (
            "references in circles",
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}),
        ),
        (
            "repetitions of repetitions",
            pattern("^((a{1,999}){1,999}){1,999}b$"),
        ),
        (
            "an expression and a length",
            json!({"pattern": "^((a{1,999}){1,999}){1,999}b$", "minLength": 50}),
        ),
        (
            "states by letters",
            pattern("^(\\p{L}{1,1000}\\p{N}{1,1000}){1,1000}$"),
        ),
        ("nested groups", pattern(&"(".repeat(5000))),
        ("a common multiple", json!({"multipleOf": 0.000_099_991})),
    ];
    let wrapped = |(what, schema)| bomb(what, json!({"json_schema": schema}));
    all.into_iter().map(wrapped).collect()
}

/// Requests that are refused.
fn bombs() -> Vec<Bomb> {
    let tool = |i: usize, properties: usize| json!({"type": "function", "function": {"name": format!("f{i}"), "parameters": {"properties": many(properties)}}});
    let tools =
        |n: usize, properties: usize| (0..n).map(|i| tool(i, properties)).collect::<Value>();
    let mut all = schemas();
    all.extend([
        bomb("an expression's groups", json!({"guided_regex": "(".repeat(9000)})),
        bomb("repetitions in an expression", json!({"guided_regex": "((a{1,999}){1,999}){1,999}b"})),
        bomb("a long expression", json!({"guided_regex": "a|".repeat(30_000)})),
        bomb("a grammar's groups", json!({"grammar": format!("start: {}", "(".repeat(9000))})),
        bomb("repetitions in a grammar", json!({"grammar": "start: (((\"a\" | \"b\"){1,9999}){1,9999}){1,9999}"})),
        bomb("llama.cpp's groups", json!({"grammar": format!("root ::= {}", "(".repeat(9000))})),
        bomb("llama.cpp's repetitions", json!({"grammar": format!("root ::= {}\"a\"{}", "(".repeat(40), "){2000}".repeat(40))})),
        bomb("a choice of 9000", json!({"guided_choice": (0..9000).map(|i| i.to_string()).collect::<Vec<_>>()})),
        bomb("9000 stop strings", json!({"stop": vec!["x"; 9000]})),
        bomb("a long stop string", json!({"stop": "x".repeat(60_000)})),
        bomb("400 tools", json!({"tools": tools(400, 0)})),
        bomb("large tools", json!({"tools": tools(40, 60), "tool_choice": "required"})),
        bomb("a large strict tool", json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"properties": many(1500)}}}]})),
        bomb("900 biases", json!({"logit_bias": (0..900).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>()})),
    ]);
    all
}

/// Requests within their limits.
fn heavy() -> [Value; 6] {
    [
        json!({"json_schema": {"enum": (0..1900).map(|i| format!("{i} value")).collect::<Value>()}}),
        json!({"json_schema": {"type": "string", "maxLength": 3900}}),
        json!({"guided_regex": "(a|b)*a(a|b){200}"}),
        json!({"guided_regex": "(\\p{L}{1,500}\\p{N}){1,500}"}),
        json!({"json_schema": {"properties": many(400), "required": many(400).keys().collect::<Vec<_>>()}}),
        json!({"grammar": format!("start: ({})+", (0..900).map(|i| format!("/a.{{0,30}}b{i}[a-z]*/")).collect::<Vec<_>>().join(" | "))}),
    ]
}

/// Resets the peak of a process.
fn forget_peak(server: &Server) {
    std::fs::write(format!("/proc/{}/clear_refs", server.child.id()), "5").unwrap();
}

/// Bytes of a line of `/proc/PID/status`.
fn status(server: &Server, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.unwrap().trim_start_matches(':').trim();
    kib.trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Maximum that a bomb may add to the process: the plan's memory for compiling, and a body's
/// copies.
const MOST: u64 = 12 << 20;

/// Each within a second and little memory, and all within the smallest budget that the server
/// accepts.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn bombs_cost_neither_time_nor_memory() {
    let refused = call(&["serve", "--port", "0", "--memory", "12MiB"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    let (_, after) = message.split_once("--memory ").expect(&message);
    let (mib, _) = after.split_once("MiB").expect(&message);
    let budget: u64 = mib.parse().unwrap();
    let server = Server::start(&["--memory", &format!("{budget}MiB")]);
    for Bomb {
        what,
        mut body,
        may_run,
    } in bombs()
    {
        body["messages"] = json!([{"role": "user", "content": "x"}]);
        body["max_tokens"] = json!(8);
        forget_peak(&server);
        let before = status(&server, "VmRSS");
        let start = Instant::now();
        let reply = server.post(CHAT, &body);
        let took = start.elapsed();
        let added = status(&server, "VmHWM").saturating_sub(before);
        println!(
            "{what}: {} ms, {} KiB: {:.120}",
            took.as_millis(),
            added >> 10,
            reply.body
        );
        let wanted = reply.status == 400 || (may_run && reply.status == 200);
        assert!(wanted, "{what}: {}", reply.body);
        // A trial's limit is one second of CPU time: whoever runs into this hangs.
        assert!(took < HANGS, "{what}: {took:?}");
        assert!(added <= MOST, "{what}: {added} bytes");
    }
    // those within their limits
    let heavy = heavy();
    std::thread::scope(|scope| {
        for body in heavy.iter().chain(&heavy) {
            let server = &server;
            scope.spawn(move || {
                let mut body = body.clone();
                body["prompt"] = json!("A vector is");
                body["max_tokens"] = json!(400);
                let reply = server.post("/v1/completions", &body);
                assert!([200, 400].contains(&reply.status), "{}", reply.body);
            });
        }
    });
    let peak = server.metric("peak_rss_bytes");
    assert!(peak <= budget << 20, "{peak} bytes of {budget} MiB");
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "look_up", "description": "Looks up a type.",
            "parameters": {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 9},
                "kind": {"enum": ["struct", "trait"]}}, "required": ["kind", "count"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "end"}},
    ])
}

fn ask_tool(choice: Value) -> Value {
    json!({
        "messages": [{"role": "user", "content": "What is a vector?"}],
        "max_tokens": 300, "temperature": 0.7, "seed": 3, "tools": tools(), "tool_choice": choice,
        "parallel_tool_calls": false,
    })
}

/// The only call in a stream.
#[derive(Default)]
struct Streamed {
    name: String,
    ids: usize,
    arguments: String,
    reasons: Vec<String>,
}

fn streamed(reply: &Reply) -> Streamed {
    let mut all = Streamed::default();
    for event in reply.events() {
        let chunk: Value = serde_json::from_str(event).unwrap_or_default();
        let choice = &chunk["choices"][0];
        all.reasons
            .extend(choice["finish_reason"].as_str().map(str::to_owned));
        for call in choice["delta"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            assert_eq!(call["index"], 0);
            all.ids += usize::from(call["id"].is_string());
            all.name += call["function"]["name"].as_str().unwrap_or_default();
            all.arguments += call["function"]["arguments"].as_str().unwrap();
        }
    }
    all
}

#[test]
fn tools_are_called() {
    let server = Server::start(&[]);
    let named = json!({"type": "function", "function": {"name": "look_up"}});
    for choice in [json!("required"), named.clone()] {
        let mut body = ask_tool(choice);
        let whole = server.post(CHAT, &body).json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
        assert!(choice["message"]["content"].is_null());
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0]["type"], "function");
        let function = &calls[0]["function"];
        let arguments = function["arguments"].as_str().unwrap();
        let value: Value = serde_json::from_str(arguments).unwrap();
        match function["name"].as_str().unwrap() {
            "look_up" => assert!(
                (1..10).contains(&value["count"].as_u64().unwrap()),
                "{value}"
            ),
            name => assert_eq!((name, value), ("end", json!({}))),
        }
        body["stream"] = json!(true);
        let reply = server.post(CHAT, &body);
        let Streamed {
            name,
            ids,
            arguments: streamed,
            reasons,
        } = streamed(&reply);
        assert_eq!(
            (ids, &*name),
            (1, function["name"].as_str().unwrap()),
            "{}",
            reply.body
        );
        assert_eq!(streamed, arguments);
        assert_eq!(reasons, ["tool_calls"]);
    }
    let mut several = ask_tool(json!("required"));
    several["parallel_tool_calls"] = json!(true);
    several["max_tokens"] = json!(900);
    let reply = server.post(CHAT, &several).json();
    let calls = reply["choices"][0]["message"]["tool_calls"]
        .as_array()
        .unwrap()
        .len();
    assert!((1..=8).contains(&calls), "{reply}");
    // text remains text
    for choice in [json!("auto"), json!("none")] {
        let reply = server.post(CHAT, &ask_tool(choice)).json();
        assert!(
            reply["choices"][0]["message"]["content"].is_string(),
            "{reply}"
        );
    }
    let mut both = ask_tool(named);
    both["response_format"] = json!({"type": "json_object"});
    assert_eq!(server.post(CHAT, &both).status, 400);
    let completion = json!({"prompt": "A", "tools": tools()});
    assert_eq!(server.post("/v1/completions", &completion).status, 400);
}

#[test]
fn responses_call_tools_too() {
    let server = Server::start(&[]);
    let tool = json!({"type": "function", "name": "look_up", "parameters": tools()[0]["function"]["parameters"]});
    let mut body = json!({"input": "What is a vector?", "tools": [tool], "max_output_tokens": 200,
        "tool_choice": {"type": "function", "name": "look_up"}, "seed": 3, "top_p": 0.5, "temperature": 0.25});
    let whole = server.post("/v1/responses", &body).json();
    let settings = ["max_output_tokens", "top_p", "temperature"].map(|key| whole[key].as_f64());
    assert_eq!(settings, [200.0, 0.5, 0.25].map(Some), "{whole}");
    let item = &whole["output"][0];
    assert_eq!(item["type"], "function_call", "{whole}");
    assert_eq!(item["name"], "look_up");
    let arguments: Value = serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["count"].is_u64(), "{arguments}");
    body["stream"] = json!(true);
    let reply = server.post("/v1/responses", &body);
    let mut streamed = String::new();
    for event in reply.events() {
        let event: Value = serde_json::from_str(event).unwrap();
        if event["type"] == "response.function_call_arguments.delta" {
            streamed += event["delta"].as_str().unwrap();
        }
    }
    assert_eq!(item["arguments"], streamed);
    // the conversation continues after a call and its result
    let again = json!({"input": [
        {"role": "user", "content": "What is a vector?"},
        {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a type"},
    ], "max_output_tokens": 5});
    assert_eq!(server.post("/v1/responses", &again).status, 200);
}

#[test]
fn templates_see_tools_calls_and_results() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let config = std::path::Path::new(&folder).join("tokenizer_config.json");
    let mut settings: Value =
        serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
    let tool_use = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}\
         {% for m in messages %}[{{ m.role }}]{{ m.content }}\
         {% if m.tool_calls is defined %}{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}:\
         {{ c.function.arguments.kind }}</tool_call>{% endfor %}{% endif %}\
         {% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}{% endfor %}";
    let default = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\
         {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{% endfor %}\
         {{ reasoning_effort }}{{ x }}{% if enable_thinking %}<think>{% endif %}";
    settings["chat_template"] = json!([
        {"name": "default", "template": default},
        {"name": "tool_use", "template": tool_use},
    ]);
    std::fs::write(&config, settings.to_string()).unwrap();
    let packed = dir.path().join("tools.ember").display().to_string();
    succeed(emberflow().args(["pack", &folder, "-o", &packed]));
    let server = Server::start(&[&packed]);
    let call = json!({"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{\"kind\": \"trait\"}"}});
    let body = json!({
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "R"},
        ],
        "tools": [{"type": "function", "function": {"name": "look_up", "description": "D", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}],
    });
    let reply = server.post("/apply-template", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let wanted = "{\"type\": \"function\", \"function\": {\"name\": \"look_up\", \"description\": \"D\", \
                  \"parameters\": {\"type\": \"object\", \"properties\": {\"z\": {}, \"a\": {}}}}}\
                  [user]Q[assistant]<tool_call>look_up:trait</tool_call>[tool]R(c1)";
    assert_eq!(reply.json()["prompt"], wanted);
    thoughts(&server);
}

/// Text after a prompt that ends with `<think>` is not part of the answer.
fn thoughts(server: &Server) {
    let turns = json!([
        {"role": "developer", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": null, "reasoning": "R"},
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
    ]);
    let mut body = json!({
        "messages": turns, "max_tokens": 6, "temperature": 0, "chat_template_kwargs": {"x": 1e-7},
        "reasoning_effort": "low", "enable_thinking": true,
    });
    let rendered = server.post("/apply-template", &body).json();
    assert_eq!(
        rendered["prompt"],
        "[system]S[user]Q[assistant](R)[user]Alow1e-07<think>"
    );
    let message = server.post(CHAT, &body).json()["choices"][0]["message"].take();
    assert_eq!(message["content"], "");
    let thought = message["reasoning_content"].as_str().unwrap().to_owned();
    assert!(!thought.is_empty());
    let usage = server.post(CHAT, &body).json()["usage"].take();
    let counted = &usage["completion_tokens_details"]["reasoning_tokens"];
    assert_eq!(
        (counted, &usage["completion_tokens"]),
        (&json!(6), &json!(6))
    );
    body["stream"] = json!(true);
    let reply = server.post(CHAT, &body);
    let mut streamed = String::new();
    for event in reply
        .events()
        .into_iter()
        .filter(|event| event.starts_with('{'))
    {
        let event: Value = serde_json::from_str(event).unwrap();
        let delta = &event["choices"][0]["delta"];
        streamed += delta["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(delta["content"].as_str().unwrap_or_default(), "");
    }
    assert_eq!(streamed.trim_end(), thought);
    body["stream"] = json!(false);
    body["reasoning_format"] = json!("none");
    let message = server.post(CHAT, &body).json()["choices"][0]["message"].take();
    assert_eq!(message["content"].as_str().unwrap().trim(), thought);
    let asked =
        json!({"input": "A", "max_output_tokens": 6, "temperature": 0, "enable_thinking": true});
    let response = server.post("/v1/responses", &asked).json();
    assert_eq!(response["output"][0]["type"], "reasoning");
    let said = response["output"][0]["content"][0]["text"]
        .as_str()
        .unwrap();
    assert!(!said.is_empty() && response["output"][1]["type"] == "message");
    let usage = &response["usage"];
    assert_eq!(
        usage["output_tokens_details"],
        json!({"reasoning_tokens": 6})
    );
    let asked = json!({"messages": [{"role": "user", "content": "A"}], "think": true, "stream": false,
        "options": {"num_predict": 6, "temperature": 0}});
    let message = server.post("/api/chat", &asked).json()["message"].take();
    assert_eq!([&message["thinking"], &message["content"]], [said, ""]);
}
