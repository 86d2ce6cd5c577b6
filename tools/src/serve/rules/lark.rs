//! Bounds of grammars that clients write.

use super::MAX_SOURCE;

/// Most lines, which bounds how far rules lead through each other.
const MAX_LINES: usize = 1000;

/// Checks that a grammar is one in Lark's form and uses nothing whose cost is unbounded.
///
/// # Errors
/// What is wrong.
pub fn check(grammar: &str) -> Result<(), String> {
    if grammar.len() > MAX_SOURCE || grammar.lines().count() > MAX_LINES {
        return Err(format!(
            "a grammar has at most {MAX_SOURCE} bytes and {MAX_LINES} lines"
        ));
    }
    let outside = outside_of_literals(grammar);
    if outside.contains("::=") {
        return Err(
            "this is GBNF; write the grammar in Lark's form (`start: \"a\" | /[0-9]+/`)".to_owned(),
        );
    }
    // Terminals that hold together or not at all, and languages inside the language.
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
                "%json" => "; send the schema as `response_format`",
                "~" => "; write a number of times as `{2,5}`",
                _ => "",
            };
            return Err(format!("`{sign}` is not supported in grammars{instead}"));
        }
    }
    Ok(())
}

/// The grammar with a blank for each text, expression and comment.
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
                    // Neither goes beyond its line.
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
        refused("root ::= \"a\"", "GBNF");
        refused("start: A\nA: /a/ & /b/", "`&`");
        refused("start: A\nA: ~/a/", "`~`");
        refused("start: %json {}", "response_format");
        refused(&"a: \"b\"\n".repeat(2000), "lines");
        check("start: \"a & b ~ ::= %json\" | /[&~]/ // & ~").unwrap();
        check(r#"start: "\"&" A{1,3}"#).unwrap();
    }
}
