//! Reads a whole text as the server reads the text of a chat: reasoning, answer and tool calls.
//!
//! For checks of chat templates, without a model. The interface may change between versions.

use emberflow_models::chat::ChatTemplate;
use serde_json::{Value, json};

use super::calls::{Part, ToolOptions};
use super::thoughts::{Opening, Reading};

/// What a text is read for.
#[derive(Debug, Clone, Copy)]
pub struct Listener<'a> {
    /// The model's chat template.
    pub template: &'a ChatTemplate,
    /// Texts of the tokenizer's special tokens. Those that mark neither reasoning nor calls do not appear in a text.
    pub specials: &'a [&'a str],
    /// The request's tools.
    pub tools: &'a [Value],
    /// The prompt before the text, which may end inside the reasoning.
    pub prompt: &'a str,
}

/// A tool call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpokenCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments as JSON text.
    pub arguments: String,
}

/// A text, split.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spoken {
    /// The reasoning.
    pub thoughts: String,
    /// The answer.
    pub text: String,
    /// The tool calls.
    pub calls: Vec<SpokenCall>,
}

impl Listener<'_> {
    /// Splits a text that comes in pieces of `length` characters and ends with the model's end token, which is not
    /// part of it.
    ///
    /// # Errors
    /// Tools that the server rejects.
    pub fn read(&self, text: &str, length: usize) -> Result<Spoken, String> {
        let source = self.template.source(!self.tools.is_empty());
        let asked: ToolOptions =
            serde_json::from_value(json!({"tools": self.tools})).map_err(|e| e.to_string())?;
        let calls = asked
            .reader(source)
            .map_err(|e| e.body()["error"]["message"].to_string())?;
        let mut reading = Reading::new(Opening::behind(self.prompt, source), calls);
        let mut spoken = Spoken::default();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(length.max(1)) {
            let piece: String = piece.iter().collect();
            reading
                .push(&piece)
                .into_iter()
                .for_each(|part| spoken.take(part));
        }
        let rest = reading.finish(false);
        rest.into_iter().for_each(|part| spoken.take(part));
        Ok(spoken)
    }
}

impl Spoken {
    fn take(&mut self, part: Part) {
        match part {
            Part::Thought(text) => self.thoughts += &text,
            Part::Text(text) => self.text += &text,
            Part::Call(name) => self.calls.push(SpokenCall {
                name,
                ..SpokenCall::default()
            }),
            Part::Arguments(more) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments += &more;
                }
            }
        }
    }
}
