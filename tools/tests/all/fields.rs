//! Sends every line of the server's field table: honoured fields are accepted, harmless ones change
//! nothing, refused ones are refused by name.

use crate::common::server::{Reply, Server};
use emberflow::serve::fields::{Does, Field, TABLE, Type, on};
use serde_json::{Value, json};

/// A kind of request: its path, its smallest body, and the location of its text.
struct Request {
    on: u16,
    path: &'static str,
    body: Value,
    text: &'static str,
}

impl Request {
    fn new(on: u16, path: &'static str, text: &'static str, body: Value) -> Self {
        Self {
            on,
            path,
            body,
            text,
        }
    }
}

fn requests() -> Vec<Request> {
    let mut all = texts();
    all.extend(others());
    all
}

/// OpenAI's and Ollama's endpoints for texts.
fn texts() -> Vec<Request> {
    let messages = json!([{"role": "user", "content": "What is a vector?"}]);
    let options = json!({"temperature": 0, "num_predict": 2});
    vec![
        Request::new(
            on::CHAT,
            "/v1/chat/completions",
            "/choices/0/message/content",
            json!({"messages": messages, "max_tokens": 2, "temperature": 0}),
        ),
        Request::new(
            on::TEXT,
            "/v1/completions",
            "/choices/0/text",
            json!({"prompt": "A vector", "max_tokens": 2, "temperature": 0}),
        ),
        Request::new(
            on::RESPONSE,
            "/v1/responses",
            "/output/0/content/0/text",
            json!({"input": "What is a vector?", "max_output_tokens": 2, "temperature": 0}),
        ),
        Request::new(
            on::OLLAMA_CHAT,
            "/api/chat",
            "/message/content",
            json!({"messages": messages, "stream": false, "options": options}),
        ),
        Request::new(
            on::OLLAMA_GENERATE,
            "/api/generate",
            "/response",
            json!({"prompt": "A vector", "raw": true, "stream": false, "options": options}),
        ),
        Request::new(
            on::OPTIONS,
            "/api/generate",
            "/response",
            json!({"prompt": "A vector", "raw": true, "stream": false, "options": options}),
        ),
    ]
}

/// Other APIs' endpoints, and embeddings.
fn others() -> Vec<Request> {
    let messages = json!([{"role": "user", "content": "What is a vector?"}]);
    vec![
        Request::new(
            on::NATIVE,
            "/completion",
            "/content",
            json!({"prompt": "A vector", "n_predict": 2, "temperature": 0}),
        ),
        Request::new(
            on::MESSAGE,
            "/v1/messages",
            "/content/0/text",
            json!({"messages": messages, "max_tokens": 2, "temperature": 0}),
        ),
        Request::new(
            on::EMBEDDING,
            "/v1/embeddings",
            "/data/0/embedding",
            json!({"input": "A vector"}),
        ),
        Request::new(
            on::OLLAMA_EMBED,
            "/api/embed",
            "/embeddings/0",
            json!({"input": "A vector"}),
        ),
        Request::new(
            on::OLLAMA_EMBEDDING,
            "/api/embeddings",
            "/embedding",
            json!({"prompt": "A vector"}),
        ),
    ]
}

