//! Reads a whole text as the server reads the text of a chat: reasoning, answer and tool calls.
//!
//! For checks of chat templates, without a model. The interface may change between versions.

use emberflow_models::chat::{ChatTemplate, Conversation};
use serde_json::{Value, json};

use super::calls::{CallFormat, Part, ToolOptions};

use super::error::ApiError;
use super::thoughts::{Opening, Reading};

/// What a text is read for.
#[derive(Debug, Clone, Copy)]
pub struct Listener<'a> {
    /// The model's chat template.
    pub template: &'a ChatTemplate,
    /// Texts of the tokenizer's special tokens. Those that mark neither reasoning nor calls do not appear in a text.
    pub specials: &'a [&'a str],
    /// Texts of the tokens that end a text.
    pub ends: &'a [String],
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
        let refused = |e: ApiError| e.body()["error"]["message"].to_string();
        let source = self.template.source(!self.tools.is_empty());
        let render = |asked: &Conversation| self.template.render(asked).ok();
        let format = CallFormat::of(source, self.ends, &render);
        let asked: ToolOptions =
            serde_json::from_value(json!({"tools": self.tools})).map_err(|e| e.to_string())?;
        let calls = asked.reader(&format).map_err(refused)?;
        let opening = Opening::behind(self.prompt, source);
        let shown = |special: &&&str| {
            let thoughts = opening.is_some_and(|opening| opening.form.shows(special));
            thoughts || format.shows(special)
        };
        let hidden = self.specials.iter().filter(|special| !shown(special));
        let text = hidden.fold(text.to_owned(), |text, special| text.replace(special, ""));
        let mut reading = Reading::new(opening, calls);
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
