//! The endpoints besides OpenAI's chats and completions, on the bundled model.

use crate::common;
use crate::common::server::Server;
use serde_json::{Value, json};

fn numbers(values: &Value) -> Vec<f32> {
    let values = values.as_array().unwrap().iter();
    values.map(|value| value.as_f64().unwrap() as f32).collect()
}

fn length(values: &[f32]) -> f64 {
    let squares = values.iter().map(|&value| f64::from(value).powi(2));
    squares.sum::<f64>().sqrt()
}

const TEXTS: [&str; 5] = [
    "A vector is a contiguous growable array type.",
    "The borrow checker",
    "A vector is a contiguous growable array type.",
    "fn main() {}",
    "A",
];

/// Alone under a large budget, or as one of many under a small one.
#[test]
fn embeddings_are_the_same_alone_and_together() {
    let alone: Vec<Vec<f32>> = {
        let server = Server::start(&["--parallel", "1"]);
        let one = |text: &&str| {
            let body = json!({"input": text, "model": ""});
            let reply = server.post("/v1/embeddings", &body).json();
            assert_eq!(reply["object"], "list", "{reply}");
            numbers(&reply["data"][0]["embedding"])
        };
        TEXTS.iter().map(one).collect()
    };
    assert!(alone.iter().all(|one| (length(one) - 1.0).abs() < 1e-5));
    assert_eq!(alone[0], alone[2]);
    let server = Server::start(&["--ffn-resident", "0.3", "--parallel", "2"]);
    let reply = server
        .post("/v1/embeddings", &json!({"input": TEXTS}))
        .json();
    let data = reply["data"].as_array().unwrap();
    assert_eq!(data.len(), TEXTS.len());
    for (at, (one, wanted)) in data.iter().zip(&alone).enumerate() {
        assert_eq!(
            (&one["index"], &one["object"]),
            (&json!(at), &json!("embedding"))
        );
        assert_eq!(&numbers(&one["embedding"]), wanted, "{at}");
    }
    let tokens = |text: &&str| {
        let body = json!({"content": text, "add_special": true});
        server.post("/tokenize", &body).json()["tokens"].take()
    };
    let lists: Vec<Value> = TEXTS.iter().map(tokens).collect();
    let count: usize = lists
        .iter()
        .map(|list| list.as_array().unwrap().len())
        .sum();
    assert_eq!(
        reply["usage"],
        json!({"prompt_tokens": count, "total_tokens": count})
    );
    let body = json!({"input": lists, "encoding_format": "base64", "dimensions": 8});
    let reply = server.post("/embeddings", &body).json();
    let short = |values: &[f32]| {
        let length = length(&values[..8]);
        let short = values[..8].iter();
        short
            .map(|&value| (f64::from(value) / length) as f32)
            .collect::<Vec<_>>()
    };
    for (one, wanted) in reply["data"].as_array().unwrap().iter().zip(&alone) {
        let bytes = base64::decode(one["embedding"].as_str().unwrap()).unwrap();
        let values = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        for (found, wanted) in values.zip(short(wanted)) {
            assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        }
        assert_eq!(bytes.len(), 32);
    }
}

#[test]
fn embeddings_as_ollama_has_them() {
    let server = Server::start(&["--context", "64"]);
    let wanted = server
        .post("/v1/embeddings", &json!({"input": TEXTS[..2]}))
        .json();
    let found = server
        .post("/api/embed", &json!({"model": "demo", "input": TEXTS[..2]}))
        .json();
    for at in 0..2 {
        assert_eq!(found["embeddings"][at], wanted["data"][at]["embedding"]);
    }
    assert_eq!(found["prompt_eval_count"], wanted["usage"]["prompt_tokens"]);
    let one = server
        .post("/api/embeddings", &json!({"prompt": TEXTS[0]}))
        .json();
    let one = numbers(&one["embedding"]);
    let length = length(&one);
    assert!((length - 1.0).abs() > 0.1, "not of length 1: {length}");
    for (found, wanted) in one.iter().zip(numbers(&wanted["data"][0]["embedding"])) {
        assert!((f64::from(*found) / length - f64::from(wanted)).abs() < 1e-6);
    }
    let none = server
        .post("/api/embed", &json!({"model": "demo", "input": ""}))
        .json();
    assert_eq!(none["embeddings"], json!([]));
    let long = "A vector is a contiguous growable array type. ".repeat(20);
    let body = json!({"input": long});
    assert_eq!(server.post("/v1/embeddings", &body).status, 400);
    let cut = server.post("/api/embed", &body).json();
    assert_eq!(cut["prompt_eval_count"], 64);
    let body = json!({"input": long, "truncate": false});
    assert_eq!(server.post("/api/embed", &body).status, 400);
}

