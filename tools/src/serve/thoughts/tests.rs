//! Reasoning is parsed the same whole or piece by piece. The formats are those of public chat templates.

use emberflow_engine::Constraint;
use serde_json::{Value, json};

use super::super::calls::{CallFormat, Part, ToolOptions};
use super::super::rules::Rules;
use super::super::rules::tests::{compiled_behind, demo};
use super::{Opening, Reading, ReasoningFormat, ReasoningOptions};

/// Reasoning, answer, and calls with their arguments.
#[derive(Debug, Clone, Default, PartialEq)]
struct Read {
    thoughts: String,
    answer: String,
    calls: Vec<(String, String)>,
}

impl Read {
    fn new(thoughts: &str, answer: &str) -> Self {
        Self {
            thoughts: thoughts.to_owned(),
            answer: answer.to_owned(),
            calls: Vec::new(),
        }
    }
}

/// Parses a text after a prompt in pieces of `length` characters.
fn read(template: &str, prompt: &str, text: &str, length: usize) -> Read {
    let (model, _) = demo();
    let tools = json!({"tools": [{"type": "function", "function": {"name": "get"}}]});
    let calls: ToolOptions = serde_json::from_value(tools).unwrap();
    let format = CallFormat::of(template, &[], &|_| None);
    let plan = calls.plan(&format, model.tokenizer()).unwrap().unwrap();
    let mut reading = Reading::new(Opening::behind(prompt, template), Some(plan.reader()));
    let chars: Vec<char> = text.chars().collect();
    let mut parts = Vec::new();
    for piece in chars.chunks(length) {
        parts.extend(reading.push(&piece.iter().collect::<String>()));
    }
    parts.extend(reading.finish(false));
    let mut read = Read::default();
    for part in parts {
        match part {
            Part::Thought(text) => read.thoughts += &text,
            Part::Text(text) => read.answer += &text,
            Part::Call(name) => read.calls.push((name, String::new())),
            Part::Arguments(more) => read.calls.last_mut().unwrap().1 += &more,
        }
    }
    read
}

#[test]
fn pieces_of_any_length_give_the_same_thoughts() {
    const THINK: &str = "<tool_call>{% if enable_thinking %}<think>\n{% endif %}</think>";
    let call = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": 1}}</tool_call>";
    for length in [1, 2, 5, 1000] {
        let think = |prompt: &str, text: &str| read(THINK, prompt, text, length);
        let both = Read::new("I look.\n\nYes < no.", "It is 4 </think>.");
        let text = "<think>\nI look.\n\nYes < no.\n</think>\n\nIt is 4 </think>.";
        assert_eq!(think("Q", text), both);
        // The prompt has the opening tag, and the model may repeat it.
        assert_eq!(think("Q<think>\n", &text["<think>\n".len()..]), both);
        assert_eq!(think("Q<think>\n", text), both);
        // The prompt closed the reasoning, or there is none.
        let plain = Read::new("", " A <think> b");
        assert_eq!(think("Q<think>\n\n</think>\n\n", " A <think> b"), plain);
        assert_eq!(think("Q", "<thin"), Read::new("", "<thin"));
        // Cut off.
        assert_eq!(think("Q<think>", "I look. "), Read::new("I look.", ""));
        let mut called = Read::new("a", "");
        called
            .calls
            .push(("get".to_owned(), "{\"a\": 1}".to_owned()));
        assert_eq!(think("Q", &format!("<think>a</think>{call}")), called);
        let gemma = "<|channel>thought\n<channel|>";
        let found = read(
            gemma,
            "Q",
            "<|channel>thought\nI look.\n<channel|>Yes",
            length,
        );
        assert_eq!(found, Read::new("I look.", "Yes"));
    }
}

