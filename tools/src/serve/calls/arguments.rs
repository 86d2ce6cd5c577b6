//! Parser of one call's arguments, for all notations.

use super::frame::{CallFrame, Notation};
use super::header::Callee;
use super::json::Scan;
use super::literal::{Literal, Progress};
use super::tagged::{Framed, Tagged};

/// State of the parser.
#[derive(Debug, Clone)]
pub struct ArgumentReader {
    /// Index of the called tool.
    tool: usize,
    of: NotationReader,
}

#[derive(Debug, Clone)]
enum NotationReader {
    Json(Scan),
    Literal(Literal),
    Tagged(Tagged),
}

impl ArgumentReader {
    /// A parser for arguments of tool number `tool`.
    pub fn new(frame: &CallFrame, tool: usize) -> Self {
        let of = match &frame.arguments {
            Notation::Json => NotationReader::Json(Scan::default()),
            Notation::Python => NotationReader::Literal(Literal::python_call()),
            Notation::Bare { quote } => NotationReader::Literal(Literal::bare(quote)),
            Notation::Tags(_) => NotationReader::Tagged(Tagged::default()),
        };
        Self { tool, of }
    }

    /// Reads from the start of `text`, removes what was read, and appends it to `out` as JSON text. `ended`: no text
    /// follows.
    pub fn take(
        &mut self,
        frame: &CallFrame,
        tools: &[Callee],
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Progress {
        match (&mut self.of, &frame.arguments) {
            (NotationReader::Json(scan), _) => match scan.take(text, out) {
                true => Progress::Done,
                false => Progress::More,
            },
            (NotationReader::Literal(literal), _) => {
                literal.take(&tools[self.tool].parameters, text, ended, out)
            }
            (NotationReader::Tagged(tagged), Notation::Tags(tags)) => {
                let parameters = &tools[self.tool].parameters;
                let framed = Framed {
                    frame,
                    tags,
                    parameters,
                };
                tagged.take(framed, text, ended, out)
            }
            (NotationReader::Tagged(_), _) => Progress::Wrong,
        }
    }
}
