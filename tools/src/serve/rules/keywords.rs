//! The keywords that schemas may have.

use crate::suggest::did_you_mean;

/// What a keyword means here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keyword {
    /// Restricts values. It contains no schemas.
    Plain,
    /// Restricts values by a schema or a list of schemas.
    Nested,
    /// Schemas by name.
    Named,
    /// An annotation.
    Note,
    /// Restricts values in a way that no grammar expresses.
    Unsupported,
}

use Keyword::{Named, Nested, Note, Plain, Unsupported};

/// Keywords of JSON Schema, and annotations of OpenAPI.
const KEYWORDS: [(&str, Keyword); 63] = [
    ("type", Plain),
    ("enum", Plain),
    ("const", Plain),
    ("properties", Named),
    ("required", Plain),
    ("additionalProperties", Nested),
    ("patternProperties", Named),
    ("minProperties", Plain),
    ("maxProperties", Plain),
    ("items", Nested),
    ("prefixItems", Nested),
    ("additionalItems", Nested),
    ("minItems", Plain),
    ("maxItems", Plain),
    ("pattern", Plain),
    ("minLength", Plain),
    ("maxLength", Plain),
    ("format", Plain),
    ("minimum", Plain),
    ("maximum", Plain),
    ("exclusiveMinimum", Plain),
    ("exclusiveMaximum", Plain),
    ("multipleOf", Plain),
    ("anyOf", Nested),
    ("oneOf", Nested),
    ("allOf", Nested),
    ("$ref", Plain),
    ("$defs", Named),
    ("definitions", Named),
    ("title", Note),
    ("description", Note),
    ("default", Note),
    ("examples", Note),
    ("example", Note),
    ("deprecated", Note),
    ("readOnly", Note),
    ("writeOnly", Note),
    ("$comment", Note),
    ("$schema", Note),
    ("$id", Note),
    ("id", Note),
    ("$anchor", Note),
    ("contentEncoding", Note),
    ("contentMediaType", Note),
    ("contentSchema", Note),
    ("discriminator", Note),
    ("externalDocs", Note),
    ("xml", Note),
    ("not", Unsupported),
    ("if", Unsupported),
    ("then", Unsupported),
    ("else", Unsupported),
    ("contains", Unsupported),
    ("minContains", Unsupported),
    ("maxContains", Unsupported),
    ("uniqueItems", Unsupported),
    ("propertyNames", Unsupported),
    ("dependencies", Unsupported),
    ("dependentRequired", Unsupported),
    ("dependentSchemas", Unsupported),
    ("unevaluatedItems", Unsupported),
    ("unevaluatedProperties", Unsupported),
    ("$dynamicRef", Unsupported),
];

/// What annotations that a client makes up begin with.
const OWN: &str = "x-";

impl Keyword {
    /// The meaning of a keyword; `None` if it is unknown.
    pub fn of(name: &str) -> Option<Self> {
        let known = KEYWORDS.iter().find(|(known, _)| *known == name);
        let own = || name.starts_with(OWN).then_some(Note);
        known.map(|&(_, keyword)| keyword).or_else(own)
    }

    /// The message that a schema has an unknown keyword.
    pub fn unknown(name: &str, place: &str) -> String {
        let short: String = name.chars().take(100).collect();
        let instead = match name {
            "nullable" => r#"; write "type": ["string", "null"]"#.to_owned(),
            _ => did_you_mean(name, KEYWORDS.map(|(known, _)| known)),
        };
        format!(
            "`{short}` at {place} is an unknown keyword{instead}; names of annotations begin with `{OWN}`"
        )
    }

    /// The message that a schema has a keyword that is not supported.
    pub fn unsupported(name: &str, place: &str) -> String {
        format!("`{name}` at {place} cannot be enforced; remove it from the schema")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words in quotes in the cell of a table's row that begins with `row`.
    fn words(page: &str, row: &str) -> Vec<String> {
        let line = page.lines().find(|line| line.starts_with(row)).expect(row);
        let cell = line.split('|').nth(2).expect(line);
        let words = cell.split('`').skip(1).step_by(2);
        words.map(str::to_owned).collect()
    }

    /// The table in docs/serve.md is this one.
    #[test]
    fn the_page_lists_the_keywords() {
        let page = include_str!("../../../../docs/serve.md");
        let of = |wanted: &[Keyword]| -> Vec<String> {
            let all = KEYWORDS
                .iter()
                .filter(|(_, keyword)| wanted.contains(keyword));
            all.map(|(name, _)| (*name).to_owned()).collect()
        };
        let mut enforced = of(&[Plain, Nested, Named]);
        enforced.retain(|name| name != "format");
        assert_eq!(words(page, "| enforced"), enforced);
        let mut notes = of(&[Note]);
        notes.push(format!("{OWN}…"));
        assert_eq!(words(page, "| annotations"), notes);
        assert_eq!(words(page, "| refused"), of(&[Unsupported]));
    }
}
