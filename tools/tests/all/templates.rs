//! Malicious chat templates.

use crate::common;
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

/// Without sampling parameters, `run` and the server sample alike: as the checkpoint recommends, else
/// greedily. Regression: the server used temperature 1.
#[test]
fn run_and_the_server_have_the_same_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let folder = common::exported(dir.path());
    let packed = format!("{}/m.ember", dir.path().display());
    for (recommended, shown) in [
        (json!({}), json!(["default", 0.0, 0, 1.0])),
        (
            json!({"do_sample": true, "temperature": 0.5, "top_k": 40}),
            json!(["recommended", 0.5, 40, 1.0]),
        ),
        // transformers' default temperature is 1
        (
            json!({"do_sample": true, "top_p": 0.75}),
            json!(["recommended", 1.0, 0, 0.75]),
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
        let keys = ["from", "temperature", "top_k", "top_p"];
        let told = |v: &Value| Value::from_iter(keys.map(|key| v["sampling"][key].clone()));
        assert_eq!(told(&run), shown);
        let server = Server::start(&[&packed]);
        assert_eq!(told(&server.get("/props").json()), shown);
        let body = json!({"prompt": "A vector", "max_tokens": 12, "seed": 3});
        assert_eq!(json!(server.complete(&body)), run["text"], "{recommended}");
    }
}
