//! State on disk: a conversation continues after a restart with the same text, whatever happened to its files.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use serde_json::{Value, json};

use crate::common::server::{HANGS, Server};
use crate::common::{emberflow, exported, succeed};

/// Models, their context, and the lengths of two prompts: dense, a mixture, recurrent beside attention, and with pools of
/// positions.
const MODELS: [(&str, &str, [usize; 2]); 4] = [
    ("demo", "900", [110, 160]),
    ("demo-moe", "900", [110, 160]),
    (
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/fixtures/models/qwen3_5"
        ),
        "500",
        [35, 45],
    ),
    (
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/fixtures/models/deepseek_v4"
        ),
        "500",
        [35, 45],
    ),
];

fn prompt(words: usize) -> String {
    let words = (0..words).map(|i| ["A vector is", "a slice of", "the trait has"][i % 3]);
    words.collect::<Vec<_>>().join(" ")
}

fn server(model: &str, folder: &Path, more: &[&str]) -> Server {
    let folder = folder.to_str().unwrap();
    let args = [&[model, "--state-dir", folder], more].concat();
    Server::start(&args)
}

/// The text of an answer, the tokens of its prompt, and how many of them were not computed.
fn ask(server: &Server, prompt: &str) -> (String, [u64; 2]) {
    let body = json!({"prompt": prompt, "max_tokens": 12, "ignore_eos": true, "temperature": 0});
    let reply = server.post("/v1/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let (json, usage) = (reply.json(), &reply.json()["usage"]);
    let numbers = [
        &usage["prompt_tokens"],
        &usage["prompt_tokens_details"]["cached_tokens"],
    ];
    let text = json["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, numbers.map(|number| number.as_u64().unwrap()))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.extension().is_some_and(|it| it == "state"))
        .collect()
}

fn slot_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|it| it == "slot"))
        .collect()
}

/// Waits for a number of whole files.
fn wait_for_files(folder: &Path, count: usize) {
    let start = Instant::now();
    while files(folder).len() < count {
        assert!(start.elapsed() < HANGS, "{:?}", files(folder));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn a_conversation_continues_after_a_kill_with_the_same_text() {
    for (model, context, lengths) in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let context = ["--context", context];
        let [short, long] = lengths.map(prompt);
        let fresh = Server::start(&[&[model], &context[..]].concat());
        let expected = [&short, &long].map(|prompt| ask(&fresh, prompt).0);
        let first = server(model, dir.path(), &context);
        let (text, [tokens, cached]) = ask(&first, &short);
        assert_eq!((text, cached), (expected[0].clone(), 0), "{model}");
        assert!(tokens > 256, "{model}: {tokens}");
        wait_for_files(dir.path(), 2);
        first.end("-KILL");
        let second = server(model, dir.path(), &context);
        let (text, [_, cached]) = ask(&second, &long);
        assert_eq!(text, expected[1], "{model}");
        assert!(cached + 8 >= tokens, "{model}: {cached} of {tokens}");
        assert_eq!(second.metric("prompt_tokens_restored_total"), cached);
        // Saved at the end too, without a pause.
        assert_eq!(second.end("-INT"), 0);
        let third = server(model, dir.path(), &context);
        let (text, [_, more]) = ask(&third, &long);
        assert!(
            text == expected[1] && more > cached,
            "{model}: {more} {cached}"
        );
    }
}

/// Pieces of a longer context do not fit in a shorter one.
#[test]
fn a_shorter_context_uses_what_fits() {
    let dir = tempfile::tempdir().unwrap();
    let long = server("demo", dir.path(), &["--context", "900"]);
    ask(&long, &prompt(160));
    wait_for_files(dir.path(), 2);
    long.end("-KILL");
    let context = ["--context", "400"];
    let short = server("demo", dir.path(), &context);
    let fresh = Server::start(&["demo", "--context", "400"]);
    for words in [20, 85, 88, 90] {
        let text = prompt(words);
        assert_eq!(ask(&short, &text).0, ask(&fresh, &text).0, "{words}");
    }
    assert!(short.metric("prompt_tokens_restored_total") >= 256);
}

#[test]
fn a_response_is_continued_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let body = |text: &str| json!({"input": text, "max_output_tokens": 6, "temperature": 0});
    let first = server("demo", dir.path(), &["--context", "900"]);
    let id = first.post("/v1/responses", &body("A vector")).json()["id"].clone();
    let mut next = body("A slice");
    next["previous_response_id"] = id.clone();
    let expected = first.post("/v1/responses", &next).json()["output"][0]["content"].clone();
    assert_eq!(first.end("-TERM"), 0);
    let second = server("demo", dir.path(), &["--context", "900"]);
    let answer = second.post("/v1/responses", &next).json();
    assert_eq!(answer["output"][0]["content"], expected, "{answer}");
    let path = format!("/v1/responses/{}", id.as_str().unwrap());
    assert_eq!(second.get(&path).status, 200);
    assert_eq!(
        second.ask(&format!("DELETE {path} HTTP/1.0"), "").status,
        200
    );
    assert_eq!(
        server("demo", dir.path(), &["--context", "900"])
            .get(&path)
            .status,
        404
    );
}

