//! Chat templates, rendered in a process of their own.
//!
//! A template is code from a file that somebody else wrote. Its steps are counted, but one step can
//! double a string, so that sixty of them need more memory than there is. This program, started
//! again, therefore renders it within limits that the kernel keeps: [`memory`] bytes and
//! [`SECONDS`] of processor time.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use emberflow_models::Error;
use emberflow_models::chat::{ChatTemplate, Message};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::Failure;

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
    bos: String,
    eos: String,
    messages: Vec<Message>,
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

    /// The template's text.
    pub fn source(&self) -> &str {
        self.template.source()
    }

    /// Most bytes that the child takes for messages of `bytes` bytes.
    pub fn memory(&self, bytes: usize) -> u64 {
        memory((bytes + self.template.source().len()) as u64)
    }

    /// Renders the prompt for `messages`, up to the beginning of the assistant's answer.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and for a template that takes too much memory or time.
    pub fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let failed = |reason: String| Error::ChatTemplate { reason };
        let template = &self.template;
        let input = Input {
            template: template.source().to_owned(),
            bos: template.bos().to_owned(),
            eos: template.eos().to_owned(),
            messages: messages.to_vec(),
        };
        let input = serde_json::to_vec(&input).map_err(|e| failed(e.to_string()))?;
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = spawn().and_then(|child| exchange(child, &input));
        let (status, output) =
            ended.map_err(|e| failed(format!("it could not be rendered: {e}")))?;
        if !status.success() {
            return Err(failed(format!(
                "it takes more than {SECONDS} second or {} MiB for this conversation",
                memory(input.len() as u64) >> 20
            )));
        }
        let output: Result<String, String> =
            serde_json::from_slice(&output).map_err(|e| failed(e.to_string()))?;
        output.map_err(failed)
    }
}

fn spawn() -> std::io::Result<Child> {
    // Also after the file was replaced by a newer version.
    Command::new("/proc/self/exe")
        .arg("render-template")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
}

/// Sends the input, then takes the output.
fn exchange(mut child: Child, input: &[u8]) -> std::io::Result<(ExitStatus, Vec<u8>)> {
    let sent = child.stdin.take().map(|mut to| to.write_all(input));
    let mut output = Vec::new();
    if let Some(from) = &mut child.stdout {
        from.take(memory(input.len() as u64))
            .read_to_end(&mut output)?;
    }
    let status = child.wait()?;
    // A child that ended early says why.
    match sent {
        Some(Err(e)) if status.success() => Err(e),
        _ => Ok((status, output)),
    }
}

/// The child: renders what standard input asks for, and writes the text or the reason why not.
///
/// # Errors
/// Standard input or output that fails.
pub fn command() -> Result<(), Failure> {
    let standard = |e: std::io::Error| Failure::usage(format!("standard input: {e}"));
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input).map_err(standard)?;
    for (resource, most) in [
        (Resource::Data, memory(input.len() as u64)),
        (Resource::Cpu, SECONDS),
        (Resource::Core, 0),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).map_err(|e| standard(e.into()))?;
    }
    let asked: Input = serde_json::from_slice(&input).map_err(|e| standard(e.into()))?;
    let rendered = ChatTemplate::new(&asked.template, &asked.bos, &asked.eos)
        .and_then(|template| template.render(&asked.messages, true))
        .map_err(|e| match e {
            Error::ChatTemplate { reason } => reason,
            e => e.to_string(),
        });
    let output = serde_json::to_vec(&rendered).map_err(|e| standard(e.into()))?;
    Ok(std::io::stdout().lock().write_all(&output)?)
}
