//! Parses Rust source for the code rules: code without comments and literals, and its functions.

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

/// A function with a body.
#[derive(Debug, PartialEq)]
pub struct Function {
    pub name: String,
    /// 1-based line of its signature.
    pub line: usize,
    /// From the signature to the closing brace.
    pub lines: usize,
    /// Names or patterns of the parameters, and their types.
    pub parameters: Vec<(String, String)>,
    /// Whether it implements a trait, which determines its signature.
    pub of_trait: bool,
}

/// All functions in blanked code.
pub fn functions(code: &str) -> Vec<Function> {
    let line_of = |at: usize| code[..at].matches('\n').count();
    let impls = trait_impls(code);
    let mut found = Vec::new();
    for at in words(code, "fn") {
        let rest = &code[at + 2..];
        let name: String = (rest.trim_start().chars())
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        // `fn(` is a type
        if name.is_empty() {
            continue;
        }
        let Some(open) = parameters_at(code, at) else {
            continue;
        };
        let close = matching(code, open);
        let Some(body) = body_at(code, close) else {
            continue;
        };
        let end = matching(code, body);
        found.push(Function {
            name,
            line: line_of(at) + 1,
            lines: line_of(end) - line_of(at) + 1,
            parameters: parameters(&code[open + 1..close]),
            of_trait: impls.iter().any(|i| i.contains(&at)),
        });
    }
    found
}

/// Ranges of the bodies of trait implementations.
fn trait_impls(code: &str) -> Vec<std::ops::Range<usize>> {
    let mut places = Vec::new();
    for at in words(code, "impl") {
        let Some(open) = code[at..].find(['{', ';']).map(|i| at + i) else {
            continue;
        };
        let header = &code[at..open];
        if code.as_bytes()[open] == b'{' && header.contains(" for ") {
            places.push(open..matching(code, open));
        }
    }
    places
}

/// Positions of `word` as a whole word.
fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    code.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |&at| {
            let after = code[at + word.len()..].chars().next();
            !part(code[..at].chars().next_back()) && !part(after)
        })
}

/// Position of the opening parenthesis of the function at `at`, after its generics.
fn parameters_at(code: &str, at: usize) -> Option<usize> {
    let mut depth = 0;
    let bytes = code.as_bytes();
    for i in at..bytes.len() {
        match bytes[i] {
            b'<' => depth += 1,
            b'>' if bytes[i - 1] != b'-' => depth -= 1,
            b'(' if depth == 0 => return Some(i),
            b'{' | b';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Position of the body of the function whose parameters end at `close`; `None` without one.
fn body_at(code: &str, close: usize) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in code.bytes().enumerate().skip(close + 1) {
        match c {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(i),
            b';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// The bracket that closes the one at `open`.
fn matching(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (i, c) in code[open..].bytes().enumerate() {
        match c {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return open + i;
        }
    }
    code.len()
}

/// Parameters split at commas, then at colons, outside of brackets.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut depth = 0;
    let mut parts = vec![(String::new(), None::<String>)];
    let mut before = ' ';
    for c in text.chars() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        before = c;
        let part = parts.last_mut().expect("there is a first part");
        match (c, depth, &mut part.1) {
            (',', 0, _) => parts.push((String::new(), None)),
            (':', 0, kind @ None) => *kind = Some(String::new()),
            (_, _, Some(kind)) => kind.push(c),
            (_, _, None) => part.0.push(c),
        }
    }
    let trimmed = parts.into_iter().filter_map(|(name, kind)| {
        let kind = kind?;
        Some((name.trim().to_owned(), kind.trim().to_owned()))
    });
    trimmed.collect()
}

/// Whether a type is a tuple or a reference to one; `()` and `(dyn Trait)` are not.
pub fn is_tuple(kind: &str) -> bool {
    let mut kind = kind.trim();
    while let Some(rest) = kind.strip_prefix('&') {
        kind = rest.trim_start();
        if let Some(rest) = kind.strip_prefix('\'') {
            kind = rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
        }
        kind = kind.trim_start();
        kind = kind.strip_prefix("mut ").unwrap_or(kind).trim_start();
    }
    let mut depth = 0;
    let mut commas = kind.chars().filter(|c| {
        match c {
            '(' | '[' | '<' => depth += 1,
            ')' | ']' | '>' => depth -= 1,
            _ => {}
        }
        depth == 1 && *c == ','
    });
    kind.starts_with('(') && commas.next().is_some()
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

#[test]
fn functions_are_found_with_their_parameters() {
    let code = "
pub fn one<F: Fn(usize) -> (u8, u8)>(
    mut x: &'a mut (usize, u32), f: F,
    (a, b): (u8, u8),
) -> [u8; 3]
where F: Copy {
    { }
}
impl From<(u8,)> for S<T> { fn two(&self, t: (u8,)) {} }
impl S { const fn three(self, u: (), v: &[(u8, u8)], w: &(dyn Fn(u8, u8) + Sync)) {} fn none(); }
type F = fn(usize) -> u8;";
    let found = functions(&blanked(code));
    let names: Vec<&str> = found.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["one", "two", "three"]);
    assert_eq!((found[0].line, found[0].lines), (2, 7));
    let tuples = |f: &Function| -> Vec<String> {
        let all = f.parameters.iter().filter(|(_, kind)| is_tuple(kind));
        all.map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(tuples(&found[0]), ["mut x", "(a, b)"]);
    assert_eq!(tuples(&found[1]), ["t"]);
    assert!(found[1].of_trait && !found[0].of_trait && !found[2].of_trait);
    assert_eq!(tuples(&found[2]), [""; 0]);
}
