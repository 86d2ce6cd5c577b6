//! Forced calls, and valid arguments, in every format.

use serde_json::{Value, json};

use emberflow_engine::Constraint;
use emberflow_models::tokenizer::Tokenizer;

use super::super::super::rules::tests::{compiled, demo, drawn, mistral, pieces};
use super::super::super::rules::{Compiler, Vocabulary};
use super::super::ToolOptions;
use super::super::format::CallFormat;
use super::super::reader::{CallReader, Part};
use super::format;

/// A template of each format.
const TEMPLATES: [&str; 20] = [
    "no marks",
    "<tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][ARGS]",
    "<tool_call><function=",
    "<｜tool▁calls▁begin｜>",
    "DSML｜",
    "<|tool_calls_section_begin|>",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<|tool_calls|>",
    "<arg_key><tool_sep>",
    "<arg_key>",
    "<|tool_call>",
    "<|tool_call_start|>",
    "<|tool_call|>",
    "<|START_ACTION|>",
    "<tool_calls>",
    "<TOOLCALL>",
];

/// Two tools, one of them with strict arguments.
fn two(choice: &str) -> ToolOptions {
    let parameters = json!({"type": "object", "properties": {"kind": {"enum": ["struct", "trait"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
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
    let mut parts = reader.push(text);
    parts.extend(reader.finish(false));
    for part in parts {
        match part {
            Part::Call(name) => calls.push([name, String::new()]),
            Part::Arguments(more) => calls.last_mut().unwrap()[1] += &more,
            Part::Text(_) | Part::Thought(_) => {}
        }
    }
    calls
}

fn check(arguments: &str) {
    let arguments: Value =
        serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
    let kind = &arguments["kind"];
    assert!(kind == "struct" || kind == "trait", "{arguments}");
    assert!(arguments.get("n").is_none_or(|n| n.as_i64().unwrap() <= 9));
}

#[test]
fn forced_calls_are_calls_in_every_form() {
    let (text, compiler) = demo();
    for template in TEMPLATES {
        let plan = two("required").plan(&format(template), text.tokenizer());
        let plan = plan.unwrap().unwrap();
        assert!(plan.forced);
        for seed in 0..3 {
            let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
            let (written, complete) = drawn(&text, &mut held, seed, 900);
            assert!(complete, "{template}: {written}");
            let calls = calls(plan.reader(), &written);
            assert!(!calls.is_empty(), "{template}: {written}");
            for [_, arguments] in calls {
                check(&arguments);
            }
        }
    }
}

/// Values of all kinds are valid, and come back.
#[test]
fn forced_arguments_of_all_kinds_are_valid() {
    let (text, compiler) = demo();
    let properties = json!({
        "b": {"type": "boolean"},
        "e": {"enum": ["x y", 2, null, true]},
        "l": {"type": "array", "items": {"enum": ["p", "q"]}, "maxItems": 3},
        "o": {"type": "object", "properties": {"i": {"type": "boolean"}, "j": {"enum": [1, 2]}}, "required": ["j"], "additionalProperties": false},
        "r": {"$ref": "#/$defs/R"},
        "u": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    });
    let schema = json!({"type": "object", "properties": properties, "required": ["b", "o", "r"], "additionalProperties": false,
        "$defs": {"R": {"enum": ["ref"]}}});
    let body = json!({"tools": [{"type": "function", "function": {"name": "get", "parameters": schema}}],
        "tool_choice": "required", "parallel_tool_calls": false});
    let asked: ToolOptions = serde_json::from_value(body).unwrap();
    for template in TEMPLATES {
        let plan = asked
            .plan(&format(template), text.tokenizer())
            .unwrap()
            .unwrap();
        for seed in 0..3 {
            let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
            let (written, complete) = drawn(&text, &mut held, seed, 1200);
            assert!(complete, "{template}: {written}");
            let calls = calls(plan.reader(), &written);
            let [[_, arguments]] = &calls[..] else {
                panic!("{template}: {calls:?} {written}");
            };
            let read: Value = serde_json::from_str(arguments)
                .unwrap_or_else(|e| panic!("{template}: {e}: {arguments}"));
            assert!(read["b"].is_boolean(), "{template}: {read}");
            assert!(
                [json!(1), json!(2)].contains(&read["o"]["j"]),
                "{template}: {read}"
            );
            assert_eq!(read["r"], "ref", "{template}");
            let known = |e: &Value| [json!("x y"), json!(2), Value::Null, json!(true)].contains(e);
            assert!(read.get("e").is_none_or(known), "{template}: {read}");
            let item = |item: &Value| item == "p" || item == "q";
            let list = |l: &Value| {
                l.as_array()
                    .is_some_and(|l| l.len() <= 3 && l.iter().all(item))
            };
            assert!(read.get("l").is_none_or(list), "{template}: {read}");
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

/// What precedes the first call of a format.
fn before(form: &CallFormat) -> String {
    let frame = &form.frames[0];
    match frame.is_bare() {
        true => "I call. {\"name\": \"".to_owned(),
        false => format!("I call. {}", frame.lead()[0].text().unwrap()),
    }
}

#[test]
fn strict_calls_are_valid_where_they_need_not_be() {
    let (text, compiler) = demo();
    for template in &TEMPLATES[1..] {
        let form = format(template);
        let plan = two("auto").plan(&form, text.tokenizer());
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
        let before = before(&form);
        for seed in 0..3 {
            let mut held = compiled(&compiler, rules);
            accept(&mut held, text.tokenizer(), &before);
            let (after, _) = drawn(&text, &mut held, seed, 200);
            let calls = calls(plan.reader(), &(before.clone() + &after));
            let [name, arguments] = &calls.first().expect(&after);
            if name == "get" {
                check(arguments);
            }
        }
    }
}

/// Definitions that every parameter with a schema of its own could refer to are not repeated without end.
#[test]
fn schemas_of_elements_are_bounded() {
    let many: serde_json::Map<String, Value> = (0..300)
        .map(|i| (format!("d{i}"), json!({"type": "integer"})))
        .collect();
    let some: serde_json::Map<String, Value> = (0..300)
        .map(|i| (format!("p{i}"), json!({"type": "integer", "minimum": 1})))
        .collect();
    let tool = |template: &str, properties: Value, defs: Value| {
        let parameters = json!({"type": "object", "properties": properties, "$defs": defs});
        let function = json!({"name": "a", "parameters": parameters});
        let body = json!({"tools": [{"type": "function", "function": function}], "tool_choice": "required"});
        let asked: ToolOptions = serde_json::from_value(body).unwrap();
        asked.plan(&format(template), demo().0.tokenizer())
    };
    for template in ["<tool_call><function=", "<|tool_call>"] {
        let small = json!({"d1": {"type": "integer"}});
        assert!(tool(template, json!({"p": {"$ref": "#/$defs/d1"}}), small).is_ok());
        let refused = tool(template, some.clone().into(), many.clone().into()).unwrap_err();
        let message = refused.body()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(
            message.contains("KiB") || message.contains("at most"),
            "{message}"
        );
    }
}

/// A tokenizer whose call markers are special tokens.
#[test]
fn structural_tokens_are_signs_of_calls() {
    let tokenizer = mistral();
    let of = |template: usize| format(TEMPLATES[template]).with_signs(&tokenizer);
    let signs = of(4).signs;
    assert_eq!(signs.len(), 2);
    let mut stream = tokenizer.stream_after_prompt();
    assert_eq!(stream.push(signs[0]), None);
    let mut stream = tokenizer.stream_after_prompt().showing(signs.clone());
    assert_eq!(stream.push(signs[0]).as_deref(), Some("[TOOL_CALLS]"));
    let vocabulary = Vocabulary {
        tokenizer: &tokenizer,
        size: tokenizer.vocab_size(),
        ends: &[1],
    };
    let compiler = Compiler::new(vocabulary, 4).unwrap();
    for (template, choice) in [(3, "required"), (4, "required"), (3, "auto"), (4, "auto")] {
        let plan = two(choice).plan(&of(template), &tokenizer);
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

/// Marks, and special tokens of the tokenizer.
const SPECIAL: [(&str, &[&str]); 6] = [
    ("<|tool_call>", &["<|tool_call>", "<tool_call|>", "<|\"|>"]),
    (
        "<|tool_calls_section_begin|>",
        &[
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ],
    ),
    (
        "<|tool_call_start|>",
        &["<|tool_call_start|>", "<|tool_call_end|>"],
    ),
    (
        "<arg_key>",
        &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>"],
    ),
    (
        "<tool_call><function=",
        &["<tool_call>", "</tool_call>", "</parameter>"],
    ),
    ("DSML｜", &["｜DSML｜"]),
];

/// Forced calls where the format's marks are special tokens, which a grammar writes as tokens.
#[test]
fn marks_may_be_special_tokens() {
    for (template, special) in SPECIAL {
        let all = [&["</s>"][..], special].concat();
        let tokenizer = pieces(&all);
        let vocabulary = Vocabulary {
            tokenizer: &tokenizer,
            size: tokenizer.vocab_size(),
            ends: &[1],
        };
        let compiler = Compiler::new(vocabulary, 4).unwrap();
        let form = format(template).with_signs(&tokenizer);
        assert_eq!(form.signs.len(), special.len(), "{template}");
        for choice in ["required", "auto"] {
            let plan = two(choice).plan(&form, &tokenizer).unwrap().unwrap();
            let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
            let mut random = fastrand::Rng::with_seed(3);
            let mut stream = tokenizer.stream_after_prompt().showing(form.signs.clone());
            let mut written = String::new();
            if choice == "auto" {
                // A text that need not call calls too.
                let first = form.frames[0].lead()[0].text().unwrap();
                let begin = format!("yes {first}");
                accept(&mut held, &tokenizer, &begin);
                written = begin;
            }
            for _ in 0..2000 {
                held.prepare().unwrap();
                let allowed: Vec<u32> = (0..tokenizer.vocab_size())
                    .filter(|&token| held.allows(token))
                    .collect();
                let token = allowed[random.usize(..allowed.len())];
                held.accept(token).unwrap();
                written.extend(stream.push(token));
                if held.is_complete() {
                    break;
                }
            }
            let calls = calls(plan.reader(), &written);
            let [name, arguments] = calls
                .first()
                .unwrap_or_else(|| panic!("{template}: {written}"));
            if choice == "required" || name == "get" {
                check(arguments);
            }
        }
    }
}
