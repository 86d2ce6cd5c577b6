//! Calls with faults that models make, and schemas that refer to themselves.

use emberflow_engine::Constraint;
use serde_json::{Map, Value, json};

use super::super::super::rules::tests::{compiled, demo, drawn};
use super::super::reader::Part;
use super::{CODER, HERMES, asked, call, format, read, read_by};

const LFM2: &str = "<|tool_call_start|>";
const GEMMA: &str = "<|tool_call>";

/// Reads arguments of Qwen3-Coder's format, written as they are, for a tool with a path and a text.
fn coder(arguments: &str) -> Vec<Part> {
    let string = json!({"type": "string"});
    let schema = json!({"type": "object", "properties": {"path": string, "text": string}});
    let reader = asked(&schema, json!({})).reader(&format(CODER));
    let text = format!("<tool_call>\n<function=get>\n{arguments}");
    read_by(&reader.unwrap().unwrap(), &text)
}

#[test]
fn a_missing_end_tag_ends_at_the_next_argument_or_the_end_of_the_call() {
    let both = call("get", r#"{"path": "/xyz", "text": "hello"}"#);
    let ends = "</parameter>\n</function>\n</tool_call>";
    let text = format!("<parameter=path>\n/xyz\n<parameter=text>\nhello\n{ends}");
    assert_eq!(coder(&text), both);
    let one = call("get", r#"{"path": "/abc"}"#);
    let text = "<parameter=path>\n/abc\n</parameter>\n</tool_call>";
    assert_eq!(coder(text), one);
    let again = format!("{text}\n<tool_call>\n<function=put>\n</function>\n</tool_call>");
    assert_eq!(coder(&again), [one, call("put", "{}")].concat());
}

#[test]
fn words_of_python_in_json_are_json() {
    let text =
        |arguments: &str| format!("<tool_call>\n{{\"name\": \"get\", {arguments}}}\n</tool_call>");
    let json = r#"{"n": null, "b": [true, false], "a": "None"}"#;
    let python = r#""arguments": {"n": None, "b": [True, False], "a": "None"}"#;
    assert_eq!(read(HERMES, &text(python)), call("get", json));
    let first = r#"{"arguments": {"n": None}, "name": "get"}"#;
    let first = format!("<tool_call>{first}</tool_call>");
    assert_eq!(read(HERMES, &first), call("get", r#"{"n": null}"#));
}

/// Arguments that are none stay incomplete, and what is left of the call is no text.
#[test]
fn a_value_is_due_and_brackets_are_of_one_kind() {
    for (arguments, left) in [("{path:}", r#"{"path": "#), ("{path:[1}", r#"{"path": ["#)] {
        let parts = read(
            GEMMA,
            &format!("<|tool_call>call:get{arguments}<tool_call|>"),
        );
        let [Part::Call(_), Part::Arguments(json)] = &parts[..] else {
            panic!("{parts:?}");
        };
        assert!(json.starts_with(left), "{json}");
        assert!(serde_json::from_str::<Value>(json).is_err(), "{json}");
    }
}

#[test]
fn strings_without_the_quotes_of_the_format() {
    let text = "<|tool_call>call:get{path:'abc, d',n:2}<tool_call|>";
    let json = r#"{"path": "abc, d", "n": 2}"#;
    assert_eq!(read(GEMMA, text), call("get", json));
}

/// The tool has the parameters `a` (a string), `b` and `n` (an integer).
#[test]
fn arguments_of_python_have_places_prefixes_parts_and_kinds() {
    for (python, json) in [
        ("'/a/b', n=3", r#"{"a": "/a/b", "n": 3}"#),
        ("'/a/b', 'c'", r#"{"a": "/a/b", "b": "c"}"#),
        ("'/a/b', 4, 5", r#"{"a": "/a/b", "b": 4, "n": 5}"#),
        ("a='abc' 'def'", r#"{"a": "abcdef"}"#),
        ("a=r'C:\\new'", r#"{"a": "C:\\new"}"#),
        ("n=+5", r#"{"n": 5}"#),
        ("n=-.5", r#"{"n": -0.5}"#),
        ("n=1_000", r#"{"n": 1000}"#),
        ("n=007", r#"{"n": 7}"#),
        ("a=007", r#"{"a": "007"}"#),
        ("b=[(1, 2)]", r#"{"b": [[1, 2]]}"#),
        ("b=+5", r#"{"b": 5}"#),
        (
            "b=[1_000, .5, -2., {'x': +7}]",
            r#"{"b": [1000, 0.5, -2.0, {"x": 7}]}"#,
        ),
    ] {
        let text = format!("<|tool_call_start|>[get({python})]<|tool_call_end|>");
        assert_eq!(read(LFM2, &text), call("get", json), "{python}");
    }
}

/// What no parameter takes, and what one takes twice, leaves a call that cannot be run.
#[test]
fn arguments_without_a_place_leave_the_call_incomplete() {
    for (source, call) in [
        (LFM2, "<|tool_call_start|>[put('/a/b')]<|tool_call_end|>"),
        (
            LFM2,
            "<|tool_call_start|>[get('/a', 1, 2, 3)]<|tool_call_end|>",
        ),
        (
            LFM2,
            "<|tool_call_start|>[get('/a', a='/b')]<|tool_call_end|>",
        ),
        (LFM2, "<|tool_call_start|>[get(n=1, n=2)]<|tool_call_end|>"),
        (GEMMA, "<|tool_call>call:get{n:1,n:2}<tool_call|>"),
    ] {
        let parts = read(source, call);
        let [Part::Call(_), Part::Arguments(json)] = &parts[..] else {
            panic!("{parts:?}");
        };
        assert!(serde_json::from_str::<Value>(json).is_err(), "{json}");
    }
}

/// Each part of a schema is visited once; with every path, this takes longer than anyone waits.
#[test]
fn kinds_of_schemas_that_refer_to_themselves() {
    let itself = json!({"$ref": "#/$defs/n"});
    let all = vec![itself.clone(); 1000];
    let schema = json!({"type": "object", "properties": {"a": itself, "b": {"$ref": "#/$defs/s"}},
        "$defs": {"n": {"anyOf": all}, "s": {"type": "string"}}});
    let text = "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n\
                </function>\n</tool_call>";
    let reader = asked(&schema, json!({})).reader(&format(CODER));
    let json = r#"{"a": 1, "b": "2"}"#;
    assert_eq!(read_by(&reader.unwrap().unwrap(), text), call("get", json));
}

/// A reference is one rule, however often it is used; six levels of 40 would be billions.
#[test]
fn grammars_of_schemas_that_refer_to_themselves() {
    let (text, compiler) = demo();
    for count in [2, 40] {
        let names = (0..count).map(|at| format!("p{at}"));
        let itself = |name| (name, json!({"$ref": "#/$defs/n"}));
        let properties: Map<String, Value> = names.map(itself).collect();
        let node =
            json!({"type": "object", "properties": properties, "additionalProperties": false});
        let schema = json!({"type": "object", "properties": {"t": {"$ref": "#/$defs/n"}},
            "required": ["t"], "additionalProperties": false, "$defs": {"n": node}});
        for template in [LFM2, GEMMA] {
            let options = asked(
                &schema,
                json!({"tool_choice": "required", "parallel_tool_calls": false}),
            );
            let plan = options.plan(&format(template), text.tokenizer());
            let plan = plan.unwrap().unwrap();
            let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
            held.prepare().unwrap();
            let (written, complete) = drawn(&text, &mut held, 1, 2000);
            if complete {
                let parts = read_by(&plan.reader(), &written);
                assert!(matches!(&parts[0], Part::Call(_)), "{written}");
            }
        }
    }
}

#[test]
fn a_constant_between_tags_is_the_only_value() {
    let (text, compiler) = demo();
    let schema =
        json!({"type": "object", "properties": {"a": {"const": "yes"}}, "required": ["a"]});
    let choice = json!({"type": "function", "function": {"name": "get"}});
    let options = asked(&schema, json!({"tool_choice": choice}));
    let plan = options.plan(&format(CODER), text.tokenizer());
    let plan = plan.unwrap().unwrap();
    let mut held = compiled(&compiler, plan.rules.as_ref().unwrap());
    let (written, complete) = drawn(&text, &mut held, 1, 400);
    assert!(complete, "{written}");
    let json = r#"{"a": "yes"}"#;
    assert_eq!(read_by(&plan.reader(), &written), call("get", json));
}
