//! Calls are parsed the same whole or piece by piece; text that only looks like a call stays text.

use serde_json::{Value, json};

use emberflow_engine::Constraint;
use emberflow_models::tokenizer::Tokenizer;

use super::super::rules::tests::{compiled, demo, drawn, mistral};
use super::super::rules::{Compiler, Vocabulary};
use super::ToolOptions;
use super::form::CallFormat;
use super::reader::{CallReader, Part};

/// Parses a text in pieces of `length` characters, and joins parts of the same kind.
fn read(form: CallFormat, text: &str, length: usize) -> Vec<Part> {
    let texts = [vec!["a".to_owned()], vec![]];
    let names = ["get".to_owned(), "put".to_owned()];
    let mut reader = CallReader::new(form, names.into(), texts.into());
    let chars: Vec<char> = text.chars().collect();
    let mut parts = Vec::new();
    for piece in chars.chunks(length) {
        parts.extend(reader.push(&piece.iter().collect::<String>()));
    }
    parts.extend(reader.finish(false));
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(Part::Text(all)), Part::Text(more)) => all.push_str(&more),
            (Some(Part::Arguments(all)), Part::Arguments(more)) => all.push_str(&more),
            (_, part) => joined.push(part),
        }
    }
    joined
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

#[test]
fn pieces_of_any_length_give_the_same_calls() {
    let arguments = r#"{"a": "} \" </tool_call>", "b": [1, {"c": 2}]}"#;
    let two = format!(
        "I ask.\n<tool_call>\n{{\"name\": \"get\", \"arguments\": {arguments}}}\n</tool_call>\n\
         <tool_call>{{\"id\": \"x\", \"name\":\"put\",\"arguments\":{{}}}}</tool_call>\n"
    );
    let begin = [text("I ask.\n")];
    let wanted = [&begin[..], &call("get", arguments), &call("put", "{}")].concat();
    let bare = format!(
        "\n{{\"name\": \"get\", \"parameters\": {arguments}}}; {{\"name\": \"put\", \"parameters\": {{}}}}"
    );
    let plain = "a < b, <tool> and <tool_cal";
    let unknown = "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>";
    let wrong = "<tool_call>no JSON</tool_call> more";
    for length in [1, 2, 3, 7, 1000] {
        assert_eq!(read(CallFormat::Tagged, &two, length), wanted, "{length}");
        assert_eq!(
            read(CallFormat::Bare, &bare, length),
            wanted[1..],
            "{length}"
        );
        let listed = format!(
            "I ask.\n[TOOL_CALLS] [{{\"name\": \"get\", \"arguments\": {arguments}}}, {{\"id\": \"x\", \
             \"name\": \"put\", \"arguments\": {{}}}}]"
        );
        assert_eq!(
            read(CallFormat::Listed, &listed, length),
            wanted,
            "{length}"
        );
        let named =
            format!("I ask.\n[TOOL_CALLS]get[ARGS]{arguments}[TOOL_CALLS]put[CALL_ID]x[ARGS]{{}}");
        assert_eq!(read(CallFormat::Named, &named, length), wanted, "{length}");
        for wrong in ["[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS] [7]", "[TOOL_C"] {
            for form in [CallFormat::Listed, CallFormat::Named] {
                assert_eq!(read(form, wrong, length), [text(wrong)], "{length}");
            }
        }
        for form in [
            CallFormat::Tagged,
            CallFormat::Bare,
            CallFormat::Listed,
            CallFormat::Named,
        ] {
            assert_eq!(read(form, plain, length), [text(plain)], "{length}");
        }
        assert_eq!(read(CallFormat::Tagged, unknown, length), [text(unknown)]);
        assert_eq!(read(CallFormat::Tagged, wrong, length), [text(wrong)]);
        assert_eq!(
            read(CallFormat::Bare, "{\"x\": 1}", length),
            [text("{\"x\": 1}")]
        );
        // Cut off by its length limit.
        let cut = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": \"b";
        assert_eq!(
            read(CallFormat::Tagged, cut, length),
            call("get", "{\"a\": \"b")
        );
        let cut = "<tool_call>{\"name\": \"ge";
        assert_eq!(read(CallFormat::Tagged, cut, length), [text(cut)]);
    }
}

