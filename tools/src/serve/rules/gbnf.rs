//! Converts llama.cpp's grammars (GBNF) to llguidance's dialect of Lark.
//!
//! A rule that reaches no recursive rule becomes one terminal, a regular expression; grammars without recursion are
//! converted exactly. In recursive rules, every longest run of items without recursion becomes a terminal. llguidance
//! matches terminals greedily: generated texts always match the original grammar, but text that could belong to a
//! terminal or to what follows it is assigned to the terminal.

use std::collections::HashMap;
use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

/// Maximum nesting of groups.
const MAX_DEPTH: usize = 50;
/// Maximum repetitions.
const MAX_TIMES: u32 = 2000;
/// Repetitions: minimum, and maximum if there is one.
type Times = (u32, Option<u32>);
/// Alternative sequences.
type Alternatives = Vec<Vec<GbnfItem>>;

/// An item of a sequence.
enum GbnfItem {
    /// A regular expression.
    Text(String),
    Rule(usize),
    Group(Alternatives),
    Repeat(Box<GbnfItem>, Times),
}

/// Converts a grammar to Lark.
///
/// # Errors
/// A syntax error, with its line.
pub fn to_lark(grammar: &str) -> Result<String, String> {
    let mut reader = GbnfReader {
        rest: grammar.chars().peekable(),
        line: 1,
        numbers: HashMap::new(),
        names: Vec::new(),
        rules: Vec::new(),
    };
    reader
        .rules()
        .map_err(|why| format!("grammar, line {}: {why}", reader.line))?;
    let mut rules = Vec::with_capacity(reader.rules.len());
    for (rule, name) in reader.rules.into_iter().zip(&reader.names) {
        rules.push(rule.ok_or_else(|| format!("the grammar has no rule `{name}`"))?);
    }
    let Some(&root) = reader.numbers.get("root") else {
        return Err("the grammar has no rule `root`".to_owned());
    };
    let plain = plain(&rules);
    let mut writer = LarkWriter {
        plain: &plain,
        out: String::new(),
        terminals: String::new(),
        made: 0,
    };
    writer.out = format!("start: {}\n", writer.name(root));
    for (at, rule) in rules.iter().enumerate() {
        let body = if plain[at] {
            writer.plain_alternatives(rule)
        } else {
            writer.alternatives(rule)
        };
        let name = writer.name(at);
        let _ = writeln!(writer.out, "{name}: {body}");
    }
    Ok(writer.out + &writer.terminals)
}

/// Which rules reach no recursive rule.
fn plain(rules: &[Alternatives]) -> Vec<bool> {
    let mut plain = vec![false; rules.len()];
    loop {
        let mut found = false;
        for (at, rule) in rules.iter().enumerate() {
            if !plain[at] && rule.iter().flatten().all(|item| item.is_plain(&plain)) {
                plain[at] = true;
                found = true;
            }
        }
        if !found {
            return plain;
        }
    }
}

impl GbnfItem {
    fn is_plain(&self, rules: &[bool]) -> bool {
        match self {
            Self::Text(_) => true,
            Self::Rule(at) => rules[*at],
            Self::Group(inner) => inner.iter().flatten().all(|item| item.is_plain(rules)),
            Self::Repeat(item, _) => item.is_plain(rules),
        }
    }
}

struct LarkWriter<'a> {
    plain: &'a [bool],
    out: String,
    /// Terminals for sequences.
    terminals: String,
    made: usize,
}

