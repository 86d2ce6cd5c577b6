//! Incremental parser of tool calls in generated text.

use std::sync::Arc;

use super::arguments::ArgumentReader;
use super::frame::{Begins, CallFrame, begins, begun, chunks};
use super::header::{Callee, Header, header};
use super::json::Scan;
use super::literal::Progress;

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text outside of calls.
    Text(String),
    /// Reasoning.
    Thought(String),
    /// Start of a call: the tool's name. Its arguments follow.
    Call(String),
    /// More of the last call's arguments, as JSON text.
    Arguments(String),
}

/// State of the parser.
#[derive(Debug, Clone)]
enum CallState {
    /// In text that a call may follow.
    Text,
    Arguments(ArgumentReader),
    /// Among the members after the arguments.
    Members(Scan),
    /// In a call that is none, up to its end.
    Broken,
    /// After the arguments.
    After,
}

/// Parser of one text.
#[derive(Debug, Clone)]
pub struct CallReader {
    /// The formats; usually one.
    frames: Arc<[CallFrame]>,
    tools: Arc<[Callee]>,
    /// Whether only the first call counts.
    single: bool,
    /// Index of the format of the current call.
    frame: usize,
    state: CallState,
    /// Text that cannot be classified yet.
    held: String,
    calls: usize,
}

/// A place where a call may begin.
#[derive(Debug, Clone, Copy)]
struct Start<'a> {
    frame: usize,
    /// Index in the format's lead.
    lead: usize,
    text: &'a str,
}

impl CallReader {
    /// A parser for calls of these tools; `single`: calls after the first are left out.
    pub fn new(frames: Arc<[CallFrame]>, tools: Arc<[Callee]>, single: bool) -> Self {
        Self {
            frames,
            tools,
            single,
            frame: 0,
            state: CallState::Text,
            held: String::new(),
            calls: 0,
        }
    }

    /// Tool names.
    pub fn names(&self) -> Arc<[String]> {
        self.tools.iter().map(|tool| tool.name.clone()).collect()
    }

    /// Whether a mark precedes calls.
    pub fn marks(&self) -> bool {
        !self.frames.iter().any(CallFrame::is_bare)
    }

    /// Whether calls after the first are left out.
    pub fn single(&self) -> bool {
        self.single
    }

    /// Number of calls so far.
    pub fn calls(&self) -> usize {
        match self.single {
            true => self.calls.min(1),
            false => self.calls,
        }
    }

