//! Texts that end in a loop: noticed, said, and ended only in chats without a limit.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::common::server::Server;
use crate::common::{emberflow, exported, json as report, succeed};

/// The bundled model, which may say one token only.
fn stuck(dir: &Path) -> String {
    let folder = exported(dir);
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(format!("{folder}/{name}")).unwrap()).unwrap()
    };
    let vocab = read("config.json")["vocab_size"].as_u64().unwrap();
    let mut generation = read("generation_config.json");
    generation["suppress_tokens"] = (0..vocab).filter(|&token| token != 300).collect();
    let path = format!("{folder}/generation_config.json");
    std::fs::write(path, generation.to_string()).unwrap();
    let packed = format!("{}/stuck.ember", dir.display());
    succeed(emberflow().args(["pack", &folder, "-o", &packed]));
    packed
}

/// A chat with one message through a pipe: standard output and standard error.
fn chat(model: &str, options: &[&str]) -> [String; 2] {
    let mut child = emberflow()
        .args(["run", model, "--chat"])
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(b"Go on.\n").unwrap();
    drop(pipe);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap())
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_loop_is_said_and_ends_an_answer_without_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let model = stuck(dir.path());
    let run = |n: &str| report(&["run", &model, "-p", "A", "-n", n, "--json"]);
    // Texts after a prompt are never cut.
    let long = run("700");
    assert_eq!(long["repetition"], json!({"period": 1, "tokens": 700}));
    assert_eq!(long["generated_tokens"], 700);
    assert!(run("127")["repetition"].is_null());
    let output = succeed(emberflow().args(["run", &model, "-p", "A", "-n", "200"]));
    let told = String::from_utf8(output.stderr).unwrap();
    let said = "ends in a loop, the same token 200 times; --repeat-penalty 1.1 may help";
    assert!(told.contains(said), "{told}");
    assert!(
        told.contains("text      ends in a loop: the same token 200 times"),
        "{told}"
    );

    let answer = |options: &[&str]| -> Value {
        let [out, _] = chat(&model, &[options, &["--json"]].concat());
        serde_json::from_str(&out).unwrap()
    };
    let ended = answer(&[]);
    assert_eq!(
        (&ended["generated_tokens"], &ended["stop"]),
        (&json!(512), &json!("length"))
    );
    assert_eq!(answer(&["-n", "600"])["generated_tokens"], 600);
    let whole = answer(&["-n", "-1", "--context", "700"]);
    assert_eq!(whole["stop"], "context");
    let [_, told] = chat(&model, &[]);
    assert!(
        told.contains("so it was ended; -n -1 lets loops go on"),
        "{told}"
    );
}

/// A client may have asked for it: the text is whole, and the response says so.
#[test]
fn a_server_ends_no_loop_and_says_it() {
    let server = Server::start(&["--memory", "96MiB"]);
    let body =
        json!({"prompt": "A", "max_tokens": 600, "ignore_eos": true, "logit_bias": {"300": 100}});
    let whole = server.post("/v1/completions", &body).json();
    let choice = &whole["choices"][0];
    let repetition = json!({"period": 1, "tokens": 600});
    assert_eq!(choice["repetition"], repetition);
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 600);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let reply = server.post("/v1/completions", &streamed);
    let events = reply.events();
    let last: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["repetition"], repetition);
    let native = server.post("/completion", &body).json();
    assert_eq!(
        (&native["repetition"], &native["stop_type"]),
        (&repetition, &json!("limit"))
    );
    server.wait_for("texts_looping_total", 3);
    let plain = json!({"prompt": "A vector", "max_tokens": 40, "temperature": 0});
    let plain = server.post("/v1/completions", &plain).json();
    assert!(plain["choices"][0].get("repetition").is_none(), "{plain}");
}