/// Hy3's template formats its tags, and writes a closed pair by default.
#[test]
fn thoughts_of_hy3_are_separated() {
    const HY3: &str = "{% set HYTK = ':opensource' %}{% set open = '<think{}>'.format(HYTK) %}\
        {% set close = '</think{}>'.format(HYTK) %}{{ '<｜hy_Assistant{}｜>'.format(HYTK) ~ open }}";
    for length in [1, 2, 5, 1000] {
        let hy3 = |prompt: &str, text: &str| read(HY3, prompt, text, length);
        let opened = "Q<｜hy_Assistant:opensource｜><think:opensource>";
        let both = Read::new("I look <think>.", "It is 4.");
        assert_eq!(
            hy3(opened, "I look <think>.</think:opensource>It is 4."),
            both
        );
        let closed = format!("{opened}</think:opensource>");
        assert_eq!(hy3(&closed, "It is 4."), Read::new("", "It is 4."));
        // The same tags, written out.
        let plain = "{{ '<think:opensource></think:opensource>' }}";
        let text = "<think:opensource>I look <think>.</think:opensource>\n\nIt is 4.";
        assert_eq!(read(plain, "Q", text, length), both);
    }
    assert_eq!(
        ReasoningFormat::of_template("{{ '<tool{}>'.format(':opensource') }}"),
        None
    );
}

const SOLAR: &str = "<|begin|>assistant<|think|><|end|><|begin|>assistant<|content|><|tool_calls|>";

#[test]
fn messages_of_solar_open_are_thoughts_answers_and_calls() {
    for length in [1, 2, 5, 1000] {
        let solar = |text: &str| read(SOLAR, "<|begin|>assistant", text, length);
        let both = Read::new("I < look.", "It is <4.");
        for between in ["<|begin|>assistant", "", "\n<|begin|>assistant"] {
            for end in ["", "<|end|>"] {
                let text =
                    format!("<|think|>\nI < look.\n<|end|>{between}<|content|>It is <4.{end}");
                assert_eq!(solar(&text), both, "{text}");
            }
        }
        assert_eq!(solar("<|content|> A "), Read::new("", " A "));
        // Text without a header, and cut-off texts.
        assert_eq!(solar("plain <|x"), Read::new("", "plain <|x"));
        assert_eq!(solar("<|think|>I <|e"), Read::new("I <|e", ""));
        assert_eq!(solar("<|think|>I<|end|><|begin|>assis"), Read::new("I", ""));
        let mut called = Read::new("I", "");
        called
            .calls
            .push(("get".to_owned(), "{\"a\": 1}".to_owned()));
        let call = "<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>get<|tool_call:args|>{\"a\": 1}";
        let text = format!("<|think|>I<|end|><|begin|>assistant{call}<|tool_call:end|><|calls|>");
        assert_eq!(solar(&text), called);
    }
}

/// A call ends a reasoning that is not closed; one in a reasoning that is closed later is only considered.
#[test]
fn calls_end_thoughts_that_are_not_closed() {
    const THINK: &str = "<think><tool_call>";
    let call = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": 1}}</tool_call>";
    let mut called = Read::new("I look.", "");
    called
        .calls
        .push(("get".to_owned(), "{\"a\": 1}".to_owned()));
    for length in [1, 2, 5, 1000] {
        let think = |text: &str| read(THINK, "Q<think>\n", text, length);
        assert_eq!(think(&format!("I look.\n{call}")), called);
        let draft = Read::new(&format!("I could {call} it."), "No.");
        assert_eq!(think(&format!("I could {call} it.</think>No.")), draft);
        let mention = Read::new("I write <tool_call> then", "");
        assert_eq!(think("I write <tool_call> then"), mention);
        // The call after the reasoning counts, the one in it does not.
        let text = format!("I could {call}\n</think>\n{call}");
        let mut both = called.clone();
        both.thoughts = format!("I could {call}");
        assert_eq!(think(&text), both);
    }
}

/// Calls in closed reasoning count if nothing follows it.
#[test]
fn calls_at_the_end_of_closed_thoughts_are_meant_if_nothing_follows() {
    const THINK: &str = "<tool_call><think></think>";
    let call = "<tool_call>{\"name\": \"get\", \"arguments\": {\"a\": 1}}</tool_call>";
    for length in [1, 2, 5, 1000] {
        let think = |text: &str| read(THINK, "Q<think>", text, length);
        for end in ["</think>", "\n</think>\n\n"] {
            let found = think(&format!("I look.\n{call}{end}"));
            assert_eq!(found.calls, [("get".to_owned(), "{\"a\": 1}".to_owned())]);
            assert_eq!(found.answer, "");
            assert!(found.thoughts.starts_with("I look."), "{found:?}");
            let answered = think(&format!("I look.\n{call}{end}It is 4."));
            assert_eq!((&*answered.answer, answered.calls.len()), ("It is 4.", 0));
        }
        // The last ones only, if they are whole.
        let two = think(&format!("{call} or {call}\n{call}</think>"));
        assert_eq!(two.calls.len(), 2, "{two:?}");
        let cut = &call[..call.len() - 14];
        for text in [
            format!("I could {call}, but not now.</think>"),
            format!("I could {cut}</think>"),
        ] {
            assert_eq!(think(&text).calls, [], "{text}");
        }
    }
}

