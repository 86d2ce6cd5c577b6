//! Ollama's API of `emberflow serve` on the bundled model: the same output as OpenAI's.

use crate::common::server::Server;
use serde_json::{Value, json};

#[test]
fn chats() {
    let server = Server::start(&["--alias", "demo"]);
    let message = json!([{"role": "user", "content": "What is a vector?"}]);
    let body = json!({"messages": message, "max_tokens": 12, "temperature": 0});
    let wanted = server.post("/v1/chat/completions", &body).json();
    let wanted = wanted["choices"][0]["message"]["content"].as_str().unwrap();
    let options = json!({"num_predict": 12, "temperature": 0});
    let mut body =
        json!({"model": "demo:latest", "messages": message, "options": options, "stream": false});
    let whole = server.post("/api/chat", &body).json();
    assert_eq!(whole["message"]["content"], wanted);
    assert_eq!(whole["message"]["role"], "assistant");
    assert_eq!(whole["done"], true);
    assert!(["stop", "length"].contains(&whole["done_reason"].as_str().unwrap()));
    let count = |name: &str| whole[name].as_u64().unwrap();
    assert!(count("prompt_eval_count") > 4 && count("eval_count") <= 12);
    assert!(count("total_duration") >= count("eval_duration") + count("prompt_eval_duration"));
    // streaming is the default
    body.as_object_mut().unwrap().remove("stream");
    let reply = server.post("/api/chat", &body);
    assert!(
        reply.head.contains("application/x-ndjson"),
        "{}",
        reply.head
    );
    let lines: Vec<Value> = reply
        .body
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let (last, pieces) = lines.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|p| p["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, wanted);
    assert!(pieces.iter().all(|p| p["done"] == false));
    assert_eq!(last["done"], true);
    assert_eq!(last["eval_count"], whole["eval_count"]);
}

#[test]
fn prompts_go_through_the_template_unless_raw() {
    let server = Server::start(&["--alias", "demo"]);
    let prompt = "The borrow checker";
    let options = json!({"num_predict": 8, "temperature": 0});
    let mut body = json!({"model": "demo", "prompt": prompt, "stream": false, "options": options});
    let found = server.post("/api/generate", &body).json();
    let message = json!([{"role": "user", "content": prompt}]);
    let chat = json!({"messages": message, "max_tokens": 8, "temperature": 0});
    let wanted = server.post("/v1/chat/completions", &chat).json();
    assert_eq!(
        found["response"],
        wanted["choices"][0]["message"]["content"]
    );
    body["raw"] = true.into();
    let found = server.post("/api/generate", &body).json();
    let plain = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
    assert_eq!(found["response"], server.complete(&plain));
}

#[test]
fn lists_and_errors() {
    let server = Server::start(&["--alias", "demo", "--strict-model"]);
    let loaded = server
        .post("/api/generate", &json!({"model": "demo"}))
        .json();
    assert_eq!(loaded["done_reason"], "load");
    assert_eq!(server.get("/api/tags").json()["models"][0]["name"], "demo");
    assert!(server.get("/api/version").json()["version"].is_string());
    let shown = server.post("/api/show", &json!({"model": "demo"})).json();
    assert_eq!(shown["details"]["family"], "llama");
    let message = json!([{"role": "user", "content": "What is a vector?"}]);
    for (path, body, status) in [
        (
            "/api/chat",
            json!({"model": "other", "messages": message}),
            404,
        ),
        (
            "/api/generate",
            json!({"prompt": "a", "images": ["aGk="]}),
            400,
        ),
        ("/api/generate", json!({"prompt": "a", "format": 3}), 400),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, status, "{}", reply.body);
        assert!(reply.json()["error"].is_string(), "{}", reply.body);
    }
}
