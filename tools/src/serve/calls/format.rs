//! The formats of tool calls of a model.
//!
//! The chat template decides: two calls are rendered, and the format is read off them (`derive.rs`). If the template
//! writes no calls, or not so that they come back, marks in its source decide (`table.rs`).

use std::sync::Arc;

use emberflow_engine::Text;
use emberflow_models::chat::{Conversation, Message};
use emberflow_models::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::derive::{
    IDS, KEYS, NAMES, NUMBERS, TEXTS, common_start, derive, inside_of_tag, whole_tags_before,
};
use super::frame::{CallFrame, Notation};
use super::header::Callee;
use super::reader::{CallReader, Part};
use super::table;
use super::types::Kinds;
use crate::template::Renderer;

/// How a model writes calls.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallFormat {
    /// The formats that its texts may have; none if the template has no calls that are known.
    pub frames: Arc<[CallFrame]>,
    /// Whether calls are messages of gpt-oss.
    pub harmony: bool,
    /// Special tokens of calls, which appear in texts to be parsed.
    pub signs: Arc<[u32]>,
    /// Rendered calls that are not understood.
    unknown: String,
}

/// Marker tokens of gpt-oss.
pub const HARMONY: [&str; 5] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
];

/// Text of the sample's question and answer.
const QUESTION: &str = "What is it?";
const ANSWER: &str = "Answer";

/// Renders a conversation, if the template accepts it.
pub type Render<'a> = dyn Fn(&Conversation) -> Option<String> + 'a;

impl CallFormat {
    /// The format of a chat template with this source. `ends`: texts of tokens that end a text.
    pub fn of(source: &str, ends: &[String], render: &Render<'_>) -> Self {
        let harmony = source.contains("<|channel|>") && source.contains("<|message|>");
        let rendered = match harmony {
            true => Rendered::Nothing,
            false => rendered(ends, render),
        };
        let mut unknown = String::new();
        let mut frames = match rendered {
            Rendered::Calls(frame) => vec![*frame],
            Rendered::Unknown(sample) => {
                unknown = sample;
                Vec::new()
            }
            Rendered::Nothing => table::of_source(source),
        };
        for frame in &mut frames {
            if let Notation::Tags(tags) = &mut frame.arguments {
                tags.cdata = source.contains("<![CDATA[");
            }
        }
        Self {
            frames: frames.into(),
            harmony,
            signs: Arc::default(),
            unknown,
        }
    }

    /// The format of a model.
    pub fn of_model(text: &Text, template: &Renderer) -> Self {
        let tokenizer = text.tokenizer();
        let ends = text.config().eos.iter();
        let ends = ends.filter_map(|&end| tokenizer.token_bytes(end));
        let ends: Vec<String> = ends.filter_map(|end| String::from_utf8(end).ok()).collect();
        let render = |asked: &Conversation| template.render(asked).ok();
        Self::of(template.source(true), &ends, &render).with_signs(tokenizer)
    }

    /// The same with the special tokens of this tokenizer.
    pub fn with_signs(mut self, tokenizer: &Tokenizer) -> Self {
        let all = (0..tokenizer.vocab_size()).filter(|&token| tokenizer.is_special(token));
        let shown = all.filter(|&token| {
            let text = tokenizer.token_bytes(token).unwrap_or_default();
            String::from_utf8(text).is_ok_and(|text| self.shows(&text))
        });
        self.signs = shown.collect();
        self
    }

    /// The format for forced calls: the model's, or Hermes' if it has none.
    pub fn forced(&self, tokenizer: &Tokenizer) -> Self {
        if !self.frames.is_empty() {
            return self.clone();
        }
        let plain = Self {
            frames: table::plain().into_iter().collect(),
            ..Self::default()
        };
        plain.with_signs(tokenizer)
    }

    /// Whether a special token with this text belongs to calls, so that it appears in texts to be parsed.
    pub fn shows(&self, special: &str) -> bool {
        let mut texts = self.frames.iter().flat_map(CallFrame::texts);
        let harmony = self.harmony && HARMONY.contains(&special);
        let written = self.unknown.contains(special) || texts.any(|text| text.contains(special));
        !special.is_empty() && (harmony || written)
    }
}

/// Whether a chat template shows tools to the model. One that cannot be rendered with them is not asked again.
pub fn shows_tools(template: &Renderer) -> bool {
    let rendered = template.render(&question());
    rendered.is_ok_and(|text| text.contains(NAMES[0]))
}

/// The special token with this text, if there is one.
pub fn special(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let token = tokenizer.token_to_id(text);
    token.filter(|&token| tokenizer.is_special(token))
}

/// What a template writes for calls.
enum Rendered {
    /// Calls in this format.
    Calls(Box<CallFrame>),
    /// Calls that are not understood, in this text.
    Unknown(String),
    /// Not the calls.
    Nothing,
}

