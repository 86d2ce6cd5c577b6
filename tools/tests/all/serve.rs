//! `emberflow serve` on the bundled model, as clients use it.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::server::{HANGS, Reply, Server, read};
use crate::common::{call, json};
use serde_json::{Value, json};

fn request(prompt: &str, tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

/// The text that `run` generates after `prompt`.
fn alone(prompt: &str, tokens: usize) -> String {
    let n = tokens.to_string();
    let mut args = vec!["run", "-p", prompt, "-n", &n, "--temp", "0"];
    args.extend(["--ignore-eos", "--json"]);
    json(&args)["text"].as_str().unwrap().to_owned()
}

#[test]
fn answers_are_those_of_run_whatever_else_is_asked() {
    let prompts = [
        "A vector is a contiguous growable array type, written as",
        "The borrow checker",
        "A vector is a contiguous growable array type of",
        "fn main() {",
        "Traits",
        "An iterator yields",
    ];
    let wanted: Vec<String> = prompts.iter().map(|p| alone(p, 40)).collect();
    let server = Server::start(&["--ffn-resident", "0.4", "--parallel", "3"]);
    for round in 0..3 {
        std::thread::scope(|scope| {
            for (at, prompt) in prompts.iter().enumerate() {
                let (server, wanted) = (&server, &wanted[at]);
                scope.spawn(move || {
                    let mut body = request(prompt, 40);
                    body["stream"] = json!((at + round) % 2 == 0);
                    body["priority"] = json!(at % 3);
                    let reply = server.post("/v1/completions", &body);
                    assert_eq!(reply.status, 200, "{}", reply.body);
                    let text = if body["stream"] == true {
                        reply.streamed()
                    } else {
                        reply.json()["choices"][0]["text"]
                            .as_str()
                            .unwrap()
                            .to_owned()
                    };
                    assert_eq!(&text, wanted, "{prompt} in round {round}");
                });
            }
        });
    }
    assert!(server.metric("prompt_tokens_cached_total") > 0);
    assert_eq!(server.end("-TERM"), 0);
}

#[test]
fn chats_stream_what_clients_expect() {
    let server = Server::start(&["--alias", "small"]);
    let mut body = json!({
        "model": "small",
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": [{"type": "text", "text": "What is a vector?"}]},
        ],
        "max_completion_tokens": 12,
        "temperature": 0,
        "ignore_eos": true,
        "some_unknown_field": 1,
    });
    let whole = server.post("/v1/chat/completions", &body).json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let reply = server.post("/chat/completions", &body);
    assert!(reply.head.contains("text/event-stream"), "{}", reply.head);
    let mut events = reply.events();
    assert_eq!(events.pop(), Some("[DONE]"));
    let chunks: Vec<Value> = (events.iter())
        .map(|e| serde_json::from_str(e).unwrap())
        .collect();
    let id = &chunks[0]["id"];
    assert!(
        chunks
            .iter()
            .all(|c| &c["id"] == id && c["model"] == "small")
    );
    let first = &chunks[0]["choices"][0]["delta"];
    assert_eq!(first["role"], "assistant");
    assert!(first["content"].is_null());
    let [.., last, usage] = &chunks[..] else {
        panic!("{chunks:?}")
    };
    assert_eq!(last["choices"][0]["delta"], json!({}));
    let reasons = chunks.iter().filter(|c| {
        let reason = &c["choices"][0]["finish_reason"];
        reason.is_string()
    });
    assert_eq!(reasons.count(), 1, "one finish_reason");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 12);
    // Its prompt was computed for the first request.
    let cached = &usage["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert!(cached.as_u64().unwrap() > 8, "{usage}");
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(reply.streamed(), text);
}

/// The `prompt_progress` of a stream's chunks, which are whole chunks for clients that do not know it.
fn progress(reply: &Reply) -> Vec<[u64; 3]> {
    assert_eq!(reply.status, 200, "{}", reply.body);
    let mut told = Vec::new();
    let mut last = 0;
    for event in reply.events() {
        let chunk: Value = serde_json::from_str(event).unwrap_or_default();
        let Some(progress) = chunk["prompt_progress"].as_object() else {
            continue;
        };
        let choice = &chunk["choices"][0];
        let whole = choice["delta"] == json!({}) || choice["text"] == "" || chunk["content"] == "";
        assert!(whole && choice["finish_reason"].is_null(), "{chunk}");
        let time = progress["time_ms"].as_u64().unwrap();
        assert!(time >= last, "{chunk}");
        last = time;
        let numbers = ["total", "cache", "processed"];
        told.push(numbers.map(|name| progress[name].as_u64().unwrap()));
    }
    told
}

