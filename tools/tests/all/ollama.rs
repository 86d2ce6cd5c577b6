//! Ollama's API of `emberflow serve` on the bundled model: the same output as OpenAI's.

use crate::common;
use crate::common::server::Server;
use serde_json::{Value, json};

#[test]
fn chats() {
    let server = Server::start(&["--alias", "demo"]);
    let message = json!([{"role": "user", "content": "What is a vector?"}]);
    let body = json!({"messages": message, "max_tokens": 12, "temperature": 0});
    let wanted = server.post("/v1/chat/completions", &body).json();
    let wanted = wanted["choices"][0]["message"]["content"].as_str().unwrap();
    let options = json!({"num_predict": 12, "temperature": 0});
    let mut body =
        json!({"model": "demo:latest", "messages": message, "options": options, "stream": false});
    let whole = server.post("/api/chat", &body).json();
    assert_eq!(whole["message"]["content"], wanted);
    assert_eq!(whole["message"]["role"], "assistant");
    assert_eq!(whole["done"], true);
    assert!(["stop", "length"].contains(&whole["done_reason"].as_str().unwrap()));
    let count = |name: &str| whole[name].as_u64().unwrap();
    assert!(count("prompt_eval_count") > 4 && count("eval_count") <= 12);
    assert!(count("total_duration") >= count("eval_duration") + count("prompt_eval_duration"));
    // streaming is the default
    body.as_object_mut().unwrap().remove("stream");
    let reply = server.post("/api/chat", &body);
    assert!(
        reply.head.contains("application/x-ndjson"),
        "{}",
        reply.head
    );
    let lines: Vec<Value> = reply
        .body
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let (last, pieces) = lines.split_last().unwrap();
    let text: String = pieces
        .iter()
        .map(|p| p["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, wanted);
    assert!(pieces.iter().all(|p| p["done"] == false));
    assert_eq!(last["done"], true);
    assert_eq!(last["eval_count"], whole["eval_count"]);
}

#[test]
fn prompts_go_through_the_template_unless_raw() {
    let server = Server::start(&["--alias", "demo"]);
    let prompt = "The borrow checker";
    let options = json!({"num_predict": 8, "temperature": 0});
    let mut body = json!({"model": "demo", "prompt": prompt, "stream": false, "options": options});
    let found = server.post("/api/generate", &body).json();
    let message = json!([{"role": "user", "content": prompt}]);
    let chat = json!({"messages": message, "max_tokens": 8, "temperature": 0});
    let wanted = server.post("/v1/chat/completions", &chat).json();
    assert_eq!(
        found["response"],
        wanted["choices"][0]["message"]["content"]
    );
    body["raw"] = true.into();
    let found = server.post("/api/generate", &body).json();
    let plain = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
    assert_eq!(found["response"], server.complete(&plain));
}

#[test]
fn lists_and_errors() {
    let server = Server::start(&["--alias", "demo", "--strict-model"]);
    let loaded = server
        .post("/api/generate", &json!({"model": "demo"}))
        .json();
    assert_eq!(loaded["done_reason"], "load");
    let listed = server.get("/api/tags").json()["models"][0].take();
    assert_eq!(listed["name"], "demo");
    let digest = listed["digest"].as_str().unwrap();
    let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    assert!(digest.len() == 64 && digest.chars().all(hex), "{digest}");
    let running = server.get("/api/ps").json()["models"][0].take();
    assert_eq!(
        (&running["digest"], &running["context_length"]),
        (&listed["digest"], &json!(1024))
    );
    // VS Code asks for 0.6.4.
    let version = server.get("/api/version").json()["version"].take();
    let numbers = version
        .as_str()
        .unwrap()
        .split('.')
        .map(|n| n.parse::<u32>().unwrap());
    assert!(numbers.collect::<Vec<_>>() >= vec![0, 6, 4], "{version}");
    let shown = server.post("/api/show", &json!({"model": "demo"})).json();
    assert_eq!(shown["details"]["family"], "llama");
    let info = &shown["model_info"];
    assert_eq!(info["general.architecture"], "llama");
    assert_eq!(info["general.basename"], "demo");
    assert_eq!(info["llama.context_length"], 1024, "that of the server");
    let config = common::json(&["inspect", "--json"])["meta"]["config"].take();
    for (name, of) in [
        ("embedding_length", "d_model"),
        ("block_count", "layers"),
        ("feed_forward_length", "ffn"),
        ("attention.head_count", "heads"),
        ("attention.head_count_kv", "kv_heads"),
    ] {
        assert!(config[of].is_u64(), "{config}");
        assert_eq!(info[format!("llama.{name}")], config[of], "{name}");
    }
    let message = json!([{"role": "user", "content": "What is a vector?"}]);
    for (path, body, status) in [
        (
            "/api/chat",
            json!({"model": "other", "messages": message}),
            404,
        ),
        (
            "/api/generate",
            json!({"prompt": "a", "images": ["aGk="]}),
            400,
        ),
        ("/api/generate", json!({"prompt": "a", "format": 3}), 400),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, status, "{}", reply.body);
        assert!(reply.json()["error"].is_string(), "{}", reply.body);
    }
}

/// The token of each log-probability, and the log-probabilities, of lines of JSON.
fn log_probs(lines: &[Value]) -> Vec<Value> {
    let all = lines.iter().filter_map(|line| line["logprobs"].as_array());
    all.flatten().cloned().collect()
}

fn lines(body: &str) -> Vec<Value> {
    body.lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

/// Log-probabilities are those of OpenAI's API, whole and streamed.
#[test]
fn tokens_have_log_probabilities() {
    let server = Server::start(&[]);
    let messages = json!([{"role": "user", "content": "What is a vector?"}]);
    let chat = json!({"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let chat = server.post("/v1/chat/completions", &chat).json();
    let wanted = chat["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(wanted[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let options = json!({"num_predict": 8, "temperature": 0});
    let ours = json!({"options": options, "logprobs": true, "top_logprobs": 2});
    for (path, field, value) in [
        ("/api/chat", "messages", messages),
        ("/api/generate", "prompt", json!("What is a vector?")),
    ] {
        let mut body = ours.clone();
        body[field] = value;
        let streamed = lines(&server.post(path, &body).body);
        assert_eq!(log_probs(&streamed), wanted, "{path}");
        assert!(streamed.len() > 3, "a line per piece");
        body["stream"] = false.into();
        assert_eq!(
            log_probs(&[server.post(path, &body).json()]),
            wanted,
            "{path}"
        );
        body["logprobs"] = false.into();
        assert_eq!(
            log_probs(&[server.post(path, &body).json()]),
            [] as [Value; 0]
        );
    }
}

/// `context` holds the tokens of the conversation so far; a prompt with it continues them.
#[test]
fn a_context_continues_a_conversation() {
    let server = Server::start(&[]);
    let options = json!({"num_predict": 6, "temperature": 0});
    let tokens = |text: &str, add: bool| -> Vec<u64> {
        let body = json!({"content": text, "add_special": add});
        let reply = server.post("/tokenize", &body).json();
        serde_json::from_value(reply["tokens"].clone()).unwrap()
    };
    let rendered = |prompt: &str| {
        let messages = json!([{"role": "user", "content": prompt}]);
        let reply = server
            .post("/apply-template", &json!({"messages": messages}))
            .json();
        tokens(reply["prompt"].as_str().unwrap(), false)
    };
    let body = json!({"prompt": "What is a vector?", "options": options});
    let streamed = lines(&server.post("/api/generate", &body).body);
    let said: String = streamed
        .iter()
        .map(|line| line["response"].as_str().unwrap())
        .collect();
    let (last, pieces) = streamed.split_last().unwrap();
    assert!(pieces.iter().all(|piece| piece.get("context").is_none()));
    let context: Vec<u64> = serde_json::from_value(last["context"].clone()).unwrap();
    assert_eq!(
        context,
        [rendered("What is a vector?"), tokens(&said, false)].concat()
    );
    let more =
        json!({"prompt": "And a trait?", "options": options, "context": context, "stream": false});
    let more = server.post("/api/generate", &more).json();
    let mut new = rendered("And a trait?");
    let begin = tokens("", true);
    if new.starts_with(&begin) {
        new.drain(..begin.len());
    }
    let prompt = [context, new].concat();
    assert_eq!(more["prompt_eval_count"], prompt.len());
    let body = json!({"prompt": prompt, "max_tokens": 6, "temperature": 0});
    assert_eq!(more["response"], server.complete(&body));
    // Without the template there is no conversation.
    let raw = json!({"prompt": "A", "raw": true, "stream": false, "options": options});
    assert!(
        server
            .post("/api/generate", &raw)
            .json()
            .get("context")
            .is_none()
    );
    let wrong = json!({"prompt": "A", "context": [999_999]});
    assert_eq!(server.post("/api/generate", &wrong).status, 400);
}

/// Of a GGUF file, the format and the quantization are those that it states, else the most frequent format.
#[test]
fn a_gguf_file_is_called_by_its_quantization() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    common::succeed(common::emberflow().arg("export").arg("-o").arg(&path));
    let original = std::fs::read(&path).unwrap();
    let key = b"general.file_type";
    let at = original.windows(key.len()).position(|w| w == key).unwrap();
    let save = |place: usize, byte: u8| {
        let mut bytes = original.clone();
        bytes[place] = byte;
        std::fs::write(&path, bytes).unwrap();
    };
    // behind the type of the value
    save(at + key.len() + 4, 15);
    let server = Server::start(&[path.to_str().unwrap()]);
    let tags = server.get("/api/tags").json();
    let shown = server.post("/api/show", &json!({"model": "m"})).json();
    for details in [&tags["models"][0]["details"], &shown["details"]] {
        assert_eq!(details["format"], "gguf");
        assert_eq!(details["quantization_level"], "Q4_K_M");
    }
    save(at + key.len() - 1, b'x');
    let inspected = common::json(&["inspect", path.to_str().unwrap(), "--json"]);
    assert_eq!(inspected["meta"]["quant"]["whole"], "F32");
}