#[test]
fn embeddings_that_cannot_be_had() {
    let server = Server::start(&[]);
    for (body, param) in [
        (json!({"input": []}), "input"),
        (json!({"input": vec!["a"; 2049]}), "input"),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            "encoding_format",
        ),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "dimensions": 100_000}), "dimensions"),
    ] {
        let reply = server.post("/v1/embeddings", &body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        assert_eq!(reply.json()["error"]["param"], param, "{}", reply.body);
    }
    assert_eq!(server.get("/v1/health").json()["status"], "ok");
    assert!(server.get("/version").json()["version"].is_string());
}

fn conversation() -> Value {
    json!([{"role": "user", "content": "What is a vector?"}])
}

/// The data of a stream's events, each with its name.
fn named(body: &str) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    let mut name = "";
    for line in body.lines() {
        if let Some(of) = line.strip_prefix("event: ") {
            name = of;
        } else if let Some(data) = line.strip_prefix("data: ") {
            all.push((name.to_owned(), serde_json::from_str(data).unwrap()));
        }
    }
    all
}

/// The same text as from OpenAI's interface, in Anthropic's format and events.
#[test]
fn messages_are_chats() {
    let server = Server::start(&["--alias", "demo"]);
    let system = "Answer briefly.";
    let chat = json!({
        "messages": [{"role": "system", "content": system}, conversation()[0]],
        "max_tokens": 12,
        "temperature": 0,
    });
    let chat = server.post("/v1/chat/completions", &chat).json();
    let wanted = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let mut body = json!({
        "model": "demo",
        "system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        "messages": conversation(),
        "max_tokens": 12,
        "temperature": 0,
    });
    let whole = server.post("/v1/messages", &body).json();
    assert_eq!(whole["content"], json!([{"type": "text", "text": wanted}]));
    assert_eq!([&whole["type"], &whole["role"]], ["message", "assistant"]);
    assert_eq!(whole["stop_reason"], "max_tokens");
    let usage = |answer: &Value, name: &str| answer["usage"][name].as_u64().unwrap();
    let prompt = usage(&whole, "input_tokens") + usage(&whole, "cache_read_input_tokens");
    assert_eq!(prompt, usage(&chat, "prompt_tokens"));
    assert_eq!(usage(&whole, "output_tokens"), 12);
    let counted = server.post("/v1/messages/count_tokens", &body).json();
    assert_eq!(counted, json!({"input_tokens": prompt}));

    body["stream"] = true.into();
    let reply = server.post("/v1/messages", &body);
    let events = named(&reply.body);
    assert!(events.iter().all(|(name, data)| data["type"] == **name));
    let kinds: Vec<&str> = events.iter().map(|(name, _)| &**name).collect();
    let [first, second, .., stop, delta, last] = kinds[..] else {
        panic!("{kinds:?}")
    };
    assert_eq!([first, second], ["message_start", "content_block_start"]);
    assert_eq!(
        [stop, delta, last],
        ["content_block_stop", "message_delta", "message_stop"]
    );
    assert_eq!(events[0].1["message"]["content"], json!([]));
    let deltas = events
        .iter()
        .filter(|(name, _)| name == "content_block_delta");
    let text: String = deltas
        .map(|(_, data)| data["delta"]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, wanted);
    let end = &events[events.len() - 2].1;
    assert_eq!(end["delta"]["stop_reason"], "max_tokens");
    assert_eq!(end["usage"]["output_tokens"], 12);

    body["stream"] = false.into();
    let stop = &wanted[3..5];
    body["stop_sequences"] = json!(["never in it", stop]);
    let ended = server.post("/v1/messages", &body).json();
    assert_eq!(
        [&ended["stop_reason"], &ended["stop_sequence"]],
        ["stop_sequence", stop]
    );
    let before = &wanted[..wanted.find(stop).unwrap()];
    assert_eq!(ended["content"][0]["text"], before);
}

