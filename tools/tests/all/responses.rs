//! `/v1/responses` of `emberflow serve` on the bundled model.

use crate::common::server::{Reply, Server};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

fn ask(input: &Value) -> Value {
    json!({"input": input, "max_output_tokens": 8, "temperature": 0})
}

fn with(mut body: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"]
        .as_str()
        .unwrap()
}

fn error(reply: &Reply, status: u16, param: &str, word: &str) {
    assert_eq!(reply.status, status, "{}", reply.body);
    let error = reply.json()["error"].take();
    assert_eq!(error["param"], param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(word), "{error}");
}

/// The last event of a stream.
fn last(reply: &Reply) -> Value {
    serde_json::from_str(reply.events().last().unwrap()).unwrap()
}

/// What a client sent stands in the response, whole and in the first and last event of a stream.
#[test]
fn a_response_repeats_its_request() {
    let server = Server::start(&[]);
    let function = json!({"type": "function", "name": "f", "description": "D", "strict": false,
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}});
    let given = json!({
        "instructions": "Be \"brief\".",
        "max_output_tokens": 5,
        "metadata": {"run": "7"},
        "parallel_tool_calls": false,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.7,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": [function],
        "top_p": 0.9,
        "user": "me",
    });
    let body = with(
        json!({"input": "Hi", "seed": 1, "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto", "service_tier": "flex", "include": ["reasoning.encrypted_content"]}),
        &given,
    );
    let whole = server.post(PATH, &body).json();
    let stream = server.post(PATH, &with(body, &json!({"stream": true})));
    let first: Value = serde_json::from_str(stream.events()[0]).unwrap();
    assert_eq!(first["type"], "response.created");
    for response in [&whole, &first["response"], &last(&stream)["response"]] {
        for (name, value) in given.as_object().unwrap() {
            assert_eq!(&response[name], value, "{name}");
        }
        assert_eq!(
            response["reasoning"],
            json!({"effort": "low", "summary": null})
        );
        assert_eq!(response["store"], true);
        assert_eq!(response["truncation"], "disabled");
    }
    let plain = server.post(PATH, &ask(&json!("Hi"))).json();
    for (name, value) in [
        ("instructions", json!(null)),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", json!(null)),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("user", json!(null)),
    ] {
        assert_eq!(plain[name], value, "{name}");
    }
    let verbose = with(ask(&json!("Hi")), &json!({"text": {"verbosity": "loud"}}));
    error(&server.post(PATH, &verbose), 400, "text", "`low`");
}

/// A response continues another one as if the whole conversation had been sent, also after a stream.
#[test]
fn a_response_continues_another_one() {
    let server = Server::start(&[]);
    let question = json!({"role": "user", "content": "What is a vector?"});
    let more = json!({"role": "user", "content": "And a trait?"});
    let instructed = json!({"instructions": "Be brief."});
    let first = server
        .post(PATH, &with(ask(&json!("What is a vector?")), &instructed))
        .json();
    let said = json!({"role": "assistant", "content": text(&first)});
    let whole = |items: &[&Value]| server.post(PATH, &ask(&json!(items))).json();
    let after = |id: &Value, input: Value| {
        server.post(
            PATH,
            &with(ask(&input), &json!({"previous_response_id": id})),
        )
    };
    let wanted = whole(&[&question, &said, &more]);
    let second = after(&first["id"], json!("And a trait?")).json();
    assert_eq!(second["previous_response_id"], first["id"]);
    assert_ne!(second["id"], first["id"]);
    assert_eq!(text(&second), text(&wanted));
    let count = |response: &Value| response["usage"]["input_tokens"].clone();
    assert_eq!(
        count(&second),
        count(&wanted),
        "instructions are not taken over"
    );
    let said_again = json!({"role": "assistant", "content": text(&second)});
    let third = json!({"role": "user", "content": "Both?"});
    let wanted = whole(&[&question, &said, &more, &said_again, &third]);
    let streamed = with(
        ask(&json!([third])),
        &json!({"previous_response_id": second["id"], "stream": true}),
    );
    let streamed = last(&server.post(PATH, &streamed))["response"].take();
    assert_eq!(
        (text(&streamed), count(&streamed)),
        (text(&wanted), count(&wanted))
    );
    let kept = server.get(&format!("{PATH}/{}", streamed["id"].as_str().unwrap()));
    assert_eq!(kept.json(), streamed);
    assert_eq!(after(&streamed["id"], json!("Go on")).status, 200);
}

