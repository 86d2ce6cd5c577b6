//! Template source before compilation: rewrites syntax that jinja2 has and the template engine
//! lacks.

use super::filters::PRINTF;

/// Maximum nesting of operands.
const MAX_DEPTH: usize = 20;

/// The template with `{% generation %}`, which marks the assistant's words for training and writes nothing, as an
/// `if` that is always true, with `'text' % arguments` as a filter, and with `append` and `pop` as assignments.
pub(super) fn prepared(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'%' | b'{') => tag_end(tag),
            _ => 1,
        };
        let (tag, after) = tag.split_at(end);
        rest = after;
        match tag.as_bytes().get(1) {
            Some(b'%') => rest = statement(&mut out, tag, rest),
            Some(b'{') => expression(&mut out, tag, 0),
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    out
}

/// Writes a statement, and its raw contents. Returns the rest.
fn statement<'a>(out: &mut String, tag: &str, rest: &'a str) -> &'a str {
    let inner = tag.trim_start_matches("{%").trim_end_matches("%}");
    let name = inner.trim_matches(['-', '+']).trim();
    match name {
        "generation" => out.push_str(&tag.replace(name, "if true")),
        "endgeneration" => out.push_str(&tag.replace(name, "endif")),
        "raw" => {
            out.push_str(tag);
            let end = rest.find("endraw").unwrap_or(rest.len());
            let (raw, after) = rest.split_at(end);
            out.push_str(raw);
            return after;
        }
        _ => match changed_list(name) {
            Some(statements) => {
                let (begin, end) = tag.split_once(name).unwrap_or(("{% ", " %}"));
                for statement in statements {
                    expression(out, &format!("{begin}{statement}{end}"), 0);
                }
            }
            None => expression(out, tag, 0),
        },
    }
    rest
}

/// `set _ = space.list.append(item)` and `set item = space.list.pop(0)`, which change a list of a namespace, as
/// statements that set the list.
fn changed_list(statement: &str) -> Option<Vec<String>> {
    let (result, call) = statement.strip_prefix("set ")?.split_once('=')?;
    let call = call.trim();
    let length = name(call);
    let list_length = length
        + call[length..]
            .strip_prefix('.')
            .map(|rest| 1 + name(rest))?;
    let (list, method) = call.split_at(list_length);
    let method = method.strip_prefix('.')?;
    let (method, arguments) = method.split_at(name(method));
    if brackets(arguments) < arguments.len() {
        return None;
    }
    let arguments = arguments.strip_prefix('(')?.strip_suffix(')')?;
    match (method, arguments.trim()) {
        ("append", item) => Some(vec![format!("set {list} = {list} + [{item}]")]),
        ("pop", "0") => Some(vec![
            format!("set {} = {list}[0]", result.trim()),
            format!("set {list} = {list}[1:]"),
        ]),
        _ => None,
    }
}

/// Length of the tag that the text begins with.
fn tag_end(text: &str) -> usize {
    let bytes = text.as_bytes();
    let closing: &[u8] = if bytes[1] == b'%' { b"%}" } else { b"}}" };
    let (mut at, mut depth) = (2, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'\'' | b'"' => at += literal(&text[at..]),
            _ if depth == 0 && bytes[at..].starts_with(closing) => return at + 2,
            b'(' | b'[' | b'{' => {
                depth += 1;
                at += 1;
            }
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                at += 1;
            }
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Length of the text in quotes that `text` begins with.
fn literal(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == bytes[0] => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

/// Writes an expression. Operands nested deeper than `MAX_DEPTH` are not rewritten.
fn expression(out: &mut String, text: &str, depth: usize) {
    let mut rest = text;
    while depth < MAX_DEPTH
        && let Some(at) = rest.find(['\'', '"'])
    {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let (quoted, after) = rest.split_at(literal(rest));
        out.push_str(quoted);
        rest = after;
        let Some(operand) = after.trim_start().strip_prefix('%') else {
            continue;
        };
        if operand.starts_with('}') {
            continue;
        }
        let operand = operand.trim_start();
        let (operand, after) = operand.split_at(operand_end(operand));
        out.push_str(&format!("|{PRINTF}("));
        expression(out, operand, depth + 1);
        out.push(')');
        rest = after;
    }
    out.push_str(rest);
}

/// Length of the operand that `text` begins with: a name, a number, a literal or a bracketed expression, with its
/// attributes, indices, calls and filters.
fn operand_end(text: &str) -> usize {
    let unsigned = text.trim_start_matches(['-', '+']);
    let mut at = text.len() - unsigned.len();
    at += match unsigned.as_bytes().first() {
        Some(b'\'' | b'"') => literal(unsigned),
        Some(b'(' | b'[' | b'{') => brackets(unsigned),
        _ => name(unsigned),
    };
    loop {
        let rest = &text[at..];
        at += match rest.as_bytes().first() {
            Some(b'.') => 1 + name(&rest[1..]),
            Some(b'(' | b'[') => brackets(rest),
            _ => match rest.trim_start().strip_prefix('|') {
                Some(filter) => {
                    let filter = filter.trim_start();
                    rest.len() - filter.len() + name(filter)
                }
                None => return at,
            },
        };
    }
}

/// Length of the name or number that `text` begins with.
fn name(text: &str) -> usize {
    let rest = text.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
    text.len() - rest.len()
}

/// Length of the brackets that `text` begins with.
fn brackets(text: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'\'' | b'"' => at += literal(&text[at..]),
            b'(' | b'[' | b'{' => {
                depth += 1;
                at += 1;
            }
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                at += 1;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    text.len()
}
