//! Reads a format off a sample: a text with two calls whose names and arguments are known.
//!
//! The sample's calls have the names [`NAMES`] and the arguments [`KEYS`] with distinct values. What stands between
//! them is the format. Parts that both calls share belong to each call, the rest to all of them.

use super::frame::{Frame, Members, Middle, Notation, Piece, Tags};

/// Names of the sample's calls.
pub const NAMES: [&str; 2] = ["alpha_tool", "beta_tool"];
/// Ids of the sample's calls.
pub const IDS: [&str; 2] = ["call00001", "call00002"];
/// Keys of the arguments, in the order of the alphabet.
pub const KEYS: [&str; 3] = ["key_one", "key_two", "key_zip"];
/// Values of the first two arguments of both calls.
pub const TEXTS: [[&str; 2]; 2] = [["Value1", "Value2"], ["Value3", "Value4"]];
/// Values of the third one.
pub const NUMBERS: [&str; 2] = ["4711", "4712"];

/// Stands for an identifier, and for a call's number.
const ID: char = '\u{e000}';
const INDEX: char = '\u{e001}';

/// The format of the calls in a sample that contains nothing else; a sample may have one call only.
pub fn derive(sample: &str) -> Option<Frame> {
    let sample = IDS.iter().fold(sample.to_owned(), |text, id| {
        text.replace(id, &ID.to_string())
    });
    let first = Call::find(&sample, 0, 0)?;
    let Some(second) = Call::find(&sample, 1, first.end) else {
        return single(&sample, first);
    };
    let lead = &sample[..first.name];
    let gap = &sample[first.end..second.name];
    let rest = &sample[second.end..];
    let tail = whole_tags_before(&gap[..common_start(gap, rest)]);
    let (head_of_first, head) = common_end(lead, &gap[tail.len()..]);
    let between = &gap[tail.len()..gap.len() - head.len()];
    let middle = numbered(first.middle(&sample), second.middle(&sample));
    Some(Frame {
        open: lead[..lead.len() - head_of_first.len()]
            .trim_start()
            .to_owned(),
        members: members(head, first.middle(&sample)),
        head: pieces(&numbered(head_of_first, head)),
        middle: pieces(&middle),
        arguments: first.notation,
        tail: pieces(tail),
        between: Some(between.to_owned()),
        close: rest[tail.len()..].trim_end().to_owned(),
    })
}

/// The format of one call.
fn single(sample: &str, call: Call) -> Option<Frame> {
    let (head, middle) = (sample[..call.name].trim_start(), call.middle(sample));
    Some(Frame {
        open: String::new(),
        head: pieces(head),
        members: members(head, middle),
        middle: pieces(middle),
        tail: pieces(sample[call.end..].trim_end()),
        arguments: call.notation,
        between: None,
        close: String::new(),
    })
}

/// Where a call of a sample stands.
struct Call {
    /// Offset of its name.
    name: usize,
    /// End of its name.
    after_name: usize,
    /// Offset of its arguments.
    start: usize,
    /// End of its arguments.
    end: usize,
    notation: Notation,
}

impl Call {
    fn find(sample: &str, number: usize, from: usize) -> Option<Self> {
        let after = |text: &str, from: usize| {
            let at = sample.get(from..)?.find(text)?;
            Some(Span {
                start: from + at,
                end: from + at + text.len(),
            })
        };
        let name = after(NAMES[number], from)?;
        let [one, two, three] = KEYS;
        let [first_text, second_text] = TEXTS[number];
        let key = after(one, name.end)?;
        let value = after(first_text, key.end)?;
        let second = after(two, value.end)?;
        let second_value = after(second_text, second.end)?;
        let third = after(three, second_value.end)?;
        let number = after(NUMBERS[number], third.end)?;
        let found = Arguments {
            sample,
            keys: [key, second, third],
            values: [value, second_value, number],
        };
        let found = found.notated(name.end)?;
        Some(Self {
            name: name.start,
            after_name: name.end,
            start: found.start,
            end: found.end,
            notation: found.notation,
        })
    }

    /// The text between name and arguments.
    fn middle<'a>(&self, sample: &'a str) -> &'a str {
        &sample[self.after_name..self.start]
    }
}

#[derive(Debug, Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
}

/// Keys and values of one call.
struct Arguments<'a> {
    sample: &'a str,
    keys: [Span; 3],
    values: [Span; 3],
}

/// Arguments whose notation is known.
struct Notated {
    start: usize,
    end: usize,
    notation: Notation,
}

