//! The calls of each family, as its public chat template writes them, and formats read off templates.

use emberflow_models::chat::{ChatTemplate, Conversation};
use serde_json::{Value, json};

use super::super::format::CallFormat;
use super::super::reader::Part;
use super::{asked, call, format, read, read_by};

/// A string with everything that ends a value somewhere, but the end of its own notation.
const TEXT: &str = "K\"öl's, \\n <b>\n\n{\"x\": [1]} 你好 <tool> ) ]";

/// The arguments of the first call; the second one has none.
fn arguments() -> Value {
    json!({"a": TEXT, "b": [1, {"c": null, "d": "e"}], "n": 7})
}

/// Checks that `text` has both calls.
#[track_caller]
fn check(source: &str, text: &str) {
    let parts = read(source, text);
    let [Part::Call(first), Part::Arguments(json), rest @ ..] = &parts[..] else {
        panic!("{source}: {parts:?}");
    };
    assert_eq!(first, "get");
    let read: Value = serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {json}"));
    assert_eq!(read, arguments(), "{source}");
    assert_eq!(rest, call("put", "{}"), "{source}");
}

/// The arguments as JSON, in `before` and `after` them, and those of the second call.
fn json_in(parts: [&str; 3]) -> String {
    let [before, between, after] = parts;
    format!("{before}{}{between}{{}}{after}", arguments())
}