/// Reads the format of calls off a template, and checks that they come back as they went in.
fn rendered(ends: &[String], render: &Render<'_>) -> Rendered {
    let Some(answer) = render(&conversation(json!({"content": ANSWER}))) else {
        return Rendered::Nothing;
    };
    let around = Surroundings {
        answer,
        begin: render(&question()).unwrap_or_default(),
    };
    let mut written = None;
    // Some templates allow one call only, and some write arguments that are text.
    for asked in [[2, 0], [2, 1], [1, 0], [1, 1]] {
        let [count, text] = asked;
        let calls: Vec<Value> = (0..count).map(|number| call(number, text == 1)).collect();
        let Some(whole) = render(&conversation(json!({"content": "", "tool_calls": calls}))) else {
            continue;
        };
        let sample = without_end(around.without(&whole), ends);
        if sample.contains(NAMES[0]) {
            written.get_or_insert_with(|| sample.to_owned());
        }
        if let Some(frame) = derive(sample)
            && comes_back(&frame, sample, count)
        {
            return Rendered::Calls(Box::new(frame));
        }
    }
    written.map_or(Rendered::Nothing, Rendered::Unknown)
}

/// A sample up to the first end token after its last call.
fn without_end<'a>(sample: &'a str, ends: &[String]) -> &'a str {
    let calls = NUMBERS.iter().filter_map(|last| sample.rfind(last));
    let calls = calls.max().unwrap_or(0);
    let ends = ends.iter().filter(|end| !end.is_empty());
    let found = ends.filter_map(|end| sample[calls..].find(&end[..]));
    &sample[..found.min().map_or(sample.len(), |at| calls + at)]
}

/// A question.
fn question() -> Conversation {
    Conversation {
        add_generation_prompt: true,
        messages: vec![Message::new("user", QUESTION)],
        ..conversation(json!({}))
    }
}

/// A question and an answer with these members.
fn conversation(answer: Value) -> Conversation {
    let mut said = Message::new("assistant", "");
    for (name, value) in answer.as_object().into_iter().flatten() {
        said.set(name, value.clone());
    }
    let tools = NAMES.map(|name| {
        let properties: serde_json::Map<String, Value> = (KEYS.iter().zip(["string", "string", "integer"]))
            .map(|(key, kind)| ((*key).to_owned(), json!({"type": kind, "description": kind})))
            .collect();
        let parameters = json!({"type": "object", "properties": properties, "required": KEYS, "additionalProperties": false});
        json!({"type": "function", "function": {"name": name, "description": name, "parameters": parameters}})
    });
    Conversation {
        messages: vec![Message::new("user", QUESTION), said],
        tools: tools.to_vec(),
        ..Conversation::default()
    }
}

/// A call of the sample; its arguments as an object, or as `text`.
fn call(number: usize, text: bool) -> Value {
    let [one, two, three] = KEYS;
    let [first, second] = TEXTS[number];
    let last: i64 = NUMBERS[number].parse().unwrap_or_default();
    let arguments = json!({one: first, two: second, three: last});
    let arguments = match text {
        true => Value::from(arguments.to_string()),
        false => arguments,
    };
    let function = json!({"name": NAMES[number], "arguments": arguments});
    json!({"id": IDS[number], "type": "function", "function": function})
}

/// What a rendered conversation has around its last message.
struct Surroundings {
    /// The conversation with an answer.
    answer: String,
    /// The prompt that asks for one.
    begin: String,
}

impl Surroundings {
    /// The last message of a rendered conversation, without an empty reasoning.
    fn without<'a>(&self, whole: &'a str) -> &'a str {
        let same = [&self.answer, &self.begin].map(|other| common_start(whole, other));
        let start = same.into_iter().max().unwrap_or(0);
        let start = whole_tags_before(&whole[..start]).len();
        let rest = &whole[start..];
        let ends = rest.chars().rev().zip(self.answer.chars().rev());
        let length: usize = (ends.take_while(|(a, b)| a == b))
            .map(|(a, _)| a.len_utf8())
            .sum();
        let end = &rest[rest.len() - length..];
        let sample = &rest[..rest.len() - length + inside_of_tag(end)];
        let name = sample.find(NAMES[0]).unwrap_or(0);
        let lead = sample[..name].to_ascii_lowercase();
        let thoughts = lead.rfind("think").map_or(0, |at| {
            let close = lead[at..].find(['>', ']']);
            close.map_or(0, |close| at + close + 1)
        });
        &sample[thoughts..]
    }
}

/// Whether a sample's calls are read from it.
fn comes_back(frame: &CallFrame, sample: &str, count: usize) -> bool {
    let parameters = KEYS.map(|key| (key.to_owned(), Kinds::ANY)).to_vec();
    let tools = NAMES.map(|name| Callee {
        name: name.to_owned(),
        parameters: parameters.clone(),
    });
    let mut reader = CallReader::new([frame.clone()].into(), tools.into(), false);
    let mut parts = reader.push(sample);
    parts.extend(reader.finish(false));
    let mut calls: Vec<Value> = Vec::new();
    let mut text = String::new();
    for part in parts {
        match part {
            Part::Call(name) => {
                calls.extend(serde_json::from_str(&text).ok());
                calls.push(name.into());
                text.clear();
            }
            Part::Arguments(more) => text += &more,
            Part::Text(_) | Part::Thought(_) => return false,
        }
    }
    calls.extend(serde_json::from_str(&text).ok());
    let wanted = (0..count).flat_map(|number| {
        let function = &call(number, false)["function"];
        [function["name"].clone(), function["arguments"].clone()]
    });
    calls == wanted.collect::<Vec<Value>>()
}
