//! The server at its limits: connections, readers that do not read, texts that are too long.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::call;
use crate::common::server::{HANGS, Reply, Server, read};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";
/// Connections in addition to `--parallel` and `--queue`.
const LOOKERS: usize = 32;

fn request(tokens: usize) -> Value {
    json!({"prompt": "A vector is", "max_tokens": tokens, "ignore_eos": true, "seed": 1})
}

/// Idle connections, as many as there are slots.
fn fill(server: &Server, places: usize) -> Vec<TcpStream> {
    let all: Vec<TcpStream> = (0..places)
        .map(|_| TcpStream::connect(&server.address).unwrap())
        .collect();
    // The server accepts them in order; each of the later ones finds the slots taken.
    all
}

/// Health and metrics still respond, other requests get a rejection; all at once.
#[test]
fn a_server_without_places_says_so() {
    let server = Server::start(&["--parallel", "1", "--queue", "1", "--context", "64"]);
    let idle = fill(&server, 2 + LOOKERS);
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
    // A connection without a request is closed.
    let mut more = fill(&server, 8);
    assert_eq!(server.get("/health").status, 200);
    for stream in &mut more {
        stream.set_read_timeout(Some(HANGS)).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
    }
    drop(idle);
    let start = Instant::now();
    while server.post(PATH, &request(1)).status != 200 {
        assert!(start.elapsed() < HANGS);
    }
}

/// Clients that do not read their streams, and one that does.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
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
    // All of them are computed although no one reads, and the others run in between.
    let reply = server.post(PATH, &request(40));
    assert_eq!(
        reply.json()["choices"][0]["text"],
        alone["choices"][0]["text"]
    );
    server.wait_for("requests_deferred", 0);
    server.wait_for("requests_processing", 0);
    let reply = server.post(PATH, &request(40));
    assert_eq!(
        reply.json()["choices"][0]["text"],
        alone["choices"][0]["text"]
    );
    // the unread part is still complete
    for stream in slow {
        let reply = read(stream);
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
            .split([' ', '('])
            .filter_map(|word| word.parse().ok())
            .collect();
        assert!(
            numbers.len() == 2 && numbers[0] > 100 && numbers[1] == 64,
            "{message}"
        );
        assert_eq!(error["param"], param);
        // As llama.cpp's server says it.
        assert_eq!(error["type"], "exceed_context_size_error");
        assert_eq!(
            (error["n_prompt_tokens"].as_u64(), &error["n_ctx"]),
            (Some(numbers[0] as u64), &json!(64))
        );
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
    assert!(error.contains("64 tokens"), "{error}");
}

/// With few file descriptors, health responds regardless of the queue, and requests are answered when
/// possible.
#[test]
fn few_files_are_enough_for_health() {
    let server = Server::start_under("ulimit -n 24", &["--context", "64"]);
    let idle = fill(&server, 30);
    for _ in 0..3 {
        assert_eq!(server.get("/health").status, 200);
    }
    drop(idle);
    // the server notices one disconnection after the other
    let answered = || server.post(PATH, &request(1)).status == 200;
    assert!((0..300).any(|_| answered() || {
        std::thread::sleep(Duration::from_millis(100));
        false
    }));
}

#[test]
fn hosts_have_names() {
    let server = Server::start(&["--host", "localhost", "--allow-host", "chat.example"]);
    assert!(
        server.address.starts_with("127.0.0.1:"),
        "{}",
        server.address
    );
    let get = |host: &str| {
        server
            .ask(&format!("GET /health HTTP/1.0\r\nHost: {host}"), "")
            .status
    };
    assert_eq!(
        [
            get("chat.example"),
            get("Chat.Example.:80"),
            get("other.example")
        ],
        [200, 200, 403]
    );
    let refused = call(&["serve", "--port", "0", "--host", "no such host"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--host no such host"));
}

/// A client may close its sending side after its request and wait.
#[test]
fn who_closes_one_side_gets_the_answer() {
    let server = Server::start(&["--parallel", "1", "--context", "1024"]);
    let wanted = server.complete(&request(300));
    for (stream, version) in [(false, "1.0"), (true, "1.0"), (false, "1.1"), (true, "1.1")] {
        let mut body = request(300);
        body["stream"] = json!(stream);
        let head = format!("POST /v1/completions HTTP/{version}\r\nHost: localhost");
        let connection = server.send(&head, &body.to_string());
        connection.shutdown(std::net::Shutdown::Write).unwrap();
        let reply = read(connection);
        assert_eq!(reply.status, 200);
        let whole = || {
            let (begin, end) = (
                reply.body.find('{').unwrap(),
                reply.body.rfind('}').unwrap(),
            );
            let answer: Value = serde_json::from_str(&reply.body[begin..=end]).unwrap();
            answer["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        let text = if stream { reply.streamed() } else { whole() };
        assert_eq!(text, wanted, "HTTP/{version}");
    }
    // immediate errors have their usual status
    let connection = server.send("POST /v1/completions HTTP/1.0", "{");
    connection.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(read(connection).status, 400);
}