/// Marks, and the text before the first arguments, before the second ones, and at the end.
const JSON: [(&str, [&str; 3]); 10] = [
    (
        "<｜tool▁calls▁begin｜>",
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n",
            "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n```json\n",
            "\n``` <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
    ),
    (
        "<｜tool▁calls▁begin｜>",
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>put<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
    ),
    (
        "<|tool_calls_section_begin|>",
        [
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_call_begin|>functions.put:1<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ],
    ),
    (
        "<|tool_calls_section_begin|>",
        [
            "<|tool_call_begin|>get:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_call_begin|>put<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
    ),
    (
        "<|tool_calls|>",
        [
            "<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>get<|tool_call:args|>",
            "<|tool_call:end|><|tool_call:begin|>c3d4<|tool_call:name|>put<|tool_call:args|>",
            "<|tool_call:end|><|calls|>",
        ],
    ),
    (
        "<|tool_call|>",
        [
            "<|tool_call|>[{\"name\": \"get\", \"arguments\": ",
            "}, {\"name\": \"put\", \"arguments\": ",
            "}]<|/tool_call|>",
        ],
    ),
    (
        "<tool_calls>",
        [
            "<tool_calls>[{\"name\": \"get\",\"arguments\": ",
            "},\n{\"name\": \"put\",\"arguments\": ",
            "}]</tool_calls>",
        ],
    ),
    (
        "<|START_ACTION|>",
        [
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get\", \"parameters\": ",
            "},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"put\", \"parameters\": ",
            "}\n]<|END_ACTION|>",
        ],
    ),
    (
        "Action: \"tool_name\":",
        [
            "Action:\n```json\n[\n    {\n        \"tool_name\": \"get\",\n        \"parameters\": ",
            "\n    },\n    {\n        \"tool_name\": \"put\",\n        \"parameters\": ",
            "\n    }\n]```\n",
        ],
    ),
    (
        "<TOOLCALL>",
        [
            "<TOOLCALL>[{\"name\": \"get\", \"arguments\": ",
            "}, {\"name\": \"put\", \"arguments\": ",
            "}]</TOOLCALL>",
        ],
    ),
];

#[test]
fn arguments_that_are_json() {
    for (source, parts) in JSON {
        check(source, &json_in(parts));
    }
}

#[test]
fn arguments_between_tags() {
    let list = "[1, {\"c\": null, \"d\": \"e\"}]";
    // Line breaks around values are part of the format in one and of the value in others.
    check(
        "<tool_call><function=",
        &format!(
            "<tool_call>\n<function=get>\n<parameter=a>\n{TEXT}\n</parameter>\n<parameter=b>\n{list}\n</parameter>\n\
             <parameter=n>\n7\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=put>\n</function>\n</tool_call>"
        ),
    );
    check(
        "<seed:tool_call>",
        &format!(
            "<seed:tool_call>\n<function=get>\n<parameter=a>{TEXT}</parameter>\n<parameter=b>[1, {{'c': None, 'd': 'e'}}]</parameter>\n\
             <parameter=n>7</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=put>\n</function>\n</seed:tool_call>"
        ),
    );
    check(
        "<arg_key>",
        &format!(
            "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>{TEXT}</arg_value>\n<arg_key>b</arg_key>\n<arg_value>{list}</arg_value>\n\
             <arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n<tool_call>put\n</tool_call>"
        ),
    );
    check(
        "<arg_key>",
        &format!(
            "<tool_call>get<arg_key>a</arg_key><arg_value>{TEXT}</arg_value><arg_key>b</arg_key><arg_value>{list}</arg_value>\
             <arg_key>n</arg_key><arg_value>7</arg_value></tool_call><tool_call>put</tool_call>"
        ),
    );
    check(
        "<arg_key><tool_sep>",
        &format!(
            "<tool_calls>\n<tool_call>get<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>{TEXT}</arg_value>\n<arg_key>b</arg_key>\n\
             <arg_value>{list}</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n\
             <tool_call>put<tool_sep>\n</tool_call>\n</tool_calls>"
        ),
    );
    check(
        "<minimax:tool_call>",
        &format!(
            "<minimax:tool_call>\n<invoke name=\"get\">\n<parameter name=\"a\">{TEXT}</parameter>\n<parameter name=\"b\">{list}</parameter>\n\
             <parameter name=\"n\">7</parameter>\n</invoke>\n<invoke name=\"put\">\n</invoke>\n</minimax:tool_call>"
        ),
    );
    for (source, section) in [
        ("DSML｜ function_calls", "function_calls"),
        ("DSML｜", "tool_calls"),
    ] {
        check(
            source,
            &format!(
                "\n\n<｜DSML｜{section}>\n<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter name=\"a\" string=\"true\">{TEXT}</｜DSML｜parameter>\n\
                 <｜DSML｜parameter name=\"b\" string=\"false\">{list}</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">7</｜DSML｜parameter>\n\
                 </｜DSML｜invoke>\n<｜DSML｜invoke name=\"put\">\n</｜DSML｜invoke>\n</｜DSML｜{section}>"
            ),
        );
    }
}

#[test]
fn a_tag_says_whether_a_value_is_a_string() {
    let with = |says: &str| {
        format!(
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"put\">\n<｜DSML｜parameter name=\"x\" string=\"{says}\">12</｜DSML｜parameter>\n\
             </｜DSML｜invoke>\n</｜DSML｜tool_calls>"
        )
    };
    assert_eq!(
        read("DSML｜", &with("true")),
        call("put", "{\"x\": \"12\"}")
    );
    assert_eq!(read("DSML｜", &with("false")), call("put", "{\"x\": 12}"));
}

#[test]
fn arguments_as_in_python_or_without_quotes() {
    check(
        "<|tool_call_start|>",
        "<|tool_call_start|>[get(a='K\"öl\\'s, \\\\n <b>\\n\\n{\"x\": [1]} 你好 <tool> ) ]', b=[1, {'c': None, \"d\": 'e'}], n=7), put()]<|tool_call_end|>",
    );
    // LFM2.5's template writes strings between quotes as they are.
    let python =
        "<|tool_call_start|>[get(a='it's \"so\", b='c' ok\n', n=7), put()]<|tool_call_end|>";
    let json = r#"{"a": "it's \"so\", b='c' ok\n", "n": 7}"#;
    let both = [call("get", json), call("put", "{}")].concat();
    assert_eq!(read("<|tool_call_start|>", python), both);
    check(
        "<|tool_call>",
        &format!(
            "<|tool_call>call:get{{a:<|\"|>{TEXT}<|\"|>,b:[1,{{c:None,d:<|\"|>e<|\"|>}}],n:7}}<tool_call|><|tool_call>call:put{{}}<tool_call|>"
        ),
    );
    let quoted = "<|tool_call>call:get{a:\"Köln\",n:7,b:true}<tool_call|>";
    let json = r#"{"a": "Köln", "n": 7, "b": true}"#;
    assert_eq!(read("<|tool_call>", quoted), call("get", json));
}

/// A template that writes calls with `call`, within `open` and `close`, and with `between` between them.
fn template(open: &str, call: &str, between: &str, close: &str) -> ChatTemplate {
    let source = format!(
        "{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{% if m.tool_calls %}}{open}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}\
         {{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{close}{{% endif %}}<|end|>\n{{% endfor %}}"
    );
    ChatTemplate::new(&source, &[]).unwrap()
}

fn derived(template: &ChatTemplate) -> CallFormat {
    let render = |asked: &Conversation| template.render(asked).ok();
    CallFormat::of(template.source(true), &[], &render)
}

/// Formats that are in no table.
#[test]
fn formats_are_read_off_templates() {
    let json = "{{ f.arguments | tojson }}";
    let tags = "{% for k, v in f.arguments.items() %}<arg {{ k }}>{{ v }}</arg>{% endfor %}";
    for (template, text) in [
        (
            template(
                "<calls>",
                &format!("<do>{{{{ f.name }}}}|{json}</do>"),
                "",
                "</calls>",
            ),
            "<calls><do>get|{\"a\": \"x\", \"n\": 1}</do><do>put|{}</do></calls>",
        ),
        (
            template(
                "",
                &format!(
                    "<c no=\"{{{{ loop.index }}}}\" id=\"{{{{ c.id }}}}\">{{\"{{{{ f.name }}}}\": {json}}}</c>"
                ),
                "\n",
                "",
            ),
            "<c no=\"1\" id=\"q\">{\"get\": {\"a\": \"x\", \"n\": 1}}</c>\n<c no=\"2\" id=\"r\">{\"put\": {}}</c>",
        ),
        (
            template(
                "<<",
                &format!(
                    "{{\"fn\": \"{{{{ f.name }}}}\", \"with\": {json}, \"id\": \"{{{{ c.id }}}}\"}}"
                ),
                "; ",
                ">>",
            ),
            "<<{\"fn\": \"get\", \"with\": {\"a\": \"x\", \"n\": 1}, \"id\": \"q\"}; {\"fn\": \"put\", \"with\": {}, \"id\": \"r\"}>>",
        ),
        (
            template("", &format!("<run {{{{ f.name }}}}>{tags}</run>"), " ", ""),
            "<run get><arg a>x</arg><arg n>1</arg></run> <run put></run>",
        ),
    ] {
        let format = derived(&template);
        assert_eq!(format.frames.len(), 1, "{}", template.source(true));
        let properties = json!({"a": {"type": "string"}, "n": {"type": "integer"}});
        let options = asked(
            &json!({"type": "object", "properties": properties}),
            json!({}),
        );
        let reader = options.reader(&format).unwrap().unwrap();
        let both = [call("get", "{\"a\": \"x\", \"n\": 1}"), call("put", "{}")].concat();
        assert_eq!(read_by(&reader, text), both);
    }
}

/// A template that writes calls in a way that is not understood has no format, whatever marks it contains.
#[test]
fn unknown_formats_are_none() {
    assert!(format("no marks").frames.is_empty());
    let described = r#"{"name": "f", "parameters": {}} <|im_start|>"#;
    assert!(format(described).frames.is_empty());
    let llama = r#"{"name": "f", "parameters": {}} <|start_header_id|>"#;
    assert_eq!(format(llama).frames.len(), 1);
    // Words that any system message may have are no marks of a family.
    for [words, mark] in [
        ["You are a helpful AI assistant named SmolLM", "/no_think"],
        ["List of tools: [", "keep_past_thinking"],
    ] {
        assert!(format(&format!("{words} <|im_start|>")).frames.is_empty());
        assert_eq!(
            format(&format!("{words} {mark}")).frames.len(),
            1,
            "{words}"
        );
    }
    let odd = template(
        "<tool_call>",
        "{{ f.arguments.key_one }} to {{ f.name }}",
        "",
        "</tool_call>",
    );
    let unknown = derived(&odd);
    assert!(unknown.frames.is_empty());
    // Its tokens stay in the text.
    assert!(unknown.shows("<tool_call>") && !unknown.shows("<|end|>") && !unknown.shows(""));
    let known = template("", "", "", "<tool_call>");
    assert_eq!(derived(&known).frames.len(), 1);
}

/// Reasoning and the end of a turn are no part of the format.
#[test]
fn only_calls_are_part_of_the_format() {
    let json = "{{ f.arguments | tojson }}";
    let call = format!("<c>{{{{ f.name }}}}:{json}</c>");
    let template = template("<think>\n\n</think>\n\n", &call, "", "<|eom|>");
    let render = |asked: &Conversation| template.render(asked).ok();
    let format = CallFormat::of(template.source(true), &["<|eom|>".to_owned()], &render);
    let [frame] = &format.frames[..] else {
        panic!("{format:?}");
    };
    assert_eq!([&frame.open[..], &frame.close], ["", ""]);
}

/// End tokens before the calls, and others after them.
#[test]
fn a_sample_ends_at_the_first_end_token_after_its_calls() {
    let json = "{{ f.arguments | tojson }}";
    let call = format!("<c>{{{{ f.name }}}}:{json}</c>");
    let template = template("<|eom|>", &call, "", "<|eot|>");
    let render = |asked: &Conversation| template.render(asked).ok();
    let ends = ["<|eom|>", "<|eot|>"].map(str::to_owned);
    let format = CallFormat::of(template.source(true), &ends, &render);
    let [frame] = &format.frames[..] else {
        panic!("{format:?}");
    };
    assert!(!frame.texts().concat().contains("<|eot|>"), "{frame:?}");
}