#[test]
fn responses_are_kept_until_they_are_deleted() {
    let server = Server::start(&["--api-key", "k"]);
    let send = |method: &str, path: &str, body: &str| {
        let head =
            format!("{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nX-Api-Key: k");
        server.ask(&head, body)
    };
    let made =
        |fields: Value| send("POST", PATH, &with(ask(&json!("Hi")), &fields).to_string()).json();
    let kept = made(json!({}));
    let path = format!("{PATH}/{}", kept["id"].as_str().unwrap());
    assert_eq!(send("GET", &path, "").json(), kept);
    assert_eq!(send("GET", &path[3..], "").json(), kept, "without /v1");
    assert_eq!(server.get(&path).status, 401);
    let deleted = send("DELETE", &path, "").json();
    assert_eq!(
        deleted,
        json!({"id": kept["id"], "object": "response", "deleted": true})
    );
    for method in ["GET", "DELETE"] {
        let reply = send(method, &path, "");
        assert_eq!(reply.status, 404, "{}", reply.body);
        assert_eq!(reply.json()["error"]["type"], "not_found_error");
    }
    let unkept = made(json!({"store": false}));
    assert_eq!(unkept["store"], false);
    for id in [&kept["id"], &unkept["id"], &json!("resp_0")] {
        let body = with(ask(&json!("Hi")), &json!({"previous_response_id": id}));
        let reply = send("POST", PATH, &body.to_string());
        error(&reply, 404, "previous_response_id", "`store` false");
    }
}

/// The conversation before a response, as pages of items.
#[test]
fn a_response_lists_its_input_items() {
    let server = Server::start(&[]);
    let first = server.post(PATH, &ask(&json!("What is a vector?"))).json();
    let input = json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And a trait?"}]}]);
    let more = with(ask(&input), &json!({"previous_response_id": first["id"]}));
    let second = server.post(PATH, &more).json();
    let path = |of: &Value| format!("{PATH}/{}/input_items", of["id"].as_str().unwrap());
    let one = server.get(&path(&first)).json();
    assert_eq!(
        (
            &one["object"],
            &one["has_more"],
            one["data"].as_array().unwrap().len()
        ),
        (&json!("list"), &json!(false), 1)
    );
    let item = &one["data"][0];
    assert_eq!([&item["type"], &item["role"]], ["message", "user"]);
    let question = json!([{"type": "input_text", "text": "What is a vector?"}]);
    assert_eq!(item["content"], question);
    assert_eq!([&one["first_id"], &one["last_id"]], [&item["id"]; 2]);
    // The newest first, with the answer between the questions.
    let all = server.get(&path(&second)).json()["data"].take();
    let roles = |items: &Value| -> Vec<String> {
        let items = items.as_array().unwrap().iter();
        items
            .map(|item| item["role"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(roles(&all), ["user", "assistant", "user"]);
    assert_eq!(all[2]["content"], question);
    assert_eq!(all[1]["content"][0]["text"], text(&first));
    assert_eq!(all[0]["content"], input[0]["content"]);
    let page = server
        .get(&format!("{}?order=asc&limit=2", path(&second)))
        .json();
    assert_eq!(
        (roles(&page["data"]).len(), &page["has_more"]),
        (2, &json!(true))
    );
    assert_eq!(page["data"][0], all[2]);
    let last = page["last_id"].as_str().unwrap();
    let rest = server
        .get(&format!("{}?order=asc&after={last}", path(&second)))
        .json();
    assert_eq!(
        (&rest["data"], &rest["has_more"]),
        (&json!([all[0]]), &json!(false))
    );
    for (query, param) in [
        ("limit=0", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ] {
        let reply = server.get(&format!("{}?{query}", path(&second)));
        error(&reply, 400, param, param);
    }
    let unknown = server.get(&format!("{PATH}/resp_0/input_items"));
    assert_eq!(unknown.status, 404, "{}", unknown.body);
}

/// A custom tool is a function with one text, and tools that clients send unasked are left out.
#[test]
fn custom_tools_are_called_with_a_text() {
    let server = Server::start(&[]);
    let custom = json!({"type": "custom", "name": "note", "description": "Notes.",
        "format": {"type": "grammar", "syntax": "regex", "definition": ".*"}});
    let choice = json!({"type": "custom", "name": "note"});
    let body = json!({"input": "What is a vector?", "max_output_tokens": 60, "temperature": 0,
        "tools": [{"type": "web_search", "external_web_access": false}, custom], "tool_choice": choice});
    let whole = server.post(PATH, &body).json();
    assert_eq!(whole["tools"], json!([custom]));
    assert_eq!(whole["tool_choice"], choice);
    let item = &whole["output"][0];
    assert_eq!(
        (&item["type"], &item["name"]),
        (&json!("custom_tool_call"), &json!("note")),
        "{whole}"
    );
    let input = item["input"].as_str().unwrap();
    assert!(!input.is_empty() && !input.starts_with('{'), "{input}");
    assert!(item.get("arguments").is_none());
    let stream = server.post(PATH, &with(body, &json!({"stream": true})));
    let mut found = Vec::new();
    for event in stream.events() {
        let event: Value = serde_json::from_str(event).unwrap();
        let (kind, place) = match event["type"].as_str().unwrap() {
            "response.output_item.added" => ("added", "/item/input"),
            "response.custom_tool_call_input.delta" => ("delta", "/delta"),
            "response.custom_tool_call_input.done" => ("done", "/input"),
            "response.output_item.done" => ("item", "/item/input"),
            _ => continue,
        };
        found.push((kind, event.pointer(place).unwrap().clone()));
    }
    let wanted = [
        ("added", ""),
        ("delta", input),
        ("done", input),
        ("item", input),
    ];
    assert_eq!(found, wanted.map(|(kind, text)| (kind, json!(text))));
    let result =
        json!([{"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "noted"}]);
    let again = with(ask(&result), &json!({"previous_response_id": whole["id"]}));
    assert_eq!(server.post(PATH, &again).status, 200);
    for (field, value) in [
        (
            "tools",
            json!([{"type": "file_search", "vector_store_ids": []}]),
        ),
        (
            "tools",
            json!([{"type": "mcp", "server_label": "l", "server_url": "u"}]),
        ),
        ("tool_choice", json!({"type": "web_search_preview"})),
    ] {
        let body = with(ask(&json!("Hi")), &json!({field: value}));
        error(&server.post(PATH, &body), 400, field, "type");
    }
    let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]);
    error(
        &server.post(PATH, &ask(&image)),
        400,
        "input",
        "input_image",
    );
}

/// Calls of functions in a namespace name both.
#[test]
fn functions_of_a_namespace_are_called() {
    let server = Server::start(&[]);
    let find = json!({"type": "function", "name": "find", "parameters": {"type": "object", "properties":
        {"kind": {"enum": ["struct", "trait"]}}, "required": ["kind"], "additionalProperties": false}});
    let tools =
        json!([{"type": "namespace", "name": "mcp__docs", "description": "D", "tools": [find]}]);
    let body = json!({"input": "What is a vector?", "max_output_tokens": 80, "temperature": 0,
        "tools": tools, "tool_choice": "required", "parallel_tool_calls": false});
    let whole = server.post(PATH, &body).json();
    let item = &whole["output"][0];
    assert_eq!(
        (&item["namespace"], &item["name"]),
        (&json!("mcp__docs"), &json!("find")),
        "{whole}"
    );
    let arguments: Value = serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["kind"].is_string());
    let result =
        json!([{"type": "function_call_output", "call_id": item["call_id"], "output": "none"}]);
    let again = with(
        ask(&result),
        &json!({"previous_response_id": whole["id"], "tools": tools}),
    );
    assert_eq!(server.post(PATH, &again).status, 200);
}

/// Log-probabilities of the text are those of a chat.
#[test]
fn a_text_has_its_log_probabilities() {
    let server = Server::start(&[]);
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0,
        "logprobs": true, "top_logprobs": 2, "ignore_eos": true});
    let chat = server.post("/v1/chat/completions", &chat).json();
    let wanted = &chat["choices"][0]["logprobs"]["content"];
    let fields =
        json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2, "ignore_eos": true});
    let body = with(ask(&json!("Hi")), &fields);
    let whole = server.post(PATH, &body).json();
    assert_eq!(&whole["output"][0]["content"][0]["logprobs"], wanted);
    assert_eq!(whole["top_logprobs"], 2);
    let stream = server.post(PATH, &with(body, &json!({"stream": true})));
    let mut streamed = Vec::new();
    for event in stream.events() {
        let event: Value = serde_json::from_str(event).unwrap();
        if event["type"] == "response.output_text.delta" {
            streamed.extend(event["logprobs"].as_array().unwrap().clone());
        }
    }
    assert_eq!(&json!(streamed), wanted);
}

