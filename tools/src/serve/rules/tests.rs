//! Constrained texts follow their grammar, and grammars that cost too much are rejected in time.

use std::time::{Duration, Instant};

use emberflow_engine::{Constraint, Model, Text};
use emberflow_models::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use super::matcher::{ByteMatcher, Room};
use super::{Compiler, Preface, Rules, Vocabulary};

/// The bundled model and its compiler.
pub fn demo() -> (Text, Compiler) {
    let model = Model::demo().unwrap();
    let text = model.text().clone();
    let compiler = Compiler::new(Vocabulary::of(&text), 4).unwrap();
    (text, compiler)
}

fn room(compiler: &Compiler) -> Room {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(compiler.room(1, false)).unwrap()
}

/// A constraint at the start of a text.
pub fn compiled(compiler: &Compiler, rules: &Rules) -> ByteMatcher {
    match compiler.compile(rules, room(compiler)) {
        Ok(held) => held,
        Err(e) => panic!("{rules:?}: {e:?}"),
    }
}

/// The same after a preface.
pub fn compiled_behind(compiler: &Compiler, preface: &Preface, rules: &Rules) -> ByteMatcher {
    match compiler.compile_behind(preface, rules, room(compiler)) {
        Ok(held) => held,
        Err(e) => panic!("{preface:?} {rules:?}: {e:?}"),
    }
}

/// Samples at most `most` of the allowed tokens; returns the text and whether it is complete.
pub fn drawn(text: &Text, held: &mut dyn Constraint, seed: u64, most: usize) -> (String, bool) {
    let mut random = fastrand::Rng::with_seed(seed);
    let (vocab, tokenizer) = (text.config().vocab, text.tokenizer());
    let mut bytes = Vec::new();
    for _ in 0..most {
        held.prepare().unwrap();
        let allowed: Vec<u32> = (0..vocab).filter(|&t| held.allows(t)).collect();
        let token = allowed[random.usize(..allowed.len())];
        held.accept(token).unwrap();
        if !text.config().eos.contains(&token) {
            bytes.extend(tokenizer.token_bytes(token).unwrap());
        }
        if held.is_complete() {
            return (String::from_utf8(bytes).unwrap(), true);
        }
    }
    (String::from_utf8_lossy(&bytes).into_owned(), false)
}

#[test]
fn texts_are_what_the_rules_say() {
    let (text, compiler) = demo();
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["a", "b c", "\u{20ac}"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    });
    for seed in 0..10 {
        let mut rules = compiled(&compiler, &Rules::Schema(person.clone()));
        let (json, complete) = drawn(&text, &mut rules, seed, 400);
        assert!(complete, "{json}");
        let value: Value = serde_json::from_str(&json).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["name", "age", "kind"]);
        assert!(value["age"].as_u64().unwrap() <= 150);
        assert!(value["name"].as_str().unwrap().chars().count() <= 20);
    }
    let mut regex = compiled(&compiler, &Rules::Regex("^[a-c]{3}/[0-9]$".to_owned()));
    let (found, complete) = drawn(&text, &mut regex, 1, 20);
    assert!(
        complete && found.len() == 5 && found.as_bytes()[3] == b'/',
        "{found}"
    );
    let choice = ["yes \"really\"", "no\n"].map(str::to_owned);
    for seed in 0..4 {
        let mut rules = compiled(&compiler, &Rules::Choice(choice.to_vec()));
        let (found, complete) = drawn(&text, &mut rules, seed, 40);
        assert!(complete && choice.contains(&found), "{found}");
    }
    let grammar = "start: word (\" \" word){2}\nword: /[a-z]{2,4}/".to_owned();
    let mut rules = compiled(&compiler, &Rules::Grammar(grammar));
    let (found, complete) = drawn(&text, &mut rules, 3, 40);
    assert!(complete && found.split(' ').count() == 3, "{found}");
}

/// JSON as commonly written for llama.cpp, with a recursive rule for white space.
const JSON_GBNF: &str = r#"
# values
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20} ws-more
ws-more ::= ("\n" ws-more)?
"#;