#[test]
fn messages_call_tools() {
    let server = Server::start(&[]);
    let schema = json!({
        "type": "object",
        "properties": {"kind": {"enum": ["struct", "trait"]}},
        "required": ["kind"],
        "additionalProperties": false,
    });
    let mut body = json!({
        "messages": conversation(),
        "max_tokens": 100,
        "temperature": 0,
        "tools": [{"name": "look_up", "description": "Looks up.", "input_schema": schema}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
    });
    let whole = server.post("/v1/messages", &body).json();
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let call = &whole["content"][0];
    assert_eq!([&call["type"], &call["name"]], ["tool_use", "look_up"]);
    assert!(["struct", "trait"].contains(&call["input"]["kind"].as_str().unwrap()));
    body["stream"] = true.into();
    let events = named(&server.post("/v1/messages", &body).body);
    let begin = events
        .iter()
        .find(|(name, _)| name == "content_block_start");
    let begin = &begin.unwrap().1["content_block"];
    assert_eq!(
        [&begin["name"], &begin["input"]],
        [&json!("look_up"), &json!({})]
    );
    let deltas = events
        .iter()
        .filter(|(_, data)| data["delta"]["type"] == "input_json_delta");
    let pieces: String = deltas
        .map(|(_, data)| data["delta"]["partial_json"].as_str().unwrap())
        .collect();
    assert_eq!(
        serde_json::from_str::<Value>(&pieces).unwrap(),
        call["input"]
    );
}

#[test]
fn messages_and_chats_have_the_same_turns() {
    let server = Server::start(&[]);
    let call =
        json!({"type": "tool_use", "id": "t1", "name": "look_up", "input": {"kind": "struct"}});
    let turns = json!([
        conversation()[0],
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "a type"}]},
            {"type": "text", "text": "And?"},
        ]},
    ]);
    let function = json!({"name": "look_up", "arguments": call["input"].to_string()});
    let chat = json!([
        conversation()[0],
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": call["id"], "type": "function", "function": function},
        ]},
        {"role": "tool", "tool_call_id": call["id"], "content": "a type"},
        {"role": "user", "content": "And?"},
    ]);
    let counted = server
        .post("/v1/messages/count_tokens", &json!({"messages": turns}))
        .json();
    let prompt = server
        .post("/apply-template", &json!({"messages": chat}))
        .json();
    let tokens = server
        .post("/tokenize", &json!({"content": prompt["prompt"]}))
        .json();
    let tokens = tokens["tokens"].as_array().unwrap().len();
    assert_eq!(counted["input_tokens"], tokens);
}

#[test]
fn messages_that_are_wrong() {
    let server = Server::start(&["--api-key", "secret"]);
    let key = "Content-Type: application/json\r\nX-Api-Key: secret";
    let ask = |key: &str, path: &str, body: &Value| {
        server.ask(&format!("POST {path} HTTP/1.0\r\n{key}"), &body.to_string())
    };
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let search = json!([{"type": "web_search_20250305", "name": "web_search"}]);
    for (key, body, status, kind) in [
        (key, json!({"messages": []}), 400, "invalid_request_error"),
        (
            key,
            json!({"messages": image}),
            400,
            "invalid_request_error",
        ),
        (
            key,
            json!({"messages": conversation(), "tools": search}),
            400,
            "invalid_request_error",
        ),
        (
            key,
            json!({"messages": conversation(), "mcp_servers": [{}]}),
            400,
            "invalid_request_error",
        ),
        (
            "X-Api-Key: wrong",
            json!({"messages": conversation()}),
            401,
            "authentication_error",
        ),
    ] {
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let reply = ask(key, path, &body);
            assert_eq!(reply.status, status, "{body}: {}", reply.body);
            let error = reply.json();
            assert_eq!([&error["type"], &error["error"]["type"]], ["error", kind]);
            assert!(!error["error"]["message"].as_str().unwrap().is_empty());
        }
    }
    let many = json!({"messages": [{"role": "user", "content": "a".repeat(200_000)}]});
    let reply = ask(key, "/v1/messages", &many);
    assert_eq!(reply.status, 413);
    assert_eq!(reply.json()["error"]["type"], "request_too_large");
}

#[test]
fn completions_as_llama_cpp_has_them() {
    let server = Server::start(&["--alias", "demo"]);
    let prompt = "A vector is a contiguous";
    let plain = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let wanted = server.complete(&plain);
    let body = json!({"prompt": prompt, "n_predict": 12, "temperature": 0, "ignore_eos": true});
    let whole = server.post("/completion", &body).json();
    assert_eq!(whole["content"], wanted);
    assert_eq!(
        [&whole["stop"], &whole["stop_type"]],
        [&json!(true), &json!("limit")]
    );
    assert_eq!(whole["tokens_predicted"], 12);
    assert_eq!(whole["timings"]["predicted_n"], 12);
    assert!(whole["timings"]["predicted_per_second"].as_f64().unwrap() > 0.0);
    let evaluated = whole["tokens_evaluated"].as_u64().unwrap();
    let timings = &whole["timings"];
    let known = timings["cache_n"].as_u64().unwrap() + timings["prompt_n"].as_u64().unwrap();
    assert_eq!(known, evaluated);
    assert_eq!(whole["generation_settings"]["temperature"], 0.0);
}

