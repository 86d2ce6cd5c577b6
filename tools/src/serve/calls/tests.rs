//! Calls are parsed the same whole or piece by piece; text that only looks like a call stays text.

mod families;
mod faults;
mod grammars;
mod literals;

use serde_json::{Value, json};

use super::super::rules::tests::demo;
use super::format::CallFormat;
use super::reader::{CallReader, Part};
use super::{Plan, ToolOptions};

/// The format of a template that writes no calls but has these marks.
fn format(source: &str) -> CallFormat {
    CallFormat::of(source, &[], &|_| None)
}

/// A parser of calls of `get`, whose parameter `a` is a string, and `put`.
fn reader(source: &str) -> CallReader {
    let properties = json!({"a": {"type": "string"}, "b": {}, "n": {"type": "integer"}});
    asked(
        &json!({"type": "object", "properties": properties}),
        json!({}),
    )
    .reader(&format(source))
    .unwrap()
    .unwrap()
}

/// A request with two tools; `parameters` are those of `get`, and `more` are further fields.
fn asked(parameters: &Value, more: Value) -> ToolOptions {
    let get = json!({"type": "function", "function": {"name": "get", "parameters": parameters}});
    let put = json!({"type": "function", "function": {"name": "put"}});
    let mut body = json!({"tools": [get, put]});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    serde_json::from_value(body).unwrap()
}

/// Parses pieces, and joins parts of the same kind.
fn parts(mut reader: CallReader, pieces: &[&str]) -> Vec<Part> {
    let mut all: Vec<Part> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    all.extend(reader.finish(false));
    let mut joined: Vec<Part> = Vec::new();
    for part in all {
        match (joined.last_mut(), part) {
            (Some(Part::Text(all)), Part::Text(more)) => all.push_str(&more),
            (Some(Part::Arguments(all)), Part::Arguments(more)) => all.push_str(&more),
            (_, part) => joined.push(part),
        }
    }
    joined
}

/// Parses a text whole, split at every character, and one character at a time: always the same.
fn read_by(reader: &CallReader, text: &str) -> Vec<Part> {
    let whole = parts(reader.clone(), &[text]);
    for (at, _) in text.char_indices() {
        let (before, after) = text.split_at(at);
        assert_eq!(parts(reader.clone(), &[before, after]), whole, "{before:?}");
    }
    let chars: Vec<String> = text.chars().map(String::from).collect();
    let chars: Vec<&str> = chars.iter().map(|c| &c[..]).collect();
    assert_eq!(parts(reader.clone(), &chars), whole);
    whole
}

