//! A hub of models with one repository, which a test can let fail in any way.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde_json::json;
use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::{emberflow, succeed};

/// The commit of its repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Longer files are large ones, which have a SHA-256.
const LARGE: usize = 4096;

/// What it was asked.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    /// The first byte that was asked for, and the last.
    pub range: Option<(usize, Option<usize>)>,
    pub token: Option<String>,
}

/// What it answers.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body after which it says nothing more for a while, and then closes.
    pub stops: Option<(usize, Duration)>,
    /// It sends a byte now and then.
    pub drips: bool,
}

impl Reply {
    /// Replaces a header.
    pub fn set(&mut self, name: &'static str, value: impl ToString) {
        self.headers.retain(|(other, _)| *other != name);
        self.headers.push((name, value.to_string()));
    }

    /// An answer without a body.
    pub fn status(status: u16) -> Self {
        Self {
            status,
            headers: vec![("Content-Length", "0".into())],
            ..Self::default()
        }
    }
}

/// A running hub.
pub struct TestHub {
    /// Its address.
    pub address: String,
    asked: Arc<Mutex<Vec<Request>>>,
}

impl TestHub {
    /// A hub that has `files` in each repository, and changes its answers by `rule`.
    pub fn start(
        files: &[(&str, &[u8])],
        rule: impl FnMut(&Request, &mut Reply) + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
        let files: Arc<BTreeMap<String, Vec<u8>>> = Arc::new(files.collect());
        let rule: Arc<Rule> = Arc::new(Mutex::new(Box::new(rule)));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (files, rule, log) = (Arc::clone(&files), Arc::clone(&rule), Arc::clone(&log));
                std::thread::spawn(move || answer(stream, &files, &rule, &log));
            }
        });
        Self { address, asked }
    }

    /// What it was asked so far.
    pub fn asked(&self) -> Vec<Request> {
        self.asked.lock().unwrap().clone()
    }

    /// First bytes of the requests for a file.
    pub fn ranges(&self, file: &str) -> Vec<usize> {
        let of_file = self
            .asked()
            .into_iter()
            .filter(|request| request.path.ends_with(file));
        of_file
            .map(|request| request.range.map_or(0, |range| range.0))
            .collect()
    }
}

/// A hub with the bundled model under each name.
pub fn bundled_hub() -> &'static TestHub {
    static HUB: OnceLock<TestHub> = OnceLock::new();
    HUB.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        succeed(emberflow().arg("export").arg("-o").arg(&path));
        let model = std::fs::read(path).unwrap();
        TestHub::start(&[("m-Q4_K_M.gguf", &model)], |_, _| ())
    })
}

type Rule = Mutex<Box<dyn FnMut(&Request, &mut Reply) + Send>>;

fn answer(
    stream: TcpStream,
    files: &BTreeMap<String, Vec<u8>>,
    rule: &Rule,
    log: &Mutex<Vec<Request>>,
) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let first = lines.next()?.ok()?;
    let mut request = Request {
        path: first.split(' ').nth(1)?.to_owned(),
        range: None,
        token: None,
    };
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (from, to) = value.strip_prefix("bytes=")?.split_once('-')?;
                request.range = Some((from.parse().ok()?, to.parse().ok()));
            }
            "authorization" => request.token = Some(value.to_owned()),
            _ => {}
        }
    }
    let mut reply = usual(&request, files);
    log.lock().unwrap().push(request.clone());
    rule.lock().unwrap()(&request, &mut reply);
    let mut head = format!("HTTP/1.1 {} Status\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut stream = stream;
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    if reply.drips {
        for byte in &reply.body {
            stream.write_all(&[*byte]).ok()?;
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    match reply.stops {
        Some((bytes, silence)) => {
            stream
                .write_all(&reply.body[..bytes.min(reply.body.len())])
                .ok()?;
            stream.flush().ok()?;
            std::thread::sleep(silence);
        }
        None => stream.write_all(&reply.body).ok()?,
    }
    Some(())
}

fn usual(request: &Request, files: &BTreeMap<String, Vec<u8>>) -> Reply {
    if request.path.starts_with("/api/models/") {
        let body = list(files).to_string().into_bytes();
        return Reply {
            status: 200,
            headers: vec![("Content-Length", body.len().to_string())],
            body,
            ..Reply::default()
        };
    }
    let file = request.path.split_once(&format!("/resolve/{COMMIT}/"));
    let Some(bytes) = file.and_then(|(_, name)| files.get(name)) else {
        return Reply::status(404);
    };
    let (status, part, range) = match request.range {
        None => (200, &bytes[..], None),
        Some((from, _)) if from >= bytes.len() => return Reply::status(416),
        Some((from, to)) => {
            let end = to.map_or(bytes.len(), |last| (last + 1).min(bytes.len()));
            let range = format!("bytes {from}-{}/{}", end - 1, bytes.len());
            (206, &bytes[from..end], Some(range))
        }
    };
    let mut reply = Reply {
        status,
        headers: vec![("Content-Length", part.len().to_string())],
        body: part.to_vec(),
        ..Reply::default()
    };
    if let Some(range) = range {
        reply.set("Content-Range", range);
    }
    reply
}

/// As Hugging Face lists a repository with `?blobs=true`.
fn list(files: &BTreeMap<String, Vec<u8>>) -> serde_json::Value {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let siblings = files.iter().map(|(name, bytes)| {
        let git = |bytes: &[u8]| {
            let head = format!("blob {}\0", bytes.len());
            hex(&Sha1::new()
                .chain_update(head)
                .chain_update(bytes)
                .finalize())
        };
        let size = bytes.len();
        match size > LARGE {
            true => json!({
                "rfilename": name, "size": size, "blobId": git(b"a pointer"),
                "lfs": {"sha256": hex(&Sha256::digest(bytes)), "size": size, "pointerSize": 134},
            }),
            false => json!({"rfilename": name, "size": size, "blobId": git(bytes)}),
        }
    });
    json!({"id": "o/n", "sha": COMMIT, "private": false, "gated": false, "siblings": siblings.collect::<Vec<_>>()})
}
