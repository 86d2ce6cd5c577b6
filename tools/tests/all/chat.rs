//! Chats on a terminal: the line editor, commands, Ctrl-C, and what is typed ahead.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::terminal::{ALT_ENTER, CTRL_C, CTRL_D, CTRL_R, Terminal};
use crate::common::{cache, emberflow, exported, succeed};

/// The bundled model with a longer context, a template that shows every message, and no recommended sampling.
fn packed(dir: &Path) -> String {
    let folder = exported(dir);
    let edit = |name: &str, edit: fn(&mut Value)| {
        let path = format!("{folder}/{name}");
        let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        std::fs::write(&path, value.to_string()).unwrap();
    };
    edit("config.json", |config| {
        config["max_position_embeddings"] = json!(8192);
    });
    edit("tokenizer_config.json", |config| {
        let template =
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
        config["chat_template"] = json!(template);
    });
    edit("generation_config.json", |config| {
        config
            .as_object_mut()
            .unwrap()
            .retain(|key, _| key.ends_with("token_id"));
    });
    let packed = format!("{}/m.ember", dir.display());
    succeed(emberflow().args(["pack", &folder, "-o", &packed]));
    packed
}

/// A chat, at its first prompt.
fn chat(dir: &Path, model: &str, options: &str) -> Terminal {
    let args = [&["run", model, "--chat"], &*words(options)].concat();
    let mut terminal = Terminal::start(&args, dir, None);
    terminal.wait("/help lists commands");
    terminal.prompt();
    terminal
}

fn words(options: &str) -> Vec<&str> {
    options.split_whitespace().collect()
}

/// The texts of a saved conversation.
fn saved(dir: &Path, name: &str) -> Vec<String> {
    let json: Value = serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap();
    let messages = json["messages"].as_array().unwrap().iter();
    let text = |message: &Value| message["content"].as_str().unwrap().to_owned();
    messages.map(text).collect()
}

/// A line that the line mode of terminals cuts.
fn long_line() -> String {
    let words: Vec<String> = (0..900).map(|n| format!("w{n}")).collect();
    let line = words.join(" ");
    assert!(line.len() > 4095 + 100);
    line
}

/// With `-p` or `-f` one message is answered, as from a pipe.
#[test]
fn one_message_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("message.txt");
    std::fs::write(&file, "What is a trait?").unwrap();
    let file = file.to_str().unwrap();
    let args = ["run", "demo", "--chat", "-n", "12", "--temp", "0"];
    let ask = |more: &[&str]| emberflow().args(args).args(more).output().unwrap();
    let piped = std::process::Command::new("sh")
        .args([
            "-c",
            "echo 'What is a trait?' | \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_emberflow"),
        ])
        .args(args)
        .output()
        .unwrap();
    assert!(piped.status.success() && piped.stdout.len() > 12);
    for more in [&["-p", "What is a trait?"], &["-f", file]] {
        let found = ask(more);
        assert!(found.status.success(), "{found:?}");
        assert_eq!(found.stdout, piped.stdout, "{more:?}");
    }
    let empty = ask(&["-p", " "]);
    assert!(!empty.status.success());
    assert!(String::from_utf8_lossy(&empty.stderr).contains("the message is empty"));
}

