//! Cuts what a model says out of what a template writes.

use emberflow_models::chat::{ChatTemplate, Conversation, Message};
use serde_json::{Value, json};

use super::cases::{CONTENT, Case, THOUGHTS, Written, plain, tools};

/// End tokens of models.
const ENDS: [&str; 22] = [
    "</s>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end_of_text|>",
    "<|end_of_msg|>",
    "<|call|>",
    "<|calls|>",
    "<|END_OF_TURN_TOKEN|>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
    "<|role_end|>",
    "<|message_sep|>",
    "<SPECIAL_12>",
    "<end_of_sentence>",
    "</assistant>",
    "<sep>",
    "<seed:eos>",
];

/// Beginnings of the next message that templates write with the end of a message.
const FOLLOWING: [&str; 2] = [
    "<｜Assistant｜>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
];

/// A template that writes messages.
pub struct Author {
    pub template: ChatTemplate,
    /// Calls in words, if the template leaves them to the content.
    words: Option<Words>,
}

/// Writes a message's calls.
type Words = fn(&Case) -> String;

/// Models whose templates pass on the content but no calls, and how they were trained to write these.
const WORDS: [(&str, Words); 4] = [
    ("SmolLM3", tagged),
    ("LFM2-8B", pythonic),
    ("LFM2.5-Instruct", pythonic),
    ("granite-3.3", listed),
];

/// The plain call as a template writes it.
pub struct Begin {
    text: String,
    /// What follows the argument, if it is a tag.
    pub behind_value: String,
}

impl Begin {
    /// What precedes the name.
    pub fn frame(&self) -> String {
        let lead = self.text.split("get_weather").next().unwrap_or_default();
        let lead = match lead.rsplit_once("think") {
            Some((_, rest)) => rest.split_once('>').map_or(rest, |(_, rest)| rest),
            None => lead,
        };
        let one_line = lead.trim().replace('\n', "⏎");
        one_line.chars().take(34).collect()
    }
}

impl Author {
    /// # Panics
    /// The template does not compile.
    pub fn new(name: &str, source: &str) -> Self {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let template = ChatTemplate::new(source, &tokens);
        let template = template.unwrap_or_else(|e| panic!("{name}: {e}"));
        let words = WORDS.iter().find(|(part, _)| name.contains(part));
        Self {
            template,
            words: words.map(|(_, words)| *words),
        }
    }

    /// The plain call, if the template writes one.
    pub fn writes_calls(&self) -> Option<Begin> {
        let text = match self.write(&plain()) {
            Ok(written) => written.text,
            // Also a template that could write the call, but fails.
            Err(why) if why == UNWRITTEN => return None,
            Err(_) => String::new(),
        };
        let behind = text.split("Paris").nth(1).unwrap_or_default().trim_start();
        let tag = behind.find('>').filter(|_| behind.starts_with("</"));
        Some(Begin {
            behind_value: tag.map_or(String::new(), |end| behind[..=end].to_owned()),
            text,
        })
    }

    /// The end tokens with which the template ends messages, with a call and without.
    pub fn ends(&self) -> Vec<String> {
        let said = json!({"role": "assistant", "content": CONTENT});
        let messages = [said, self.message(&plain(), false)].into_iter();
        let texts = messages.filter_map(|message| self.render(Some(message), false).ok());
        let mut ends: Vec<String> = texts.flat_map(|text| split_end(&text).1).collect();
        ends.sort();
        ends.dedup();
        ends
    }

    /// The prompt and what a model says.
    ///
    /// # Errors
    /// What the template says, or that it does not write a part of the calls.
    pub fn write(&self, case: &Case) -> Result<Written, String> {
        let before = self.render(None, false)?;
        let prompt = self.render(None, true)?;
        let opened = prompt.strip_prefix(&*before).unwrap_or_default().to_owned();
        // A prompt that opens the reasoning is followed by some.
        let mut failure = String::new();
        for thinks in [case.thinks, true] {
            match self.answer(case, thinks, [&before, &opened]) {
                Ok((answer, thoughts)) => {
                    if let Some(text) = answer.strip_prefix(&*opened) {
                        let text = text.to_owned();
                        return Ok(Written {
                            prompt,
                            text,
                            thoughts,
                        });
                    }
                }
                Err(why) => failure = why,
            }
        }
        let Ok((answer, thoughts)) = self.answer(case, false, [&before, &opened]) else {
            return Err(failure);
        };
        // The template writes past messages without the reasoning that its prompt opens or closes.
        let same = opened.chars().zip(answer.chars());
        let same: String = same.take_while(|(a, b)| a == b).map(|(a, _)| a).collect();
        let begin = same.rfind(['>', '\n', ':']).map_or(0, |at| at + 1);
        let thinking = opened[begin..].trim();
        let text = &answer[begin..];
        let last = &thinking[thinking.rfind('<').unwrap_or(0)..];
        let closed = last.starts_with("</") || last.contains("|>") && !last.starts_with("<|");
        let (text, thoughts) = match thinking.starts_with('<') && !closed {
            true => {
                let close = last.replacen('<', "</", 1);
                let text = format!("{THOUGHTS}\n{close}\n\n{}", text.trim_start());
                (text, THOUGHTS.to_owned())
            }
            false => {
                let text = text.strip_prefix(last).unwrap_or(text);
                (text.to_owned(), thoughts)
            }
        };
        Ok(Written {
            prompt,
            text,
            thoughts,
        })
    }

