//! `emberflow serve` with valid but unusual checkpoints and clients that many servers refuse.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use crate::common::server::Server;
use crate::common::{emberflow, exported, succeed};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A container of the bundled model after `edit` changed one of its JSON files.
fn edited(dir: &Path, file: &str, edit: impl Fn(&mut Value)) -> String {
    let folder = exported(dir);
    let path = Path::new(&folder).join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|_| "{}".to_owned());
    let mut value = serde_json::from_str(&text).unwrap();
    edit(&mut value);
    std::fs::write(&path, value.to_string()).unwrap();
    let packed = dir.join("edited.ember").display().to_string();
    succeed(emberflow().args(["pack", &folder, "-o", &packed]));
    packed
}

/// Templates of SmolLM2 and others concatenate strings, and the server's own answers with calls have no
/// content.
#[test]
fn templates_that_join_strings_take_messages_without_content() {
    let dir = tempfile::tempdir().unwrap();
    let template =
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}";
    let packed = edited(dir.path(), "tokenizer_config.json", |config| {
        config["chat_template"] = json!(template);
    });
    let server = Server::start(&[&packed]);
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    for content in [json!(null), json!("")] {
        let messages = json!([
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "R"},
        ]);
        let body = json!({"messages": messages, "max_tokens": 2});
        let reply = server.post("/apply-template", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.json()["prompt"], "<user>Q\n<assistant>\n<tool>R\n");
        assert_eq!(server.post(CHAT, &body).status, 200);
    }
    let missing = json!({"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "Q"}]});
    let reply = server.post("/apply-template", &missing);
    assert_eq!(
        reply.json()["prompt"],
        "<assistant>\n<user>Q\n",
        "{}",
        reply.body
    );
}

/// What a server says on standard error up to its address.
fn told_at_start(model: &str) -> String {
    let mut child = emberflow()
        .args(["serve", "--port", "0", model])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut address).unwrap();
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(address.starts_with("http://"), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_template_without_tools_is_told_once_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let messages = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let tools = "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}";
    for (template, count) in [(messages.to_owned(), 1), (format!("{tools}{messages}"), 0)] {
        let folder = dir.path().join(count.to_string());
        std::fs::create_dir(&folder).unwrap();
        let packed = edited(&folder, "tokenizer_config.json", |config| {
            config["chat_template"] = json!(template);
        });
        let told = told_at_start(&packed);
        let warnings = told.matches("the model's chat template has no tools");
        assert_eq!(warnings.count(), count, "{told}");
    }
}

/// A checkpoint's rules ban what a schema requires: the schema takes precedence, and the text stays
/// valid.
#[test]
fn schemas_come_before_the_rules_of_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&[]);
    let ask = |text: &str| {
        let reply = server.post("/tokenize", &json!({"content": text}));
        reply.json()["tokens"].as_array().unwrap().clone()
    };
    let forbidden: Vec<Value> = "{}\"0123456789:, "
        .chars()
        .flat_map(|c| ask(&c.to_string()))
        .collect();
    drop(server);
    let packed = edited(dir.path(), "generation_config.json", |config| {
        config["suppress_tokens"] = json!(forbidden);
    });
    let server = Server::start(&[&packed]);
    let schema = json!({
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["n"], "additionalProperties": false,
    });
    let body = json!({
        "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 60, "temperature": 0.9, "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    });
    let reply = server.post(CHAT, &body).json();
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!((1..100).contains(&value["n"].as_u64().unwrap()), "{text}");
}

/// SDKs in browsers send custom headers, and check first whether they may.
#[test]
fn browsers_may_send_the_headers_that_they_ask_for() {
    let server = Server::start(&[]);
    let ask = |origin: &str| {
        let wanted = "Access-Control-Request-Method: POST\r\n\
            Access-Control-Request-Headers: authorization,content-type,x-stainless-os";
        let head = format!("OPTIONS {CHAT} HTTP/1.0\r\nOrigin: {origin}\r\n{wanted}");
        let head = server.ask(&head, "").head.to_ascii_lowercase();
        let of = |name: &str| {
            let line = head.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim().to_owned())
        };
        [
            of("access-control-allow-headers:"),
            of("access-control-allow-origin:"),
        ]
    };
    let [headers, origin] = ask("http://localhost:5173");
    assert_eq!(origin.as_deref(), Some("http://localhost:5173"));
    assert!(headers.unwrap().contains("x-stainless-os"));
    assert_eq!(ask("https://example.com")[1], None);
}

/// A client that sends a long body receives the error, not a broken connection.
#[test]
fn refusals_reach_clients_that_are_still_sending() {
    let server = Server::start(&["--api-key", "secret"]);
    let long = "x".repeat(8 << 20);
    for (head, status) in [
        ("POST /v1/chat/completions HTTP/1.0", 401),
        (
            "POST /v1/nothing HTTP/1.0\r\nAuthorization: Bearer secret",
            404,
        ),
        (
            "POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer secret",
            413,
        ),
        ("POST /health HTTP/1.0\r\nAuthorization: Bearer secret", 405),
    ] {
        let reply = server.ask(head, &long);
        assert_eq!(reply.status, status, "{head}: {}", reply.body);
        assert!(
            reply.json()["error"]["message"].is_string(),
            "{}",
            reply.body
        );
    }
}

/// JSON of many small values takes many times its bytes when parsed; the budget still holds.
#[test]
fn bodies_of_many_small_values_stay_within_the_budget() {
    let budget = 96u64 << 20;
    let server = Server::start(&["--memory", "96MiB"]);
    // as many as the body limit allows
    let many = vec![json!([]); 27_000];
    let body =
        json!({"messages": [{"role": "user", "content": "Q"}], "max_tokens": 1, "metadata": many});
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                let reply = server.post(CHAT, &body);
                // parsed, and not refused for its length
                assert!([200, 429, 503].contains(&reply.status), "{}", reply.body);
            });
        }
    });
    let peak = server.metric("peak_rss_bytes");
    assert!(peak <= budget, "{peak} bytes of {budget}");
    let after = json!({"messages": [{"role": "user", "content": "Q"}], "max_tokens": 1});
    assert_eq!(server.post(CHAT, &after).status, 200);
}
