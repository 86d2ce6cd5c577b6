//! Calls in which a text ends: no API returns one that a client could run, whole or streamed.

use serde_json::{Value, json};

use crate::common::server::Server;
use crate::common::{emberflow, exported, succeed};

const CHAT: &str = "/v1/chat/completions";
const ARGUMENTS: &str = "{\"input\": \"*** Begin Patch\\n+rm -rf /tmp/x";

/// A template that writes calls as Hermes does.
const HERMES: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n\
     {\"name\": {{ c.function.name | tojson }}, \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>\n\
     {% endfor %}[end]\n{% endfor %}[assistant]";
/// The same as Llama 3 does.
const LLAMA: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}\
     {\"name\": {{ c.function.name | tojson }}, \"parameters\": {{ c.function.arguments | tojson }}}\
     {% endfor %}[end]\n{% endfor %}[assistant]";

/// A server of the bundled model with this template.
fn server(dir: &std::path::Path, template: &str) -> Server {
    let folder = exported(dir);
    let config = format!("{folder}/tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    settings["chat_template"] = json!(template);
    std::fs::write(&config, settings.to_string()).unwrap();
    let packed = dir.join("calls.ember").display().to_string();
    succeed(emberflow().args(["pack", &folder, "-o", &packed]));
    Server::start(&[&packed])
}

/// A grammar of one text: a whole call, and one that ends within its arguments.
fn said(cut: bool) -> String {
    let text = match cut {
        true => format!("<tool_call>\n{{\"name\": \"put\", \"arguments\": {ARGUMENTS}"),
        false => format!(
            "<tool_call>\n{{\"name\": \"put\", \"arguments\": {ARGUMENTS}\"}}}}\n</tool_call>"
        ),
    };
    format!("start: {}", json!(text))
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"input": {"type": "string"}}})
}

fn events(body: &str) -> Vec<Value> {
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter_map(|data| serde_json::from_str(data).ok())
        .collect()
}

fn whole() -> String {
    format!("{ARGUMENTS}\"}}")
}

#[test]
fn a_call_that_never_ended_cannot_be_run() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), HERMES);
    for cut in [false, true] {
        chats(&server, cut);
        messages(&server, cut);
        responses(&server, cut);
    }
}

fn chats(server: &Server, cut: bool) {
    let function = json!({"type": "function", "function": {"name": "put", "parameters": schema()}});
    let mut body = json!({"messages": [{"role": "user", "content": "Q"}], "tools": [function],
        "guided_grammar": said(cut), "max_tokens": 300});
    let reply = server.post(CHAT, &body).json();
    let choice = &reply["choices"][0];
    let [reason, arguments] = match cut {
        true => ["length", ARGUMENTS],
        false => ["tool_calls", &whole()],
    };
    assert_eq!(choice["finish_reason"], reason, "{reply}");
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(function["arguments"], arguments, "{reply}");
    body["stream"] = true.into();
    let all = events(&server.post(CHAT, &body).body);
    let reasons: Vec<&str> = all
        .iter()
        .filter_map(|event| event["choices"][0]["finish_reason"].as_str())
        .collect();
    assert_eq!(reasons, [reason]);
    let pieces = all.iter().map(|event| {
        event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"].as_str()
    });
    assert_eq!(pieces.flatten().collect::<String>(), arguments);
}

