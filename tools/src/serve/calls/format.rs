//! The formats of tool calls of a model.
//!
//! The chat template decides: two calls are rendered, and the format is read off them (`derive.rs`). If the template
//! writes no calls, or not so that they come back, marks in its source decide (`table.rs`).

use std::sync::Arc;

use emberflow_models::chat::{Conversation, Message};
use emberflow_models::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::derive::{IDS, KEYS, NAMES, NUMBERS, TEXTS, derive, inside_of_tag, whole_tags_before};
use super::frame::{Frame, Notation};
use super::header::Callee;
use super::reader::{CallReader, Part};
use super::table;
use super::types::Kinds;

/// How a model writes calls.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallFormat {
    /// The formats that its texts may have; none if the template has no calls that are known.
    pub frames: Arc<[Frame]>,
    /// Whether calls are messages of gpt-oss.
    pub harmony: bool,
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
    /// The format of a chat template with this source.
    pub fn of(source: &str, render: &Render<'_>) -> Self {
        let harmony = source.contains("<|channel|>") && source.contains("<|message|>");
        let rendered = (!harmony && source.contains("tool_calls"))
            .then(|| rendered(render))
            .flatten();
        let mut frames = match rendered {
            Some(frame) => vec![frame],
            None => table::of_source(source),
        };
        for frame in &mut frames {
            if let Notation::Tags(tags) = &mut frame.arguments {
                tags.cdata = source.contains("<![CDATA[");
            }
        }
        Self {
            frames: frames.into(),
            harmony,
        }
    }

    /// The format for forced calls: the model's, or Hermes' if it has none.
    pub fn forced(&self) -> Self {
        match self.frames.is_empty() {
            true => Self {
                frames: table::plain().into_iter().collect(),
                harmony: false,
            },
            false => self.clone(),
        }
    }

    /// Whether a special token with this text belongs to calls, so that it appears in texts to be parsed.
    pub fn shows(&self, special: &str) -> bool {
        let mut texts = self.frames.iter().flat_map(Frame::texts);
        let harmony = self.harmony && HARMONY.contains(&special);
        !special.is_empty() && (harmony || texts.any(|text| text.contains(special)))
    }

    /// Special tokens of calls.
    pub fn signs(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let all = (0..tokenizer.vocab_size()).filter(|&token| tokenizer.is_special(token));
        let shown = all.filter(|&token| {
            let text = tokenizer.token_bytes(token).unwrap_or_default();
            String::from_utf8(text).is_ok_and(|text| self.shows(&text))
        });
        shown.collect()
    }
}

/// The special token with this text, if there is one.
pub fn special(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let token = tokenizer.token_to_id(text);
    token.filter(|&token| tokenizer.is_special(token))
}

/// The format of a template that writes calls, if they come back as they went in.
fn rendered(render: &Render<'_>) -> Option<Frame> {
    let answer = render(&conversation(json!({"content": ANSWER})))?;
    let mut samples = [(2, false), (2, true), (1, false), (1, true)]
        .into_iter()
        .filter_map(|(count, text)| {
            let calls: Vec<Value> = (0..count).map(|number| call(number, text)).collect();
            let whole = render(&conversation(json!({"content": "", "tool_calls": calls})))?;
            let sample = without_surroundings(&whole, &answer);
            derive(sample).filter(|frame| comes_back(frame, sample, count))
        });
    samples.next()
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

/// A rendered conversation without what it has in common with another one around its last message, and without an
/// empty reasoning.
fn without_surroundings<'a>(whole: &'a str, other: &str) -> &'a str {
    let same = whole.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    let start: usize = same.map(|(a, _)| a.len_utf8()).sum();
    let start = whole_tags_before(&whole[..start]).len();
    let rest = &whole[start..];
    let ends = rest.chars().rev().zip(other.chars().rev());
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

/// Whether a sample's calls are read from it.
fn comes_back(frame: &Frame, sample: &str, count: usize) -> bool {
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
