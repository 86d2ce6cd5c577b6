//! Harmony, gpt-oss's message format: a header with channel and recipient, then the content.

use std::sync::Arc;

use super::super::calls::{CallReader, Part, begun};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";

/// Maximum bytes of a header.
const MAX_HEADER: usize = 512;

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Thought,
    Answer,
    /// Arguments of a call.
    Call,
    /// Arguments of a call that does not count.
    Extra,
}

/// State of the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HarmonyState {
    /// At the start: the prompt ends with the sender of a message.
    Begin,
    Header,
    Body(Body),
}

/// Parser of one text.
#[derive(Debug, Clone)]
pub struct Harmony {
    /// Known tools.
    names: Option<Arc<[String]>>,
    /// Whether only the first call counts.
    single: bool,
    state: HarmonyState,
    held: String,
    calls: usize,
}

impl Harmony {
    /// A parser for the calls that `calls` would parse.
    pub fn new(calls: Option<CallReader>) -> Self {
        Self {
            names: calls.as_ref().map(CallReader::names),
            single: calls.is_some_and(|calls| calls.single()),
            state: HarmonyState::Begin,
            held: String::new(),
            calls: 0,
        }
    }

    /// Parses the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while !self.held.is_empty() && self.step(&mut parts) {}
        parts
    }

    /// Whether text is held back.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Parses the rest at the end of the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let rest = std::mem::take(&mut self.held);
        let header = [START, CHANNEL, MESSAGE, CONSTRAIN, " to="];
        match self.state {
            HarmonyState::Begin if !header.iter().any(|sign| rest.starts_with(sign)) => {
                text(Body::Answer, rest).into_iter().collect()
            }
            HarmonyState::Begin | HarmonyState::Header => Vec::new(),
            HarmonyState::Body(body) => text(body, rest).into_iter().collect(),
        }
    }

    /// Handles what can be classified; returns whether to continue.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            HarmonyState::Begin => {
                let signs = [START, CHANNEL, MESSAGE, CONSTRAIN, " to="];
                if signs.iter().any(|sign| self.held.starts_with(sign)) {
                    self.state = HarmonyState::Header;
                } else if signs.iter().any(|sign| sign.starts_with(&self.held)) {
                    return false;
                } else {
                    // Text without a header.
                    self.state = HarmonyState::Body(Body::Answer);
                }
                true
            }
            HarmonyState::Header => self.header(parts),
            HarmonyState::Body(body) => self.body(body, parts),
        }
    }

    fn header(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(at) = self.held.find(MESSAGE) else {
            if self.held.len() > MAX_HEADER {
                self.state = HarmonyState::Body(Body::Answer);
            }
            return self.held.len() > MAX_HEADER;
        };
        let rest = self.held.split_off(at + MESSAGE.len());
        let header = std::mem::replace(&mut self.held, rest);
        let behind = |sign: &str| {
            let (_, behind) = header.split_once(sign)?;
            behind.split([' ', '<', '\n']).next()
        };
        let channel = behind(CHANNEL).unwrap_or("final");
        let body = match (behind("to="), channel) {
            (Some(to), _) if to != "assistant" && to != "user" => {
                let name = to.strip_prefix("functions.").unwrap_or(to);
                let known = self.names.as_ref();
                if !known.is_some_and(|names| names.iter().any(|known| known == name)) {
                    // A tool that gpt-oss was trained with, but that the request does not have.
                    Body::Thought
                } else if self.single && self.calls > 0 {
                    Body::Extra
                } else {
                    parts.push(Part::Call(name.to_owned()));
                    self.calls += 1;
                    Body::Call
                }
            }
            (_, "analysis") => Body::Thought,
            _ => Body::Answer,
        };
        self.state = HarmonyState::Body(body);
        true
    }

    fn body(&mut self, body: Body, parts: &mut Vec<Part>) -> bool {
        let ends = [END, START, CHANNEL];
        let found = ends.iter().filter_map(|end| self.held.find(end)).min();
        let clear = found.unwrap_or_else(|| {
            let begun = ends.iter().map(|end| begun(&self.held, end)).max();
            self.held.len() - begun.unwrap_or(0)
        });
        let rest = self.held.split_off(clear);
        parts.extend(text(body, std::mem::replace(&mut self.held, rest)));
        if found.is_some() {
            if let Some(rest) = self.held.strip_prefix(END) {
                self.held = rest.to_owned();
            }
            self.state = HarmonyState::Header;
        }
        found.is_some()
    }
}

fn text(body: Body, text: String) -> Option<Part> {
    match body {
        _ if text.is_empty() => None,
        Body::Extra => None,
        Body::Thought => Some(Part::Thought(text)),
        Body::Answer => Some(Part::Text(text)),
        Body::Call => Some(Part::Arguments(text)),
    }
}