#[test]
fn damaged_foreign_and_missing_files_cost_a_cold_prompt_and_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let long = prompt(160);
    let first = server("demo", dir.path(), &["--context", "900"]);
    let (expected, _) = ask(&first, &long);
    wait_for_files(dir.path(), 2);
    assert_eq!(first.end("-TERM"), 0);
    let all = files(dir.path());
    let whole: Vec<_> = all
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    std::fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let name = all[0].file_name().unwrap().to_str().unwrap();
    let foreign = dir
        .path()
        .join(format!("{}{}", "0".repeat(32), &name[32..]));
    std::fs::write(&foreign, "of another model").unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..8 {
        for (path, bytes) in all.iter().zip(&whole) {
            std::fs::write(path, bytes).unwrap();
            let at = random.u64(..bytes.len() as u64);
            let file = File::options().write(true).open(path).unwrap();
            match round {
                0..4 => file
                    .write_at(&[bytes[at as usize] ^ 4], at)
                    .map(|_| ())
                    .unwrap(),
                4 | 5 => file.set_len(at).unwrap(),
                // Another text's name.
                6 => std::fs::write(path, &whole[whole.len() - 1]).unwrap(),
                _ => file.set_len(0).unwrap(),
            }
        }
        let server = server("demo", dir.path(), &["--context", "900"]);
        if round % 2 == 1 {
            all.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
        assert_eq!(ask(&server, &long).0, expected, "{round}");
        server.end("-KILL");
    }
    assert_eq!(
        std::fs::read(dir.path().join("notes.txt")).unwrap(),
        b"mine"
    );
    assert_eq!(std::fs::read(foreign).unwrap(), b"of another model");
}

#[test]
fn the_folder_stays_within_its_size_and_two_servers_share_it() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = [(); 2].map(|()| {
        server(
            "demo",
            dir.path(),
            &["--context", "900", "--state-size", "4MiB"],
        )
    });
    let bytes = || -> u64 {
        let sizes = files(dir.path())
            .into_iter()
            .filter_map(|path| path.metadata().ok());
        sizes.map(|facts| facts.len()).sum()
    };
    let text = prompt(150);
    let (expected, _) = ask(&first, &text);
    wait_for_files(dir.path(), 2);
    for round in 0..8 {
        let other = format!("{round} {text}");
        let texts = [&first, &second].map(|server| ask(server, &other).0);
        assert_eq!(texts[0], texts[1]);
        // Both may save at the same moment.
        assert!(bytes() <= 5 << 20);
        let _ = std::fs::remove_file(dir.path().join("written-today"));
    }
    assert_eq!(ask(&second, &text).0, expected);
    for server in [first, second] {
        assert_eq!(server.end("-TERM"), 0);
    }
    assert!((1..=5 << 20).contains(&bytes()), "{}", bytes());
}

