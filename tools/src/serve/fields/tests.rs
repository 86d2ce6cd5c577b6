//! The table is complete, and request bodies are checked against it.

use serde_json::{Value, json};

use super::*;

fn taken(on: u16, body: &Value) -> Value {
    let taken = take(on, body.to_string().as_bytes()).unwrap();
    serde_json::from_slice(&taken).unwrap()
}

fn refused(on: u16, body: &Value) -> Value {
    let error = take(on, body.to_string().as_bytes()).unwrap_err();
    error.body()["error"].take()
}

#[test]
fn a_name_has_one_meaning_in_a_request() {
    for (at, field) in TABLE.iter().enumerate() {
        let twice = |other: &Field| other.name == field.name && other.on & field.on != 0;
        assert!(!TABLE[..at].iter().any(twice), "{}", field.name);
        if let Does::As(name) = field.does {
            for bit in (0..16)
                .map(|bit| field.on & 1 << bit)
                .filter(|&bit| bit != 0)
            {
                // Options become fields of OpenAI's API.
                let on = if bit == on::OPTIONS { on::OPEN } else { bit };
                let meant = super::field(on, name).map(|meant| meant.does);
                assert_eq!(meant, Some(Does::Honoured), "{} as {name}", field.name);
            }
        }
    }
}

#[test]
fn the_page_shows_the_table() {
    const BEGIN: &str = "<!-- fields: the table of tools/src/serve/fields/table.rs; EMBERFLOW_RECORD=1 cargo test fields writes it -->\n";
    const END: &str = "<!-- end of fields -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/serve.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (shown, after) = rest.split_once(END).unwrap();
    if std::env::var_os("EMBERFLOW_RECORD").is_some() {
        std::fs::write(path, format!("{before}{BEGIN}{}{END}{after}", markdown())).unwrap();
        return;
    }
    assert!(
        shown == markdown(),
        "set EMBERFLOW_RECORD=1 to update the table"
    );
}

#[test]
fn values_are_read_as_clients_mean_them() {
    let body = json!({
        "prompt": "A", "max_tokens": 20.0, "n_predict": 7, "top_k": -1, "seed": -1, "temperature": null,
        "user": "me", "mirostat": 0, "top_n_sigma": -1.0, "no_such_field": 1,
    });
    assert_eq!(
        taken(on::TEXT, &body),
        json!({"prompt": "A", "max_tokens": 20})
    );
    let body = json!({"n_predict": -1, "repetition_penalty": 1.5});
    assert_eq!(taken(on::TEXT, &body), json!({"repeat_penalty": 1.5}));
    let body = json!({"num_predict": -2, "top_k": 3, "num_gpu": 99});
    assert_eq!(taken(on::OPTIONS, &body), json!({"top_k": 3}));
    let nested = json!({"messages": [{"role": "user", "content": "a\"b\\"}]});
    assert_eq!(taken(on::CHAT, &nested), nested);
}

#[test]
fn errors_name_the_field() {
    let check = |body: Value, name: &str, wanted: &str| {
        let error = refused(on::CHAT, &body);
        assert_eq!(error["param"], name);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(wanted), "{message}");
    };
    check(
        json!({"temperature": "hot"}),
        "temperature",
        "is \"hot\", expected a number",
    );
    check(
        json!({"max_tokens": -5}),
        "max_tokens",
        "is -5, expected a non-negative integer (or -1)",
    );
    check(json!({"max_tokens": 1.5}), "max_tokens", "1.5");
    check(json!({"max_tokens": 1e30}), "max_tokens", "1e+30");
    check(json!({"stream": "yes"}), "stream", "true or false");
    check(json!({"messages": "Hello"}), "messages", "a list");
    check(
        json!({"mirostat": 2}),
        "mirostat",
        "remove it or set it to 0",
    );
    check(json!({"functions": [{}]}), "functions", "use `tools`");
    let wrong = take(on::CHAT, b"[1]").unwrap_err().body();
    assert!(
        wrong["error"]["message"]
            .as_str()
            .unwrap()
            .contains("the request body"),
        "{wrong}"
    );
}

#[test]
fn errors_of_parts_name_the_way_to_them() {
    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only read")]
    struct TestChat {
        messages: Vec<TestMessage>,
    }
    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only read")]
    struct TestMessage {
        role: String,
    }
    let body = br#"{"messages": [{"role": "user"}, {"role": 3}]}"#;
    let error = read::<TestChat>(on::CHAT, &take(on::CHAT, body).unwrap())
        .unwrap_err()
        .body();
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(
        message,
        "messages[1].role: invalid type: integer `3`, expected a string"
    );
    assert_eq!(error["error"]["param"], "messages");
}