/// As llama.cpp's server reports it: tokens of the prompt, those that were reused, and all that are read.
#[test]
fn streams_tell_how_much_of_a_prompt_is_read() {
    let server = Server::start(&["--context", "1024"]);
    let words = |first: &str| format!("{first} {}", "is a slice of a vector".repeat(130));
    for path in ["/v1/completions", "/v1/chat/completions", "/completion"] {
        let mut body = request(&words(path), 4);
        body["messages"] = json!([{"role": "user", "content": words(path)}]);
        body["stream"] = json!(true);
        assert_eq!(progress(&server.post(path, &body)), [] as [[u64; 3]; 0]);
        // A prompt that is not known yet.
        body["prompt"] = json!(words(&format!("New {path}")));
        body["messages"][0]["content"] = body["prompt"].clone();
        body["return_progress"] = json!(true);
        let reply = server.post(path, &body);
        let told = progress(&reply);
        let [total, cached, _] = told[0];
        assert!(told.len() >= 3, "{path}: {told:?}");
        assert!(
            told.iter().all(|one| one[..2] == [total, cached]),
            "{told:?}"
        );
        let read: Vec<u64> = told.iter().map(|one| one[2]).collect();
        assert!(read.is_sorted_by(|a, b| a < b), "{path}: {read:?}");
        assert_eq!((read[0], read.last()), (cached, Some(&total)), "{path}");
        // The same prompt again.
        let told = progress(&server.post(path, &body));
        let again = told[0];
        assert!(
            again[1] > cached && again[1] == again[2] && again[0] == total,
            "{told:?}"
        );
        assert_eq!(told.last().map(|one| one[2]), Some(total));
        body["stream"] = json!(false);
        let whole = server.post(path, &body);
        assert!(!whole.body.contains("prompt_progress"), "{}", whole.body);
    }
}

#[test]
fn texts_end_before_stop_strings() {
    let server = Server::start(&[]);
    let mut body = request("A vector is a contiguous", 60);
    let text = server.complete(&body);
    // from inside a word to inside the next one, so across token boundaries
    let space = text.char_indices().filter(|(_, c)| *c == ' ');
    let at = space.map(|(at, _)| at).nth(4).unwrap();
    let stop = &text[at - 2..at + 2];
    let before = &text[..text.find(stop).unwrap()];
    body["stop"] = json!([stop, "never in the text"]);
    let reply = server.post("/v1/completions", &body).json();
    assert_eq!(reply["choices"][0]["text"], before);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    body["stream"] = json!(true);
    assert_eq!(server.post("/v1/completions", &body).streamed(), before);
}

#[test]
fn several_texts_and_seeds() {
    let server = Server::start(&["--parallel", "3"]);
    let mut body = request("A vector", 12);
    body["temperature"] = json!(0.9);
    body["seed"] = json!(7);
    body["n"] = json!(3);
    body["echo"] = json!(true);
    let texts = |body: &Value| -> Vec<String> {
        let reply = server.post("/v1/completions", body).json();
        let choices = reply["choices"].as_array().unwrap();
        let text = |c: &Value| c["text"].as_str().unwrap().to_owned();
        choices.iter().map(text).collect()
    };
    let first = texts(&body);
    assert_eq!(first.len(), 3);
    assert!(first.iter().all(|text| text.starts_with("A vector")));
    assert_ne!(first[0], first[1]);
    assert_eq!(first, texts(&body), "the seed decides");
    // More texts than slots wait for each other.
    body["n"] = json!(8);
    let more = texts(&body);
    assert_eq!((more.len(), &more[..3]), (8, &first[..]));
    let usage = server.post("/v1/completions", &body).json()["usage"].take();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached <= usage["prompt_tokens"].as_u64(), "{usage}");
    // Text i is that of seed + i.
    body["n"] = json!(1);
    body["seed"] = json!(8);
    assert_eq!(texts(&body), first[1..2]);
    let tokens = server.post(
        "/tokenize",
        &json!({"content": "A vector", "add_special": true}),
    );
    let tokens = tokens.json()["tokens"].clone();
    let back = server
        .post("/detokenize", &json!({"tokens": tokens}))
        .json();
    assert!(back["content"].as_str().unwrap().ends_with("A vector"));
    body["prompt"] = json!([tokens, "Another prompt"]);
    let reply = server.post("/v1/completions", &body);
    assert_eq!(reply.status, 400, "a list mixes kinds: {}", reply.body);
    body["prompt"] = json!([tokens, tokens]);
    assert_eq!(texts(&body).len(), 2);
    assert_eq!(texts(&body)[0], first[1]);
}

