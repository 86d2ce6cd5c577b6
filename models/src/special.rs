//! The special tokens of a tokenizer: those declared in its file, those added around every text,
//! and those that end one.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;

/// Texts of tokens that end a text, a turn or a message in current chat formats. Files often name
/// only one of them by id.
const ENDS: [&str; 22] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|tool_response>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<eos>",
    END_OF_SEQUENCE,
];

/// Ordinary text in some vocabularies.
const END_OF_SEQUENCE: &str = "</s>";

/// Whether a token with this text ends a text even if the file does not declare it special. `</s>`
/// is ordinary text in some vocabularies.
pub(crate) fn is_surely_end(text: &str) -> bool {
    text != END_OF_SEQUENCE && ENDS.contains(&text)
}

/// The tokens that end a text, among tokens and their texts.
pub(crate) fn ends<'a>(tokens: impl Iterator<Item = Token<'a>>) -> Vec<u32> {
    let all: Vec<Token<'a>> = tokens.filter(|token| ENDS.contains(&token.text)).collect();
    let has = |text: &str| all.iter().any(|token| token.text == text);
    // In these formats `<|end|>` ends a part of an answer, and another token the whole answer.
    let parts = has("<|call|>") && has("<|return|>") || has("<|calls|>") && has("<|flush|>");
    // Gemma 4 has `</s>` in its vocabulary, as text.
    let text = has("<|tool_response>");
    let kept = all.iter().filter(|token| match token.text {
        "<|end|>" => !parts,
        END_OF_SEQUENCE => !text,
        _ => true,
    });
    kept.map(|token| token.id).collect()
}

/// A token and its text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub(crate) id: u32,
    pub(crate) text: &'a str,
}

/// Tokens that a tokenizer adds around every text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Around {
    /// Before it: usually a start token, or none.
    pub before: Vec<u32>,
    /// After it: usually none.
    pub after: Vec<u32>,
}

impl Around {
    /// The tokens of a `post_processor`: the special tokens of its template for one text.
    pub(crate) fn of(processor: &Value) -> Self {
        Self::template(processor).unwrap_or_default()
    }

    fn template(processor: &Value) -> Option<Self> {
        match processor.get("type")?.as_str()? {
            "Sequence" => {
                (processor.get("processors")?.as_array()?.iter()).find_map(Self::template)
            }
            "TemplateProcessing" => {
                let mut around = Self::default();
                let mut list = &mut around.before;
                for piece in processor.get("single")?.as_array()? {
                    let Some(special) = piece.get("SpecialToken") else {
                        list = &mut around.after;
                        continue;
                    };
                    let name = special.get("id")?.as_str()?;
                    let ids = processor.get("special_tokens")?.get(name)?.get("ids")?;
                    let ids = ids.as_array()?.iter();
                    let ids = ids.map(|id| u32::try_from(id.as_u64()?).ok());
                    list.extend(ids.collect::<Option<Vec<u32>>>()?);
                }
                Some(around)
            }
            _ => None,
        }
    }
}

/// Information from a tokenizer for the readers.
pub(crate) struct SpecialTokens {
    added: Vec<AddedToken>,
    /// Tokens around a text.
    pub(crate) around: Around,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
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
        let around = Around::of(&parsed.post_processor);
        Ok(Self {
            added: parsed.added_tokens,
            around,
        })
    }

    /// Id of an added token.
    pub(crate) fn id(&self, content: &str) -> Option<u32> {
        self.added
            .iter()
            .find(|token| token.content == content)
            .map(|token| token.id)
    }

    /// The special tokens that end a text, recognised by their text.
    pub(crate) fn ends(&self) -> Vec<u32> {
        let special = self.added.iter().filter(|token| token.special);
        ends(special.map(|token| Token {
            id: token.id,
            text: &token.content,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(text: &str) -> SpecialTokens {
        SpecialTokens::parse(Path::new("tokenizer.json"), text).unwrap()
    }

    #[test]
    fn the_template_names_all_tokens_around_a_text() {
        let template = r#"{"type":"TemplateProcessing",
            "single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"SpecialToken":{"id":"two","type_id":0}},
                {"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"</s>","type_id":0}}],
            "special_tokens":{"<s>":{"id":"<s>","ids":[7],"tokens":["<s>"]},
                "two":{"id":"two","ids":[8,9],"tokens":["a","b"]},
                "</s>":{"id":"</s>","ids":[2],"tokens":["</s>"]}}}"#;
        let expected = Around {
            before: vec![7, 8, 9],
            after: vec![2],
        };
        assert_eq!(
            special(&format!(r#"{{"post_processor":{template}}}"#)).around,
            expected
        );
        let sequence =
            format!(r#"{{"type":"Sequence","processors":[{{"type":"ByteLevel"}},{template}]}}"#);
        assert_eq!(
            special(&format!(r#"{{"post_processor":{sequence}}}"#)).around,
            expected
        );
    }

    #[test]
    fn without_a_template_nothing_is_around_a_text() {
        assert_eq!(special("{}").around, Around::default());
        let null = special(r#"{"post_processor":null}"#);
        assert_eq!(null.around, Around::default());
    }

    /// As marked by llama.cpp's `llama_vocab` as end-of-generation tokens.
    #[test]
    fn ends_are_known_by_their_text() {
        let ends = |texts: &[&str]| {
            let tokens = texts.iter().zip(0..);
            ends(tokens.map(|(text, id)| Token { id, text }))
        };
        assert_eq!(ends(&["<s>", "</s>", "<|im_start|>", "<|im_end|>"]), [1, 3]);
        assert_eq!(ends(&["<|end|>", "<|user|>", "<|endoftext|>"]), [0, 2]);
        assert_eq!(ends(&["<bos>", "<eos>", "<end_of_turn>"]), [1, 2]);
        assert_eq!(
            ends(&["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
            [0, 1, 2]
        );
        // gpt-oss, Solar, Gemma 4
        assert_eq!(ends(&["<|end|>", "<|return|>", "<|call|>"]), [1, 2]);
        assert_eq!(ends(&["<|end|>", "<|flush|>", "<|calls|>"]), [1, 2]);
        assert_eq!(
            ends(&["</s>", "<eos>", "<turn|>", "<|tool_response>"]),
            [1, 2, 3]
        );
    }
}
