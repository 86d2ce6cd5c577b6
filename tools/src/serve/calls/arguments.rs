//! Parser of one call's arguments, for all notations.

use super::frame::{Frame, Notation};
use super::header::Callee;
use super::json::Scan;
use super::literal::{Literal, Progress};
use super::tagged::{Framed, Tagged};

/// State of the parser.
#[derive(Debug, Clone)]
pub struct Arguments {
    /// Index of the called tool.
    tool: usize,
    of: Notated,
}

#[derive(Debug, Clone)]
enum Notated {
    Json(Scan),
    Literal(Literal),
    Tagged(Tagged),
}

impl Arguments {
    /// A parser for arguments of tool number `tool`.
    pub fn new(frame: &Frame, tool: usize) -> Self {
        let of = match &frame.arguments {
            Notation::Json => Notated::Json(Scan::default()),
            Notation::Python => Notated::Literal(Literal::python_call()),
            Notation::Bare { quote } => Notated::Literal(Literal::bare(quote)),
            Notation::Tags(_) => Notated::Tagged(Tagged::default()),
        };
        Self { tool, of }
    }

    /// Reads from the start of `text`, removes what was read, and appends it to `out` as JSON text. `ended`: no text
    /// follows.
    pub fn take(
        &mut self,
        frame: &Frame,
        tools: &[Callee],
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Progress {
        match (&mut self.of, &frame.arguments) {
            (Notated::Json(scan), _) => match scan.take(text, out) {
                true => Progress::Done,
                false => Progress::More,
            },
            (Notated::Literal(literal), _) => literal.take(text, ended, out),
            (Notated::Tagged(tagged), Notation::Tags(tags)) => {
                let parameters = &tools[self.tool].parameters;
                let framed = Framed {
                    frame,
                    tags,
                    parameters,
                };
                tagged.take(framed, text, ended, out)
            }
            (Notated::Tagged(_), _) => Progress::Wrong,
        }
    }
}