/// As evaluation harnesses ask: tokens in, their log-probabilities out, equal to those of
/// `perplexity`.
#[test]
fn log_probabilities_are_those_of_perplexity() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt").display().to_string();
    let text = "A vector is a contiguous growable array type, written as `Vec<T>`. ".repeat(9);
    std::fs::write(&file, &text).unwrap();
    let wanted = json(&["perplexity", "-f", &file, "--json"]);
    let server = Server::start(&["--ffn-resident", "0.5", "--parallel", "2"]);
    let tokens = json!({"content": text, "add_special": true});
    let tokens = server.post("/tokenize", &tokens).json()["tokens"].clone();
    let mut body = request("", 0);
    body["prompt"] = tokens.clone();
    body["echo"] = json!(true);
    body["logprobs"] = json!(1);
    // a second time with the prompt cached: it is recomputed for its logits
    for _ in 0..2 {
        let choice = server.post("/v1/completions", &body).json()["choices"][0].take();
        assert_eq!(choice["text"], text);
        let log_probs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(log_probs.len(), tokens.as_array().unwrap().len());
        assert!(log_probs[0].is_null());
        let sum: f64 = log_probs[1..].iter().map(|l| l.as_f64().unwrap()).sum();
        let perplexity = (-sum / (log_probs.len() - 1) as f64).exp();
        let difference = perplexity / wanted["perplexity"].as_f64().unwrap() - 1.0;
        assert!(difference.abs() < 1e-5, "{perplexity} and {wanted}");
        let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
        assert_eq!(offsets[1], 0, "the first token is special");
        assert!(offsets.windows(2).all(|w| w[0].as_u64() <= w[1].as_u64()));
    }
    // with generated tokens, whole and in a stream
    let mut body = json!({
        "messages": [{"role": "user", "content": "What is a vector?"}],
        "logprobs": true, "top_logprobs": 3, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
    });
    let choice = server.post("/v1/chat/completions", &body).json()["choices"][0].take();
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 12);
    let joined: String = content
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(choice["message"]["content"], joined);
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(
            top[0]["token"], token["token"],
            "greedy takes the likeliest"
        );
        assert_eq!(top[0]["logprob"], token["logprob"]);
        let bytes = json!(token["token"].as_str().unwrap().as_bytes());
        assert_eq!(token["bytes"], bytes);
    }
    body["stream"] = json!(true);
    let reply = server.post("/v1/chat/completions", &body);
    let mut streamed = Vec::new();
    for event in reply.events() {
        let chunk: Value = serde_json::from_str(event).unwrap_or_default();
        let more = chunk["choices"][0]["logprobs"]["content"].as_array();
        streamed.extend(more.cloned().unwrap_or_default());
    }
    assert_eq!(&streamed, content);
}

