//! A server for tests, through its HTTP interface.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::emberflow;

/// Nothing takes this long, on a busy machine either, unless it hangs.
pub const HANGS: Duration = Duration::from_secs(120);

/// A server that is stopped on drop.
pub struct Server {
    pub child: Child,
    pub address: String,
}

/// A response.
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The data of a stream's events.
    pub fn events(&self) -> Vec<&str> {
        let lines = self.body.lines();
        lines.filter_map(|l| l.strip_prefix("data: ")).collect()
    }

    /// The joined text of a stream.
    pub fn streamed(&self) -> String {
        let mut text = String::new();
        for event in self.events() {
            let Ok(chunk) = serde_json::from_str::<Value>(event) else {
                assert_eq!(event, "[DONE]");
                continue;
            };
            let choice = &chunk["choices"][0];
            let piece = choice["delta"]["content"].as_str();
            text += piece.or(choice["text"].as_str()).unwrap_or_default();
        }
        text
    }
}

impl Server {
    pub fn start(args: &[&str]) -> Self {
        let mut command = emberflow();
        command.args(["serve", "--port", "0"]).args(args);
        Self::begin(command)
    }

    /// Starts it in a shell after a command, `ulimit` for example.
    pub fn start_under(command: &str, args: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        let serve = format!("{command} && exec \"$0\" serve --port 0 \"$@\"");
        shell
            .args(["-c", &serve, env!("CARGO_BIN_EXE_emberflow")])
            .args(args);
        let plain = emberflow();
        shell.envs(
            plain
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
        Self::begin(shell)
    }

    fn begin(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line.trim().strip_prefix("http://").expect(&line).to_owned();
        Self { child, address }
    }

    /// Sends a request and leaves the connection open. HTTP/1.0: the body ends with the connection.
    pub fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(HANGS)).unwrap();
        let len = body.len();
        let request = format!("{head}\r\nContent-Length: {len}\r\n\r\n{body}");
        // a server that refuses at once may close before everything is sent
        let _ = stream.write_all(request.as_bytes());
        stream
    }

    pub fn ask(&self, head: &str, body: &str) -> Reply {
        read(self.send(head, body))
    }

    pub fn get(&self, path: &str) -> Reply {
        self.ask(&format!("GET {path} HTTP/1.0"), "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        let head = format!("POST {path} HTTP/1.0\r\nContent-Type: application/json");
        self.ask(&head, &body.to_string())
    }

    pub fn complete(&self, body: &Value) -> String {
        let reply = self.post("/v1/completions", body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["choices"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    pub fn metric(&self, name: &str) -> u64 {
        let body = self.get("/metrics").body;
        let name = format!("emberflow_{name} ");
        let line = body.lines().find_map(|line| line.strip_prefix(&name));
        line.expect(&body).parse().unwrap()
    }

    /// Waits until a number of `/metrics` is `wanted`.
    pub fn wait_for(&self, name: &str, wanted: u64) {
        let start = Instant::now();
        while self.metric(name) != wanted {
            assert!(start.elapsed() < HANGS, "{name}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops it by a signal; returns its status.
    pub fn end(mut self, signal: &str) -> i32 {
        let id = self.child.id().to_string();
        Command::new("kill").args([signal, &id]).status().unwrap();
        self.child.wait().unwrap().code().unwrap_or(-1)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn read(mut stream: TcpStream) -> Reply {
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").expect(&all);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Reply {
        status,
        head: head.to_ascii_lowercase(),
        body: body.to_owned(),
    }
}
