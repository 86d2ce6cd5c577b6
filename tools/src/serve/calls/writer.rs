//! Parts of grammars in llguidance's Lark.

use std::cell::RefCell;
use std::collections::HashSet;

use serde_json::{Value, json};

/// A special token and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sign {
    /// The text.
    pub text: String,
    /// The token.
    pub token: u32,
}

/// Writes expressions, and collects the rules that they need.
#[derive(Debug)]
pub struct Writer<'a> {
    /// Special tokens, which have a notation of their own.
    signs: &'a [Sign],
    /// Maximum bytes of all rules.
    most: usize,
    rules: RefCell<Written>,
}

/// The rules so far.
#[derive(Debug, Default)]
struct Written {
    names: HashSet<String>,
    text: String,
    full: bool,
}

/// Any text.
pub const TEXT: &str = "TEXT";

impl<'a> Writer<'a> {
    /// A writer for these special tokens and at most `most` bytes of rules.
    pub fn new(signs: &'a [Sign], most: usize) -> Self {
        let writer = Self {
            signs,
            most,
            rules: RefCell::default(),
        };
        writer.rule(TEXT, "/(?s:.)*/");
        writer
    }

    /// Adds a rule if there is none with this name, and space for it.
    pub fn rule(&self, name: &str, expression: &str) {
        let mut rules = self.rules.borrow_mut();
        let size = rules.text.len() + name.len() + expression.len();
        rules.full |= size > self.most;
        if !rules.full && rules.names.insert(name.to_owned()) {
            rules.text += &format!("{name}: {expression}\n");
        }
    }

    /// Whether a rule was left out because there are too many bytes.
    pub fn is_full(&self) -> bool {
        self.rules.borrow().full
    }

    /// All rules.
    pub fn finish(self) -> String {
        self.rules.into_inner().text
    }

    /// This text.
    pub fn text(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(found) = self.first(rest) {
            parts.extend((found.at > 0).then(|| quoted(&rest[..found.at])));
            parts.push(format!("<[{}]>", found.sign.token));
            rest = &rest[found.at + found.sign.text.len()..];
        }
        if !rest.is_empty() || parts.is_empty() {
            parts.push(quoted(rest));
        }
        parts.join(" ")
    }

    /// A text of the terminal `text` up to the first `end`, and `end`. `name`: that of the rule for it.
    pub fn until(&self, name: &str, text: &str, end: &str) -> String {
        let Some(found) = self.first(end) else {
            // Without a special token, the text ends as soon as its end appears.
            self.rule(&format!("{name}[lazy]"), &format!("{text} {}", quoted(end)));
            return name.to_owned();
        };
        let rest = self.text(&end[found.at..]);
        if found.at == 0 {
            return format!("{text} {rest}");
        }
        let token = name.to_uppercase();
        self.rule(&token, &format!("{text} {}", quoted(&end[..found.at])));
        format!("{token} {rest}")
    }

    /// The terminal of texts that do not contain `part`.
    pub fn without(part: &str) -> String {
        format!("~/(?s:.*){}(?s:.*)/", escaped(part))
    }

    /// The first special token in a text; the longest one that begins there.
    fn first(&self, text: &str) -> Option<FoundSign<'_>> {
        let found = self.signs.iter().filter_map(|sign| {
            let at = text.find(&sign.text)?;
            Some(FoundSign { sign, at })
        });
        found.min_by_key(|found| (found.at, usize::MAX - found.sign.text.len()))
    }
}

/// A special token in a text.
struct FoundSign<'a> {
    sign: &'a Sign,
    at: usize,
}

/// A text in quotes.
pub fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// JSON that is valid against a schema.
pub fn json_of(schema: &Value) -> String {
    format!("%json {schema}")
}

/// A text as a part of a regular expression.
fn escaped(text: &str) -> String {
    let all = text.chars().map(|c| match c {
        c if c.is_ascii_alphanumeric() => c.to_string(),
        c => format!("\\x{{{:X}}}", u32::from(c)),
    });
    all.collect()
}

/// Members in this order, of which some may be missing, with a separator between them.
pub struct Sequence<'a> {
    /// Prefix of the names of rules.
    pub name: &'a str,
    /// Expressions of the members, and whether each must be there.
    pub members: Vec<Member>,
    /// The separator's expression; `None` if there is none.
    pub separator: Option<String>,
}

/// A member of a sequence.
pub struct Member {
    /// Its expression.
    pub expression: String,
    /// Whether it must be there.
    pub required: bool,
}

impl Sequence<'_> {
    /// The expression of the sequence.
    pub fn write(&self, writer: &Writer<'_>) -> String {
        let Some(separator) = &self.separator else {
            let all = self.members.iter().map(|member| {
                let mark = if member.required { "" } else { "?" };
                format!("({}){mark}", member.expression)
            });
            return all.collect::<Vec<_>>().join(" ");
        };
        // From the end: what may follow if no member, or one, came before.
        let (mut first, mut later) = (String::new(), String::new());
        for (at, member) in self.members.iter().enumerate().rev() {
            let one = format!("{}_m{at}", self.name);
            writer.rule(&one, &member.expression);
            let either = |with: String, without: &str| match (member.required, without) {
                (true, _) => with,
                (false, "") => format!("({with})?"),
                (false, without) => format!("{with} | {without}"),
            };
            let begun = either(format!("{one} {later}"), &first);
            let more = either(format!("{separator} {one} {later}"), &later);
            (first, later) = (
                format!("{}_a{at}", self.name),
                format!("{}_b{at}", self.name),
            );
            writer.rule(&first, &begun);
            writer.rule(&later, &more);
        }
        first
    }
}
