//! Values of arguments that are written as text: by the kinds that the schema allows.

use serde_json::json;

use super::super::literal::python;
use super::{CODER, asked, call, format, read_by};
use super::{Part, reader};

/// Reads arguments of Qwen3-Coder's format with a schema for each.
fn read(arguments: &[[&str; 2]]) -> Vec<Part> {
    let properties = json!({
        "b": {"type": "boolean"},
        "u": {"type": ["string", "null"]},
        "n": {"type": "integer"},
        "r": {"$ref": "#/$defs/S"},
        "o": {"anyOf": [{"$ref": "#/$defs/S"}, {"type": "object"}]},
        "c": {"type": "string"},
        "e": {"enum": ["1", "2"]},
    });
    let schema =
        json!({"type": "object", "properties": properties, "$defs": {"S": {"type": "string"}}});
    let written = arguments.iter();
    let written = written.map(|[key, value]| format!("<parameter={key}>\n{value}\n</parameter>\n"));
    let written: String = written.collect();
    let text = format!("<tool_call>\n<function=get>\n{written}</function>\n</tool_call>");
    let reader = asked(&schema, json!({}))
        .reader(&format(CODER))
        .unwrap()
        .unwrap();
    read_by(&reader, &text)
}

#[test]
fn values_have_the_kind_of_their_schema() {
    for (key, value, json) in [
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("b", "perhaps", "\"perhaps\""),
        ("u", "None", "null"),
        ("u", "null", "null"),
        ("u", "12", "\"12\""),
        ("u", "\"12\"", "\"12\""),
        (
            "n",
            "123456789012345678901234567890",
            "123456789012345678901234567890",
        ),
        ("n", "12.0", "12.0"),
        ("r", "123", "\"123\""),
        ("o", "{'a': [True, 'b']}", r#"{"a": [true, "b"]}"#),
        (
            "o",
            "{\"a\": 12345678901234567890123}",
            "{\"a\": 12345678901234567890123}",
        ),
        ("o", "12", "\"12\""),
        ("e", "1", "\"1\""),
        ("x", "{\"a\": 1}", "{\"a\": 1}"),
        ("x", "no JSON", "\"no JSON\""),
        ("c", "12 < \"3\"\n", r#""12 < \"3\"\n""#),
        ("c", "", "\"\""),
    ] {
        assert_eq!(
            read(&[[key, value]]),
            call("get", &format!("{{\"{key}\": {json}}}"))
        );
    }
}

#[test]
fn a_value_may_contain_its_end_tag() {
    let xml = "<root>\n<parameter>x</parameter>\n</root>";
    let json = r#"{"c": "<root>\n<parameter>x</parameter>\n</root>", "n": 1}"#;
    assert_eq!(read(&[["c", xml], ["n", "1"]]), call("get", json));
    let tags = "a</parameter></tool_call>b";
    assert_eq!(
        read(&[["c", tags]]),
        call("get", r#"{"c": "a</parameter></tool_call>b"}"#)
    );
}

#[test]
fn of_a_repeated_argument_the_first_one_stays() {
    let json = r#"{"c": "a", "n": 1}"#;
    assert_eq!(
        read(&[["c", "a"], ["c", "b"], ["n", "1"], ["n", "2"]]),
        call("get", json)
    );
}

/// A long string is passed on while it is written.
#[test]
fn strings_are_streamed() {
    let mut reader = reader(CODER);
    reader.push("<tool_call>\n<function=get>\n<parameter=a>\n");
    assert_eq!(reader.push("one\n"), [Part::Arguments("one".to_owned())]);
    assert_eq!(reader.push("two"), [Part::Arguments("\\ntwo".to_owned())]);
}

#[test]
fn python_literals_are_json() {
    for (literal, json) in [
        ("True", "true"),
        ("-1.5e3", "-1.5e3"),
        ("'it\\'s \\u00e9 \\x41 \\ud83d\\ude00'", "\"it's é A 😀\""),
        ("[1, (2, None), {}]", "[1, [2, null], {}]"),
        (
            "{'a': \"b\", 'c': {'d': []}}",
            r#"{"a": "b", "c": {"d": []}}"#,
        ),
        ("'''a'b'''", "\"a'b\""),
    ] {
        assert_eq!(python(literal).as_deref(), Some(json), "{literal}");
    }
    for none in ["no", "[1", "'a", "{'a'}", "1 2", "", "[1]]", "a.b()"] {
        assert_eq!(python(none), None, "{none}");
    }
    let deep = "[".repeat(1000);
    assert_eq!(python(&deep), None);
}