/// Values of string parameters are not changed; others are JSON.
#[test]
fn arguments_may_be_elements() {
    let two = "I ask.\n<tool_call>\n<function=get>\n<parameter=a>\n12 < \"3\"\n\n</parameter>\n\
               <parameter=b>\n[1, {\"c\": 2}]\n</parameter>\n<parameter=d>\nno JSON\n</parameter>\n\
               </function>\n</tool_call>\n<tool_call>\n<function=put>\n</function>\n</tool_call>\n";
    let arguments = r#"{"a": "12 < \"3\"\n", "b": [1,{"c":2}], "d": "no JSON"}"#;
    let wanted = [
        &[text("I ask.\n")][..],
        &call("get", arguments),
        &call("put", "{}"),
    ]
    .concat();
    for length in [1, 2, 3, 7, 1000] {
        assert_eq!(read(CallFormat::Elements, two, length), wanted, "{length}");
        let open = "<tool_call>\n<function=get>\n<parameter=b>\n1\n</parameter>";
        assert_eq!(
            read(CallFormat::Elements, open, length),
            call("get", "{\"b\": 1}")
        );
        for wrong in [
            "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
            "<tool_call>{\"name\": \"get\"}</tool_call>",
            "a <tool_cal",
        ] {
            assert_eq!(
                read(CallFormat::Elements, wrong, length),
                [text(wrong)],
                "{length}"
            );
        }
    }
}

/// Definitions that every parameter could refer to are not repeated without end.
#[test]
fn schemas_of_elements_are_bounded() {
    let many: serde_json::Map<String, Value> = (0..300)
        .map(|i| (format!("d{i}"), json!({"type": "integer"})))
        .collect();
    let some: serde_json::Map<String, Value> = (0..300)
        .map(|i| (format!("p{i}"), json!({"$ref": "#/$defs/d1"})))
        .collect();
    let tool = |properties: Value, defs: Value| {
        let parameters = json!({"type": "object", "properties": properties, "$defs": defs});
        let function = json!({"name": "a", "parameters": parameters});
        let body = json!({"tools": [{"type": "function", "function": function}], "tool_choice": "required"});
        let asked: ToolOptions = serde_json::from_value(body).unwrap();
        asked.plan("<tool_call><function=", demo().0.tokenizer())
    };
    let small = json!({"d1": {"type": "integer"}});
    assert!(tool(json!({"p": {"$ref": "#/$defs/d1"}}), small).is_ok());
    let refused = tool(some.into(), many.into()).unwrap_err();
    let message = refused.body()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.contains("KiB") || message.contains("at most"),
        "{message}"
    );
}

fn plan(body: Value) -> Result<bool, String> {
    let asked: ToolOptions = serde_json::from_value(body).map_err(|e| e.to_string())?;
    match asked.plan("", demo().0.tokenizer()) {
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
        with(json!({"properties": wide})),
        json!("required"),
        "at most",
    );
}

#[test]
fn the_beginning_of_a_call_that_was_cut_off_is_no_text() {
    for (text, left) in [
        (
            "Well. <tool_call>{\"name\": \"ge",
            vec![Part::Text("Well. ".into())],
        ),
        (
            "<tool_call>{\"name\": \"get\", \"arguments\": {\"a",
            vec![Part::Call("get".into()), Part::Arguments("{\"a".into())],
        ),
    ] {
        let mut reader = CallReader::new(CallFormat::Tagged, ["get".to_owned()].into(), [].into());
        let mut parts = reader.push(text);
        parts.extend(reader.finish(true));
        assert_eq!(parts, left, "{text}");
    }
}

/// A template of each form.
const TEMPLATES: [&str; 5] = [
    "<tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][ARGS]",
    "<tool_call><function=",
];

/// Two tools, one of them with strict arguments.
fn two(choice: &str) -> ToolOptions {
    let parameters = json!({"type": "object", "properties": {"kind": {"enum": ["struct", "trait"]}},
        "required": ["kind"], "additionalProperties": false});
    let tool = |name: &str, strict: bool| {
        json!({"type": "function",
            "function": {"name": name, "strict": strict, "parameters": parameters}})
    };
    let body = json!({"tools": [tool("get", true), tool("put", false)], "tool_choice": choice});
    serde_json::from_value(body).unwrap()
}

