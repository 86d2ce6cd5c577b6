//! The special tokens declared by a `tokenizer.json`.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;

/// What the readers need from a tokenizer.
pub(crate) struct SpecialTokens {
    added: Vec<AddedToken>,
    /// Token that the post-processor prepends to a text.
    pub(crate) leading: Option<u32>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    post_processor: Value,
}

impl SpecialTokens {
    pub(crate) fn parse(path: &Path, tokenizer_json: &str) -> Result<Self, Error> {
        let parsed: TokenizerJson =
            serde_json::from_str(tokenizer_json).map_err(|error| Error::Json {
                path: path.to_owned(),
                reason: error.to_string(),
            })?;
        let leading = leading_token(&parsed.post_processor);
        Ok(Self {
            added: parsed.added_tokens,
            leading,
        })
    }

    /// Id of an added token.
    pub(crate) fn id(&self, content: &str) -> Option<u32> {
        self.added
            .iter()
            .find(|token| token.content == content)
            .map(|token| token.id)
    }
}

/// The first piece of the template for one text, if it is a special token.
fn leading_token(processor: &Value) -> Option<u32> {
    match processor.get("type")?.as_str()? {
        "Sequence" => processor
            .get("processors")?
            .as_array()?
            .iter()
            .find_map(leading_token),
        "TemplateProcessing" => {
            let name = processor
                .get("single")?
                .get(0)?
                .get("SpecialToken")?
                .get("id")?
                .as_str()?;
            let id = processor
                .get("special_tokens")?
                .get(name)?
                .get("ids")?
                .get(0)?
                .as_u64()?;
            u32::try_from(id).ok()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(text: &str) -> SpecialTokens {
        SpecialTokens::parse(Path::new("tokenizer.json"), text).unwrap()
    }

    #[test]
    fn the_template_names_the_leading_token() {
        let template = r#"{"type":"TemplateProcessing",
            "single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],
            "special_tokens":{"<s>":{"id":"<s>","ids":[7],"tokens":["<s>"]}}}"#;
        assert_eq!(
            special(&format!(r#"{{"post_processor":{template}}}"#)).leading,
            Some(7)
        );
        let sequence =
            format!(r#"{{"type":"Sequence","processors":[{{"type":"ByteLevel"}},{template}]}}"#);
        assert_eq!(
            special(&format!(r#"{{"post_processor":{sequence}}}"#)).leading,
            Some(7)
        );
    }

    #[test]
    fn without_a_template_nothing_leads() {
        assert_eq!(special("{}").leading, None);
        assert_eq!(special(r#"{"post_processor":null}"#).leading, None);
        let trailing = r#"{"post_processor":{"type":"TemplateProcessing",
            "single":[{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}],
            "special_tokens":{"</s>":{"id":"</s>","ids":[2],"tokens":["</s>"]}}}}"#;
        assert_eq!(special(trailing).leading, None);
    }
}
