//! Forced calls, and valid arguments, in every format.

use serde_json::{Value, json};

use emberflow_engine::Constraint;
use emberflow_models::tokenizer::Tokenizer;

use super::super::super::rules::tests::{compiled, demo, drawn, mistral, pieces};
use super::super::super::rules::{Compiler, Vocabulary};
use super::super::ToolOptions;
use super::super::format::CallFormat;
use super::super::reader::{CallReader, Part};
use super::{CODER, HERMES, asked, format};

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
        "c": {"const": "so it's"},
        "m": {"type": "string", "minLength": 2, "maxLength": 5},
        "p": {"type": "string", "pattern": "^[a-c]{2,4}$"},
        "q": {"type": "string", "pattern": "[<>]$", "maxLength": 12},
    });
    let required = ["b", "o", "r", "c", "m", "p", "q"];
    let schema = json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false,
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
            assert_eq!(read["c"], "so it's", "{template}");
            let text = |key: &str| {
                read[key]
                    .as_str()
                    .unwrap_or_else(|| panic!("{template}: {read}"))
            };
            let length = |key: &str| text(key).chars().count();
            assert!((2..=5).contains(&length("m")), "{template}: {read}");
            let letters = text("p").chars().all(|c| "abc".contains(c));
            assert!(
                letters && (2..=4).contains(&length("p")),
                "{template}: {read}"
            );
            assert!(
                text("q").ends_with(['<', '>']) && length("q") <= 12,
                "{template}: {read}"
            );
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

/// The tags of Qwen3-Coder as special tokens: strings that a schema restricts come before one.
#[test]
fn restricted_strings_end_at_a_special_token() {
    let tokenizer = pieces(&["</s>", "<tool_call>", "</tool_call>", "</parameter>"]);
    let vocabulary = Vocabulary {
        tokenizer: &tokenizer,
        size: tokenizer.vocab_size(),
        ends: &[1],
    };
    let compiler = Compiler::new(vocabulary, 4).unwrap();
    let form = format("<tool_call><function=").with_signs(&tokenizer);
    let properties = json!({"a": {"type": "string", "pattern": "no", "maxLength": 9}});
    let schema = json!({"type": "object", "properties": properties, "required": ["a"]});
    let options = asked(
        &schema,
        json!({"tool_choice": {"type": "function", "name": "get"}}),
    );
    let plan = options.plan(&form, &tokenizer).unwrap().unwrap();
    for seed in 0..5 {
        let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
        let mut random = fastrand::Rng::with_seed(seed);
        let mut stream = tokenizer.stream_after_prompt().showing(form.signs.clone());
        let mut written = String::new();
        while !held.is_complete() {
            held.prepare().unwrap();
            let all = 0..tokenizer.vocab_size();
            let allowed: Vec<u32> = all.filter(|&token| held.allows(token)).collect();
            let token = allowed[random.usize(..allowed.len())];
            held.accept(token).unwrap();
            written.extend(stream.push(token));
        }
        let calls = calls(plan.reader(), &written);
        let [[_, arguments]] = &calls[..] else {
            panic!("{calls:?} {written}");
        };
        let read: Value = serde_json::from_str(arguments).unwrap();
        let text = read["a"].as_str().unwrap();
        assert!(text.contains("no") && text.chars().count() <= 9, "{text:?}");
    }
}