const HARMONY: &str = "<|start|>assistant<|channel|>final<|message|>";

#[test]
fn harmony_channels_are_thoughts_answers_and_calls() {
    for length in [1, 2, 5, 1000] {
        let harmony = |text: &str| read(HARMONY, "<|start|>assistant", text, length);
        let thought = "<|channel|>analysis<|message|>I < look.<|end|><|start|>assistant";
        assert_eq!(
            harmony(&format!("{thought}<|channel|>final<|message|>It is 4.")),
            Read::new("I < look.", "It is 4.")
        );
        assert_eq!(
            harmony("<|channel|>analysis<|message|>I"),
            Read::new("I", "")
        );
        assert_eq!(harmony("plain <|x"), Read::new("", "plain <|x"));
        let mut called = Read::new("I < look.", "");
        called
            .calls
            .push(("get".to_owned(), "{\"a\": 1}".to_owned()));
        for header in [
            "<|channel|>commentary to=functions.get <|constrain|>json",
            " to=functions.get<|channel|>commentary <|constrain|>json",
            " to=functions.get<|channel|>commentary json",
        ] {
            let text = format!("{thought}{header}<|message|>{{\"a\": 1}}");
            assert_eq!(harmony(&text), called, "{header}");
        }
        // An unknown tool.
        let text = format!("{thought}<|channel|>analysis to=python code<|message|>x");
        assert_eq!(harmony(&text), Read::new("I < look.x", ""));
    }
}

#[test]
fn rules_hold_the_answer_behind_thoughts() {
    let (text, compiler) = demo();
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false});
    let rules = Rules::Schema(schema);
    let think = "<think></think>";
    for (template, prompt, begin) in [
        (think, "<think>\n", "I < look.\n</think>\n\n"),
        (think, "", "<think>I</think>"),
        (think, "", ""),
        (SOLAR, "", "<|content|>"),
        (SOLAR, "", "<|think|>I<|end|><|begin|>assistant<|content|>"),
        (HARMONY, "", "<|channel|>final<|message|>"),
        (
            HARMONY,
            "",
            "<|channel|>analysis<|message|>I<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>",
        ),
    ] {
        let opening = Opening::behind(prompt, template).unwrap();
        let preface = opening.preface(false, text.tokenizer());
        // Whether all tokens of the text are allowed and complete it.
        let holds = |wanted: &str| {
            let mut held = compiled_behind(&compiler, &preface, &rules);
            let allowed = text.tokens(wanted).unwrap().iter().all(|&token| {
                held.prepare().unwrap();
                held.allows(token) && held.accept(token).is_ok()
            });
            allowed && held.is_complete()
        };
        assert!(holds(&format!("{begin}{{\"a\": 1}}")), "{template} {begin}");
        assert!(
            !holds(&format!("{begin}{{\"a\": 3}}")),
            "{template} {begin}"
        );
    }
}

#[test]
fn templates_are_told_what_was_asked() {
    let variables = |asked: Value| {
        let asked: ReasoningOptions = serde_json::from_value(asked).unwrap();
        Value::Object(asked.variables())
    };
    let kwargs = json!({"enable_thinking": true, "x": [1]});
    for (asked, wanted) in [
        (json!({}), json!({})),
        (json!({"chat_template_kwargs": kwargs}), kwargs.clone()),
        (
            json!({"enable_thinking": false}),
            json!({"enable_thinking": false, "thinking": false}),
        ),
        (
            json!({"reasoning_effort": "low"}),
            json!({"reasoning_effort": "low"}),
        ),
        (
            json!({"reasoning": {"effort": "high"}}),
            json!({"reasoning_effort": "high"}),
        ),
        (
            json!({"reasoning_effort": "none"}),
            json!({"enable_thinking": false, "thinking": false}),
        ),
    ] {
        assert_eq!(variables(asked), wanted);
    }
    let asked = json!({"chat_template_kwargs": kwargs, "enable_thinking": false});
    assert_eq!(variables(asked)["enable_thinking"], true);
    assert!(ReasoningFormat::of_template("{{ messages }}").is_none());
}