/// `top_p` 0 leaves the most likely token, whatever the temperature.
#[test]
fn top_p_zero_is_greedy() {
    let server = Server::start(&[]);
    let messages = json!([{"role": "user", "content": "What is a vector?"}]);
    let options = json!({"num_predict": 8, "temperature": 0});
    for (path, mut body) in [
        (PATH, ask(&json!("What is a vector?"))),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 8, "temperature": 0}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "A vector", "max_tokens": 8, "temperature": 0}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 8, "temperature": 0}),
        ),
        (
            "/completion",
            json!({"prompt": "A vector", "n_predict": 8, "temperature": 0}),
        ),
        (
            "/api/chat",
            json!({"messages": messages, "stream": false, "options": options}),
        ),
    ] {
        let said = |body: &Value| {
            let reply = server.post(path, body);
            assert_eq!(reply.status, 200, "{path}: {}", reply.body);
            let all = reply.json();
            let places = ["/output/0/content", "/choices/0", "/content", "/message"];
            places
                .iter()
                .find_map(|place| all.pointer(place))
                .unwrap()
                .clone()
        };
        let greedy = said(&body);
        let fields = json!({"temperature": 1.5, "top_p": 0, "seed": 3});
        if body["options"].is_object() {
            body["options"] = with(body["options"].take(), &fields);
        } else {
            body = with(body, &fields);
        }
        assert_eq!(said(&body), greedy, "{path}");
    }
}

#[test]
fn ranking_is_refused_with_the_reason() {
    let server = Server::start(&[]);
    for path in ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"] {
        let body = json!({"query": "q", "documents": ["a", "b"]});
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
        let error = reply.json()["error"].take();
        assert_eq!(error["type"], "not_supported_error");
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .contains("no ranking head"),
            "{error}"
        );
    }
}
