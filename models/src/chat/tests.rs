use super::*;

fn conversation() -> Vec<Message> {
    [("user", "Hi"), ("assistant", "Yes?")]
        .map(|(role, content)| Message::new(role, content))
        .into()
}

fn render(template: &str) -> Result<String, String> {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let template = ChatTemplate::new(template, &tokens).map_err(|e| e.to_string())?;
    let conversation = Conversation {
        messages: conversation(),
        add_generation_prompt: true,
        ..Conversation::default()
    };
    template.render(&conversation).map_err(|e| e.to_string())
}

#[test]
fn block_tags_swallow_their_line_and_tokens_are_written() {
    let text = render(
        "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}: {{ m['content'] }}\n  {% endfor %}\n{% if add_generation_prompt %}\n> {% endif %}\n",
    );
    assert_eq!(text.unwrap(), "<s>\nuser: Hi\nassistant: Yes?\n> ");
}

#[test]
fn a_refusal_gives_the_templates_own_words() {
    let error = render(
        "{% if messages[0].role != 'system' %}\n{{ raise_exception('no system turn') }}\n{% endif %}",
    );
    assert_eq!(
        error.unwrap_err(),
        "chat template: refused by the template: no system turn (line 2)"
    );
}

#[test]
fn a_broken_template_is_refused_with_its_line() {
    let error = render("{{ bos_token }}\n{% for m in %}").unwrap_err();
    assert!(error.contains("(line 2)"), "{error}");
}

#[test]
fn unknown_functions_and_methods_are_refused() {
    assert!(
        render("{{ open('/etc/passwd') }}")
            .unwrap_err()
            .contains("open")
    );
    assert!(
        render("{{ bos_token.encode() }}")
            .unwrap_err()
            .contains("encode")
    );
    assert!(render("{% include 'other' %}").is_err());
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let error = render(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    );
    assert!(error.unwrap_err().contains("fuel"));
    assert!(render("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}").is_err());
    assert!(render("{{ 'x' * 999999999999 }}").is_err());
}

/// An expression renders as this text.
fn assert_value(expression: &str, expected: &str) {
    let text = render(&format!("{{{{ {expression} }}}}"));
    assert_eq!(text.as_deref(), Ok(expected), "{expression}");
}

#[test]
fn python_methods_that_templates_use() {
    for (expression, expected) in [
        ("'> a.'.removeprefix('> ').removesuffix('.')", "a"),
        ("'a.b.c'.rsplit('.', 1)|join('/')", "a.b/c"),
        ("' a  b c '.rsplit(none, 1)|join('/')", " a  b/c"),
        ("' a  b c '.rsplit()|join('/')", "a/b/c"),
        ("'a=b=c'.partition('=')|join('/')", "a/=/b=c"),
        ("'a=b=c'.rpartition('=')|join('/')", "a=b/=/c"),
        ("'abc'.partition('=')|join('/')", "abc//"),
        ("'abc'.rpartition('=')|join('/')", "//abc"),
        ("{'k': 1}.get('x', 2)", "2"),
        ("'aXb'.lower().title()", "Axb"),
    ] {
        assert_value(expression, expected);
    }
    assert!(render("{{ 'abc'.rsplit('') }}").is_err());
}

#[test]
fn tojson_writes_what_json_dumps_writes() {
    for (expression, expected) in [
        (
            "{'b': [1, 2.5, none], 'a': '<é\"\\n>'} | tojson",
            r#"{"b": [1, 2.5, null], "a": "<é\"\n>"}"#,
        ),
        (
            "{'b': 1, 'a': 'é😀'} | tojson(sort_keys=true, ensure_ascii=true)",
            r#"{"a": "\u00e9\ud83d\ude00", "b": 1}"#,
        ),
        ("[1, [], {}] | tojson(separators=[',', ':'])", "[1,[],{}]"),
        (
            "[1, {'a': []}] | tojson(indent=2)",
            "[\n  1,\n  {\n    \"a\": []\n  }\n]",
        ),
    ] {
        assert_value(expression, expected);
    }
    assert!(render("{{ nothing | tojson }}").is_err());
}

/// Kimi K2's template keeps the ids of calls in a list.
#[test]
fn lists_of_namespaces_can_be_changed() {
    let source = "{%- set queue = namespace(ids=[]) -%}
{%- macro add(id) -%}{%- set _ = queue.ids.append('<' + id + '>') -%}{%- endmacro -%}
{%- for id in ['a', 'b', 'c'] -%}{{ add(id) }}{%- endfor -%}
{%- for _ in range(2) -%}
  {%- set id = queue.ids.pop(0) -%}
  {{ id }} of {{ queue.ids | length }};
{%- endfor -%}";
    assert_eq!(render(source).unwrap(), "<a> of 2;<b> of 1;");
    let more = "{% set n = namespace(l=[]) %}{% set _ = n.l.append(1) and n.l.append(2) %}";
    assert!(render(more).unwrap_err().contains("append"));
    for broken in [
        "n.l.append(",
        "n.l.append)",
        "n..append(1)",
        "n.l.pop(0",
        "n.l.",
    ] {
        assert!(render(&format!("{{% set x = {broken} %}}")).is_err());
    }
}

#[test]
fn generation_tags_write_nothing() {
    let text = render(
        "{% for m in messages %}\n{%- generation -%}\n {{ m.content }}\n{% endgeneration %}\n{% endfor %}",
    );
    assert_eq!(text.unwrap(), "Hi\nYes?\n");
}

#[test]
fn a_fixed_clock_gives_a_fixed_date() {
    let mut template = ChatTemplate::new("{{ strftime_now('%d %b %Y') }}", &[]).unwrap();
    template.set_clock(Some(1_721_995_200));
    let rendered = template.render(&Conversation::default());
    assert_eq!(rendered.unwrap(), "26 Jul 2024");
}

/// DeepSeek V3's template joins the arguments to other text; others need an object.
#[test]
fn arguments_of_calls_are_objects_or_text_as_the_template_takes_them() {
    let call = serde_json::json!({"function": {"name": "f", "arguments": {"a": ["ü", 1.0]}}});
    let mut message = Message::new("assistant", "");
    message.set("tool_calls", vec![call].into());
    let conversation = Conversation {
        messages: vec![message],
        ..Conversation::default()
    };
    let render = |arguments: &str| {
        let source = format!(
            "{{% set arguments = messages[0].tool_calls[0].function.arguments %}}{{{{ {arguments} }}}}"
        );
        let template = ChatTemplate::new(&source, &[]).unwrap();
        template.render(&conversation).map_err(|e| e.to_string())
    };
    assert_eq!(
        render("'<' + arguments + '>'").unwrap(),
        "<{\"a\": [\"ü\", 1.0]}>"
    );
    assert_eq!(render("arguments.a[0]").unwrap(), "ü");
    let error = render("raise_exception('never')").unwrap_err();
    assert!(error.contains("never"), "{error}");
}

#[test]
fn reasoning_has_the_name_that_the_template_uses() {
    for given in ["reasoning_content", "thinking", "reasoning"] {
        let mut message = Message::new("assistant", "Yes");
        message.set(given, "I look.".into());
        let conversation = Conversation {
            messages: vec![message],
            ..Conversation::default()
        };
        let source =
            "{% set m = messages[0] %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}";
        let template = ChatTemplate::new(source, &[]).unwrap();
        let text = template.render(&conversation).unwrap();
        assert_eq!(text, "I look.|I look.|I look.", "{given}");
    }
}
