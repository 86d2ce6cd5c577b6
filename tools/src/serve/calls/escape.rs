//! Characters of strings: Python's escapes, and JSON's.

use serde_json::Value;

/// An escape at the start of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Escape {
    /// It stands for this text; its length.
    Of(String, usize),
    /// More text is needed.
    Unclear,
    /// There is none.
    None,
}

/// The escape at the start of `text`, in Python or JSON.
pub fn read(text: &str) -> Escape {
    let mut chars = text.chars();
    if chars.next() != Some('\\') {
        return Escape::None;
    }
    let Some(sign) = chars.next() else {
        return Escape::Unclear;
    };
    let simple = match sign {
        'n' => "\n",
        't' => "\t",
        'r' => "\r",
        'b' => "\u{8}",
        'f' => "\u{c}",
        '\\' => "\\",
        '\'' => "'",
        '"' => "\"",
        '/' => "/",
        '\n' => "",
        'x' => return hex(text, 2),
        'u' => return hex(text, 4),
        'U' => return hex(text, 8),
        _ => return Escape::None,
    };
    Escape::Of(simple.to_owned(), 1 + sign.len_utf8())
}

/// `\xhh`, `\uhhhh` (one or a surrogate pair) or `\Uhhhhhhhh`.
fn hex(text: &str, digits: usize) -> Escape {
    let code = |text: &str| {
        let digits = text.get(2..2 + digits)?;
        let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
        u32::from_str_radix(digits, 16).ok().filter(|_| plain)
    };
    let length = 2 + digits;
    let short = text.len() < length && text[2..].bytes().all(|b| b.is_ascii_hexdigit());
    let Some(first) = code(text) else {
        return if short { Escape::Unclear } else { Escape::None };
    };
    if digits == 4 && (0xd800..0xdc00).contains(&first) {
        let rest = &text[length..];
        if rest.len() < length && ("\\u".starts_with(rest) || rest.starts_with("\\u")) {
            return Escape::Unclear;
        }
        let second =
            code(rest).filter(|low| rest.starts_with("\\u") && (0xdc00..0xe000).contains(low));
        if let Some(low) = second {
            let joined = 0x10000 + ((first - 0xd800) << 10) + (low - 0xdc00);
            return of(joined, 2 * length);
        }
    }
    of(first, length)
}

fn of(code: u32, length: usize) -> Escape {
    let c = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
    Escape::Of(c.to_string(), length)
}

/// Appends a character of a JSON string.
pub fn append(c: char, out: &mut String) {
    if c == '"' || c == '\\' || u32::from(c) < 0x20 {
        let quoted = Value::from(c.to_string()).to_string();
        out.push_str(&quoted[1..quoted.len() - 1]);
    } else {
        out.push(c);
    }
}
