//! Where the prompt of a chat ends: at the start of an assistant message, or inside the last message, which the
//! generated text then continues.

use emberflow_models::chat::Message;
use serde_json::Value;

use super::error::ApiError;

/// How the prompt of a chat ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// With the start of an assistant message.
    Opened,
    /// After the last message.
    Closed,
    /// Inside the last message: on request, or because it is the assistant's.
    Continued {
        /// Whether it was requested explicitly.
        asked: bool,
    },
}

/// Marker appended to the last message, to find its end in the rendered text. Name and method are those of
/// transformers.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl Turn {
    /// From the request fields and the last message.
    ///
    /// # Errors
    /// A field of another type, or no message to continue.
    pub fn of(
        continued: Option<&Value>,
        opened: Option<bool>,
        last: Option<&Message>,
    ) -> Result<Self, ApiError> {
        let wrong = |why| Err(ApiError::param("continue_final_message", why));
        let answers = |last: &&Message| {
            let role = last.get("role").and_then(Value::as_str);
            role == Some("assistant") && last.get("tool_calls").is_none()
        };
        match continued {
            Some(Value::Bool(true)) if last.is_none_or(|last| content(last).is_empty()) => {
                wrong("the last message has no content to continue")
            }
            Some(Value::Bool(true)) => Ok(Self::Continued { asked: true }),
            Some(Value::String(part)) if part == "content" => Ok(Self::Continued { asked: true }),
            None if last
                .filter(answers)
                .is_some_and(|last| !content(last).is_empty()) =>
            {
                Ok(Self::Continued { asked: false })
            }
            None | Some(Value::Bool(false)) if opened == Some(false) => Ok(Self::Closed),
            None | Some(Value::Bool(false)) => Ok(Self::Opened),
            Some(_) => wrong("`continue_final_message` must be true, false or \"content\""),
        }
    }

    /// Renders the prompt. `render` renders messages, with or without the start of an assistant message.
    ///
    /// # Errors
    /// Errors of `render`; a template that changes the message to be continued.
    pub fn prompt(
        self,
        messages: &[Message],
        render: impl Fn(&[Message], bool) -> Result<String, ApiError>,
    ) -> Result<String, ApiError> {
        let (asked, Some((last, before))) = (self.asked(), messages.split_last()) else {
            return render(messages, self == Self::Opened);
        };
        let Some(asked) = asked else {
            return render(messages, self == Self::Opened);
        };
        let mut marked = messages.to_vec();
        if let Some(last) = marked.last_mut() {
            last.set("content", (content(last).to_owned() + MARK).into());
        }
        let rendered = render(&marked, false)?;
        let end = rendered.rfind(MARK.trim_end());
        match end.filter(|_| rendered.contains(content(last).trim())) {
            Some(end) if rendered[end..].starts_with(MARK) => Ok(rendered[..end].to_owned()),
            Some(end) => Ok(rendered[..end].trim_end().to_owned()),
            None if asked => Err(ApiError::param(
                "continue_final_message",
                "the chat template changes the last message, so that it cannot be continued",
            )),
            None => Ok(render(before, true)? + content(last)),
        }
    }

    fn asked(self) -> Option<bool> {
        match self {
            Self::Continued { asked } => Some(asked),
            Self::Opened | Self::Closed => None,
        }
    }
}

/// Text of a message.
fn content(message: &Message) -> &str {
    let content = message.get("content").and_then(Value::as_str);
    content.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use emberflow_models::chat::{ChatTemplate, Conversation};

    use super::*;

    const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    const TRIMMED: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    const THOUGHTLESS: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    fn prompt(template: &str, last: &str, turn: Turn) -> Result<String, ApiError> {
        let template = ChatTemplate::new(template, &[]).unwrap();
        let messages = [Message::new("user", "Hi"), Message::new("assistant", last)];
        turn.prompt(&messages, |messages, open| {
            let conversation = Conversation {
                messages: messages.to_vec(),
                add_generation_prompt: open,
                ..Conversation::default()
            };
            template.render(&conversation).map_err(ApiError::invalid)
        })
    }

    /// Expected values from transformers 5.23's `apply_chat_template(…, continue_final_message=True)`, or from
    /// llama.cpp's server if that fails.
    #[test]
    fn the_last_message_is_continued() {
        let asked = Turn::Continued { asked: true };
        let continued = |template, last| prompt(template, last, asked).unwrap();
        assert_eq!(
            continued(CHATML, "A vector is "),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nA vector is "
        );
        assert_eq!(
            continued(TRIMMED, "A vector is "),
            "[user] Hi</s>[assistant] A vector is"
        );
        assert_eq!(continued(TRIMMED, "A"), "[user] Hi</s>[assistant] A");
        let changed = "a</think>b";
        assert!(prompt(THOUGHTLESS, changed, asked).is_err());
        let own = Turn::Continued { asked: false };
        assert_eq!(
            prompt(THOUGHTLESS, changed, own).unwrap(),
            "<user>Hi</s><assistant>a</think>b"
        );
        let closed = prompt(CHATML, "A", Turn::Closed).unwrap();
        assert!(closed.ends_with("assistant\nA<|im_end|>\n"), "{closed}");
        let opened = prompt(CHATML, "A", Turn::Opened).unwrap();
        assert!(
            opened.ends_with("A<|im_end|>\n<|im_start|>assistant\n"),
            "{opened}"
        );
    }

    #[test]
    fn what_is_continued_follows_from_the_request() {
        let turn = |continued: Value, opened, last: &Message| {
            let continued = Some(&continued).filter(|value| !value.is_null());
            Turn::of(continued, opened, Some(last))
        };
        let (answer, question) = (Message::new("assistant", "A"), Message::new("user", "Hi"));
        let own = Turn::Continued { asked: false };
        assert_eq!(turn(Value::Null, None, &answer).unwrap(), own);
        assert_eq!(
            turn(Value::Null, None, &Message::new("assistant", "")).unwrap(),
            Turn::Opened
        );
        assert_eq!(turn(Value::Null, None, &question).unwrap(), Turn::Opened);
        assert_eq!(
            turn(Value::Null, Some(false), &question).unwrap(),
            Turn::Closed
        );
        assert_eq!(turn(false.into(), None, &answer).unwrap(), Turn::Opened);
        assert_eq!(
            turn(false.into(), Some(false), &answer).unwrap(),
            Turn::Closed
        );
        assert_eq!(
            turn(true.into(), None, &question).unwrap(),
            Turn::Continued { asked: true }
        );
        assert!(turn(true.into(), None, &Message::new("user", "")).is_err());
        assert!(turn("reasoning".into(), None, &answer).is_err());
    }
}
