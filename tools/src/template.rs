//! Renders chat templates in a child process.
//!
//! A template is untrusted code. The interpreter bounds its steps, but one step can double a string, so sixty steps
//! could exhaust memory. The child (this program again) has kernel limits on memory and CPU time.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use emberflow_models::Error;
use emberflow_models::chat::{ChatTemplate, Conversation};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::child::{self, ChildBounds, Limits};

/// Memory limit in bytes for a conversation of `input` bytes: eight copies of it plus the program.
pub const fn memory(input: u64) -> u64 {
    (4 << 20) + 8 * input
}

/// CPU time limit.
const SECONDS: u64 = 1;

/// Input of the child.
#[derive(Debug, Serialize, Deserialize)]
struct RenderInput {
    template: String,
    tool_template: Option<String>,
    /// Special tokens: names and texts.
    tokens: Vec<(String, String)>,
    conversation: Conversation,
}

/// Renders conversations, one at a time.
#[derive(Debug)]
pub struct Renderer {
    template: ChatTemplate,
    one: Mutex<()>,
}

impl Renderer {
    /// A renderer for `template`.
    pub fn new(template: ChatTemplate) -> Self {
        Self {
            template,
            one: Mutex::new(()),
        }
    }

    /// The template's source; with tools, that of the tool template.
    pub fn source(&self, with_tools: bool) -> &str {
        self.template.source(with_tools)
    }

    /// Memory that the child may use for messages of `bytes` bytes.
    pub fn memory(&self, bytes: usize) -> u64 {
        let sources = [
            self.template.source(false),
            self.template.tool_source().unwrap_or_default(),
        ];
        memory((bytes + sources.map(str::len).iter().sum::<usize>()) as u64)
    }

    /// Renders the prompt of a conversation.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and a template that exceeds its memory or time limit.
    pub fn render(&self, conversation: &Conversation) -> Result<String, Error> {
        let failed = |reason: String| Error::ChatTemplate { reason };
        let template = &self.template;
        let input = RenderInput {
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
        let memory = memory(input.len() as u64);
        let bounds = ChildBounds {
            bytes: usize::try_from(memory).unwrap_or(usize::MAX),
            time: child::LONGEST,
            total: child::LONGEST,
        };
        let ended = child::ask(child::this_program(), &["render-template"], input, bounds);
        let ended = ended.map_err(|e| failed(format!("rendering failed: {e}")))?;
        if !ended.succeeded() {
            return Err(failed(format!(
                "it needs more than {SECONDS} second or {} MiB for this conversation",
                memory >> 20
            )));
        }
        let output: Result<String, String> =
            serde_json::from_slice(&ended.output).map_err(|e| failed(e.to_string()))?;
        output.map_err(failed)
    }
}

/// The child: reads the input from standard input, writes the text or the error.
///
/// # Errors
/// I/O errors on standard input or output.
pub fn command() -> Result<(), Failure> {
    let input = child::begin(|input| Limits {
        memory: memory(input),
        seconds: SECONDS,
    })?;
    let standard = |e: serde_json::Error| child::failure(e.into());
    let asked: RenderInput = serde_json::from_slice(&input).map_err(standard)?;
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