#[test]
fn long_lines_pastes_and_several_lines_are_one_message_each() {
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path());
    let mut terminal = chat(dir.path(), &model, "-n 4 --context 8192 --ignore-eos");
    let long = long_line();
    terminal.line(&long);
    terminal.wait("cut after 4 tokens");
    terminal.prompt();
    terminal.line("\x1b[200~fn first() {\r\n\tsecond\\\nthird \u{1F525}\n}\x1b[201~");
    terminal.wait("cut after 4 tokens");
    terminal.prompt();
    terminal.line(&format!("one{ALT_ENTER}two"));
    terminal.wait("cut after 4 tokens");
    terminal.prompt();
    terminal.line("\"\"\"begins");
    terminal.line("goes on");
    terminal.line("ends\"\"\"");
    terminal.wait("cut after 4 tokens");
    terminal.prompt();
    // A former message is found and sent again.
    terminal.press(CTRL_R);
    terminal.press("first()");
    terminal.wait("first() {");
    terminal.press("\r");
    terminal.wait("cut after 4 tokens");
    terminal.prompt();
    terminal.line("/save chat.json");
    terminal.wait("(10 messages saved to chat.json)");
    terminal.press(CTRL_D);
    assert_eq!(terminal.end(), 0);
    let said = saved(dir.path(), "chat.json");
    let paste = "fn first() {\n\tsecond\\\nthird \u{1F525}\n}";
    assert_eq!(said[0], long);
    assert_eq!(
        [&*said[2], &said[4], &said[6]],
        [paste, "one\ntwo", "begins\ngoes on\nends"]
    );
    assert_eq!(said[8], paste);

    let history = cache().join("emberflow/chat_history");
    let mode = history.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{mode:o}");
    // The next chat has it.
    let mut terminal = chat(dir.path(), &model, "-n 4");
    terminal.press("\x1b[A");
    terminal.wait("/save chat.json");
    terminal.press(CTRL_C);
    terminal.wait("(Ctrl-D or /exit ends the chat)");
    terminal.prompt();
    terminal.line("/exit");
    assert_eq!(terminal.end(), 0);
}

#[test]
fn commands_change_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path());
    let mut terminal = chat(dir.path(), &model, "-n 12 --ignore-eos");
    let mut does = |line: &str, told: &str| {
        terminal.line(line);
        terminal.wait(told);
        terminal.prompt()
    };
    does("/retry", "write a message first");
    does("/stats", "nothing was answered yet");
    does("What is a trait?", "cut after 12 tokens");
    let before = does("/save a.json", "(2 messages saved");
    assert!(!before.contains("tokens/s"), "{before}");
    does("/retry", "cut after 12 tokens");
    does("/save b.json", "(2 messages saved");
    does("/stats", "(12 tokens, ");
    does("/system Be short.", "");
    does("/system", "Be short.");
    does("/set temp 0", "(greedy (as chosen); at most 12 tokens)");
    does("/set temp hot", "0 for greedy");
    does("/set top-p 3", "top-p");
    does("/set n 5", "at most 5 tokens");
    does("And a vector?", "cut after 5 tokens");
    does("/save c.json", "(4 messages saved");
    does("/hlep", "did you mean /help?");
    does("/clear", "forgotten");
    does("/save d.json", "(0 messages saved");
    does("/load a.json", "(2 messages loaded");
    does("/system", "no system message");
    does("/load nothing.json", "nothing.json");
    std::fs::write(dir.path().join("notes.txt"), "precious").unwrap();
    does("/save notes.txt", "name another file");
    does("/load notes.txt", "/save writes one");
    does(
        "/set temp -",
        "temperature 0.8, top-k 40, top-p 0.95, min-p 0.05",
    );
    // A message that does not fit is refused, and the chat goes on.
    let paste = format!("\x1b[200~{}\x1b[201~", "word ".repeat(3000));
    does(&paste, "context");
    does("More?", "cut after 5 tokens");
    does("/save a.json", "(4 messages saved");
    terminal.press(CTRL_D);
    assert_eq!(terminal.end(), 0);
    assert!(terminal.is_as_before());

    let at = |name: &str| saved(dir.path(), name);
    let (first, again, third) = (at("a.json"), at("b.json"), at("c.json"));
    assert_eq!([&*first[0], &again[0]], ["What is a trait?"; 2]);
    assert_ne!(first[1], again[1], "another seed draws another answer");
    assert_eq!(
        third[..4],
        ["Be short.", &first[0], &again[1], "And a vector?"]
    );
    assert_eq!(at("d.json"), ["Be short."]);
    assert_eq!(first[2], "More?");
    let notes = std::fs::read_to_string(dir.path().join("notes.txt")).unwrap();
    assert_eq!(notes, "precious");
}