#[test]
fn grammars_of_llama_cpp_hold_texts_too() {
    let (text, compiler) = demo();
    let texts = |grammar: &str, most: usize, check: &dyn Fn(&str)| {
        let mut complete = 0;
        for seed in 0..30 {
            let mut held = compiled(&compiler, &Rules::Grammar(grammar.to_owned()));
            let (found, ended) = drawn(&text, &mut held, seed, most);
            if ended {
                complete += 1;
                check(&found);
            }
        }
        assert!(complete > 3, "{complete} of {grammar}");
    };
    texts(JSON_GBNF, 300, &|found| {
        let value: Value = serde_json::from_str(found).expect(found);
        assert!(value.is_object());
    });
    let steps = "root ::= (\"- \" [^\\n-]{1,4} \"\\n\"){2,3}";
    texts(steps, 60, &|found| {
        let lines: Vec<&str> = found.lines().collect();
        assert!((2..=3).contains(&lines.len()), "{found}");
        assert!(lines.iter().all(|line| line.starts_with("- ")), "{found}");
    });
    // What follows could also belong to the repetition: one regular expression.
    let ends = "root ::= word [a] \"b\"?\nword ::= [a-c]{2,6}";
    texts(ends, 20, &|found| {
        let end = found.strip_suffix('b').filter(|rest| rest.ends_with('a'));
        assert!(
            end.unwrap_or(found).ends_with('a') && found.len() > 2,
            "{found}"
        );
    });
    let nested = "root ::= \"(\" root? \")\" | [\\u0061-\\u0062]";
    texts(nested, 60, &|found| {
        let open = found.matches('(').count();
        assert_eq!(open, found.matches(')').count(), "{found}");
    });
    let wrong = Rules::Grammar("root ::= (\"a\"".to_owned());
    let refused = compiler.compile(&wrong, room(&compiler)).unwrap_err();
    let message = refused.body()["error"]["message"].to_string();
    assert!(message.contains("missing `)`"), "{message}");
}

