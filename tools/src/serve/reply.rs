//! Responses: whole, or as a stream of server-sent events.

use serde_json::{Value, json};

/// Which of the two kinds of response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// What all parts of a response have in common.
#[derive(Debug, Clone)]
pub struct Head {
    /// Its kind.
    pub kind: Kind,
    /// Its id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model.
    pub model: String,
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Of all prompts.
    pub prompt: usize,
    /// Of these, how many were known.
    pub cached: usize,
    /// Generated.
    pub completion: usize,
}

impl Usage {
    /// As a `usage` object.
    pub fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// Why a text ended, as a `finish_reason`.
pub fn reason(stopped: bool) -> &'static str {
    match stopped {
        true => "stop",
        false => "length",
    }
}

impl Head {
    fn object(&self, chunk: bool) -> &'static str {
        match (self.kind, chunk) {
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Text, _) => "text_completion",
        }
    }

    fn with(&self, chunk: bool, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": self.object(chunk),
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// The first chunk of choice `index`; completions have none.
    pub fn first(&self, index: usize) -> Option<Value> {
        let choice = json!({
            "index": index,
            "delta": {"role": "assistant", "content": null},
            "logprobs": null,
            "finish_reason": null,
        });
        (self.kind == Kind::Chat).then(|| self.with(true, vec![choice]))
    }

    /// A chunk of text.
    pub fn piece(&self, index: usize, text: &str) -> Value {
        let mut choice = json!({"index": index, "logprobs": null, "finish_reason": null});
        match self.kind {
            Kind::Chat => choice["delta"] = json!({"content": text}),
            Kind::Text => choice["text"] = json!(text),
        }
        self.with(true, vec![choice])
    }

    /// The last chunk of a choice.
    pub fn last(&self, index: usize, reason: &str) -> Value {
        let mut choice = json!({"index": index, "logprobs": null, "finish_reason": reason});
        match self.kind {
            Kind::Chat => choice["delta"] = json!({}),
            Kind::Text => choice["text"] = json!(""),
        }
        self.with(true, vec![choice])
    }

    /// The chunk after the last one, with the numbers of tokens.
    pub fn usage(&self, usage: Usage) -> Value {
        let mut chunk = self.with(true, Vec::new());
        chunk["usage"] = usage.json();
        chunk
    }

    /// A whole response of these texts and the reasons why they ended.
    pub fn whole(&self, texts: &[String], reasons: &[&str], usage: Usage) -> Value {
        let choice = |(index, (text, reason)): (usize, (&String, &&str))| {
            let mut choice = json!({"index": index, "logprobs": null, "finish_reason": reason});
            match self.kind {
                Kind::Chat => {
                    choice["message"] =
                        json!({"role": "assistant", "content": text, "refusal": null});
                }
                Kind::Text => choice["text"] = json!(text),
            }
            choice
        };
        let choices = texts.iter().zip(reasons).enumerate().map(choice).collect();
        let mut response = self.with(false, choices);
        response["usage"] = usage.json();
        response
    }
}
