//! How a model writes a call.

use emberflow_models::tokenizer::Tokenizer;

/// The form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere in a text: Hermes, Qwen.
    Tagged,
    /// `{"name": …, "parameters": …}` instead of a text: Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}, …]` behind a text: Mistral.
    Listed,
    /// A channel of gpt-oss's: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}`.
    Harmony,
    /// `[TOOL_CALLS]NAME[ARGS]{…}` behind a text, once for each call: newer models of Mistral.
    Named,
}

/// Signs of gpt-oss's messages.
pub const HARMONY: [&str; 5] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
];

impl Form {
    /// That of a chat template.
    pub fn of_template(template: &str) -> Self {
        let has = |text: &str| template.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            return Self::Harmony;
        }
        match (has("<tool_call>"), has("[TOOL_CALLS]")) {
            (true, _) => Self::Tagged,
            (false, true) if has("[ARGS]") => Self::Named,
            (false, true) => Self::Listed,
            _ if has("<|python_tag|>") || has("\"parameters\":") => Self::Bare,
            _ => Self::Tagged,
        }
    }

    /// What stands before a call, or before all of them.
    pub fn open(self) -> &'static str {
        match self {
            Self::Tagged => "<tool_call>",
            Self::Bare => "",
            Self::Harmony => "<|channel|>",
            Self::Listed | Self::Named => "[TOOL_CALLS]",
        }
    }

    /// What stands behind it.
    pub fn close(self) -> &'static str {
        match self {
            Self::Tagged => "</tool_call>",
            Self::Bare | Self::Named | Self::Harmony => "",
            Self::Listed => "]",
        }
    }

    /// The member with the arguments, or what stands before them.
    pub fn arguments(self) -> &'static str {
        match self {
            Self::Tagged | Self::Listed => "arguments",
            Self::Bare => "parameters",
            Self::Named => "[ARGS]",
            Self::Harmony => "<|message|>",
        }
    }

    /// Those tokens of its signs that are no text elsewhere.
    pub fn signs(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let all: &[&str] = match self {
            Self::Tagged => &["<tool_call>", "</tool_call>"],
            Self::Bare => &[],
            Self::Harmony => &HARMONY,
            Self::Listed => &["[TOOL_CALLS]"],
            Self::Named => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        };
        all.iter()
            .filter_map(|sign| special(sign, tokenizer))
            .collect()
    }
}

/// The token of this text, if it is a structural one.
pub fn special(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let token = tokenizer.token_to_id(text);
    token.filter(|&token| tokenizer.is_special(token))
}
