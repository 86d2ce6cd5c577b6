//! Limits on client grammars.

use super::MAX_SOURCE;

/// Maximum lines, which bounds how far rules refer to each other.
const MAX_LINES: usize = 1000;

/// Checks the size of a grammar before it is parsed.
///
/// # Errors
/// The grammar is too large.
pub fn check_size(grammar: &str) -> Result<(), String> {
    if grammar.len() > MAX_SOURCE || grammar.lines().count() > MAX_LINES {
        Err(format!(
            "a grammar may have at most {MAX_SOURCE} bytes and {MAX_LINES} lines"
        ))
    } else {
        Ok(())
    }
}

/// Whether a grammar is GBNF: a line starts with a name and `::=`.
pub fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let line = line.trim_start();
        let name = line.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || "-_".contains(c));
        name.len() < line.len() && name.trim_start().starts_with("::=")
    })
}

/// Checks that a grammar is Lark and uses no construct of unbounded cost.
///
/// # Errors
/// What is not supported.
pub fn check(grammar: &str) -> Result<(), String> {
    check_size(grammar)?;
    let outside = outside_of_literals(grammar);
    // Intersections and complements of terminals, and embedded grammars.
    for sign in [
        "&",
        "~",
        "%json",
        "%regex",
        "%lark",
        "%if",
        "%override",
        "%declare",
    ] {
        if outside.contains(sign) {
            let instead = match sign {
                "%json" => "; use `response_format` for schemas",
                "~" => "; write repetitions as `{2,5}`",
                _ => "",
            };
            return Err(format!("`{sign}` is not supported in grammars{instead}"));
        }
    }
    Ok(())
}

/// The grammar with spaces in place of strings, regular expressions and comments.
fn outside_of_literals(grammar: &str) -> String {
    let mut out = String::with_capacity(grammar.len());
    let mut rest = grammar.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '/' if rest.peek() == Some(&'/') => {
                for c in rest.by_ref() {
                    if c == '\n' {
                        break;
                    }
                }
                out.push('\n');
            }
            '"' | '/' => {
                let mut escaped = false;
                for inner in rest.by_ref() {
                    // Strings and regular expressions end with their line.
                    if inner == '\n' || (inner == c && !escaped) {
                        break;
                    }
                    escaped = inner == '\\' && !escaped;
                }
                out.push(' ');
            }
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unbounded_is_refused_by_name() {
        let refused = |grammar: &str, why: &str| {
            let found = check(grammar).unwrap_err();
            assert!(found.contains(why), "{grammar}: {found}");
        };
        refused("start: A\nA: /a/ & /b/", "`&`");
        refused("start: A\nA: ~/a/", "`~`");
        refused("start: %json {}", "response_format");
        refused(&"a: \"b\"\n".repeat(2000), "lines");
        assert!(is_gbnf("# a: b\n root-1 ::= \"a\"") && !is_gbnf("start: \"::=\"\n\"a ::= b\""));
        check("start: \"a & b ~ ::= %json\" | /[&~]/ // & ~").unwrap();
        check(r#"start: "\"&" A{1,3}"#).unwrap();
    }
}