    /// Parses the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while !self.held.is_empty() && self.step(false, &mut parts) {}
        parts
    }

    /// Parses the rest at the end of the text. If the text was `cut` by its length limit, the beginning of a call is
    /// dropped rather than returned as text.
    pub fn finish(&mut self, cut: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        while !self.held.is_empty() && self.step(true, &mut parts) {}
        let rest = std::mem::take(&mut self.held);
        if matches!(self.state, CallState::Text) {
            let blank = rest.trim().is_empty();
            let begins = |start: &Start<'_>| begins(&rest, start.text) != Begins::Not;
            let begun = cut && !blank && self.starts().iter().any(begins);
            let between = blank && self.calls > 0;
            if !(rest.is_empty() || begun || between) {
                parts.push(Part::Text(rest));
            }
        }
        parts
    }

    /// Handles what can be classified; returns whether to continue.
    fn step(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        match &mut self.state {
            CallState::Text => self.text(parts),
            CallState::Arguments(_) => self.arguments(ended, parts),
            CallState::Members(scan) => {
                let end = scan.end(&self.held);
                self.held.drain(..end.unwrap_or(self.held.len()));
                if end.is_some() {
                    self.state = CallState::After;
                }
                end.is_some()
            }
            CallState::Broken => self.broken(),
            CallState::After => self.after(ended, parts),
        }
    }

    /// Where calls may begin.
    fn starts(&self) -> Vec<Start<'_>> {
        let frames = self.frames.iter().enumerate();
        let all = frames.flat_map(|(frame, of)| {
            let lead = of.lead();
            let mut all: Vec<Start<'_>> = (of.starts(&lead).into_iter())
                .filter_map(|at| {
                    lead[at].text().map(|text| Start {
                        frame,
                        lead: at,
                        text,
                    })
                })
                .collect();
            all.extend(of.is_bare().then_some(Start {
                frame,
                lead: 0,
                text: "{",
            }));
            all
        });
        all.collect()
    }

    fn text(&mut self, parts: &mut Vec<Part>) -> bool {
        let starts = self.starts();
        let found = starts.iter().filter_map(|start| self.held.find(start.text));
        let clear = found.min().unwrap_or_else(|| {
            let begun = starts.iter().map(|start| begun(&self.held, start.text));
            self.held.len() - begun.max().unwrap_or(0)
        });
        // White space before a call belongs to its format.
        let clear = self.held[..clear].trim_end().len();
        self.say(clear, parts);
        let mut unclear = false;
        let candidates: Vec<(usize, usize)> = (self.starts().iter())
            .filter(|start| matches!(begins(&self.held, start.text), Begins::With(_)))
            .map(|start| (start.frame, start.lead))
            .collect();
        for &(frame, lead) in &candidates {
            match header(&self.frames[frame], &self.held, lead, &self.tools) {
                Header::Unclear => unclear = true,
                Header::Other => {}
                found => {
                    self.frame = frame;
                    return self.begin(found, parts);
                }
            }
        }
        if unclear || candidates.is_empty() {
            return false;
        }
        // It only looks like a call.
        let blank = self.held.len() - self.held.trim_start().len();
        let first = self.held[blank..].chars().next();
        self.say(blank + first.map_or(0, char::len_utf8), parts);
        true
    }

    /// The first bytes are text outside of calls; white space between two calls is none.
    fn say(&mut self, length: usize, parts: &mut Vec<Part>) {
        let rest = self.held.split_off(length);
        let text = std::mem::replace(&mut self.held, rest);
        let between = self.calls > 0 && text.trim().is_empty();
        if !(text.is_empty() || between) {
            parts.push(Part::Text(text));
        }
    }

    /// Begins a call, or takes a whole one.
    fn begin(&mut self, found: Header, parts: &mut Vec<Part>) -> bool {
        match found {
            Header::Call { tool, at } => {
                self.held.drain(..at);
                self.calls += 1;
                self.tell(Part::Call(self.tools[tool].name.clone()), parts);
                let frame = &self.frames[self.frame];
                self.state = CallState::Arguments(ArgumentReader::new(frame, tool));
            }
            Header::Whole {
                tool,
                arguments,
                end,
            } => {
                self.held.drain(..end);
                self.calls += 1;
                self.tell(Part::Call(self.tools[tool].name.clone()), parts);
                self.tell(Part::Arguments(arguments), parts);
                self.state = CallState::After;
            }
            Header::Other | Header::Unclear => {}
        }
        true
    }

    /// A part of a call, unless the call does not count.
    fn tell(&self, part: Part, parts: &mut Vec<Part>) {
        if self.calls() == self.calls {
            parts.push(part);
        }
    }

    fn arguments(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        let CallState::Arguments(arguments) = &mut self.state else {
            return false;
        };
        let frame = &self.frames[self.frame];
        let mut json = String::new();
        let progress = arguments.take(frame, &self.tools, &mut self.held, ended, &mut json);
        if !json.is_empty() {
            self.tell(Part::Arguments(json), parts);
        }
        match progress {
            Progress::More => return false,
            Progress::Wrong => self.state = CallState::Broken,
            Progress::Done => {
                self.state = match &self.frames[self.frame].members {
                    Some(_) => CallState::Members(Scan::inside()),
                    None => CallState::After,
                };
            }
        }
        true
    }

    /// Skips what is left of a call that is none.
    fn broken(&mut self) -> bool {
        let ends = self.frames[self.frame].ends();
        let Some(end) = ends.first() else {
            self.state = CallState::Text;
            return true;
        };
        if let Some(at) = self.held.find(end) {
            self.held.drain(..at);
            self.state = CallState::After;
            return true;
        }
        let held = begun(&self.held, end);
        self.held.drain(..self.held.len() - held);
        false
    }

    /// After a call: its end, the end of all calls, or another call.
    fn after(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        let frame = &self.frames[self.frame];
        let mut ends = frame.ends();
        let last = ends.last().copied().unwrap_or_default();
        ends.extend(frame.between.iter().flat_map(|between| chunks(between)));
        if frame.members.is_some() {
            ends.extend(["]", ",", ";"]);
        }
        let mut unclear = self.held.trim().is_empty();
        let mut found: Option<(usize, bool)> = None;
        for end in ends {
            match begins(&self.held, end) {
                Begins::With(length) => found = found.max(Some((length, end == last))),
                Begins::Unclear => unclear = true,
                Begins::Not => {}
            }
        }
        if let Some((length, over)) = found.filter(|_| ended || !unclear) {
            self.held.drain(..length);
            if over {
                self.state = CallState::Text;
            }
            return true;
        }
        let lead = frame.lead_of_next();
        match header(frame, &self.held, lead, &self.tools) {
            Header::Unclear => unclear = true,
            Header::Other => {}
            found => return self.begin(found, parts),
        }
        if !unclear {
            self.state = CallState::Text;
        }
        !unclear
    }
}