/// Calls in a text: names and arguments.
fn calls(mut reader: CallReader, text: &str) -> Vec<[String; 2]> {
    let mut calls: Vec<[String; 2]> = Vec::new();
    for part in reader.push(text) {
        match part {
            Part::Call(name) => calls.push([name, String::new()]),
            Part::Arguments(more) => calls.last_mut().unwrap()[1] += &more,
            Part::Text(_) | Part::Thought(_) => {}
        }
    }
    calls
}

#[test]
fn forced_calls_are_calls_in_every_form() {
    let (text, compiler) = demo();
    for template in TEMPLATES {
        let plan = two("required").plan(template, text.tokenizer());
        let plan = plan.unwrap().unwrap();
        assert!(plan.forced);
        for seed in 0..4 {
            let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
            let (written, complete) = drawn(&text, &mut held, seed, 600);
            assert!(complete, "{template}: {written}");
            let calls = calls(plan.reader(), &written);
            assert!(!calls.is_empty(), "{template}: {written}");
            for [_, arguments] in calls {
                let arguments: Value = serde_json::from_str(&arguments).unwrap();
                assert!(["struct", "trait"].contains(&arguments["kind"].as_str().unwrap()));
            }
        }
    }
}

/// Accepts the tokens of a text.
fn accept(held: &mut dyn Constraint, tokenizer: &Tokenizer, text: &str) {
    for token in tokenizer.encode(text, false).unwrap() {
        held.prepare().unwrap();
        assert!(held.allows(token), "{text}");
        held.accept(token).unwrap();
    }
}

#[test]
fn strict_calls_are_valid_where_they_need_not_be() {
    let (text, compiler) = demo();
    for template in TEMPLATES {
        let plan = two("auto").plan(template, text.tokenizer());
        let plan = plan.unwrap().unwrap();
        assert!(!plan.forced);
        let rules = plan.rules.as_ref().unwrap();
        // Any text is allowed.
        let mut held = compiled(&compiler, rules);
        accept(
            &mut held,
            text.tokenizer(),
            "No call < is \"needed\" [here] }{.\n",
        );
        held.prepare().unwrap();
        assert!(held.allows(text.config().eos[0]), "{template}");
        let form = CallFormat::of_template(template);
        let before = match form {
            CallFormat::Bare => "{\"name\"".to_owned(),
            _ => format!("I call. {}", form.open()),
        };
        for seed in 0..4 {
            let mut held = compiled(&compiler, rules);
            accept(&mut held, text.tokenizer(), &before);
            let (after, _) = drawn(&text, &mut held, seed, 120);
            let calls = calls(plan.reader(), &(before.clone() + &after));
            let [name, arguments] = &calls.first().expect(&after);
            if name == "get" {
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert!(["struct", "trait"].contains(&arguments["kind"].as_str().unwrap()));
            }
        }
    }
}

/// A tokenizer whose call markers are special tokens.
#[test]
fn structural_tokens_are_signs_of_calls() {
    let tokenizer = mistral();
    let signs = CallFormat::Named.signs(&tokenizer);
    assert_eq!(signs.len(), 2);
    let mut stream = tokenizer.stream_after_prompt();
    assert_eq!(stream.push(signs[0]), None);
    let mut stream = tokenizer
        .stream_after_prompt()
        .showing(signs.clone().into());
    assert_eq!(stream.push(signs[0]).as_deref(), Some("[TOOL_CALLS]"));
    let vocabulary = Vocabulary {
        tokenizer: &tokenizer,
        size: tokenizer.vocab_size(),
        ends: &[1],
    };
    let compiler = Compiler::new(vocabulary, 4).unwrap();
    for (template, choice) in [(2, "required"), (3, "required"), (2, "auto"), (3, "auto")] {
        let plan = two(choice).plan(TEMPLATES[template], &tokenizer);
        let plan = plan.unwrap().unwrap();
        let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
        held.prepare().unwrap();
        assert!(held.allows(signs[0]));
        held.accept(signs[0]).unwrap();
        held.prepare().unwrap();
        let allowed: Vec<u32> = (0..tokenizer.vocab_size())
            .filter(|&t| held.allows(t))
            .collect();
        assert!(allowed.len() < 6, "{template} {choice}: {allowed:?}");
    }
}
