//! Rust source without comments and literals.

/// Only the code: comments and contents of literals become blanks; lines are preserved.
pub fn blanked(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        if end == at {
            let c = bytes[at];
            out.push(if c.is_ascii() { c as char } else { ' ' });
            at += 1;
            continue;
        }
        // the quotes of a literal remain, so that it stays an expression
        let quote = if bytes[at] == b'/' { ' ' } else { '"' };
        for (i, &c) in bytes[at..end].iter().enumerate() {
            let outer = i == 0 || i + 1 == end - at;
            out.push(match c {
                b'\n' => '\n',
                _ if outer => quote,
                _ => ' ',
            });
        }
        at = end;
    }
    out
}

/// End of the comment or literal that begins at `at`; `at` itself if there is none.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let word = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    let inside_word = at > 0 && word(bytes[at - 1]);
    let find = |needle: &[u8], from: usize| {
        let mut places = rest.get(from..).unwrap_or_default().windows(needle.len());
        places
            .position(|w| w == needle)
            .map_or(rest.len(), |i| from + i + needle.len())
    };
    let len = if rest.starts_with(b"//") {
        find(b"\n", 2).saturating_sub(1).max(2)
    } else if rest.starts_with(b"/*") {
        find(b"*/", 2)
    } else if !inside_word && (rest.starts_with(b"r\"") || rest.starts_with(b"r#")) {
        let hashes = rest[1..].iter().take_while(|&&c| c == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close = [&b"\""[..], &b"#".repeat(hashes)].concat();
            find(&close, 2 + hashes)
        } else {
            0
        }
    } else if rest[0] == b'"' {
        quoted(rest, b'"')
    } else if rest[0] == b'\'' && is_char(rest) {
        quoted(rest, b'\'')
    } else {
        0
    };
    at + len
}

/// Bytes to the closing `quote`, which a backslash hides.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut i = 1;
    while i < rest.len() {
        match rest[i] {
            b'\\' => i += 1,
            c if c == quote => return i + 1,
            _ => {}
        }
        i += 1;
    }
    rest.len()
}

/// Whether an apostrophe begins a character literal, not a lifetime.
fn is_char(rest: &[u8]) -> bool {
    match rest.get(1) {
        Some(b'\\') => true,
        Some(c) if c.is_ascii() => rest.get(2) == Some(&b'\''),
        Some(_) => true,
        None => false,
    }
}

#[test]
fn comments_and_literals_are_blanked() {
    let code = blanked(
        "a /* fn x( */ \"fn \\\" {\" 'b' '\\'' r#\"} \" \"# 'c: // fn d() {\nlet br\"}\" = 1; 'é'",
    );
    assert!(!code.contains("fn") && !code.contains(['{', '}']), "{code}");
    assert!(code.contains("'c:") && code.contains("let b"), "{code}");
    assert_eq!(code.lines().count(), 2);
}
