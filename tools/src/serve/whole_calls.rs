//! Calls whose arguments came to their end. A text may end inside a call, or go on in another notation: that call must not
//! be run.

use serde_json::{Map, Value};

use super::calls::Part;

/// The arguments of a call as an object; `None` if the call is not whole.
pub fn input(arguments: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(arguments).ok()
}

/// Counts the calls of a text.
#[derive(Debug, Clone, Default)]
pub struct CallCount {
    /// Arguments of the last call.
    last: Option<String>,
    /// Number of whole calls.
    whole: usize,
    /// Whether there is another one.
    broken: bool,
}

impl CallCount {
    /// Takes the next parts of the text.
    pub fn take(&mut self, parts: &[Part]) {
        for part in parts {
            match part {
                Part::Call(_) => {
                    self.settle();
                    self.last = Some(String::new());
                }
                Part::Arguments(more) => self.last.iter_mut().for_each(|last| last.push_str(more)),
                Part::Text(_) | Part::Thought(_) => {}
            }
        }
    }

    /// Ends the text: the number of calls, if all of them are whole.
    pub fn finish(&mut self) -> Option<usize> {
        self.settle();
        (!self.broken).then_some(self.whole)
    }

    fn settle(&mut self) {
        match self.last.take().map(|arguments| input(&arguments)) {
            Some(Some(_)) => self.whole += 1,
            Some(None) => self.broken = true,
            None => {}
        }
    }
}

/// Holds calls back until they are whole.
#[derive(Debug, Clone, Default)]
pub struct HeldCall {
    /// Name and arguments.
    held: Option<(String, String)>,
}

impl HeldCall {
    /// The parts that can be sent, with calls as a name and all arguments; `holds`: which calls are held back. `ended`: no
    /// parts follow. Calls that are not whole are left out.
    pub fn pass(
        &mut self,
        parts: Vec<Part>,
        ended: bool,
        holds: impl Fn(&str) -> bool,
    ) -> Vec<Part> {
        let mut ready = Vec::new();
        for part in parts {
            match (part, &mut self.held) {
                (Part::Arguments(more), Some((_, arguments))) => arguments.push_str(&more),
                (Part::Call(name), _) if holds(&name) => {
                    ready.extend(self.release());
                    self.held = Some((name, String::new()));
                }
                (part, _) => {
                    ready.extend(self.release());
                    ready.push(part);
                }
            }
        }
        if ended {
            ready.extend(self.release());
        }
        ready
    }

    fn release(&mut self) -> Vec<Part> {
        match self.held.take() {
            Some((name, arguments)) if input(&arguments).is_some() => {
                vec![Part::Call(name), Part::Arguments(arguments)]
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, pieces: &[&str]) -> Vec<Part> {
        let arguments = pieces.iter().map(|&piece| Part::Arguments(piece.into()));
        [Part::Call(name.into())]
            .into_iter()
            .chain(arguments)
            .collect()
    }

    #[test]
    fn calls_are_counted_if_all_are_whole() {
        let count = |texts: &[&[&str]]| {
            let mut count = CallCount::default();
            for pieces in texts {
                count.take(&call("f", pieces));
                count.take(&[Part::Text("\n".into())]);
            }
            count.finish()
        };
        assert_eq!(count(&[]), Some(0));
        assert_eq!(count(&[&["{\"a\": ", "1}"], &["{}"]]), Some(2));
        for broken in [
            "",
            "{\"path\": \"/home/user/pro",
            "{\"n\": None}",
            "{\"path\": }",
            "[1]",
        ] {
            assert_eq!(count(&[&[broken]]), None, "{broken}");
            assert_eq!(count(&[&[broken], &["{}"]]), None, "{broken}");
            assert_eq!(count(&[&["{}"], &[broken]]), None, "{broken}");
        }
    }

    #[test]
    fn held_calls_come_whole_or_not_at_all() {
        let mut held = HeldCall::default();
        let all = |name: &str| name != "free";
        let mut pass = |parts, ended| held.pass(parts, ended, all);
        assert_eq!(pass(call("f", &["{\"a\""]), false), []);
        assert_eq!(pass(vec![Part::Arguments(": 1}".into())], false), []);
        let text = Part::Text("so".into());
        let mut wanted = call("f", &["{\"a\": 1}"]);
        wanted.push(text.clone());
        assert_eq!(pass(vec![text.clone()], false), wanted);
        let free = call("free", &["{\"a"]);
        assert_eq!(pass(free.clone(), false), free);
        let cut = [call("f", &["{\"a\": \"x"]), vec![text.clone()]].concat();
        assert_eq!(pass(cut, false), [text]);
        assert_eq!(pass(call("f", &["{\"a\": \"x"]), true), []);
        assert_eq!(pass(call("f", &["{", "}"]), true), call("f", &["{}"]));
    }
}