    /// The assistant's message.
    fn message(&self, case: &Case, thinks: bool) -> Value {
        let mut message =
            json!({"role": "assistant", "content": if case.says { CONTENT } else { "" }});
        match self.words {
            Some(words) => {
                let content = if case.says { CONTENT } else { "" };
                message["content"] = (content.to_owned() + &words(case)).into();
            }
            None => {
                let calls = case.calls.iter().enumerate().map(|(at, (name, arguments))| {
                    let function = json!({"name": name, "arguments": arguments});
                    json!({"id": format!("abcdefgh{at}"), "type": "function", "function": function})
                });
                message["tool_calls"] = calls.collect();
            }
        }
        if thinks {
            message["reasoning_content"] = THOUGHTS.into();
        }
        message
    }

    /// What the template writes for the assistant's message, without its end, and the reasoning in it.
    fn answer(
        &self,
        case: &Case,
        thinks: bool,
        [before, opened]: [&str; 2],
    ) -> Result<(String, String), String> {
        let all = self.render(Some(self.message(case, thinks)), false)?;
        let Some(answer) = behind(&all, before, opened) else {
            return Err(UNWRITTEN.to_owned());
        };
        let missing = case.calls.iter().any(|(name, arguments)| {
            let texts = arguments.as_object().into_iter().flatten();
            let mut texts = texts.filter_map(|(_, value)| value.as_str());
            let plain = |text: &str| text.chars().all(char::is_alphanumeric);
            !answer.contains(name) || texts.any(|text| plain(text) && !answer.contains(text))
        });
        if missing {
            return Err(UNWRITTEN.to_owned());
        }
        let thoughts = match answer.contains(THOUGHTS) {
            true => THOUGHTS,
            false => "",
        };
        Ok((split_end(answer).0.to_owned(), thoughts.to_owned()))
    }

    /// The conversation up to the user's message, or up to the assistant's.
    fn render(&self, answer: Option<Value>, opens: bool) -> Result<String, String> {
        let question = json!({"role": "user", "content": "Hi there"});
        let messages = [Some(question), answer].into_iter().flatten();
        let messages: Result<Vec<Message>, _> = messages.map(serde_json::from_value).collect();
        let conversation = Conversation {
            messages: messages.map_err(|e| e.to_string())?,
            tools: tools().into(),
            add_generation_prompt: opens,
            ..Conversation::default()
        };
        self.template
            .render(&conversation)
            .map_err(|e| e.to_string())
    }
}

const UNWRITTEN: &str = "the template does not write the calls";

/// What follows the conversation up to the user's message. Some templates end a conversation with further instructions.
fn behind<'a>(all: &'a str, before: &str, opened: &str) -> Option<&'a str> {
    if let Some(answer) = all.strip_prefix(before) {
        return Some(answer);
    }
    let same = all.chars().zip(before.chars()).take_while(|(a, b)| a == b);
    let same: usize = same.map(|(a, _)| a.len_utf8()).sum();
    let heads = all.match_indices(opened).map(|(at, _)| at);
    let at = heads.filter(|&at| !opened.is_empty() && at <= same).max()?;
    all[at..].strip_suffix(&before[at..])
}

/// A text without its end, and the end tokens in it.
fn split_end(text: &str) -> (&str, Vec<String>) {
    let (mut text, mut ends) = (text.trim_end(), Vec::new());
    let all = || ENDS.iter().chain(&FOLLOWING);
    while let Some((rest, end)) = all().find_map(|end| Some((text.strip_suffix(end)?, *end))) {
        text = rest.trim_end_matches('\n');
        ends.extend(ENDS.contains(&end).then(|| end.to_owned()));
    }
    (text, ends)
}

fn json_call(name: &str, arguments: &Value) -> String {
    format!("{{\"name\": \"{name}\", \"arguments\": {arguments}}}")
}

fn tagged(case: &Case) -> String {
    let call = |(name, arguments): &(&str, Value)| {
        format!("<tool_call>\n{}\n</tool_call>", json_call(name, arguments))
    };
    case.calls.iter().map(call).collect::<Vec<_>>().join("\n")
}

fn listed(case: &Case) -> String {
    let call = |(name, arguments): &(&str, Value)| json_call(name, arguments);
    let calls: Vec<String> = case.calls.iter().map(call).collect();
    format!("<|tool_call|>[{}]", calls.join(", "))
}

fn pythonic(case: &Case) -> String {
    let call = |(name, arguments): &(&str, Value)| {
        let members = arguments.as_object().into_iter().flatten();
        let members: Vec<String> = members
            .map(|(key, value)| format!("{key}={}", literal(value)))
            .collect();
        format!("{name}({})", members.join(", "))
    };
    let calls: Vec<String> = case.calls.iter().map(call).collect();
    format!("<|tool_call_start|>[{}]<|tool_call_end|>", calls.join(", "))
}

/// A value as Python writes it.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(all) => {
            let all: Vec<String> = all.iter().map(literal).collect();
            format!("[{}]", all.join(", "))
        }
        Value::Object(all) => {
            let all = all.iter();
            let all: Vec<String> = all
                .map(|(key, value)| format!("{}: {}", json!(key), literal(value)))
                .collect();
            format!("{{{}}}", all.join(", "))
        }
        value => value.to_string(),
    }
}
