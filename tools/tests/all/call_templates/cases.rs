//! What is put into templates.

use serde_json::{Value, json};

/// Words before a call.
pub const CONTENT: &str = "I look it up.";
/// Reasoning before a call.
pub const THOUGHTS: &str = "The user wants to know it.";

/// A message of an assistant.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: &'static str,
    /// Names of tools, and arguments.
    pub calls: Vec<(&'static str, Value)>,
    /// Whether [`CONTENT`] is written.
    pub says: bool,
    /// Whether [`THOUGHTS`] are written, where the template has any.
    pub thinks: bool,
}

/// What a template writes for a message.
#[derive(Debug, Clone)]
pub struct Written {
    /// The prompt before the message.
    pub prompt: String,
    /// The text that a model says, without its end token.
    pub text: String,
    /// The reasoning in it.
    pub thoughts: String,
}

impl Written {
    /// The content in the text.
    pub fn content(&self, case: &Case) -> &'static str {
        match case.says && self.text.contains(CONTENT) {
            true => CONTENT,
            false => "",
        }
    }

    /// Texts in the manner of special tokens.
    pub fn signs(&self) -> Vec<&str> {
        let mut all = Vec::new();
        for [open, close] in [["<|", "|>"], ["<｜", "｜>"]] {
            let mut rest = &*self.text;
            while let Some(at) = rest.find(open) {
                rest = &rest[at..];
                let end = rest.find(close).map_or(open.len(), |end| end + close.len());
                let sign = &rest[..end];
                let is_name = |c: char| !c.is_whitespace() && !"<>\"".contains(c);
                if end > 4 && sign[1..end - 1].chars().all(is_name) && !all.contains(&sign) {
                    all.push(sign);
                }
                rest = &rest[open.len()..];
            }
        }
        all
    }
}

/// The tools of all cases.
pub fn tools() -> [Value; 4] {
    let tool = |name: &str, properties: Value, required: Value| {
        json!({"type": "function", "function": {
            "name": name,
            "description": format!("Does {name}."),
            "parameters": {"type": "object", "properties": properties, "required": required},
        }})
    };
    let of = |kind: &str| json!({"type": kind, "description": "A value."});
    [
        tool(
            "get_weather",
            json!({"city": of("string"), "days": of("integer"), "metric": of("boolean")}),
            json!(["city"]),
        ),
        tool(
            "write_file",
            json!({"path": of("string"), "text": of("string")}),
            json!(["path", "text"]),
        ),
        tool(
            "store",
            json!({
                "record": {"type": "object", "description": "A record.", "additionalProperties": {}},
                "rows": {"type": "array", "description": "Rows.", "items": {"type": "object", "additionalProperties": {}}},
                "ratio": of("number"),
            }),
            json!(["record"]),
        ),
        tool("list_all", json!({}), json!([])),
    ]
}

/// The simplest case.
pub fn plain() -> Case {
    Case {
        name: "plain",
        calls: vec![("get_weather", json!({"city": "Paris"}))],
        says: false,
        thinks: false,
    }
}

/// All cases. `behind` is what the template writes behind an argument.
pub fn cases(behind: &str) -> Vec<Case> {
    let tags = format!(
        "a </parameter> b </tool_call> c </function> d </arg_value> e {behind} f <b>&amp;</b> ]]> ```"
    );
    let file = |path: &str, text: &str| vec![("write_file", json!({"path": path, "text": text}))];
    let record =
        json!({"a": {"b": [1, -2.5, null, false, {"c": "d"}], "e-f": ""}, "g": {}, "h": []});
    let weather = |city: &str| ("get_weather", json!({"city": city}));
    let rows = json!([{"x": 1}, {"x": "it's \"y\""}]);
    let case = |name, calls| Case {
        name,
        calls,
        ..plain()
    };
    vec![
        plain(),
        Case {
            thinks: true,
            ..case("thoughts", plain().calls)
        },
        Case {
            says: true,
            ..case("content", plain().calls)
        },
        case(
            "types",
            vec![(
                "get_weather",
                json!({"city": "Oslo", "days": 3, "metric": true}),
            )],
        ),
        case(
            "nested",
            vec![(
                "store",
                json!({"record": record, "rows": rows, "ratio": 0.25}),
            )],
        ),
        case("no arguments", vec![("list_all", json!({}))]),
        case(
            "unicode",
            file("Zürich/東京 🙂.txt", "naïve — „Grüße“ 日本語 \u{200b}🙂"),
        ),
        case(
            "quotes",
            file(
                "a'b.txt",
                r#"He said "hi", it's 'fine' \ \\n {"a": 1}, [x] `y` (z=1)"#,
            ),
        ),
        case("lines", file("a.txt", "one\n\n  two\n\tthree\r\nfour")),
        case("edges", file("a.txt", "\n  one \n")),
        case("tags", file("a.xml", &tags)),
        case("look-alikes", file("42", "true")),
        case("JSON as text", file("null", "{\"a\": [1, 2]}")),
        case("empty", file("", "")),
        case(
            "parallel",
            vec![weather("Paris"), ("list_all", json!({})), weather("Oslo")],
        ),
    ]
}