impl LarkWriter<'_> {
    fn name(&self, at: usize) -> String {
        if self.plain[at] {
            format!("T{at}")
        } else {
            format!("r{at}")
        }
    }

    fn plain_alternatives(&self, all: &Alternatives) -> String {
        let sequence = |items: &Vec<GbnfItem>| self.plain_sequence(items);
        all.iter().map(sequence).collect::<Vec<_>>().join(" | ")
    }

    fn plain_sequence(&self, items: &[GbnfItem]) -> String {
        match items {
            [] => "\"\"".to_owned(),
            _ => {
                let all = items.iter().map(|item| self.plain_item(item));
                all.collect::<Vec<_>>().join(" ")
            }
        }
    }

    fn plain_item(&self, item: &GbnfItem) -> String {
        match item {
            GbnfItem::Text(text) if text.is_empty() => "\"\"".to_owned(),
            GbnfItem::Text(text) => format!("/{text}/"),
            GbnfItem::Rule(at) => self.name(*at),
            GbnfItem::Group(inner) => format!("({})", self.plain_alternatives(inner)),
            GbnfItem::Repeat(item, times) => repeat(&self.plain_item(item), *times),
        }
    }

    fn alternatives(&mut self, all: &Alternatives) -> String {
        let mut out = Vec::with_capacity(all.len());
        for items in all {
            let mut parts = Vec::new();
            for run in items.chunk_by(|a, b| a.is_plain(self.plain) == b.is_plain(self.plain)) {
                if run.iter().all(|item| item.is_plain(self.plain)) {
                    parts.push(self.terminal(run));
                } else {
                    for item in run {
                        parts.push(self.item(item));
                    }
                }
            }
            out.push(if parts.is_empty() {
                "\"\"".to_owned()
            } else {
                parts.join(" ")
            });
        }
        out.join(" | ")
    }

    fn item(&mut self, item: &GbnfItem) -> String {
        match item {
            GbnfItem::Group(inner) => format!("({})", self.alternatives(inner)),
            GbnfItem::Repeat(item, times) => repeat(&self.item(item), *times),
            plain => self.plain_item(plain),
        }
    }

    /// Defines a terminal for a sequence, unless it is a single terminal.
    fn terminal(&mut self, run: &[GbnfItem]) -> String {
        if let [one @ (GbnfItem::Rule(_) | GbnfItem::Text(_))] = run {
            return self.plain_item(one);
        }
        let body = self.plain_sequence(run);
        let name = format!("S{}", self.made);
        self.made += 1;
        let _ = writeln!(self.terminals, "{name}: {body}");
        name
    }
}

fn repeat(inner: &str, times: Times) -> String {
    match times {
        (0, None) => format!("({inner})*"),
        (1, None) => format!("({inner})+"),
        (0, Some(0)) => "\"\"".to_owned(),
        (from, None) => format!("({inner}){{{from},}}"),
        (from, Some(to)) => format!("({inner}){{{from},{to}}}"),
    }
}

/// A character as a regular expression.
fn escaped(c: char) -> String {
    match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | ' ' => c.to_string(),
        _ => format!("\\x{{{:X}}}", u32::from(c)),
    }
}

struct GbnfReader<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
    numbers: HashMap<String, usize>,
    names: Vec<String>,
    rules: Vec<Option<Alternatives>>,
}

