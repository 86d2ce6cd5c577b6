//! Malicious chat templates.

use crate::common;
use std::io::Write;
use std::process::Stdio;
use std::time::Instant;

use crate::common::server::{HANGS, Server};
use crate::common::{emberflow, succeed};
use serde_json::{Value, json};

/// A chat template that does as the first message says.
const BOMBS: &str = "\
{%- set wanted = messages[0].content -%}
{%- macro again() %}{{ again() }}{{ again() }}{% endmacro -%}
{%- if wanted == 'double' -%}
  {%- set n = namespace(x='ab') -%}
  {%- for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor -%}
  {{ n.x }}
{%- elif wanted == 'list' -%}
  {%- set n = namespace(x=[1, 2]) -%}
  {%- for i in range(60) %}{% set n.x = (n.x + n.x) | list %}{% endfor -%}
  {{ n.x }}
{%- elif wanted == 'write' -%}
  {%- for i in range(9000) %}{% for j in range(900) %}{{ 'x' * 10000 }}{% endfor %}{% endfor -%}
{%- elif wanted == 'repeat' -%}
  {{ 'x' * 100000000000 }}
{%- elif wanted == 'recurse' -%}
  {{ again() }}
{%- elif wanted == 'endless' -%}
  {%- for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor -%}
{%- else -%}
  {{ wanted }}
{%- endif -%}";

#[test]
fn hostile_chat_templates_end_in_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let folder = common::exported(dir.path());
    let config = format!("{folder}/tokenizer_config.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    value["chat_template"] = json!(BOMBS);
    std::fs::write(&config, value.to_string()).unwrap();
    let packed = format!("{}/m.ember", dir.path().display());
    succeed(emberflow().args(["pack", &folder, "-o", &packed]));
    let server = Server::start(&[&packed, "--memory", "96MiB"]);
    let ask = |content: &str| {
        let messages = json!([{"role": "user", "content": content}]);
        let body = json!({"messages": messages, "max_tokens": 2});
        server.post("/v1/chat/completions", &body)
    };
    for bomb in ["double", "list", "write", "repeat", "recurse", "endless"] {
        let start = Instant::now();
        let reply = ask(bomb);
        assert!(start.elapsed() < HANGS, "{bomb}");
        assert_eq!(reply.status, 400, "{bomb}: {}", reply.body);
        let message = reply.json()["error"]["message"].to_string();
        assert!(message.contains("chat template"), "{bomb}: {message}");
        assert_eq!(ask("A vector").status, 200, "after {bomb}");
    }
    assert!(server.metric("peak_rss_bytes") <= 96 << 20);
}

/// Without sampling parameters, chats, the server and a text after a prompt sample as the checkpoint recommends. Without
/// a recommendation, a text after a prompt is greedy, and the others use llama.cpp's defaults.
#[test]
fn what_the_checkpoint_recommends_is_the_default_else_that_of_chats() {
    let dir = tempfile::tempdir().unwrap();
    let folder = common::exported(dir.path());
    let packed = format!("{}/m.ember", dir.path().display());
    for (recommended, shown, in_chats) in [
        (
            json!({}),
            json!(["default", 0.0, 0, 1.0, 0.0]),
            json!(["default", 0.8, 40, 0.95, 0.05]),
        ),
        (
            json!({"do_sample": true, "temperature": 0.5, "top_k": 40}),
            json!(["recommended", 0.5, 40, 1.0, 0.0]),
            json!(["recommended", 0.5, 40, 1.0, 0.0]),
        ),
        // transformers' default temperature is 1
        (
            json!({"do_sample": true, "top_p": 0.75}),
            json!(["recommended", 1.0, 0, 0.75, 0.0]),
            json!(["recommended", 1.0, 0, 0.75, 0.0]),
        ),
    ] {
        std::fs::write(
            format!("{folder}/generation_config.json"),
            recommended.to_string(),
        )
        .unwrap();
        succeed(emberflow().args(["pack", &folder, "-o", &packed, "--force"]));
        let run = common::json(&[
            "run", &packed, "-p", "A vector", "-n", "12", "--seed", "3", "--json",
        ]);
        let keys = ["from", "temperature", "top_k", "top_p", "min_p"];
        let told = |v: &Value| Value::from_iter(keys.map(|key| v["sampling"][key].clone()));
        assert_eq!(told(&run), shown);
        let server = Server::start(&[&packed]);
        assert_eq!(told(&server.get("/props").json()), in_chats);
        // With the parameters that the server used, `run` draws the same text.
        let [temp, top_k, top_p, min_p] = [1, 2, 3, 4].map(|at| in_chats[at].to_string());
        let run = common::json(&[
            "run", &packed, "-p", "A vector", "-n", "12", "--seed", "3", "--json", "--temp", &temp,
            "--top-k", &top_k, "--top-p", &top_p, "--min-p", &min_p,
        ]);
        let body = json!({"prompt": "A vector", "max_tokens": 12, "seed": 3});
        assert_eq!(json!(server.complete(&body)), run["text"], "{recommended}");
        let chat = chat(&packed, "What is a trait?\n");
        assert_eq!(told(&chat), in_chats);
        assert_eq!(chat["sampling"]["seed"], 3);
    }
}

/// The report of a chat with one message.
fn chat(model: &str, message: &str) -> Value {
    let mut child = emberflow()
        .args(["run", model, "--chat", "--seed", "3", "-n", "4", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(message.as_bytes()).unwrap();
    drop(pipe);
    serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap()
}