/// A plausible value from a client.
fn sample(field: &Field, on: u16) -> Value {
    let given = match field.name {
        "messages" => json!([{"role": "user", "content": "Hello"}]),
        "system" if on == on::MESSAGE => json!(""),
        "tools" if on == on::MESSAGE => json!([{"name": "f", "input_schema": {"type": "object"}}]),
        "tool_choice" if on == on::MESSAGE => json!({"type": "auto"}),
        "stop_sequences" => json!(["A trait"]),
        "encoding_format" => json!("float"),
        "response_fields" if on == on::NATIVE => json!(["content"]),
        "prompt" | "input" | "stop" => json!("A trait"),
        "tools" => json!([{"type": "function", "function": {"name": "f"}}]),
        "tool_choice" => json!("auto"),
        "response_format" => json!({"type": "text"}),
        "text" => json!({"format": {"type": "text"}}),
        "include" => json!(["reasoning.encrypted_content"]),
        "stream_options" => json!({"include_usage": true}),
        "structured_outputs" => json!({"choice": ["a", "b"]}),
        "guided_choice" => json!(["a", "b"]),
        "json_schema" | "guided_json" => json!({"type": "integer"}),
        "format" => json!("json"),
        "grammar" | "guided_grammar" => json!("start: \"a\""),
        "guided_regex" => json!("[ab]"),
        "logit_bias" => json!({"1": 2}),
        "logprobs" if on == on::CHAT => json!(true),
        "bad_words" => json!(["trait"]),
        "top_logprobs" => json!(2),
        "n" => json!(2),
        "min_tokens" | "best_of" | "n_cmpl" => json!(1),
        "options" => json!({"top_k": 3}),
        "continue_final_message" => json!(false),
        "think" => json!(true),
        // The bundled model has no fill-in-the-middle tokens.
        "suffix" => json!(""),
        "add_generation_prompt" => json!(false),
        _ => Value::Null,
    };
    match (given, field.kind) {
        (Value::Null, Type::Flag) => json!(!field.off.contains(&"true")),
        (Value::Null, Type::Whole | Type::Count) => json!(3),
        (Value::Null, Type::Number) => json!(0.5),
        (Value::Null, Type::Text) => json!("some"),
        (Value::Null, Type::List) => json!([1, 2]),
        (Value::Null, Type::Object) => json!({"a": 1}),
        (Value::Null, Type::Any) => json!(2),
        (given, _) => given,
    }
}

/// A value of another type.
fn wrong(field: &Field) -> Value {
    match field.kind {
        Type::Text => json!({}),
        _ => json!("wrong"),
    }
}

/// The request with another value of a field.
fn with(request: &Request, name: &str, value: Value) -> Value {
    let mut body = request.body.clone();
    match request.on {
        on::OPTIONS => body["options"][name] = value,
        _ => body[name] = value,
    }
    // it requires the other one
    if name == "top_logprobs" && request.on == on::CHAT {
        body["logprobs"] = json!(true);
    }
    body
}

fn post(server: &Server, request: &Request, body: &Value) -> Reply {
    server.post(request.path, body)
}