#[test]
fn a_message_longer_than_the_context_drops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path());
    let mut terminal = chat(dir.path(), &model, "-n 5 --ignore-eos --context 100");
    let mut does = |line: &str, told: &str| {
        terminal.line(line);
        terminal.wait(told);
        terminal.prompt()
    };
    does("What is a trait?", "cut after 5 tokens");
    does(&"word ".repeat(120), "the context holds 100");
    does("/save a.json", "(2 messages saved");
    terminal.press(CTRL_D);
    assert_eq!(terminal.end(), 0);
    assert_eq!(saved(dir.path(), "a.json")[0], "What is a trait?");
}

/// An answer of 300 tokens takes long enough to type into it; the text that is typed belongs to the next prompt.
#[test]
fn typed_ahead_text_stays_out_of_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path());
    let mut terminal = chat(dir.path(), &model, "-n 300 --ignore-eos");
    terminal.line("Say something.");
    terminal.press("typed\x1b[200~ ahead\nin two lines\x1b[201~\r");
    let answer = terminal.wait("cut after 300 tokens");
    assert!(!answer.contains("typed"), "{answer}");
    terminal.prompt();
    terminal.wait("in two lines");
    terminal.wait("cut after 300 tokens");
    terminal.prompt();
    terminal.line("/save chat.json");
    terminal.wait("(4 messages saved");
    assert_eq!(
        saved(dir.path(), "chat.json")[2],
        "typed ahead\nin two lines"
    );
}

#[test]
fn ctrl_c_stops_an_answer_and_the_chat_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path());
    let mut terminal = Terminal::start(
        // A model that is named alone is talked to.
        &[
            "run",
            &model,
            "-n",
            "-1",
            "--ignore-eos",
            "--context",
            "8192",
        ],
        dir.path(),
        Some("answers"),
    );
    terminal.wait("/help lists commands");
    terminal.prompt();
    terminal.line("Go on for ever.");
    let answers = dir.path().join("answers");
    while std::fs::read(&answers).unwrap().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    terminal.press(CTRL_C);
    terminal.wait("(answer stopped; /retry answers again)");
    terminal.prompt();
    terminal.line("/save chat.json");
    terminal.wait("(2 messages saved");
    terminal.prompt();
    assert!(!terminal.is_as_before());
    terminal.press(CTRL_D);
    assert_eq!(terminal.end(), 0);
    assert!(terminal.is_as_before());
    // Standard output has the answer only.
    let answer = std::fs::read_to_string(&answers).unwrap();
    assert_eq!(answer.trim(), saved(dir.path(), "chat.json")[1]);
}

/// A prompt that is typed is not cut either.
#[test]
fn a_typed_prompt_arrives_whole() {
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path());
    let args = ["run", &model, "-p", "-", "-n", "1", "--json"];
    let mut terminal = Terminal::start(&args, dir.path(), Some("report"));
    terminal.wait("prompt> ");
    terminal.line(&long_line());
    assert_eq!(terminal.end(), 0);
    let report = std::fs::read(dir.path().join("report")).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    let given = ["run", &model, "-p", &long_line(), "-n", "1", "--json"];
    let given = crate::common::json(&given);
    assert_eq!(report["logits_hash"], given["logits_hash"]);
    assert_eq!(report["prompt_tokens"], given["prompt_tokens"]);
}

/// Who prompts a model that chats, on a terminal, reads how to get an answer; pipes have nothing but the text.
#[test]
fn a_prompt_for_a_chat_model_has_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.gguf");
    succeed(emberflow().arg("export").arg("-o").arg(&model));
    let args = ["run", "m.gguf", "-p", "A vector is", "-n", "4"];
    let mut terminal = Terminal::start(&args, dir.path(), Some("text"));
    terminal.wait("for an answer, add --chat");
    assert_eq!(terminal.end(), 0);
    let piped = succeed(emberflow().args(args).current_dir(dir.path()));
    let text = std::fs::read(dir.path().join("text")).unwrap();
    assert!(text.starts_with(b"A vector is"));
    assert_eq!(piped.stdout, text);
    assert!(!String::from_utf8_lossy(&piped.stderr).contains("--chat"));
}