#[test]
fn completions_of_llama_cpp_in_streams_and_parts() {
    let server = Server::start(&[]);
    let prompt = "A vector is a contiguous";
    let mut body = json!({"prompt": prompt, "n_predict": 12, "temperature": 0, "ignore_eos": true});
    let whole = server.post("/completion", &body).json();
    let wanted = whole["content"].as_str().unwrap();
    body["stream"] = true.into();
    body["return_tokens"] = true.into();
    let reply = server.post("/completion", &body);
    let events: Vec<Value> = reply
        .events()
        .iter()
        .map(|e| serde_json::from_str(e).unwrap())
        .collect();
    let (last, pieces) = events.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|p| p["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, wanted);
    assert!(pieces.iter().all(|piece| piece["stop"] == false));
    assert_eq!(
        [&last["stop"], &last["content"]],
        [&json!(true), &json!("")]
    );
    let tokens: Vec<Value> = pieces
        .iter()
        .flat_map(|p| p["tokens"].as_array().unwrap().clone())
        .collect();
    assert_eq!(tokens.len(), 12);
    let back = server
        .post("/detokenize", &json!({"tokens": tokens}))
        .json();
    assert_eq!(
        back["content"].as_str().unwrap().trim_start(),
        wanted.trim_start()
    );

    // Several prompts, tokens among them, and only some fields.
    let tokens = server
        .post(
            "/tokenize",
            &json!({"content": prompt, "add_special": true}),
        )
        .json();
    let mixed = json!([prompt, tokens["tokens"], ["A vector is", " a contiguous"]]);
    let fields = json!(["content", "timings/predicted_n", "nothing"]);
    let body = json!({"prompt": mixed, "n_predict": 12, "temperature": 0, "ignore_eos": true, "response_fields": fields});
    let several = server.post("/completion", &body).json();
    assert_eq!(
        several[0],
        json!({"content": wanted, "timings/predicted_n": 12})
    );
    assert_eq!(several[1], several[0]);
    assert_eq!(several.as_array().unwrap().len(), 3);
}

#[test]
fn completions_of_llama_cpp_end_and_tell_why() {
    let server = Server::start(&[]);
    let prompt = "A vector is a contiguous";
    let body = json!({"prompt": prompt, "n_predict": 12, "temperature": 0, "ignore_eos": true});
    let whole = server.post("/completion", &body).json();
    let wanted = whole["content"].as_str().unwrap();
    let stop = &wanted[2..4];
    let body =
        json!({"prompt": prompt, "n_predict": 12, "temperature": 0, "stop": [stop], "n_probs": 2});
    let ended = server.post("/completion", &body).json();
    assert_eq!(
        [&ended["stop_type"], &ended["stopping_word"]],
        ["word", stop]
    );
    let likely = &ended["completion_probabilities"][0];
    assert_eq!(likely["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(likely["id"], likely["top_logprobs"][0]["id"]);
    // a banned token does not occur
    let first = &likely["id"];
    let body = json!({"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 1, "logit_bias": [[first, false]]});
    let other = server.post("/completion", &body).json();
    assert_ne!(&other["completion_probabilities"][0]["id"], first);
}

#[test]
fn gaps_need_tokens_for_them() {
    let server = Server::start(&[]);
    let gap = json!({"input_prefix": "fn main() {", "input_suffix": "}"});
    let text = json!({"prompt": "fn main() {", "suffix": "}"});
    for (path, body) in [
        ("/infill", &gap),
        ("/v1/completions", &text),
        ("/api/generate", &text),
    ] {
        let reply = server.post(path, body);
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
        assert!(reply.body.contains("fim_prefix"), "{}", reply.body);
    }
}

/// Serves the bundled model with structural tokens renamed to fill-in-the-middle tokens.
fn with_gaps(dir: &std::path::Path) -> Server {
    let folder = common::exported(dir);
    let packed = dir.join("gaps.ember").display().to_string();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let path = format!("{folder}/{name}");
        let text = std::fs::read_to_string(&path).unwrap();
        let text = text.replace("<|user|>", "<|fim_prefix|>");
        let text = text.replace("<|assistant|>", "<|fim_suffix|>");
        std::fs::write(&path, text.replace("<|end|>", "<|fim_middle|>")).unwrap();
    }
    let pack = ["pack", &folder, "-o", &packed, "--quant", "q8"];
    common::succeed(common::emberflow().args(pack));
    Server::start(&[&packed, "--context", "96"])
}

fn tokens(server: &Server, text: &str) -> Vec<u64> {
    let tokens = server.post("/tokenize", &json!({"content": text})).json();
    serde_json::from_value(tokens["tokens"].clone()).unwrap()
}

/// The content and the prompt of a greedy text of 8 tokens.
fn greedy(server: &Server, path: &str, fields: Value) -> Value {
    let mut body = json!({"n_predict": 8, "temperature": 0, "ignore_eos": true});
    let fields = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    let reply = server.post(path, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let reply = reply.json();
    assert!(
        reply["tokens_evaluated"].as_u64().unwrap() <= 96 - 8,
        "{reply}"
    );
    json!([reply["content"], reply["prompt"]])
}

const BEFORE: &str = "A vector is a";
const AFTER: &str = "growable array type.";

/// The prompt equals that of llama.cpp's `format_prompt_infill`: the start token, the prefix, the suffix,
/// and the token before the middle.
fn gap(server: &Server) -> Vec<u64> {
    [
        &[0, 1][..],
        &tokens(server, BEFORE),
        &[2],
        &tokens(server, AFTER),
        &[3],
    ]
    .concat()
}

#[test]
fn gaps_are_filled() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_gaps(dir.path());
    let wanted = greedy(&server, "/completion", json!({"prompt": gap(&server)}));
    let parts = json!({"input_prefix": "A vector", "prompt": " is a", "input_suffix": AFTER});
    assert_eq!(greedy(&server, "/infill", parts), wanted);
    // The fields that llama.vim sends.
    let editor = json!({
        "id_slot": 0, "input_prefix": "A vector", "input_suffix": AFTER, "input_extra": [], "prompt": " is a",
        "n_predict": 8, "n_indent": 0, "stop": [], "top_k": 1, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
        "t_max_prompt_ms": 500, "t_max_predict_ms": 60_000, "stream": false, "cache_prompt": true,
        "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
    });
    let reply = server.post("/infill", &editor);
    assert_eq!(reply.status, 200, "{}", reply.body);
    // all but the last token of the prompt is cached
    assert_eq!(reply.json()["timings/prompt_n"], 1, "{}", reply.body);
    let mut body = json!({"prompt": BEFORE, "suffix": AFTER, "max_tokens": 8, "temperature": 0});
    let ollama = json!({"prompt": BEFORE, "suffix": AFTER, "stream": false, "options": {"num_predict": 8, "temperature": 0}});
    let ended = server.complete(&body);
    let generated = server.post("/api/generate", &ollama).json();
    assert_eq!(generated["response"], ended);
    body["ignore_eos"] = true.into();
    assert_eq!(server.complete(&body), wanted[0]);
    for (name, value) in [("prompt", json!([1, 2])), ("echo", json!(true))] {
        let mut body = body.clone();
        body[name] = value;
        let reply = server.post("/v1/completions", &body);
        assert_eq!(reply.json()["error"]["param"], "suffix", "{}", reply.body);
    }
}

/// Other files come first, and text that does not fit is dropped, farthest from the gap first.
#[test]
fn gaps_in_repositories() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_gaps(dir.path());
    let extra = json!([{"filename": "vec.rs", "text": "struct Vec;"}]);
    let mut parts = json!({"input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": extra});
    let beside = ["\n\n--- snippet ---\n\n", "struct Vec;"].map(|text| tokens(&server, text));
    let prompt = [beside.concat(), gap(&server)].concat();
    let wanted = greedy(&server, "/completion", json!({"prompt": prompt}));
    assert_eq!(greedy(&server, "/infill", parts.clone()), wanted);
    parts["input_prefix"] = format!("{}{BEFORE}", "Nothing of this stays. ".repeat(40)).into();
    parts["input_suffix"] = AFTER.repeat(40).into();
    let found = greedy(&server, "/infill", parts);
    let around = format!("{BEFORE}<|fim_suffix|>{AFTER}");
    assert!(found[1].as_str().unwrap().contains(&around), "{found}");
}