/// A SentencePiece-like tokenizer: pieces with a visible space, and bytes as `<0xHH>`.
pub fn pieces(special: &[&str]) -> Tokenizer {
    let words = [
        "<unk>",
        "</s>",
        "\u{2581}",
        "\u{2581}yes",
        "no",
        "\u{e9}",
        "\u{2581}{\"a",
    ];
    let mut vocab: Map<String, Value> = words
        .iter()
        .zip(0..)
        .map(|(w, id)| ((*w).to_owned(), json!(id)))
        .collect();
    vocab.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), json!(10 + u32::from(byte)))));
    for (word, id) in special.iter().zip(266..) {
        vocab.entry(*word).or_insert(json!(id));
    }
    let special = special.iter().map(|word| {
        json!({"id": vocab[*word], "content": word, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let special: Vec<Value> = special.collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(&file.to_string()).unwrap()
}

/// A tokenizer whose call markers are special tokens.
pub fn mistral() -> Tokenizer {
    pieces(&["</s>", "[TOOL_CALLS]", "[ARGS]"])
}

/// Bytes of SentencePiece-like tokens: pieces with a visible space, and `<0xHH>`.
#[test]
fn pieces_and_bytes_have_the_right_bytes() {
    let tokenizer = pieces(&["</s>"]);
    // The model has more tokens than the tokenizer.
    let vocabulary = Vocabulary {
        tokenizer: &tokenizer,
        size: 300,
        ends: &[1],
    };
    let compiler = Compiler::new(vocabulary, 1).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    let rules = Rules::Choice(
        [" yes", "no", "\u{e9}\u{20ac}", " {\"a\": 1}"]
            .map(str::to_owned)
            .to_vec(),
    );
    for seed in 0..40 {
        let mut held = compiled(&compiler, &rules);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut stream = tokenizer.stream_after_prompt();
        let mut text = String::new();
        while !held.is_complete() {
            held.prepare().unwrap();
            let allowed: Vec<u32> = (0..300).filter(|&t| held.allows(t)).collect();
            assert!(!allowed.iter().any(|&t| t == 0 || t > 265), "{allowed:?}");
            let token = allowed[random.usize(..allowed.len())];
            held.accept(token).unwrap();
            seen.insert(token);
            text.extend(stream.push(token));
        }
        let Rules::Choice(all) = &rules else { panic!() };
        assert!(all.contains(&text), "{text:?}");
    }
    assert!(
        seen.contains(&3) && seen.contains(&6) && seen.contains(&(10 + 0xe2)),
        "{seen:?}"
    );
}

#[test]
fn a_fork_goes_on_by_itself() {
    let (text, compiler) = demo();
    let mut first = compiled(&compiler, &Rules::object());
    let _ = drawn(&text, &mut first, 5, 4);
    let (mut a, mut b) = (first.fork(), first.fork());
    let alone = drawn(&text, &mut *a, 9, 60);
    let _ = drawn(&text, &mut first, 1, 60);
    assert_eq!(drawn(&text, &mut *b, 9, 60), alone);
}

fn nested(levels: usize, mut wrap: impl FnMut(Value) -> Value) -> Value {
    (0..levels).fold(json!({"type": "string"}), |inner, _| wrap(inner))
}

fn many(count: usize, one: impl Fn(usize) -> Value) -> Map<String, Value> {
    (0..count).map(|i| (format!("p{i}"), one(i))).collect()
}

/// Schemas whose cost grows much faster than their size.
fn bombs() -> Vec<Value> {
    let text = || json!({"type": "string"});
    let branch = |i: usize, wide: usize| -> Value {
        let one = |j| json!({"type": "object", "properties": {format!("p{i}_{j}"): text()}});
        json!({"anyOf": (0..wide).map(one).collect::<Value>()})
    };
    let links = |count: usize, link: &dyn Fn(usize) -> Value| {
        let mut all: Map<String, Value> = many(count, |i| link(i + 1));
        all.insert(format!("p{count}"), text());
        json!({"$ref": "#/$defs/p0", "$defs": all})
    };
    let to = |i: usize| json!({"$ref": format!("#/$defs/p{i}")});
    let pattern = |i: usize| json!({"pattern": format!("a.{{{}}}b", 5 + i)});
    let same = |i: usize| json!({"properties": {"x": {"anyOf": (0..30).map(|j| json!({"const": i + j})).collect::<Value>()}}});
    vec![
        nested(120, |v| json!({"items": v})),
        nested(
            50,
            |v| json!({"type": "array", "minItems": 1000, "maxItems": 2000, "items": v}),
        ),
        nested(12, |v| json!({"anyOf": [v, v], "oneOf": [v]})),
        nested(
            9,
            |v| json!({"allOf": [{"anyOf": [v, text()]}, {"anyOf": [v, text()]}]}),
        ),
        json!({"allOf": (0..20).map(|i| branch(i, 2)).collect::<Value>()}),
        json!({"allOf": (0..3).map(|i| branch(i, 200)).collect::<Value>()}),
        json!({"allOf": (0..3).map(|i| branch(i, 40)).collect::<Value>()}),
        json!({"allOf": (0..4).map(same).collect::<Value>()}),
        json!({"type": "object", "properties": many(5000, |_| text())}),
        json!({"type": "object", "properties": many(600, |_| text())}),
        json!({"type": "object", "minProperties": 1, "properties": many(300, |_| text()), "additionalProperties": false}),
        json!({"enum": (0..10_000).map(|i| format!("value {i}")).collect::<Value>()}),
        json!({"type": "string", "minLength": u64::MAX}),
        json!({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000}),
        json!({"type": "array", "items": {"type": "string", "maxLength": 1_000_000_000}}),
        json!({"type": "string", "allOf": (0..20).map(pattern).collect::<Value>()}),
        json!({"properties": many(20, |i| json!({"type": "string", "minLength": 3, "pattern": format!("a.{{{i}0}}b.{{100}}c")}))}),
        json!({"type": "string", "pattern": "(".repeat(5000)}),
        json!({"type": "string", "pattern": "^((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}$"}),
        json!({"patternProperties": many(200, |_| text())}),
        json!({"multipleOf": 99_991}),
        json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
        json!({"multipleOf": 1e-300}),
        json!({"type": "integer", "minimum": -1.3e49}),
        json!({"minimum": -1e300, "maximum": 1e300, "multipleOf": 0.1}),
        links(600, &to),
        links(40, &|i| json!({"allOf": [to(i), to(i)]})),
        links(
            40,
            &|i| json!({"properties": {"x": to(i), "y": to(i)}, "$ref": format!("#/$defs/p{i}")}),
        ),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        json!({"$ref": "#", "type": "object", "properties": {"a": {"$ref": "#"}}}),
        json!({"$ref": "https://example.com/schema.json"}),
        json!({"$ref": "#/nowhere"}),
        json!({"not": {"type": "string"}}),
        json!({"type": "no such type \u{20ac}".repeat(40)}),
        json!({"const": ["\u{20ac}".repeat(200)], "enum": "\u{20ac}".repeat(200)}),
        json!(false),
        json!([1, 2]),
        json!("text"),
    ]
}

/// Grammars whose cost grows much faster than their size.
fn grammars() -> Vec<String> {
    vec![
        "start: e\ne: e e | \"a\" | e e e | \"\"".to_owned(),
        format!("start: {}\"a\"{}", "(".repeat(4000), ")".repeat(4000)),
        format!(
            "start: A0\n{}A40: \"x\"",
            (0..40)
                .map(|i| format!("A{i}: A{0} A{0}\n", i + 1))
                .collect::<String>()
        ),
        format!(
            "start: a0\n{}a900: \"x\"",
            (0..900)
                .map(|i| format!("a{i}: a{0}? a{0}?\n", i + 1))
                .collect::<String>()
        ),
        format!(
            "start: A0\n{}A900: \"x\"",
            (0..900)
                .map(|i| format!("A{i}: A{}\n", i + 1))
                .collect::<String>()
        ),
        "start: (((\"a\" | \"b\"){1,9999}){1,9999}){1,9999}".to_owned(),
        format!(
            "start: ({})+",
            (0..900)
                .map(|i| format!("/a.{{0,30}}b{i}[a-z]*/"))
                .collect::<Vec<_>>()
                .join(" | ")
        ),
        format!("start: /{}a{}/", "(".repeat(2000), ")*".repeat(2000)),
        "start: /(.*a.*){1000}/".to_owned(),
        "start: /(\\p{L}{1,1000}\\p{N}{1,1000}){1,1000}/".to_owned(),
        "start: start".to_owned(),
        "root ::= root root | \"a\" | ".to_owned(),
        format!("root ::= {}\"a\"{}", "(".repeat(49), "){2000}".repeat(49)),
        format!("root ::= {}", "[a-z]{0,2000} ".repeat(400)),
        format!(
            "root ::= {}",
            (0..2000)
                .map(|i| format!("\"{i}\""))
                .collect::<Vec<_>>()
                .join(" | ")
        ),
        format!(
            "root ::= a0\n{}a40 ::= \"x\"",
            (0..40)
                .map(|i| format!("a{i} ::= a{0} a{0}\n", i + 1))
                .collect::<String>()
        ),
        "start: a\na: b\nb: a".to_owned(),
        "start: nothing".to_owned(),
        String::new(),
        "\u{20ac}".repeat(1000),
    ]
}

#[test]
fn bombs_are_refused_in_time_or_run_within_bounds() {
    let (text, compiler) = demo();
    let mut refused = 0;
    let schemas = bombs().into_iter().map(Rules::Schema);
    let all = schemas.chain(grammars().into_iter().map(Rules::Grammar));
    for rules in all.chain([
        Rules::Regex("(a|b)*a(a|b){500}".into()),
        Rules::Choice(Vec::new()),
    ]) {
        let start = Instant::now();
        // With the same stack size as in the server.
        let compiled = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(super::super::STACK);
            let compile = || compiler.compile(&rules, room(&compiler));
            thread.spawn_scoped(scope, compile).unwrap().join().unwrap()
        });
        let took = start.elapsed();
        let shown: String = format!("{rules:?}").chars().take(100).collect();
        // Far below the cost without limits, even on a busy machine.
        assert!(took < Duration::from_secs(5), "{took:?}: {shown}");
        match compiled {
            Err(_) => refused += 1,
            Ok(mut held) => {
                let start = Instant::now();
                let mut random = fastrand::Rng::with_seed(7);
                let mut tokens = 0;
                while tokens < 100 && !held.is_complete() && held.prepare().is_ok() {
                    let allowed: Vec<u32> = (0..text.config().vocab)
                        .filter(|&t| held.allows(t))
                        .collect();
                    if held.accept(allowed[random.usize(..allowed.len())]).is_err() {
                        break;
                    }
                    tokens += 1;
                }
                let took = start.elapsed();
                assert!(
                    took < Duration::from_secs(3),
                    "{tokens} tokens in {took:?}: {shown}"
                );
            }
        }
    }
    assert!(refused >= 30, "{refused}");
}

fn checked(compiler: &Compiler, schema: &Value) -> Result<ByteMatcher, String> {
    let rules = Rules::Schema(schema.clone());
    let compiled = compiler.compile(&rules, room(compiler));
    compiled.map_err(|e| format!("{e:?}"))
}

/// Two schemas, and whether a value is valid against both (found with jsonschema 4.26). They may refer to
/// [`definitions`].
fn pairs() -> Vec<(Value, Value, bool)> {
    let optional = json!({"type": "object", "properties": {"k": {"const": "b"}}});
    vec![
        (json!({"type": "integer"}), json!({"type": "number"}), true),
        (json!({"type": "integer"}), json!({"type": "string"}), false),
        (json!({"minimum": 3}), json!({"type": "integer"}), true),
        (
            json!({"type": "integer", "maximum": 3}),
            json!({"type": "number", "minimum": 4}),
            false,
        ),
        (
            json!({"type": "integer", "maximum": 3}),
            json!({"type": "integer", "minimum": 3}),
            true,
        ),
        (
            json!({"type": "number", "exclusiveMaximum": 3}),
            json!({"type": "number", "minimum": 3}),
            false,
        ),
        (json!({"enum": [1, "a"]}), json!({"const": 1.0}), true),
        (json!({"enum": [1, "a"]}), json!({"const": "b"}), false),
        (
            json!({"type": "string", "maxLength": 2}),
            json!({"type": "string", "minLength": 3}),
            false,
        ),
        (
            json!({"type": "string", "pattern": "a"}),
            json!({"type": "string", "pattern": "b"}),
            true,
        ),
        (tagged("a"), tagged("b"), false),
        (tagged("a"), optional, false),
        (
            json!({"properties": {"a": {"type": "integer"}}}),
            json!({"properties": {"b": {}}}),
            true,
        ),
        (
            json!({"$ref": "#/$defs/a"}),
            json!({"$ref": "#/$defs/b"}),
            false,
        ),
        (
            json!({"$ref": "#/$defs/a"}),
            json!({"$ref": "#/$defs/a"}),
            true,
        ),
        (json!({"$ref": "#/$defs/n"}), json!({"type": "null"}), true),
        (json!({"$ref": "#/$defs/a"}), json!({"type": "null"}), false),
        (
            json!({"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
            json!({"type": "integer"}),
            false,
        ),
        (
            json!({"required": ["a"], "additionalProperties": false, "properties": {"a": {}}, "type": "object"}),
            json!({"required": ["b"], "type": "object"}),
            false,
        ),
    ]
}

fn tagged(tag: &str) -> Value {
    json!({"type": "object", "properties": {"k": {"const": tag}}, "required": ["k"]})
}

fn definitions() -> Value {
    json!({"a": tagged("a"), "b": tagged("b"), "n": {"type": ["null", "string"]}})
}

#[test]
fn one_of_is_taken_where_no_value_fits_two_schemas() {
    let (_, compiler) = demo();
    for (a, b, overlap) in pairs() {
        let schema = json!({"$defs": definitions(), "oneOf": [a, b]});
        let found = checked(&compiler, &schema);
        match (overlap, found) {
            (true, Err(why)) => assert!(why.contains("`oneOf` at #"), "{schema}: {why}"),
            (false, Ok(_)) => {}
            (_, found) => panic!("{schema}: {found:?}"),
        }
    }
}

#[test]
fn one_of_several_required_properties_is_exact() {
    let (text, compiler) = demo();
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "additionalProperties": false,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    });
    for seed in 0..8 {
        let mut held = checked(&compiler, &schema).unwrap();
        let (found, complete) = drawn(&text, &mut held, seed, 200);
        let value: Value = serde_json::from_str(&found).unwrap();
        assert!(complete && value.as_object().unwrap().len() == 1, "{found}");
    }
}

#[test]
fn counts_are_counts_and_formats_may_be_annotations() {
    let (text, compiler) = demo();
    let refused = |schema: Value| checked(&compiler, &schema).unwrap_err();
    let why = refused(json!({"properties": {"a": {"type": "string", "minLength": -1}}}));
    assert!(
        why.contains("`minLength` at #/properties/a is -1; it must be a non-negative integer"),
        "{why}"
    );
    assert!(refused(json!({"type": "array", "maxItems": 1.5})).contains("`maxItems` at # is 1.5"));
    assert!(refused(json!({"type": "object", "minProperties": "1"})).contains(r#"is \"1\""#));
    for format in [
        "int32",
        "phone",
        "byte",
        "regex",
        "unknown",
        "my-own",
        "idn-email",
        "iri",
        "json-pointer",
        "uri-reference",
    ] {
        let schema = json!({"type": "string", "format": format, "maxLength": 20.0});
        let found = checked(&compiler, &schema);
        assert!(found.is_ok(), "{format}: {found:?}");
    }
    let pointer =
        json!({"type": "string", "format": "json-pointer", "minLength": 1, "maxLength": 20});
    let mut held = checked(&compiler, &pointer).unwrap();
    let (found, _) = drawn(&text, &mut held, 1, 200);
    assert!(
        found.starts_with("\"/") || found.starts_with("\"\\"),
        "{found}"
    );
    // A property may be named like a keyword.
    let named = json!({"properties": {"oneOf": {"type": "integer"}, "format": {"const": "x"}, "minLength": {"const": -1}}});
    assert!(checked(&compiler, &named).is_ok());
}

#[test]
fn json_is_compact() {
    let (text, compiler) = demo();
    let inner = json!({"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 3, "maxItems": 3});
    let schema = json!({"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"], "additionalProperties": false});
    for seed in 0..8 {
        let mut held = checked(&compiler, &schema).unwrap();
        let (found, complete) = drawn(&text, &mut held, seed, 400);
        assert!(complete, "{found}");
        let blanks: Vec<usize> = found
            .match_indices(char::is_whitespace)
            .map(|(at, _)| at)
            .collect();
        let allowed =
            |at: &usize| found[..*at].ends_with([',', ':']) && found.as_bytes()[*at] == b' ';
        assert!(blanks.iter().all(allowed), "{found}");
    }
}

/// Annotations change nothing; what is misspelt or not supported is refused by its name and place.
#[test]
fn keywords_are_known_or_refused() {
    let (text, compiler) = demo();
    let notes = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", "$comment": "c", "title": "t",
        "description": "d", "default": {"minLength": -1}, "examples": [1], "deprecated": true, "readOnly": true,
        "writeOnly": false, "contentEncoding": "base64", "contentMediaType": "image/png", "x-order": {"not": 1},
        "discriminator": {"propertyName": "k"}, "enum": ["yes"],
    });
    let mut held = checked(&compiler, &notes).unwrap();
    assert_eq!(drawn(&text, &mut held, 1, 20).0, "\"yes\"");
    // Names of properties and definitions are no keywords.
    let names = json!({"properties": {"propertie": {}, "not": {}}, "$defs": {"if": {"type": "null"}}, "const": {"maxLenght": 1}});
    assert!(checked(&compiler, &names).is_ok());
    for (schema, why) in [
        (
            json!({"propertie": {}}),
            "`propertie` at # is an unknown keyword; did you mean properties?",
        ),
        (
            json!({"properties": {"a": {"type": "string", "maxLenght": 3}}}),
            "`maxLenght` at #/properties/a is an unknown keyword; did you mean maxLength?",
        ),
        (
            json!({"items": {"anyOf": [{}, {"Type": "null"}]}}),
            "`Type` at #/items/anyOf/1",
        ),
        (
            json!({"$defs": {"a": {"frmat": "date"}}}),
            "`frmat` at #/$defs/a",
        ),
        (
            json!({"type": "string", "nullable": true}),
            "write \\\"type\\\"",
        ),
        (
            json!({"items": {"not": {}}}),
            "`not` at #/items cannot be enforced",
        ),
        (
            json!({"type": "array", "uniqueItems": true}),
            "`uniqueItems` at # cannot be enforced",
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-04/schema#", "if": {}}),
            "`if` at #",
        ),
    ] {
        let found = checked(&compiler, &schema).unwrap_err();
        assert!(found.contains(why), "{schema}: {found}");
    }
}