impl GbnfReader<'_> {
    fn next(&mut self) -> Option<char> {
        let c = self.rest.next();
        self.line += usize::from(c == Some('\n'));
        c
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.rest.peek() == Some(&wanted);
        if found {
            self.next();
        }
        found
    }

    /// Skips white space and comments; also line breaks if the rule may continue after them.
    fn skip(&mut self, lines: bool) {
        while let Some(&c) = self.rest.peek() {
            match c {
                '#' => while self.rest.next_if(|&c| c != '\n').is_some() {},
                '\n' | '\r' if lines => {
                    self.next();
                }
                ' ' | '\t' => {
                    self.next();
                }
                _ => break,
            }
        }
    }

    fn rules(&mut self) -> Result<(), String> {
        loop {
            self.skip(true);
            if self.rest.peek().is_none() {
                return Ok(());
            }
            let name = self.name().ok_or("expected a rule name")?;
            let at = self.number(name);
            self.skip(false);
            if !(self.take(':') && self.take(':') && self.take('=')) {
                return Err(format!("expected `::=` after `{}`", self.names[at]));
            }
            self.skip(true);
            let body = self.alternatives(0)?;
            if let Some(&c) = self.rest.peek()
                && c != '\n'
                && c != '\r'
            {
                return Err(format!("unexpected `{c}`"));
            }
            if self.rules[at].replace(body).is_some() {
                return Err(format!("rule `{}` is defined twice", self.names[at]));
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let mut name = String::new();
        let fits = |c: &char| c.is_ascii_alphanumeric() || "-_".contains(*c);
        while let Some(c) = self.rest.next_if(fits) {
            name.push(c);
        }
        (!name.is_empty()).then_some(name)
    }

    fn number(&mut self, name: String) -> usize {
        let at = self.rules.len();
        match self.numbers.get(&name) {
            Some(&known) => known,
            None => {
                self.names.push(name.clone());
                self.rules.push(None);
                self.numbers.insert(name, at);
                at
            }
        }
    }

    fn alternatives(&mut self, depth: usize) -> Result<Alternatives, String> {
        if depth > MAX_DEPTH {
            return Err(format!(
                "groups may be nested at most {MAX_DEPTH} levels deep"
            ));
        }
        let mut all = vec![self.sequence(depth)?];
        while self.take('|') {
            self.skip(true);
            all.push(self.sequence(depth)?);
        }
        Ok(all)
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<GbnfItem>, String> {
        let mut items: Vec<GbnfItem> = Vec::new();
        while let Some(&c) = self.rest.peek() {
            let item = match c {
                '"' => self.text()?,
                '[' => self.class()?,
                '.' => {
                    self.next();
                    GbnfItem::Text("(?s:.)".to_owned())
                }
                '(' => {
                    self.next();
                    self.skip(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.take(')') {
                        return Err("missing `)`".to_owned());
                    }
                    GbnfItem::Group(inner)
                }
                '*' | '+' | '?' | '{' => {
                    let times = self.times()?;
                    let last = items.pop().ok_or("nothing to repeat")?;
                    GbnfItem::Repeat(Box::new(last), times)
                }
                '<' | '!' => {
                    return Err("tokens (`<think>`, `<[1]>`) are not supported".to_owned());
                }
                _ => match self.name() {
                    Some(name) => GbnfItem::Rule(self.number(name)),
                    None => break,
                },
            };
            items.push(item);
            self.skip(depth > 0);
        }
        Ok(items)
    }

    fn times(&mut self) -> Result<Times, String> {
        match self.next() {
            Some('*') => return Ok((0, None)),
            Some('+') => return Ok((1, None)),
            Some('?') => return Ok((0, Some(1))),
            _ => {}
        }
        let wrong =
            || format!("a repetition must be `{{m}}`, `{{m,}}` or `{{m,n}}`, at most {MAX_TIMES}");
        self.skip(true);
        let from = self.count();
        self.skip(true);
        let to = if self.take(',') {
            self.skip(true);
            self.count()
        } else {
            Some(from.ok_or_else(wrong)?)
        };
        self.skip(true);
        let from = from.unwrap_or(0);
        let most = to.unwrap_or(from);
        if self.take('}') && from <= most && most <= MAX_TIMES {
            Ok((from, to))
        } else {
            Err(wrong())
        }
    }

    fn count(&mut self) -> Option<u32> {
        let mut digits = String::new();
        while let Some(c) = self.rest.next_if(char::is_ascii_digit) {
            digits.push(c);
        }
        if digits.is_empty() {
            None
        } else {
            Some(digits.parse().unwrap_or(u32::MAX))
        }
    }

    fn text(&mut self) -> Result<GbnfItem, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.character("unterminated string")? {
                ('"', false) => return Ok(GbnfItem::Text(text)),
                (c, _) => text += &escaped(c),
            }
        }
    }

    fn class(&mut self) -> Result<GbnfItem, String> {
        self.next();
        let mut class = String::from(if self.take('^') { "[^" } else { "[" });
        let mut empty = true;
        loop {
            let why = "missing `]`";
            let from = match self.character(why)? {
                (']', false) if empty => return Err("empty character class".to_owned()),
                (']', false) => break,
                (c, _) => c,
            };
            empty = false;
            class += &escaped(from);
            if self.rest.peek() != Some(&'-') {
                continue;
            }
            self.next();
            match self.character(why)? {
                // A hyphen at the end is literal.
                (']', false) => {
                    class += &escaped('-');
                    break;
                }
                (to, _) if to < from => {
                    return Err(format!("`{from}-{to}` is not a valid range"));
                }
                (to, _) => {
                    class.push('-');
                    class += &escaped(to);
                }
            }
        }
        class.push(']');
        Ok(GbnfItem::Text(class))
    }

    /// The next character of a string or character class, and whether it was escaped.
    fn character(&mut self, missing: &str) -> Result<(char, bool), String> {
        let c = self.next().ok_or(missing)?;
        if c != '\\' {
            return Ok((c, false));
        }
        let escaped = match self.next().ok_or(missing)? {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'x' => self.code(2)?,
            'u' => self.code(4)?,
            'U' => self.code(8)?,
            c @ ('"' | '\\' | '[' | ']' | '/' | '-' | '^') => c,
            c => return Err(format!("unknown escape `\\{c}`")),
        };
        Ok((escaped, true))
    }

    fn code(&mut self, digits: usize) -> Result<char, String> {
        let mut code = 0;
        for _ in 0..digits {
            let digit = self.next().and_then(|c| c.to_digit(16));
            code =
                16 * code + digit.ok_or(format!("an escape needs {digits} hexadecimal digits"))?;
        }
        char::from_u32(code).ok_or(format!("{code:X} is not a character"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_terminals_where_they_can() {
        let lark =
            to_lark("root ::= word (\" \" word){2,} # three\nword ::= [a-z\\-]+ | \"\\u20ac/\"\n");
        let wanted =
            "start: T0\nT0: T1 ((/ / T1)){2,}\nT1: (/[a-z\\x{2D}]/)+ | /\\x{20AC}\\x{2F}/\n";
        assert_eq!(lark.unwrap(), wanted);
        let lark = to_lark("root ::=\n  \"(\" root \")\" ws |\n  [0-9]+ ws\nws ::= (\" \" ws)?");
        let wanted = "start: r0\nr0: /\\x{28}/ r0 /\\x{29}/ r1 | S0 r1\nr1: ((/ / r1)){0,1}\nS0: (/[0-9]/)+\n";
        assert_eq!(lark.unwrap(), wanted);
        let lark = to_lark("root ::= a{0} a{3} a{,2} .\na ::= | \"\"");
        let wanted = "start: T0\nT0: \"\" (T1){3,3} (T1){0,2} /(?s:.)/\nT1: \"\" | \"\"\n";
        assert_eq!(lark.unwrap(), wanted);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (grammar, why) in [
            ("a ::= \"b\"", "no rule `root`"),
            ("root ::= a", "no rule `a`"),
            (
                "root ::= \"a\"\n\nroot ::= \"b\"",
                "line 3: rule `root` is defined twice",
            ),
            ("root ::= \"a", "unterminated"),
            ("root ::= [a", "missing `]`"),
            ("root ::= [z-a]", "not a valid range"),
            ("root ::= []", "empty"),
            ("root ::= (\"a\"", "missing `)`"),
            ("root ::= *", "nothing to repeat"),
            ("root ::= \"a\"{3,2}", "at most 2000"),
            ("root ::= \"a\"{99999999999}", "at most 2000"),
            ("root ::= \"a\" )", "unexpected `)`"),
            ("root ::= \"\\q\"", "`\\q`"),
            ("root ::= \"\\uD800\"", "D800"),
            ("root ::= <[7]>", "tokens"),
            ("root := \"a\"", "`::=`"),
            (&format!("root ::= {}", "(".repeat(9000)), "deep"),
        ] {
            let found = to_lark(grammar).unwrap_err();
            assert!(found.contains(why), "{grammar:.60}: {found}");
        }
    }
}