impl Arguments<'_> {
    fn notated(&self, after_name: usize) -> Option<Notated> {
        let [key, ..] = self.keys;
        let [value, _, number] = self.values;
        let before = &self.sample[..key.start];
        let between = &self.sample[key.end..value.start];
        let bare: String = between.split_whitespace().collect();
        let bracket = |open: &str| {
            let at = before.trim_end().strip_suffix(open)?.len();
            (at >= after_name).then_some(at)
        };
        let end = |close: char| {
            let rest = &self.sample[number.end..];
            let at = rest.len() - rest.trim_start().len();
            rest[at..].starts_with(close).then_some(number.end + at + 1)
        };
        if bare == "\":\"" {
            let before = before.strip_suffix('"')?.trim_end();
            return Some(Notated {
                start: before.strip_suffix('{')?.len(),
                end: end('}')?,
                notation: Notation::Json,
            });
        }
        if let (Some(start), "='" | "=\"") = (bracket("("), &*bare) {
            return Some(Notated {
                start,
                end: end(')')?,
                notation: Notation::Python,
            });
        }
        if let (Some(start), Some(quote)) = (bracket("{"), bare.strip_prefix(':')) {
            return Some(Notated {
                start,
                end: end('}')?,
                notation: Notation::Bare {
                    quote: quote.to_owned(),
                },
            });
        }
        self.tagged(after_name)
    }

    fn tagged(&self, after_name: usize) -> Option<Notated> {
        let [key, second, third] = self.keys;
        let [value, second_value, number] = self.values;
        let sample = self.sample;
        let gap = &sample[value.end..second.start];
        let rest = &sample[number.end..];
        let close = whole_tags_before(&gap[..common_start(gap, rest)]);
        let (_, open) = common_end(&sample[after_name..key.start], &gap[close.len()..]);
        let open = open.trim_start();
        let middle = &sample[key.end..value.start];
        let of_number = &sample[third.end..number.start];
        let tags = Tags {
            open: open.to_owned(),
            middle: middles(middle, of_number)?,
            close: close.to_owned(),
            between: gap[close.len()..gap.len() - open.len()].to_owned(),
            cdata: false,
        };
        // All arguments have the same tags.
        let same = middle == &sample[second.end..second_value.start]
            && gap == &sample[second_value.end..third.start];
        let tagged = [open, middle, close]
            .iter()
            .all(|tag| !tag.trim().is_empty());
        (same && tagged).then_some(Notated {
            start: key.start - open.len(),
            end: number.end + close.len(),
            notation: Notation::Tags(tags),
        })
    }
}

/// The text between key and value, from that of a string and that of a number.
fn middles(text: &str, number: &str) -> Option<Middle> {
    if text == number {
        return Some(Middle::Plain(text.to_owned()));
    }
    let word = |c: char| c.is_alphanumeric();
    let start = common_start(text, number);
    let start = text[..start].trim_end_matches(word).len();
    let end = |text: &str| {
        let rest = &text[start..];
        start + rest.len() - rest.trim_start_matches(word).len()
    };
    let (of_text, of_number) = (end(text), end(number));
    let after = &text[of_text..];
    (after == &number[of_number..] && !after.is_empty()).then(|| Middle::Typed {
        before: text[..start].to_owned(),
        text: text[start..of_text].to_owned(),
        number: number[start..of_number].to_owned(),
        after: after.to_owned(),
    })
}

/// Length of what both texts begin with.
pub fn common_start(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(a, _)| a.len_utf8()).sum()
}

/// What both texts end with, apart from digits; from the first whole tag on.
fn common_end<'a>(a: &'a str, b: &'a str) -> (&'a str, &'a str) {
    let digits = |a: char, b: char| a.is_ascii_digit() && b.is_ascii_digit();
    let pairs = a.chars().rev().zip(b.chars().rev());
    let same = pairs.take_while(|&(a, b)| a == b || digits(a, b));
    let length = same.map(|(a, _)| a.len_utf8()).sum::<usize>();
    let (a, b) = (&a[a.len() - length..], &b[b.len() - length..]);
    let skipped = inside_of_tag(a);
    (&a[skipped..], &b[skipped..])
}

/// Length of the rest of a tag with which a text begins.
pub fn inside_of_tag(text: &str) -> usize {
    match (text.find('>'), text.find('<')) {
        (Some(end), None) => end + 1,
        (Some(end), Some(start)) if end < start => end + 1,
        _ => 0,
    }
}

/// A text without the tag with which it ends if that is not whole.
pub fn whole_tags_before(text: &str) -> &str {
    match (text.rfind('<'), text.rfind('>')) {
        (Some(start), None) => &text[..start],
        (Some(start), Some(end)) if end < start => &text[..start],
        _ => text,
    }
}

/// A text with a mark in place of digits that differ in the same text of the next call.
fn numbered(first: &str, second: &str) -> String {
    if first.len() != second.len() {
        return first.to_owned();
    }
    let pairs = first.chars().zip(second.chars());
    pairs.map(|(a, b)| if a == b { a } else { INDEX }).collect()
}

/// Fixed texts, identifiers and numbers.
fn pieces(text: &str) -> Vec<Piece> {
    let mut all = Vec::new();
    for part in text.split_inclusive([ID, INDEX]) {
        let (fixed, last) = match part.strip_suffix([ID, INDEX]) {
            Some(fixed) => (fixed, part.chars().last()),
            None => (part, None),
        };
        if !fixed.is_empty() {
            all.push(Piece::Text(fixed.to_owned()));
        }
        all.extend(last.map(|mark| match mark {
            ID => Piece::Id,
            _ => Piece::Index,
        }));
    }
    all
}

/// The members of a call that is an object: what precedes name and arguments ends with `"KEY": `.
fn members(head: &str, middle: &str) -> Option<Members> {
    let key = |text: &str| {
        let text = text.trim_end().strip_suffix(':')?.trim_end();
        let (_, key) = text.strip_suffix('"')?.rsplit_once('"')?;
        Some(key.to_owned())
    };
    let object = head.contains('{');
    Some(Members {
        name: key(head.strip_suffix('"')?).filter(|_| object)?,
        arguments: key(middle)?,
    })
}
