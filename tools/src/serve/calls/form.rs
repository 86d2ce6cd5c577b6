//! How a model writes a call.

/// The form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere in a text: Hermes, Qwen.
    Tagged,
    /// `{"name": …, "parameters": …}` instead of a text: Llama 3.
    Bare,
}

impl Form {
    /// That of a chat template.
    pub fn of_template(template: &str) -> Self {
        let llama = template.contains("<|python_tag|>") || template.contains("\"parameters\":");
        match llama && !template.contains("<tool_call>") {
            true => Self::Bare,
            false => Self::Tagged,
        }
    }

    /// What stands before a call.
    pub fn open(self) -> &'static str {
        match self {
            Self::Tagged => "<tool_call>",
            Self::Bare => "",
        }
    }

    /// What stands behind it.
    pub fn close(self) -> &'static str {
        match self {
            Self::Tagged => "</tool_call>",
            Self::Bare => "",
        }
    }

    /// The member with the arguments.
    pub fn arguments(self) -> &'static str {
        match self {
            Self::Tagged => "arguments",
            Self::Bare => "parameters",
        }
    }
}
