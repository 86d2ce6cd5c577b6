//! Chat templates, rendered in a process of their own.
//!
//! A template is code from a file that somebody else wrote. Its steps are counted, but one step can
//! double a string, so that sixty of them need more memory than there is. This program, started
//! again, therefore renders it within limits of memory and processor time that the kernel keeps.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use emberflow_models::Error;
use emberflow_models::chat::{ChatTemplate, Conversation};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::child::{self, Limits};

/// Most bytes of memory for a conversation of `input` bytes: eight copies of it, and what the program
/// itself takes.
const fn memory(input: u64) -> u64 {
    (4 << 20) + 8 * input
}

/// Most processor time.
const SECONDS: u64 = 1;

/// What the child reads.
#[derive(Debug, Serialize, Deserialize)]
struct Input {
    template: String,
    tool_template: Option<String>,
    /// Names and texts.
    tokens: Vec<(String, String)>,
    conversation: Conversation,
}

/// Renders one conversation at a time.
#[derive(Debug)]
pub struct Renderer {
    template: ChatTemplate,
    one: Mutex<()>,
}

impl Renderer {
    /// Renders by `template`.
    pub fn new(template: ChatTemplate) -> Self {
        Self {
            template,
            one: Mutex::new(()),
        }
    }

    /// The template's text; with tools, that of the template for them.
    pub fn source(&self, with_tools: bool) -> &str {
        self.template.source(with_tools)
    }

    /// Most bytes that the child takes for messages of `bytes` bytes.
    pub fn memory(&self, bytes: usize) -> u64 {
        let sources = [
            self.template.source(false),
            self.template.tool_source().unwrap_or_default(),
        ];
        memory((bytes + sources.map(str::len).iter().sum::<usize>()) as u64)
    }

    /// Renders the prompt for a conversation.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and for a template that takes too much memory or time.
    pub fn render(&self, conversation: &Conversation) -> Result<String, Error> {
        let failed = |reason: String| Error::ChatTemplate { reason };
        let template = &self.template;
        let input = Input {
            template: template.source(false).to_owned(),
            tool_template: template.tool_source().map(str::to_owned),
            tokens: template
                .tokens()
                .map(|(name, text)| (name.to_owned(), text.to_owned()))
                .collect(),
            conversation: conversation.clone(),
        };
        let input = serde_json::to_vec(&input).map_err(|e| failed(e.to_string()))?;
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = child::ask("render-template", &input, memory(input.len() as u64));
        let ended = ended.map_err(|e| failed(format!("it could not be rendered: {e}")))?;
        if !ended.status.success() {
            return Err(failed(format!(
                "it takes more than {SECONDS} second or {} MiB for this conversation",
                memory(input.len() as u64) >> 20
            )));
        }
        let output: Result<String, String> =
            serde_json::from_slice(&ended.output).map_err(|e| failed(e.to_string()))?;
        output.map_err(failed)
    }
}

/// The child: renders what standard input asks for, and writes the text or the reason why not.
///
/// # Errors
/// Standard input or output that fails.
pub fn command() -> Result<(), Failure> {
    let input = child::begin(|input| Limits {
        memory: memory(input),
        seconds: SECONDS,
    })?;
    let standard = |e: serde_json::Error| child::failure(e.into());
    let asked: Input = serde_json::from_slice(&input).map_err(standard)?;
    let tokens = asked.tokens.iter().map(|(name, text)| (&**name, &**text));
    let tokens: Vec<(&str, &str)> = tokens.collect();
    let rendered = ChatTemplate::new(&asked.template, &tokens)
        .and_then(|template| template.with_tool_use(asked.tool_template.as_deref()))
        .and_then(|template| template.render(&asked.conversation))
        .map_err(|e| match e {
            Error::ChatTemplate { reason } => reason,
            e => e.to_string(),
        });
    let output = serde_json::to_vec(&rendered).map_err(standard)?;
    Ok(std::io::stdout().lock().write_all(&output)?)
}