/// An action on a slot: the status, and the reply.
fn act(server: &Server, slot: usize, action: &str, file: &str) -> (u16, Value) {
    let path = format!("/slots/{slot}?action={action}");
    let reply = server.post(&path, &json!({"filename": file}));
    (reply.status, reply.json())
}

/// `/slots` once a conversation is idle and nothing else runs.
fn idle(server: &Server) -> Value {
    let start = Instant::now();
    loop {
        let slots = server.get("/slots").json();
        if slots[0]["state"] == "idle" {
            return slots;
        }
        assert!(start.elapsed() < HANGS, "{slots}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_saved_slot_is_restored_after_a_kill_and_gives_the_same_text() {
    for (model, context, lengths) in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let more = ["--context", context, "--parallel", "3"];
        let [short, long] = lengths.map(prompt);
        let fresh = Server::start(&[&[model], &more[..2]].concat());
        let expected = ask(&fresh, &long).0;
        let first = server(model, dir.path(), &more);
        let (_, [tokens, _]) = ask(&first, &short);
        let id = idle(&first)[0]["id"].as_u64().unwrap() as usize;
        let (status, saved) = act(&first, id, "save", "talk one.bin");
        assert_eq!(status, 200, "{saved}");
        let count = |reply: &Value, name: &str| reply[name].as_u64().expect(name);
        assert!(count(&saved, "n_saved") + 8 >= tokens, "{model}: {saved}");
        assert!(
            count(&saved, "n_written") > 0 && saved["id_slot"] == id,
            "{saved}"
        );
        assert!(saved["timings"]["save_ms"].as_f64() > Some(0.0), "{saved}");
        first.end("-KILL");
        let second = server(model, dir.path(), &more);
        let (status, restored) = act(&second, 1, "restore", "talk one.bin");
        assert_eq!(status, 200, "{restored}");
        assert_eq!(restored["n_restored"], saved["n_saved"], "{model}");
        assert_eq!(restored["n_read"], saved["n_written"], "{model}");
        let slots = idle(&second);
        assert_eq!(
            (&slots[0]["id"], &slots[0]["tokens"]),
            (&json!(1), &saved["n_saved"])
        );
        let (text, [_, cached]) = ask(&second, &long);
        assert_eq!(text, expected, "{model}");
        assert!(cached + 8 >= tokens, "{model}: {cached} of {tokens}");
        // It is in memory: nothing is read for the request. But recurrent state goes back to the end of the last answer only.
        if model.starts_with("demo") {
            assert_eq!(second.metric("prompt_tokens_restored_total"), 0, "{model}");
        }
        let (_, erased) = act(&second, 1, "erase", "");
        assert!(count(&erased, "n_erased") > cached, "{erased}");
        assert_eq!(act(&second, 1, "erase", "").1["n_erased"], 0);
    }
}

#[test]
fn what_is_no_saved_slot_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let context = ["--context", "900", "--parallel", "2"];
    let long = prompt(160);
    let check = |server: &Server, slot: usize, action: &str, file: &str, status: u16, why: &str| {
        let (found, reply) = act(server, slot, action, file);
        let message = reply["error"]["message"].as_str().unwrap_or_default();
        assert!(found == status && message.contains(why), "{found}: {reply}");
    };
    let stateless = Server::start(&["demo"]);
    check(&stateless, 0, "save", "a", 501, "--state-dir");
    let first = server("demo", dir.path(), &context);
    let (expected, _) = ask(&first, &long);
    for name in ["", "..", "../a", "a/b", "/etc/passwd", "a\\b", "a.", "a\n"] {
        check(&first, 0, "save", name, 400, "filename");
        check(&first, 0, "restore", name, 400, "filename");
    }
    check(&first, 0, "move", "a", 400, "invalid action");
    check(&first, 2, "save", "a", 400, "invalid slot id");
    check(&first, 1, "save", "a", 404, "slot 1 has no conversation");
    check(&first, 0, "restore", "a", 404, "no saved slot");
    assert_eq!(act(&first, 0, "save", "a").0, 200);
    let listed = slot_files(dir.path()).pop().unwrap();
    let whole = std::fs::read(&listed).unwrap();
    for at in [0, 20, whole.len() - 6] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        std::fs::write(&listed, damaged).unwrap();
        let (status, reply) = act(&first, 1, "restore", "a");
        assert_eq!(status, 400, "{at}: {reply}");
    }
    std::fs::write(&listed, &whole).unwrap();
    assert_eq!(first.end("-TERM"), 0);
    let other = server("demo-moe", dir.path(), &context);
    check(&other, 0, "restore", "a", 404, "no saved slot");
    let shorter = server("demo", dir.path(), &["--context", "400"]);
    check(&shorter, 0, "restore", "a", 400, "more than --context");
    // A piece of it is damaged, which is noticed when it is read; then it is gone.
    let second = server("demo", dir.path(), &context);
    let piece = files(dir.path()).pop().unwrap();
    let mut bytes = std::fs::read(&piece).unwrap();
    let end = bytes.len() - 9;
    bytes[end] ^= 1;
    std::fs::write(&piece, bytes).unwrap();
    for _ in 0..2 {
        check(&second, 0, "restore", "a", 404, "gone or damaged");
    }
    assert_eq!(ask(&second, &long).0, expected);
    // No room: neither for pieces nor for the list.
    let small = tempfile::tempdir().unwrap();
    let third = server("demo", small.path(), &["--state-size", "64KiB"]);
    ask(&third, &long);
    check(&third, 0, "save", "a", 507, "--state-size");
    assert_eq!(slot_files(small.path()), [] as [PathBuf; 0]);
}