/// Whether a string is one of a tool's strict arguments, in the notation of a format.
fn allows(template: &str, schema: &Value, value: &str) -> bool {
    let (text, compiler) = demo();
    let schema = json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
    let options = asked(
        &schema,
        json!({"tool_choice": {"type": "function", "name": "get"}}),
    );
    let plan = options
        .plan(&format(template), text.tokenizer())
        .unwrap()
        .unwrap();
    let written = match template {
        HERMES => format!(
            "<tool_call>\n{{\"name\": \"get\", \"arguments\": {{\"a\": {}}}}}\n</tool_call>",
            json!(value)
        ),
        _ => format!(
            "<tool_call>\n<function=get>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        ),
    };
    let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
    for token in text.tokenizer().encode(&written, false).unwrap() {
        if held.prepare().is_err() || !held.allows(token) {
            return false;
        }
        held.accept(token).unwrap();
    }
    true
}

/// What a schema says of a string holds between tags as it does in JSON.
#[test]
fn strings_between_tags_are_those_of_json() {
    let host = "a-b.example";
    for (schema, values) in [
        (json!({"pattern": "b"}), &["abc", "b", "a", "", "b\nc"][..]),
        (json!({"pattern": "^ab"}), &["abc", "cab", "ab"]),
        (json!({"pattern": "ab$"}), &["ab", "cab", "abc"]),
        (json!({"pattern": "^a$|^b$|c"}), &["a", "b", "xc", "ab"]),
        (json!({"pattern": "(^a$|^b/$)"}), &["a", "b/", "ab"]),
        (
            json!({"pattern": "^\\d{3}-\\w$"}),
            &["123-a", "123-\u{e9}", "12-a"],
        ),
        (
            json!({"minLength": 2, "maxLength": 3}),
            &["a", "ab", "\u{e9}\u{20ac}x", "abcd"],
        ),
        (
            json!({"pattern": "^a+$", "minLength": 2}),
            &["a", "aa", "ab"],
        ),
        (
            json!({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}),
            &["ab", "a", "b"],
        ),
        (
            json!({"anyOf": [{"const": "x y"}, {"maxLength": 1}]}),
            &["x y", "x", "xy"],
        ),
        (json!({"enum": ["", "a", 1]}), &["", "a", "1"]),
        (
            json!({"format": "date"}),
            &["2024-12-31", "2024-02-28", "2024-02-31", "2024-1-1"],
        ),
        (
            json!({"format": "time"}),
            &["23:59:59Z", "01:02:03.5+01:00", "24:00:00Z", "12:00"],
        ),
        (
            json!({"format": "date-time"}),
            &["2024-02-03T01:02:03Z", "2024-02-03"],
        ),
        (
            json!({"format": "duration"}),
            &["P1Y2M3DT4H5M6S", "PT5S", "P3W", "P", "P1YT"],
        ),
        (
            json!({"format": "email"}),
            &["a.b+c@a-b.example", "a@b", "a.b", "@b", "a b@c"],
        ),
        (json!({"format": "hostname"}), &[host, "a", "-a", "a..b"]),
        (
            json!({"format": "ipv4"}),
            &["127.0.0.1", "255.255.255.255", "256.1.1.1", "1.2.3"],
        ),
        (
            json!({"format": "ipv6"}),
            &[
                "::1",
                "fe80::1:2",
                "1:2:3:4:5:6:7:8",
                "::",
                "1:2",
                "1::2::3",
            ],
        ),
        (
            json!({"format": "uuid"}),
            &[
                "123e4567-e89b-12d3-a456-426614174000",
                "123e4567-e89b-12d3-a456",
            ],
        ),
        (
            json!({"format": "uri"}),
            &[
                "https://a.example:80/b?c=d#e",
                "mailto:a@b",
                "a b",
                "//a",
                "urn:x:y",
            ],
        ),
        (json!({"format": "json-pointer"}), &["/a/b~1", "", "a"]),
    ] {
        let mut schema = schema.clone();
        schema["type"] = "string".into();
        for value in values {
            let [json, tags] = [HERMES, CODER].map(|template| allows(template, &schema, value));
            assert_eq!(tags, json, "{schema}: {value:?}");
        }
    }
}

/// Refusals of schemas that the notation of a format does not express.
#[test]
fn what_cannot_be_enforced_is_refused_by_name_if_it_is_strict() {
    let (text, _) = demo();
    let plan = |template: &str, strict: bool, schema: &Value| {
        let function = json!({"name": "get", "strict": strict, "parameters": schema});
        let tools = json!([{"type": "function", "function": function}]);
        let choice = if strict { "auto" } else { "required" };
        let body = json!({"tools": tools, "tool_choice": choice});
        let asked: ToolOptions = serde_json::from_value(body).unwrap();
        let plan = asked.plan(&format(template), text.tokenizer());
        plan.map(|_| ())
            .map_err(|why| why.body()["error"]["message"].as_str().unwrap().to_owned())
    };
    let object = |more: Value| {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let more = more.as_object().unwrap().clone();
        schema.as_object_mut().unwrap().extend(more);
        schema
    };
    for (schema, word) in [
        (object(json!({"minProperties": 1})), "`minProperties` at #"),
        (
            object(json!({"anyOf": [{"required": ["a"]}]})),
            "`anyOf` at #",
        ),
        (
            object(json!({"patternProperties": {"^b": {}}})),
            "`patternProperties` at #",
        ),
        (object(json!({"required": ["b"]})), "`required` names \"b\""),
        (
            json!({"type": "object", "additionalProperties": {"type": "integer"}}),
            "`additionalProperties`",
        ),
    ] {
        for template in [CODER, "<arg_key>", "<|tool_call_start|>", "<|tool_call>"] {
            let why = plan(template, true, &schema).unwrap_err();
            assert!(
                why.contains(word) && why.contains("`get`"),
                "{template}: {why}"
            );
            plan(template, false, &schema).unwrap();
        }
        plan(HERMES, true, &schema).unwrap();
    }
    // The end of a value cannot be in one.
    let tag = object(json!({"properties": {"a": {"enum": ["b", "</parameter>"]}}}));
    let why = plan(CODER, true, &tag).unwrap_err();
    assert!(why.contains("`a`: the value \"</parameter>\""), "{why}");
    plan(HERMES, true, &tag).unwrap();
    let empty =
        object(json!({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}}));
    let why = plan(CODER, true, &empty).unwrap_err();
    assert!(
        why.contains("`minLength` 3 is greater than `maxLength` 2"),
        "{why}"
    );
    // The root may be a reference.
    let root = json!({"$ref": "#/$defs/A", "$defs": {"A": object(json!({"required": ["a"]}))}});
    plan(CODER, true, &root).unwrap();
}
