//! Formats of tool calls.

use emberflow_models::tokenizer::Tokenizer;

/// How a model writes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere in a text: Hermes, Qwen.
    Tagged,
    /// `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`: Qwen3-Coder,
    /// Qwen3.5.
    Elements,
    /// `{"name": …, "parameters": …}` instead of a text: Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}, …]` after a text: Mistral.
    Listed,
    /// A channel of gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}`.
    Harmony,
    /// `[TOOL_CALLS]NAME[ARGS]{…}` after a text, once per call: newer Mistral models.
    Named,
}

/// Marker tokens of gpt-oss.
pub const HARMONY: [&str; 5] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
];

impl CallFormat {
    /// The format used by a chat template.
    pub fn of_template(template: &str) -> Self {
        let has = |text: &str| template.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            return Self::Harmony;
        }
        match (has("<tool_call>"), has("[TOOL_CALLS]")) {
            (true, _) if has("<function=") => Self::Elements,
            (true, _) => Self::Tagged,
            (false, true) if has("[ARGS]") => Self::Named,
            (false, true) => Self::Listed,
            _ if has("<|python_tag|>") || has("\"parameters\":") => Self::Bare,
            _ => Self::Tagged,
        }
    }

    /// Text before a call, or before a list of calls.
    pub fn open(self) -> &'static str {
        match self {
            Self::Tagged | Self::Elements => "<tool_call>",
            Self::Bare => "",
            Self::Harmony => "<|channel|>",
            Self::Listed | Self::Named => "[TOOL_CALLS]",
        }
    }

    /// Text after a call.
    pub fn close(self) -> &'static str {
        match self {
            Self::Tagged | Self::Elements => "</tool_call>",
            Self::Bare | Self::Named | Self::Harmony => "",
            Self::Listed => "]",
        }
    }

    /// The member with the arguments, or the text before them.
    pub fn arguments(self) -> &'static str {
        match self {
            Self::Tagged | Self::Listed => "arguments",
            Self::Elements => "",
            Self::Bare => "parameters",
            Self::Named => "[ARGS]",
            Self::Harmony => "<|message|>",
        }
    }

    /// Markers that are special tokens.
    pub fn signs(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let all: &[&str] = match self {
            Self::Tagged | Self::Elements => &["<tool_call>", "</tool_call>"],
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

/// The special token with this text, if there is one.
pub fn special(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let token = tokenizer.token_to_id(text);
    token.filter(|&token| tokenizer.is_special(token))
}