#[test]
fn biases_and_penalties_change_what_is_drawn() {
    let server = Server::start(&[]);
    let mut body = request("A vector is a contiguous", 30);
    let plain = server.complete(&body);
    body["frequency_penalty"] = json!(2);
    body["presence_penalty"] = json!(1.5);
    assert_ne!(server.complete(&body), plain);
    let tokens = server
        .post("/tokenize", &json!({"content": " vector"}))
        .json();
    let token = tokens["tokens"][0].to_string();
    let mut body = request("A vector is a contiguous", 3);
    body["logit_bias"] = json!({token: 100});
    assert_eq!(server.complete(&body), " vector vector vector");
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let server = Server::start(&["--api-key", "secret", "--context", "64", "--strict-model"]);
    let with_key = |method: &str, path: &str, body: &str| {
        let head = format!("{method} {path} HTTP/1.0\r\nAuthorization: Bearer secret");
        server.ask(&head, body)
    };
    let check = |reply: &Reply, status: u16, message: &str| {
        assert_eq!(reply.status, status, "{}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["code"], status);
        let found = error["message"].as_str().unwrap();
        assert!(found.contains(message), "{found}");
    };
    let path = "/v1/completions";
    check(&server.post(path, &request("A", 1)), 401, "API key");
    assert_eq!(server.get("/health").status, 200);
    let fits = request("A", 1).to_string();
    assert_eq!(with_key("POST", path, &fits).status, 200);
    check(&with_key("GET", path, ""), 405, "method");
    check(&with_key("GET", "/v1/nothing", ""), 404, "path not found");
    check(&with_key("POST", path, "{"), 400, "body");
    check(&with_key("POST", path, "{}"), 400, "prompt");
    let number = with_key("POST", path, r#"{"prompt": 3}"#);
    check(&number, 400, "`prompt` must be a string");
    let role = json!({"messages": [{"role": "bogus", "content": "A"}]}).to_string();
    check(
        &with_key("POST", "/v1/chat/completions", &role),
        400,
        "unknown role `bogus`",
    );
    let long = request(&"word ".repeat(100), 1).to_string();
    check(&with_key("POST", path, &long), 400, "64 tokens");
    let huge = request(&"word ".repeat(1 << 20), 1).to_string();
    check(&with_key("POST", path, &huge), 413, "larger");
    for (field, value) in [
        ("model", json!("gpt-4")),
        ("n", json!(0)),
        ("n", json!(129)),
        ("top_p", json!(7)),
        ("temperature", json!(-1)),
        ("min_p", json!(2)),
        ("repeat_penalty", json!(0)),
        ("presence_penalty", json!(1e300)),
        ("stop", json!(vec!["x"; 17])),
        ("tools", json!([{"type": "function"}])),
        ("prompt", json!([999_999])),
        ("logprobs", json!(21)),
        ("top_logprobs", json!(2)),
        ("logit_bias", json!({"999999": 1})),
        ("logit_bias", json!({"1": 1000})),
        ("prompt", json!("")),
        ("prompt", json!([[1, 2], []])),
    ] {
        let mut body = request("A", 1);
        body[field] = value.clone();
        let reply = with_key("POST", path, &body.to_string());
        let wanted = if field == "model" { 404 } else { 400 };
        // the bundled model begins every text with a token, so an empty prompt is not empty
        if body["prompt"] == "" {
            assert_eq!(reply.status, 200, "{}", reply.body);
        } else {
            check(&reply, wanted, "");
        }
        if value.is_f64() || value.is_i64() {
            assert_eq!(reply.json()["error"]["param"], field, "{}", reply.body);
        }
    }
}

#[test]
fn who_goes_away_is_forgotten_at_once() {
    let server = Server::start(&["--parallel", "1", "--queue", "1", "--context", "1024"]);
    let head = "POST /v1/completions HTTP/1.0";
    let long = request("A vector", 1000).to_string();
    let running = server.send(head, &long);
    server.wait_for("requests_processing", 1);
    let waiting = server.send(head, &long);
    server.wait_for("requests_deferred", 1);
    let refused = server.ask(head, &long);
    assert_eq!(refused.status, 429);
    assert!(refused.head.contains("retry-after"), "{}", refused.head);
    drop(waiting);
    drop(running);
    server.wait_for("requests_deferred", 0);
    server.wait_for("requests_processing", 0);
    assert!(server.metric("tokens_predicted_total") < 1900);
    assert_eq!(
        server.complete(&request("A vector", 9)),
        alone("A vector", 9)
    );
}

#[test]
fn the_budget_holds_and_the_end_is_clean() {
    let refused = call(&["serve", "--port", "0", "--memory", "12MiB"]);
    assert_eq!(refused.status.code(), Some(1));
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    let (_, after) = message.split_once("--memory ").expect(&message);
    let (mib, _) = after.split_once("MiB").expect(&message);
    let budget: u64 = mib.parse().unwrap();
    let server = Server::start(&["--memory", &format!("{budget}MiB")]);
    let prompt = "A vector is a contiguous growable array type. ".repeat(60);
    std::thread::scope(|scope| {
        for at in 0..8 {
            let (server, prompt) = (&server, &prompt);
            scope.spawn(move || {
                let prompt = format!("{at} {prompt}");
                let reply = server.post("/v1/completions", &request(&prompt, 20));
                assert!([200, 400].contains(&reply.status), "{}", reply.body);
            });
        }
    });
    let peak = server.metric("peak_rss_bytes");
    assert!(peak <= budget << 20, "{peak} bytes of {budget} MiB");
    // a request that runs when the signal arrives gets its response
    let head = "POST /v1/completions HTTP/1.0";
    let running = server.send(head, &request("A vector", 200).to_string());
    server.wait_for("requests_processing", 1);
    let reply = std::thread::spawn(move || read(running));
    assert_eq!(server.end("-TERM"), 0);
    let reply = reply.join().unwrap();
    assert_eq!(reply.json()["usage"]["completion_tokens"], 200);
}

#[test]
fn what_it_does_can_be_looked_at() {
    let server = Server::start(&["--memory", "96MiB", "--parallel", "2"]);
    assert!(server.get("/").body.contains("<!doctype html>"));
    let head = "POST /v1/completions HTTP/1.0\r\nX-Emberflow-Class: proactive";
    let running = server.send(head, &request("A vector", 900).to_string());
    server.wait_for("requests_processing", 1);
    let start = Instant::now();
    let slot = loop {
        let slots = server.get("/slots").json();
        if slots[0]["tokens"].as_u64() > Some(3) {
            break slots[0].clone();
        }
        assert!(start.elapsed() < HANGS, "{slots}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(slot["class"], "proactive");
    assert_eq!(slot["state"], "decoding");
    drop(running);
    server.wait_for("requests_processing", 0);
    let stats = server.get("/stats").json();
    assert_eq!(stats["memory"]["budget_bytes"], 96 << 20);
    let parts = stats["memory"]["parts"].as_object().unwrap();
    let sum: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(sum <= 96 << 20, "{stats}");
    let layers = stats["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 8);
    let held = |layer: &Value| layer["hot"].as_u64().unwrap() + layer["cold"].as_u64().unwrap();
    assert!(
        layers
            .iter()
            .all(|layer| held(layer) <= 960 && held(layer) > 0)
    );
    assert!(stats["totals"]["pass_ns"].as_u64() > stats["totals"]["ffn_ns"].as_u64());
}

#[test]
fn an_interactive_request_overtakes_background_work() {
    let server = Server::start(&["--parallel", "2"]);
    let mut background = request("A vector", 600);
    background["priority"] = json!(1);
    let head = "POST /v1/completions HTTP/1.0\r\nX-Emberflow-Class: proactive";
    let first = server.send(head, &background.to_string());
    server.wait_for("requests_processing", 1);
    let second = server.send(head, &background.to_string());
    server.wait_for("requests_deferred", 1);
    // one slot is reserved for it
    let wanted = alone("The borrow checker", 8);
    assert_eq!(server.complete(&request("The borrow checker", 8)), wanted);
    assert!(server.metric("preemptions_total") > 0);
    assert_eq!(server.metric("requests_deferred"), 1);
    drop((first, second));
    server.wait_for("requests_processing", 0);
}

#[test]
fn browsers_of_this_machine_may_ask() {
    let server = Server::start(&[]);
    let allowed = |origin: &str| {
        let head = format!("OPTIONS /v1/completions HTTP/1.0\r\nOrigin: {origin}");
        let reply = server.ask(&head, "");
        assert_eq!(reply.status, 200);
        reply.head.contains("access-control-allow-origin")
    };
    assert!(allowed("http://localhost:3000"));
    assert!(allowed("http://127.0.0.1"));
    assert!(!allowed("http://localhost.evil.example"));
    assert!(!allowed("https://example.com"));
    // a name that resolves here but may be registered by others gets no response to any request
    for path in ["/", "/health", "/stats", "/v1/models"] {
        let get = |host: &str| {
            server
                .ask(&format!("GET {path} HTTP/1.0\r\nHost: {host}"), "")
                .status
        };
        assert_eq!(get("evil.example"), 403, "{path}");
        assert_eq!(get("evil.example:8080"), 403);
        assert_eq!(get("127.0.0.1.evil.example"), 403);
        for host in [
            "localhost:8080",
            "127.0.0.1",
            "[::1]:8080",
            "192.0.2.1",
            "server",
            "server.local",
        ] {
            assert_eq!(get(host), 200, "{path} of {host}");
        }
    }
    // without such an origin nothing is computed, also for a foreign name that resolves to this
    // machine
    let body = request("A", 1).to_string();
    let status = |origin: &str, host: &str| {
        let head = format!("POST /v1/completions HTTP/1.0\r\nHost: {host}\r\nOrigin: {origin}");
        server.ask(&head, &body).status
    };
    assert_eq!(status("https://example.com", "127.0.0.1"), 403);
    assert_eq!(status("http://evil.example:8080", "evil.example:8080"), 403);
    assert_eq!(status("http://192.0.2.1:8080", "192.0.2.1:8080"), 200);
    assert_eq!(status("http://192.0.2.1:8080", "192.0.2.7:8080"), 403);
}

#[test]
fn a_body_that_is_too_large_is_taken_and_refused() {
    let server = Server::start(&["--context", "64"]);
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let body = vec![b'x'; 8 << 20];
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    assert_eq!(read(stream).status, 413);
}

#[test]
fn an_empty_key_is_no_key() {
    let refused = call(&["serve", "--port", "0", "--api-key", ""]);
    assert_eq!(refused.status.code(), Some(2));
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(why.contains("key is empty"), "{why}");
}