/// The same for a template with these marks.
fn read(source: &str, text: &str) -> Vec<Part> {
    read_by(&reader(source), text)
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn call(name: &str, arguments: &str) -> [Part; 2] {
    [
        Part::Call(name.to_owned()),
        Part::Arguments(arguments.to_owned()),
    ]
}

const HERMES: &str = "<tool_call>";
const CODER: &str = "<tool_call><function=";

#[test]
fn pieces_of_any_length_give_the_same_calls() {
    let arguments = r#"{"a": "} \" </tool_call>", "b": [1, {"c": 2}]}"#;
    let two = format!(
        "I ask.\n<tool_call>\n{{\"name\": \"get\", \"arguments\": {arguments}}}\n</tool_call>\n\
         <tool_call>{{\"id\": \"x\", \"name\":\"put\",\"arguments\":{{}}}}</tool_call>\n"
    );
    let begin = [text("I ask.")];
    let wanted = [&begin[..], &call("get", arguments), &call("put", "{}")].concat();
    assert_eq!(read(HERMES, &two), wanted);
    let bare = format!(
        "\n{{\"name\": \"get\", \"parameters\": {arguments}}}; {{\"name\": \"put\", \"parameters\": {{}}}}"
    );
    assert_eq!(read("<|python_tag|>", &bare), wanted[1..]);
    assert_eq!(read("<|python_tag|>", &format!("I ask. {bare}")), wanted);
    let listed = format!(
        "I ask.\n[TOOL_CALLS] [{{\"name\": \"get\", \"arguments\": {arguments}}}, {{\"id\": \"x\", \
         \"name\": \"put\", \"arguments\": {{}}}}]"
    );
    assert_eq!(read("[TOOL_CALLS]", &listed), wanted);
    let named =
        format!("I ask.\n[TOOL_CALLS]get[ARGS]{arguments}[TOOL_CALLS]put[CALL_ID]x[ARGS]{{}}");
    assert_eq!(read("[TOOL_CALLS][ARGS]", &named), wanted);
}

#[test]
fn text_that_only_looks_like_a_call_stays_text() {
    for same in [
        "a < b, <tool> and <tool_cal",
        "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
        "<tool_call>no JSON</tool_call> more",
        "<tool_call>{\"name\": \"ge",
        "[TOOL_CALLS]rm[ARGS]{}",
        "[TOOL_CALLS] [7]",
        "[TOOL_C",
        "{\"x\": 1}",
        "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        "<|tool_call>call:rm{}<tool_call|>",
        "<|tool_call_start|>[rm()]<|tool_call_end|>",
        "<tool_call>rm\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ] {
        for source in [
            HERMES,
            CODER,
            "[TOOL_CALLS]",
            "[TOOL_CALLS][ARGS]",
            "<|python_tag|>",
            "<|tool_call>",
            "<|tool_call_start|>",
            "<arg_key>",
            "<｜tool▁calls▁begin｜>",
            "no marks",
        ] {
            assert_eq!(read(source, same), [text(same)], "{source}");
        }
    }
}

#[test]
fn members_of_a_call_stand_in_any_order() {
    let tagged = |object: &str| read(HERMES, &format!("<tool_call>\n{object}\n</tool_call>"));
    let wanted = call("get", r#"{"a": "x"}"#);
    assert_eq!(
        tagged(r#"{"arguments": {"a": "x"}, "name": "get"}"#),
        wanted
    );
    let escaped = r#"{"name": "get", "arguments": "{\"a\": \"x\"}"}"#;
    assert_eq!(tagged(escaped), wanted);
    assert_eq!(tagged(r#"{"name": "put"}"#), call("put", "{}"));
    let null = r#"{"name": "put", "arguments": null, "type": "function"}"#;
    assert_eq!(tagged(null), call("put", "{}"));
    let after = r#"{"name": "get", "arguments": {"a": "x"}, "id": "}1"}"#;
    assert_eq!(tagged(after), wanted);
}

#[test]
fn a_text_that_ends_in_a_call_gives_no_complete_one() {
    let cut = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": \"b";
    assert_eq!(read(HERMES, cut), call("get", "{\"a\": \"b"));
    let begin = "<tool_call>\n<function=get>\n<parameter=a>\n/home/me\n</parameter>\n";
    for (more, arguments) in [
        ("<parameter=n>\n1", r#"{"a": "/home/me""#),
        (
            "<parameter=n>\n1\n</parameter>",
            r#"{"a": "/home/me", "n": 1"#,
        ),
        ("<parameter=", r#"{"a": "/home/me""#),
        ("", r#"{"a": "/home/me""#),
    ] {
        assert_eq!(
            read(CODER, &format!("{begin}{more}")),
            call("get", arguments)
        );
    }
    let in_text = "<tool_call>\n<function=get>\n<parameter=a>\n/ho";
    assert_eq!(read(CODER, in_text), call("get", r#"{"a": "/ho"#));
    let glm = "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>/ho";
    assert_eq!(read("<arg_key>", glm), call("get", r#"{"a": "/ho"#));
    let python = "<|tool_call_start|>[get(a='/ho";
    assert_eq!(
        read("<|tool_call_start|>", python),
        call("get", r#"{"a": "/ho"#)
    );
    let gemma = read("<|tool_call>", "<|tool_call>call:get{n:12");
    let [Part::Call(_), Part::Arguments(json)] = &gemma[..] else {
        panic!("{gemma:?}");
    };
    assert!(serde_json::from_str::<Value>(json).is_err(), "{json}");
}

#[test]
fn the_beginning_of_a_call_that_was_cut_off_is_no_text() {
    for (text, left) in [
        (
            "Well. <tool_call>{\"name\": \"ge",
            vec![Part::Text("Well.".into())],
        ),
        ("Well. <tool_", vec![Part::Text("Well.".into())]),
        (
            "<tool_call>{\"name\": \"get\", \"arguments\": {\"a",
            vec![Part::Call("get".into()), Part::Arguments("{\"a".into())],
        ),
    ] {
        let mut reader = reader(HERMES);
        let mut parts = reader.push(text);
        parts.extend(reader.finish(true));
        assert_eq!(parts, left, "{text}");
    }
}

#[test]
fn only_the_first_call_counts_without_parallel_calls() {
    let two = "<tool_call>\n{\"name\": \"put\", \"arguments\": {}}\n</tool_call>\n\
               <tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>";
    let options = asked(
        &json!({"type": "object"}),
        json!({"parallel_tool_calls": false}),
    );
    let plan: Plan = options
        .plan(&format(HERMES), demo().0.tokenizer())
        .unwrap()
        .unwrap();
    assert_eq!(read_by(&plan.reader(), two), call("put", "{}"));
    let mut reader = plan.reader();
    reader.push(two);
    assert_eq!(reader.calls(), 1);
    let both = asked(
        &json!({"type": "object"}),
        json!({"parallel_tool_calls": true}),
    );
    let mut reader = both.reader(&format(HERMES)).unwrap().unwrap();
    reader.push(two);
    assert_eq!(reader.calls(), 2);
}

fn plan(body: Value) -> Result<bool, String> {
    let asked: ToolOptions = serde_json::from_value(body).map_err(|e| e.to_string())?;
    match asked.plan(&format(""), demo().0.tokenizer()) {
        Ok(plan) => Ok(plan.is_some_and(|plan| plan.rules.is_some())),
        Err(e) => Err(e.body()["error"]["message"].as_str().unwrap().to_owned()),
    }
}

#[test]
fn tools_are_checked() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let forced = |tools: Value, choice: Value| plan(json!({"tools": tools, "tool_choice": choice}));
    assert_eq!(forced(json!([tool("a")]), json!("auto")), Ok(false));
    assert_eq!(forced(json!([tool("a")]), json!("required")), Ok(true));
    assert_eq!(forced(json!([tool("a"), tool("b")]), tool("b")), Ok(true));
    assert_eq!(
        forced(
            json!([{"type": "function", "name": "a"}]),
            json!({"type": "function", "name": "a"})
        ),
        Ok(true)
    );
    let refused = |tools: Value, choice: Value, why: &str| {
        let found = forced(tools, choice).unwrap_err();
        assert!(found.contains(why), "{found}");
    };
    refused(json!([]), json!("required"), "`tools` is missing");
    refused(json!([tool("a")]), tool("b"), "no tool has the name `b`");
    refused(json!([tool("a")]), json!("sometimes"), "`none`");
    refused(json!([tool("a"), tool("a")]), json!("auto"), "two tools");
    refused(json!([tool("a b")]), json!("auto"), "name");
    refused(json!([{"type": "web_search"}]), json!("auto"), "web_search");
    let many: Value = (0..10_000).map(|i| tool(&format!("f{i}"))).collect();
    refused(many, json!("auto"), "at most 128");
    let with = |parameters: Value| json!([{"type": "function", "function": {"name": "a", "parameters": parameters}}]);
    refused(with(json!({"type": "string"})), json!("auto"), "object");
    refused(with(json!([1])), json!("auto"), "object");
    let wide: serde_json::Map<String, Value> =
        (0..3000).map(|i| (format!("p{i}"), json!({}))).collect();
    refused(
        with(json!({"properties": wide.clone()})),
        json!("required"),
        "at most",
    );
    // A keyword may be misspelt: that matters if the schema is to be enforced exactly.
    let misspelt = json!({"properties": {"p": {"type": "string", "maxLenght": 3}}});
    assert_eq!(forced(with(misspelt.clone()), json!("auto")), Ok(false));
    assert_eq!(forced(with(misspelt.clone()), json!("required")), Ok(true));
    let unsupported = with(json!({"properties": {"p": {"uniqueItems": true}}}));
    refused(
        unsupported,
        json!("required"),
        "parameters of `a`: `uniqueItems` at #/properties/p",
    );
    let mut strict = with(misspelt);
    strict[0]["function"]["strict"] = json!(true);
    for choice in ["auto", "required"] {
        let why = "parameters of `a`: `maxLenght` at #/properties/p is an unknown keyword";
        refused(strict.clone(), json!(choice), why);
    }
    let mut strict = with(json!({"properties": wide}));
    strict[0]["function"]["strict"] = json!(true);
    refused(strict, json!("auto"), "at most");
}
