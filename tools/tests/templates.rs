//! Chat templates that somebody hostile wrote.

mod common;
#[path = "common/server.rs"]
mod server;

use std::time::{Duration, Instant};

use common::{emberflow, succeed};
use serde_json::{Value, json};
use server::Server;

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
        // A second of processor time, on a machine that does other work.
        assert!(start.elapsed() < Duration::from_secs(5), "{bomb}");
        assert_eq!(reply.status, 400, "{bomb}: {}", reply.body);
        let message = reply.json()["error"]["message"].to_string();
        assert!(message.contains("chat template"), "{bomb}: {message}");
        assert_eq!(ask("A vector").status, 200, "after {bomb}");
    }
    assert!(server.metric("peak_rss_bytes") <= 96 << 20);
}
