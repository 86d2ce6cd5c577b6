//! What the server does at its limits: connections, readers that do not read, texts that are too long.

mod common;
#[path = "common/server.rs"]
mod server;

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use server::{Reply, Server};

const PATH: &str = "/v1/completions";
/// Connections beside `--parallel` and `--queue`.
const LOOKERS: usize = 32;

fn request(tokens: usize) -> Value {
    json!({"prompt": "A vector is", "max_tokens": tokens, "ignore_eos": true, "seed": 1})
}

/// Connections that ask nothing, as many as there are places.
fn fill(server: &Server, places: usize) -> Vec<TcpStream> {
    let all: Vec<TcpStream> = (0..places)
        .map(|_| TcpStream::connect(&server.address).unwrap())
        .collect();
    // The server takes them in order; each of the later ones finds them there.
    all
}

/// Health and metrics are told even then, the others that there is no place; all at once.
#[test]
fn a_server_without_places_says_so() {
    let server = Server::start(&["--parallel", "1", "--queue", "1", "--context", "64"]);
    let idle = fill(&server, 2 + LOOKERS);
    let start = Instant::now();
    for _ in 0..20 {
        assert_eq!(server.get("/health").status, 200);
    }
    assert_eq!(server.get("/metrics").status, 200);
    for reply in [
        server.post(PATH, &request(1)),
        server.get("/v1/models"),
        server.post(PATH, &json!({"prompt": "x".repeat(200_000)})),
    ] {
        assert_eq!(reply.status, 503, "{}", reply.body);
        let error = &reply.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("connections"), "{message}");
        assert!(reply.head.contains("retry-after"), "{}", reply.head);
    }
    // Who then asks nothing is let go.
    let mut more = fill(&server, 8);
    assert_eq!(server.get("/health").status, 200);
    for stream in &mut more {
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(10));
    drop(idle);
    let start = Instant::now();
    while server.post(PATH, &request(1)).status != 200 {
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

/// Clients that take nothing of their streams, and one that does.
#[test]
fn a_slow_reader_holds_nobody_up() {
    let server = Server::start(&["--parallel", "2", "--context", "1024"]);
    let alone = server.post(PATH, &request(40)).body;
    let alone: Value = serde_json::from_str(&alone).unwrap();
    let mut body = request(900);
    body["stream"] = json!(true);
    let head = format!("POST {PATH} HTTP/1.0");
    let slow: Vec<TcpStream> = (0..6)
        .map(|_| server.send(&head, &body.to_string()))
        .collect();
    let start = Instant::now();
    // All of them are computed although nobody reads, and the others have their turns between.
    let reply = server.post(PATH, &request(40));
    assert_eq!(
        reply.json()["choices"][0]["text"],
        alone["choices"][0]["text"]
    );
    server.wait_for("requests_deferred", 0);
    server.wait_for("requests_processing", 0);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(60), "{took:?}");
    let reply = server.post(PATH, &request(40));
    assert_eq!(
        reply.json()["choices"][0]["text"],
        alone["choices"][0]["text"]
    );
    // What was not read is still there, whole.
    for stream in slow {
        let reply = server::read(stream);
        assert_eq!(reply.events().last(), Some(&"[DONE]"));
    }
}

#[test]
fn texts_beyond_the_context_are_refused_with_both_numbers() {
    let server = Server::start(&["--context", "64"]);
    let words = "word ".repeat(100);
    let messages = json!([{"role": "user", "content": words}]);
    let check = |reply: &Reply, param: &str| {
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = &reply.json()["error"];
        let message = error["message"].as_str().unwrap();
        let numbers: Vec<usize> = message
            .split(' ')
            .filter_map(|word| word.parse().ok())
            .collect();
        assert!(
            numbers.len() == 2 && numbers[0] > 100 && numbers[1] == 64,
            "{message}"
        );
        assert_eq!(error["param"], param);
    };
    check(&server.post(PATH, &json!({"prompt": words})), "prompt");
    let chat = server.post("/v1/chat/completions", &json!({"messages": messages}));
    check(&chat, "messages");
    check(
        &server.post("/v1/responses", &json!({"input": words})),
        "input",
    );
    let ollama = server.post("/api/chat", &json!({"model": "demo", "messages": messages}));
    assert_eq!(ollama.status, 400);
    let error = ollama.json()["error"].to_string();
    assert!(error.contains("room for 64"), "{error}");
}