/// Files of saved slots that other programs wrote, or that look like unfinished ones, stay.
#[test]
fn files_of_others_and_odd_names_stay() {
    let dir = tempfile::tempdir().unwrap();
    let foreign = dir.path().join("theirs.slot");
    std::fs::write(&foreign, "not ours").unwrap();
    let first = server("demo", dir.path(), &["--context", "900", "--parallel", "2"]);
    let (text, _) = ask(&first, &prompt(110));
    for name in ["a", "a.slot.partial-2", "Straße"] {
        assert_eq!(act(&first, 0, "save", name).0, 200, "{name}");
    }
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    for file in slot_files(dir.path()) {
        let file = File::options().append(true).open(file).unwrap();
        file.set_modified(old).unwrap();
    }
    // Another conversation takes the folder's list of files anew; it goes on with most of the first one, and keeps its slot.
    let (_, [_, cached]) = ask(
        &first,
        &format!("{}{}", prompt(110), &text[..text.len() / 2]),
    );
    assert!(cached > 100);
    // The list is from before or after the end of an answer.
    let start = Instant::now();
    while idle(&first)[0]["id"] != 1 {
        assert!(start.elapsed() < HANGS, "the end of the first answer");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(act(&first, 0, "save", "b").0, 200);
    assert_eq!(slot_files(dir.path()).len(), 5);
    assert_eq!(std::fs::read_to_string(&foreign).unwrap(), "not ours");
    for name in ["a", "a.slot.partial-2", "Straße", "b"] {
        assert_eq!(act(&first, 1, "restore", name).0, 200, "{name}");
    }
}

/// A stream is not held up by a request whose state is read: counted, because reading a piece takes as long as a few tokens.
#[test]
fn texts_go_on_while_state_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--context", "1024", "--parallel", "2"];
    let long = prompt(180);
    let first = server("demo", dir.path(), &more);
    let (expected, _) = ask(&first, &long);
    assert_eq!(first.end("-TERM"), 0);
    assert!(files(dir.path()).len() >= 2);
    let second = server("demo", dir.path(), &more);
    let body = json!({
        "prompt": "A vector", "max_tokens": 900, "ignore_eos": true, "temperature": 0, "stream": true,
    });
    let running = second.send("POST /v1/completions HTTP/1.0", &body.to_string());
    let start = Instant::now();
    while second.metric("tokens_predicted_total") < 3 {
        assert!(start.elapsed() < HANGS);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let (text, [_, cached]) = ask(&second, &long);
    assert_eq!(text, expected);
    assert_eq!(second.metric("prompt_tokens_restored_total"), cached);
    assert!(cached > 256);
    // The stream still runs.
    second.wait_for("requests_processing", 1);
    assert!(second.metric("passes_while_reading_state_total") > 0);
    drop(running);
}

fn run(args: &[&str]) -> Value {
    let out = succeed(
        emberflow()
            .arg("run")
            .args(args)
            .args(["--json", "--ignore-eos"]),
    );
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn a_session_continues_a_text_and_a_chat() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.session");
    let session = file.to_str().unwrap();
    let (short, long) = (prompt(60), prompt(90));
    let of = |prompt: &str, more: &[&str]| run(&[&["-p", prompt, "-n", "12"], more].concat());
    let first = of(&short, &["--session", session]);
    assert_eq!(first["text"], of(&short, &[])["text"]);
    let second = of(&long, &["--session", session]);
    assert_eq!(second["text"], of(&long, &[])["text"]);
    let [all, part] = [of(&long, &[]), second].map(|it| it["prompt_tokens"].as_u64().unwrap());
    assert!(part * 2 < all, "{part} of {all}");
    // A damaged file costs time only; another file is never replaced.
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 9]).unwrap();
    assert_eq!(
        of(&long, &["--session", session])["text"],
        of(&long, &[])["text"]
    );
    std::fs::write(&file, &bytes[..40]).unwrap();
    of(&long, &["--session", session]);
    let aside = std::fs::read(dir.path().join("a.session.damaged")).unwrap();
    assert_eq!(aside, &bytes[..40]);
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "mine").unwrap();
    for (model, path, why) in [
        ("demo", &precious, "is not a saved session"),
        ("demo-moe", &file, "another model"),
    ] {
        let path = path.to_str().unwrap();
        let out = emberflow()
            .args(["run", model, "-p", "A", "--session", path])
            .output();
        let out = out.unwrap();
        let err = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && err.contains(why), "{err}");
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"mine");

    let model = exported(dir.path());
    let chat = dir.path().join("b.session");
    let talk = |message: &str, more: &[&str]| {
        let args = ["run", &model, "--chat", "-n", "8", "--temp", "0", "--json"];
        let said = dir.path().join("said");
        std::fs::write(&said, message).unwrap();
        let mut command = emberflow();
        command
            .args(args)
            .args(more)
            .stdin(File::open(said).unwrap());
        String::from_utf8(succeed(&mut command).stdout).unwrap()
    };
    let path = ["--session", chat.to_str().unwrap()];
    talk("What is a vector?\n", &path);
    let continued = talk("And a slice?\n", &path);
    let other = emberflow()
        .args(["run", &model, "-p", "A"])
        .args(path)
        .output()
        .unwrap();
    assert_eq!(
        other.status.code(),
        Some(2),
        "a chat's messages would be lost"
    );
    let at_once = talk("What is a vector?\nAnd a slice?\n", &[]);
    let last =
        |out: &str| -> Value { serde_json::from_str(out.trim().lines().last().unwrap()).unwrap() };
    assert_eq!(last(&continued)["text"], last(&at_once)["text"]);
    assert_eq!(
        last(&continued)["logits_hash"],
        last(&at_once)["logits_hash"]
    );
    // The first answer is saved at once: a chat that is killed has it.
    let killed = dir.path().join("c.session");
    let path = ["--session", killed.to_str().unwrap()];
    let mut command = emberflow();
    let args = ["run", &model, "--chat", "-n", "8", "--temp", "0", "--json"];
    command.args(args).args(path).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"What is a vector?\n").unwrap();
    let start = Instant::now();
    while !killed.exists() {
        assert!(start.elapsed() < HANGS);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let continued = talk("And a slice?\n", &path);
    assert_eq!(last(&continued)["text"], last(&at_once)["text"]);
}