fn refused(reply: &Reply, name: &str, line: &str) {
    assert_eq!(reply.status, 400, "{line}: {}", reply.body);
    let error = reply.json()["error"].take();
    // Ollama's errors are texts, Anthropic's have only a message.
    let message = error.as_str().or_else(|| error["message"].as_str());
    match (error.get("param"), message) {
        (Some(param), _) => assert_eq!(param, name, "{line}: {error}"),
        (None, message) => assert!(
            message.is_some_and(|m| m.contains(&format!("`{name}`"))),
            "{line}: {error}"
        ),
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_field_does_what_the_table_says() {
    let server = Server::start(&["--context", "256", "--parallel", "2"]);
    for request in requests() {
        let plain = post(&server, &request, &request.body);
        assert_eq!(plain.status, 200, "{}: {}", request.path, plain.body);
        let text = |reply: &Reply| reply.json().pointer(request.text).cloned();
        let wanted = text(&plain);
        assert!(wanted.is_some(), "{}: {}", request.path, plain.body);
        for field in TABLE.iter().filter(|field| field.on & request.on != 0) {
            let line = format!("{} of {}", field.name, request.path);
            let send = |value: Value| post(&server, &request, &with(&request, field.name, value));
            let reply = send(match field.name {
                "previous_response_id" => plain.json()["id"].take(),
                _ => sample(field, request.on),
            });
            match field.does {
                Does::Refused(_) => refused(&reply, field.name, &line),
                Does::Harmless(_) => {
                    assert_eq!(reply.status, 200, "{line}: {}", reply.body);
                    assert_eq!(text(&reply), wanted, "{line} changes the text");
                }
                Does::Returned(_) => {
                    assert_eq!(reply.status, 200, "{line}: {}", reply.body);
                    assert_eq!(text(&reply), wanted, "{line} changes the text");
                    assert_eq!(
                        reply.json()[field.name],
                        sample(field, request.on),
                        "{line}"
                    );
                    refused(&send(wrong(field)), field.name, &line);
                }
                Does::Honoured | Does::As(_) => {
                    assert_eq!(reply.status, 200, "{line}: {}", reply.body);
                    if field.kind != Type::Any {
                        refused(&send(wrong(field)), field.name, &line);
                    }
                }
            }
            for off in field.off {
                let reply = send(serde_json::from_str(off).unwrap());
                assert_eq!(reply.status, 200, "{line} is {off}: {}", reply.body);
            }
        }
    }
}

/// A token that ends the text is counted, and reported with the tokens; harnesses drop the last one.
#[test]
fn the_token_that_ends_a_text_is_told() {
    let server = Server::start(&[]);
    let tokens = |text: &str| -> Vec<u64> {
        let reply = server.post("/tokenize", &json!({"content": text})).json();
        serde_json::from_value(reply["tokens"].clone()).unwrap()
    };
    let [end] = tokens("<|endoftext|>")[..] else {
        panic!("one token")
    };
    let prompt = tokens("A vector is");
    let mut body = json!({
        "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true,
        "logit_bias": {end.to_string(): 100},
    });
    let reply = server.post("/v1/completions", &body).json();
    assert_eq!(reply["usage"]["completion_tokens"], 1);
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"]),
        (&json!("A vector is"), &json!("stop"))
    );
    let told = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(told.len(), prompt.len() + 1, "{choice}");
    assert_eq!(choice["logprobs"]["tokens"][prompt.len()], "<|endoftext|>");
    // the only token
    body["echo"] = json!(false);
    let choice = server.post("/v1/completions", &body).json()["choices"][0].take();
    assert_eq!(
        choice["logprobs"]["tokens"],
        json!(["<|endoftext|>"]),
        "{choice}"
    );
    assert_eq!(choice["text"], "");
    // In chats, whole and in a stream.
    let mut body = json!({
        "messages": [{"role": "user", "content": "Hello"}], "logprobs": true, "max_tokens": 3,
        "logit_bias": {end.to_string(): 100},
    });
    let content =
        server.post("/v1/chat/completions", &body).json()["choices"][0]["logprobs"]["content"]
            .take();
    assert_eq!(content.as_array().map(Vec::len), Some(1), "{content}");
    body["stream"] = json!(true);
    let reply = server.post("/v1/chat/completions", &body);
    let told = |event: &&&str| {
        let chunk: Value = serde_json::from_str(event).unwrap_or_default();
        chunk["choices"][0]["logprobs"]["content"].is_array()
    };
    assert_eq!(
        reply.events().iter().filter(told).count(),
        1,
        "{}",
        reply.body
    );
    // no token at all: an empty list, not a missing one
    let body = json!({"prompt": "A", "max_tokens": 0, "logprobs": 0});
    let choice = server.post("/v1/completions", &body).json()["choices"][0].take();
    assert_eq!(choice["logprobs"]["tokens"], json!([]), "{choice}");
}

/// A known text of a running server.
struct Known {
    server: Server,
    plain: Value,
    text: String,
    tokens: Vec<u32>,
}

impl Known {
    fn new() -> Self {
        let server = Server::start(&[]);
        let prompt = "A vector is a contiguous growable array type, written as";
        let plain = request(prompt, 12);
        let text = server.complete(&plain);
        Self {
            tokens: tokens(&server, &text),
            server,
            plain,
            text,
        }
    }

    /// The text with other fields.
    fn with(&self, fields: Value) -> Value {
        let mut body = self.plain.clone();
        let fields = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
        let reply = self.server.post("/v1/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    }

    fn text_with(&self, fields: Value) -> String {
        self.with(fields)["choices"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned()
    }
}

fn request(prompt: &str, tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

fn tokens(server: &Server, text: &str) -> Vec<u32> {
    let reply = server.post("/tokenize", &json!({"content": text})).json();
    serde_json::from_value(reply["tokens"].clone()).unwrap()
}

/// Checks vLLM's sampling parameters by its documentation.
#[test]
fn texts_are_bounded_as_vllm_bounds_them() {
    let known = Known::new();
    let Known {
        server,
        text,
        tokens: all,
        ..
    } = &known;
    let count = |reply: &Value| reply["usage"]["completion_tokens"].as_u64().unwrap();
    // a token that occurs once, in the middle
    let once = |token: &u32| all.iter().filter(|t| *t == token).count() == 1;
    let at = (2..8).find(|&at| once(&all[at])).unwrap();
    let stopped = known.with(json!({"stop_token_ids": [all[at]]}));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(count(&stopped), at as u64 + 1);
    let written = stopped["choices"][0]["text"].as_str().unwrap();
    assert!(
        text.starts_with(written) && written.len() < text.len(),
        "{written}"
    );
    let least = at as u64 + 3;
    let later = known.with(json!({"stop_token_ids": [all[at]], "min_tokens": least}));
    assert!(count(&later) >= least, "{later}");
    let written = later["choices"][0]["text"].as_str().unwrap();
    assert_ne!(written, text, "the token was not allowed where it came");
    // A word, alone or after a space, and lists.
    let letters = |word: &&str| word.len() > 2 && word.chars().all(char::is_alphabetic);
    let word = text.split(' ').skip(1).find(letters).unwrap();
    let without = known.text_with(json!({"bad_words": [word]}));
    assert!(!without.contains(word), "{word} in {without}");
    let list = [all[0], all[at]];
    let only = known.text_with(json!({"allowed_token_ids": list}));
    let found = tokens(server, &only);
    assert!(found.iter().all(|token| list.contains(token)), "{only}");
    let none =
        json!({"prompt": "A", "allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1});
    let reply = server.post("/v1/completions", &none);
    assert_eq!(reply.status, 400);
    assert!(reply.body.contains("leave no token"), "{}", reply.body);
}

#[test]
fn texts_begin_and_end_where_clients_say() {
    let known = Known::new();
    let stop = &known.text[4..8];
    let kept = known.text_with(json!({"stop": stop, "include_stop_str_in_output": true}));
    assert_eq!(
        kept,
        known.text[..known.text.find(stop).unwrap() + stop.len()]
    );
    let end = tokens(&known.server, "<|endoftext|>")[0].to_string();
    let shown = json!({"logit_bias": {&end: 100}, "skip_special_tokens": false, "max_tokens": 1});
    assert_eq!(
        known.text_with(shown),
        "<|endoftext|>",
        "`ignore_eos` is set"
    );
    let cut = known.with(json!({"truncate_prompt_tokens": 2}));
    assert_eq!(cut["usage"]["prompt_tokens"], 2);
    // a pair with `false` bans the first token
    let banned = known.text_with(json!({"logit_bias": [[known.tokens[0], false]]}));
    assert_ne!(tokens(&known.server, &banned)[0], known.tokens[0]);
    // prefill: the answer continues the assistant's message
    let ask = |last: &str| {
        let messages = json!([
            {"role": "user", "content": "What is a vector?"},
            {"role": "assistant", "content": last},
        ]);
        let body = json!({"messages": messages});
        known.server.post("/apply-template", &body).json()["prompt"].take()
    };
    let prompt = ask("A vector is ");
    assert!(
        prompt.as_str().unwrap().ends_with("A vector is "),
        "{prompt}"
    );
}