/// This API has no grammars: a stop string ends the text within the forced call.
fn messages(server: &Server, cut: bool) {
    let schema = json!({"type": "object", "properties": {"kind": {"enum": ["struct"]}},
        "required": ["kind"], "additionalProperties": false});
    let mut body = json!({"messages": [{"role": "user", "content": "Q"}], "max_tokens": 300,
        "tools": [{"name": "put", "input_schema": schema}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    if cut {
        body["stop_sequences"] = json!(["uct"]);
    }
    let reply = server.post("/v1/messages", &body).json();
    if cut {
        assert_eq!(reply["stop_reason"], "max_tokens", "{reply}");
        assert_eq!(reply["content"], json!([]));
    } else {
        assert_eq!(reply["stop_reason"], "tool_use", "{reply}");
        assert_eq!(reply["content"][0]["input"], json!({"kind": "struct"}));
    }
    body["stream"] = true.into();
    let all = events(&server.post("/v1/messages", &body).body);
    let begun = all
        .iter()
        .filter(|event| event["type"] == "content_block_start");
    assert_eq!(begun.count(), usize::from(!cut));
    let pieces = all
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str());
    let pieces: String = pieces.collect();
    match cut {
        true => assert_eq!(pieces, ""),
        false => assert_eq!(pieces.parse::<Value>().unwrap(), json!({"kind": "struct"})),
    }
    let end = all.iter().find(|event| event["type"] == "message_delta");
    assert_eq!(end.unwrap()["delta"]["stop_reason"], reply["stop_reason"]);
}

fn responses(server: &Server, cut: bool) {
    for kind in ["custom", "function"] {
        let mut tool = json!({"type": kind, "name": "put"});
        if kind == "function" {
            tool["parameters"] = schema();
        }
        let mut body = json!({"input": "Q", "tools": [tool], "guided_grammar": said(cut),
            "max_output_tokens": 300});
        let reply = server.post("/v1/responses", &body).json();
        let status = if cut { "incomplete" } else { "completed" };
        assert_eq!(reply["status"], status, "{reply}");
        let item = &reply["output"][0];
        match (kind, cut) {
            ("custom", true) => assert_eq!(item["type"], "message", "no call: {reply}"),
            ("custom", false) => {
                assert_eq!(item["input"], "*** Begin Patch\n+rm -rf /tmp/x", "{reply}");
            }
            (_, true) => assert_eq!(
                [&item["status"], &item["arguments"]],
                [&json!("incomplete"), &json!(ARGUMENTS)]
            ),
            (_, false) => assert_eq!(
                [&item["status"], &item["arguments"]],
                [&json!("completed"), &json!(whole())]
            ),
        }
        body["stream"] = true.into();
        let all = events(&server.post("/v1/responses", &body).body);
        let last = all.last().unwrap();
        assert_eq!(last["type"], format!("response.{status}"));
        let done = all
            .iter()
            .filter(|event| event["type"] == "response.output_item.done");
        let done: Vec<&Value> = done.map(|event| &event["item"]).collect();
        assert_eq!(json!(done), last["response"]["output"]);
        assert_eq!(done.len(), 1);
        assert_eq!(
            [&done[0]["type"], &done[0]["status"]],
            [&item["type"], &item["status"]]
        );
    }
}

/// A chat cut by `max_tokens` anywhere in a call gives the same, whole and streamed: the call as far as it was written, or
/// none, and never the reason of a call.
#[test]
fn a_call_cut_by_the_length_limit_is_the_same_whole_and_streamed() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), HERMES);
    let function = json!({"type": "function", "function": {"name": "put", "parameters": schema()}});
    let mut body = json!({"messages": [{"role": "user", "content": "Q"}], "tools": [function],
        "guided_grammar": said(false), "temperature": 0, "max_tokens": 300});
    let uncut = server.post(CHAT, &body).json();
    assert_eq!(
        uncut["choices"][0]["finish_reason"], "tool_calls",
        "{uncut}"
    );
    let tokens = uncut["usage"]["completion_tokens"].as_u64().unwrap();
    let mut partial = 0;
    for most in (1..tokens).step_by(5) {
        body["max_tokens"] = most.into();
        body["stream"] = false.into();
        let whole = server.post(CHAT, &body).json()["choices"][0].take();
        body["stream"] = true.into();
        let all = events(&server.post(CHAT, &body).body);
        let joined = |pointer: &str| -> String {
            let pieces = all
                .iter()
                .filter_map(|event| event.pointer(pointer)?.as_str());
            pieces.collect()
        };
        let reason = joined("/choices/0/finish_reason");
        assert_eq!(whole["finish_reason"], reason, "{most}");
        let content = whole["message"]["content"].as_str().unwrap_or_default();
        assert_eq!(joined("/choices/0/delta/content"), content, "{most}");
        let function = &whole["message"]["tool_calls"][0]["function"];
        let [name, arguments] =
            ["name", "arguments"].map(|key| function[key].as_str().unwrap_or_default());
        let call = "/choices/0/delta/tool_calls/0/function";
        assert_eq!(joined(&format!("{call}/name")), name, "{most}");
        assert_eq!(joined(&format!("{call}/arguments")), arguments, "{most}");
        assert!(self::whole().starts_with(arguments), "{most}: {arguments}");
        let complete = arguments.parse::<Value>().is_ok();
        assert!(
            reason == "length" || complete,
            "{most}: {reason} {arguments}"
        );
        partial += usize::from(!arguments.is_empty() && !complete);
    }
    assert!(partial > 2, "{partial}");
}

/// Ollama's API has no grammars: a schema whose only text is a call, and a stop string that ends it within the call.
#[test]
fn ollama_leaves_out_a_call_that_never_ended() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), LLAMA);
    let only = |kind: &str| json!({"const": kind});
    let object = |properties: Value| {
        let names: Vec<&String> = properties.as_object().unwrap().keys().collect();
        json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
    };
    let arguments = object(json!({"kind": only("struct")}));
    let call = object(json!({"name": only("put"), "parameters": arguments}));
    let tool = json!({"type": "function", "function": {"name": "put", "parameters": arguments}});
    for (stop, wanted) in [
        (
            "nothing",
            json!([{"function": {"name": "put", "arguments": {"kind": "struct"}}}]),
        ),
        ("uct", Value::Null),
        ("\"kind\"", Value::Null),
    ] {
        for stream in [false, true] {
            let body = json!({"messages": [{"role": "user", "content": "Q"}], "tools": [tool], "format": call,
                "stream": stream, "options": {"num_predict": 200, "stop": [stop]}});
            let reply = server.post("/api/chat", &body).body;
            let lines: Vec<Value> = reply.lines().map(|line| line.parse().unwrap()).collect();
            let last = lines.last().unwrap();
            assert_eq!(last["message"]["tool_calls"], wanted, "{reply}");
            let reason = if wanted.is_null() { "length" } else { "stop" };
            assert_eq!(
                [&last["done"], &last["done_reason"]],
                [&json!(true), &json!(reason)]
            );
            // The call is no text either.
            assert!(
                lines.iter().all(|line| line["message"]["content"] == ""),
                "{reply}"
            );
        }
    }
    let shown = server.post("/api/show", &json!({"model": "x"})).json();
    assert!(
        shown["capabilities"]
            .as_array()
            .unwrap()
            .contains(&json!("tools"))
    );
}
