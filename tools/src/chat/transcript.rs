//! The messages of a chat, and their file: a JSON object with `messages` as in OpenAI's API.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use emberflow_models::chat::{Conversation, Message};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::tell::tell;
use crate::{Failure, atomic};

/// Maximum size of a saved conversation in bytes.
const LONGEST: u64 = 16 << 20;

/// A conversation. Its first message may be the system's.
#[derive(Debug, Clone, PartialEq)]
pub struct Transcript {
    said: Conversation,
    /// Exchanges that were dropped for room in the context, which a session still has.
    dropped: Vec<Message>,
}

/// A saved conversation.
#[derive(Serialize, Deserialize)]
struct Saved {
    messages: Vec<Message>,
}

fn has_role(message: &Message, role: &str) -> bool {
    message.get("role").and_then(Value::as_str) == Some(role)
}

impl Transcript {
    /// An empty conversation with an optional system message.
    pub fn new(system: Option<&str>) -> Self {
        let mut transcript = Self {
            said: Conversation {
                add_generation_prompt: true,
                ..Conversation::default()
            },
            dropped: Vec::new(),
        };
        transcript.set_system(system);
        transcript
    }

    /// The conversation that [`note`](Self::note) has saved, if there is one; a system message replaces its own.
    ///
    /// # Errors
    /// A usage error for another text.
    pub fn of_note(note: &str, system: Option<&str>) -> Result<Self, Failure> {
        let mut transcript = Self::new(system);
        if !note.is_empty() {
            let wrong =
                |why: &str| Failure::usage(format!("the session has no conversation: {why}"));
            transcript.said.messages = messages(note.as_bytes(), wrong)?;
            if system.is_some() {
                transcript.set_system(system);
            }
            let count = transcript.turns();
            tell(format_args!(
                "(a conversation of {count} messages continues)"
            ));
        }
        Ok(transcript)
    }

    /// The conversation as text, with what was dropped.
    ///
    /// # Errors
    /// None that messages can have.
    pub fn note(&self) -> Result<String, Failure> {
        let mut messages = self.said.messages.clone();
        let first = self.first_turn();
        messages.splice(first..first, self.dropped.iter().cloned());
        let json = serde_json::to_string(&Saved { messages });
        Ok(json.map_err(std::io::Error::from)?)
    }

    /// The messages for the chat template.
    pub fn conversation(&self) -> &Conversation {
        &self.said
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        let first = self.said.messages.first();
        first
            .filter(|message| has_role(message, "system"))?
            .get("content")?
            .as_str()
    }

    /// Replaces or removes the system message.
    pub fn set_system(&mut self, system: Option<&str>) {
        let old = 0..self.first_turn();
        let new = system.map(|text| Message::new("system", text));
        self.said.messages.splice(old, new);
    }

    /// Number of system messages, which are never dropped.
    fn first_turn(&self) -> usize {
        usize::from(self.system().is_some())
    }

    /// Messages without the system's.
    pub fn turns(&self) -> usize {
        self.said.messages.len() - self.first_turn()
    }

    /// Adds a message of the user, in place of one without an answer.
    pub fn ask(&mut self, text: &str) {
        self.take_back_question();
        self.said.messages.push(Message::new("user", text));
    }

    /// Adds an answer.
    pub fn answer(&mut self, text: &str) {
        self.said.messages.push(Message::new("assistant", text));
    }

    /// Removes the last message if it is the user's.
    pub fn take_back_question(&mut self) {
        self.said.messages.pop_if(|last| has_role(last, "user"));
    }

    /// Removes the last answer, so that the message before it can be answered again. Returns what was removed.
    ///
    /// # Errors
    /// A usage error if nothing was asked.
    pub fn take_back_answer(&mut self) -> Result<Vec<Message>, Failure> {
        let messages = &mut self.said.messages;
        let answered = messages
            .iter()
            .rposition(|message| has_role(message, "user"));
        match answered {
            Some(at) => Ok(messages.split_off(at + 1)),
            None => Err(Failure::usage(
                "there is nothing to answer again: write a message first",
            )),
        }
    }

    /// Puts back what [`take_back_answer`](Self::take_back_answer) removed, if there is no other answer.
    pub fn put_back_answer(&mut self, answer: Vec<Message>) {
        let messages = &mut self.said.messages;
        if messages.last().is_some_and(|last| has_role(last, "user")) {
            messages.extend(answer);
        }
    }

    /// Drops the oldest exchange, a question with what follows it up to the next question, but never the last message.
    /// Returns whether there was one.
    pub fn drop_oldest(&mut self) -> bool {
        let (first, messages) = (self.first_turn(), &mut self.said.messages);
        if messages.len() <= first + 1 {
            return false;
        }
        let mut later = messages.iter().skip(first + 1);
        let length = later.position(|message| has_role(message, "user"));
        let end = length.map_or(messages.len() - 1, |length| first + 1 + length);
        self.dropped.extend(messages.drain(first..end));
        true
    }

    /// Forgets everything but the system message.
    pub fn clear(&mut self) {
        let first = self.first_turn();
        self.said.messages.truncate(first);
        self.dropped.clear();
    }

    /// Writes the conversation to `path`, where it may replace a saved conversation but no other file. `reads` are the files
    /// that the program reads.
    ///
    /// # Errors
    /// A usage error for another existing file; I/O errors.
    pub fn save(&self, path: &Path, reads: Option<&Path>) -> Result<(), Failure> {
        if path.is_file() && read(path).is_err() {
            return Err(Failure::usage(format!(
                "{} exists and is no saved conversation; name another file",
                path.display()
            )));
        }
        atomic::may_create(path, true, &[reads])?;
        let saved = Saved {
            messages: self.said.messages.clone(),
        };
        let mut bytes = serde_json::to_vec_pretty(&saved).map_err(std::io::Error::from)?;
        bytes.push(b'\n');
        atomic::write(path, &bytes)
    }

    /// Replaces the conversation by a saved one.
    ///
    /// # Errors
    /// I/O errors, and a usage error for another kind of file; the conversation is then unchanged.
    pub fn load(&mut self, path: &Path) -> Result<(), Failure> {
        self.said.messages = read(path)?;
        self.dropped.clear();
        Ok(())
    }
}

/// Reads a saved conversation.
fn read(path: &Path) -> Result<Vec<Message>, Failure> {
    let wrong = |why: &str| {
        Failure::usage(format!(
            "{} is no saved conversation ({why}); /save writes one",
            path.display()
        ))
    };
    let mut bytes = Vec::new();
    // Opening a pipe would block until something writes to it.
    if path.exists() && !path.is_file() {
        return Err(wrong("it is no file"));
    }
    let file = File::open(path).map_err(Failure::file(path))?;
    let read = file.take(LONGEST + 1).read_to_end(&mut bytes);
    if read.map_err(Failure::file(path))? as u64 > LONGEST {
        return Err(wrong("it is larger than 16 MiB"));
    }
    messages(&bytes, wrong)
}

/// The messages in JSON.
fn messages(json: &[u8], wrong: impl Fn(&str) -> Failure) -> Result<Vec<Message>, Failure> {
    let saved: Saved = serde_json::from_slice(json).map_err(|e| wrong(&e.to_string()))?;
    for (at, message) in saved.messages.iter().enumerate() {
        let role = ["user", "assistant"]
            .iter()
            .any(|role| has_role(message, role))
            || at == 0 && has_role(message, "system");
        let text = message.get("content").is_some_and(Value::is_string);
        if !role || !text {
            let number = at + 1;
            return Err(wrong(&format!(
                "message {number} is not the user's, the assistant's or a first one of the system, with text"
            )));
        }
    }
    Ok(saved.messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(transcript: &Transcript) -> Vec<String> {
        let messages = transcript.said.messages.iter();
        let of = |message: &Message| {
            let member = |name| message.get(name).unwrap().as_str().unwrap().to_owned();
            member("role")[..1].to_owned() + ":" + &member("content")
        };
        messages.map(of).collect()
    }

    #[test]
    fn a_note_has_what_was_dropped() {
        let mut chat = Transcript::new(Some("Be short."));
        for turn in 1..4 {
            chat.ask(&format!("q{turn}"));
            chat.answer(&format!("a{turn}"));
        }
        let all = said(&chat);
        assert!(chat.drop_oldest() && chat.drop_oldest());
        assert_eq!(chat.turns(), 2);
        let again = Transcript::of_note(&chat.note().unwrap(), None).unwrap();
        assert_eq!(said(&again), all);
        let other = Transcript::of_note(&chat.note().unwrap(), Some("Be long.")).unwrap();
        assert_eq!((said(&other)[0].as_str(), other.turns()), ("s:Be long.", 6));
        chat.clear();
        assert_eq!(
            said(&Transcript::of_note(&chat.note().unwrap(), None).unwrap()),
            ["s:Be short."]
        );
    }

    #[test]
    fn answers_are_taken_back_and_old_exchanges_dropped() {
        let mut chat = Transcript::new(Some("Be short."));
        assert!(chat.take_back_answer().is_err());
        for turn in 1..4 {
            chat.ask(&format!("q{turn}"));
            chat.answer(&format!("a{turn}"));
        }
        assert_eq!(chat.turns(), 6);
        chat.take_back_answer().unwrap();
        assert_eq!(
            said(&chat),
            ["s:Be short.", "u:q1", "a:a1", "u:q2", "a:a2", "u:q3"]
        );
        // A question without an answer can be answered.
        chat.take_back_answer().unwrap();
        assert!(chat.drop_oldest());
        assert_eq!(said(&chat), ["s:Be short.", "u:q2", "a:a2", "u:q3"]);
        assert!(chat.drop_oldest() && !chat.drop_oldest());
        assert_eq!(said(&chat), ["s:Be short.", "u:q3"]);
        chat.take_back_question();
        chat.take_back_question();
        assert_eq!(said(&chat), ["s:Be short."]);
    }

    #[test]
    fn a_question_without_answer_is_replaced_and_a_removed_answer_put_back() {
        let mut chat = Transcript::new(None);
        chat.ask("q1");
        chat.ask("q2");
        assert_eq!(said(&chat), ["u:q2"]);
        chat.answer("a2");
        let answer = chat.take_back_answer().unwrap();
        assert_eq!(said(&chat), ["u:q2"]);
        chat.put_back_answer(answer.clone());
        chat.put_back_answer(answer);
        assert_eq!(said(&chat), ["u:q2", "a:a2"]);
    }

    #[test]
    fn exchanges_of_any_length_are_dropped_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.json");
        let roles = ["user", "user", "assistant", "assistant", "user"];
        let messages = roles.map(|role| serde_json::json!({"role": role, "content": &role[..1]}));
        let saved = serde_json::json!({"messages": messages});
        std::fs::write(&path, saved.to_string()).unwrap();
        let mut chat = Transcript::new(Some("s"));
        chat.load(&path).unwrap();
        assert!(chat.drop_oldest());
        assert_eq!(said(&chat), ["u:u", "a:a", "a:a", "u:u"]);
        assert!(chat.drop_oldest() && !chat.drop_oldest());
        assert_eq!(said(&chat), ["u:u"]);
    }

    #[test]
    fn the_system_message_is_replaced_removed_and_kept() {
        let mut chat = Transcript::new(None);
        chat.ask("q");
        chat.set_system(Some("one"));
        chat.set_system(Some("two"));
        assert_eq!(said(&chat), ["s:two", "u:q"]);
        assert_eq!((chat.system(), chat.turns()), (Some("two"), 1));
        chat.clear();
        assert_eq!(said(&chat), ["s:two"]);
        chat.set_system(None);
        assert_eq!((chat.system(), chat.turns()), (None, 0));
    }

    #[test]
    fn a_saved_conversation_is_the_same_and_no_other_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut chat = Transcript::new(Some("Be \"short\"."));
        chat.ask("two\nlines, é");
        chat.answer("yes");
        chat.save(&at("chat.json"), None).unwrap();
        // The form that clients of OpenAI's API know.
        let text = std::fs::read_to_string(at("chat.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["messages"][1]["content"], "two\nlines, é");
        let mut loaded = Transcript::new(Some("other"));
        loaded.load(&at("chat.json")).unwrap();
        assert_eq!(loaded, chat);
        // It can be saved again.
        chat.ask("more");
        chat.save(&at("chat.json"), None).unwrap();
        loaded.load(&at("chat.json")).unwrap();
        assert_eq!(loaded.turns(), 3);

        for (name, content) in [
            ("notes.txt", "precious"),
            ("other.json", "{\"messages\": 3}"),
            ("empty", ""),
        ] {
            std::fs::write(at(name), content).unwrap();
            let refused = chat.save(&at(name), None).unwrap_err().to_string();
            assert!(refused.contains("name another file"), "{refused}");
            assert_eq!(std::fs::read_to_string(at(name)).unwrap(), content);
            let refused = loaded.load(&at(name)).unwrap_err().to_string();
            assert!(refused.contains("/save writes one"), "{refused}");
        }
        let refused = chat.save(dir.path(), None).unwrap_err().to_string();
        assert!(refused.contains("folder"), "{refused}");
        let missing = loaded.load(&at("missing")).unwrap_err().to_string();
        assert!(missing.contains("missing"), "{missing}");
        let model = at("model.ember");
        std::fs::write(&model, text).unwrap();
        let refused = chat.save(&model, Some(&model)).unwrap_err().to_string();
        assert!(refused.contains("reads"), "{refused}");
        assert_eq!(loaded.turns(), 3, "a failed load changes nothing");
    }

    #[test]
    fn only_conversations_are_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.json");
        let mut chat = Transcript::new(None);
        for (messages, fits) in [
            (r#"[]"#, true),
            (r#"[{"role":"user","content":"a"}]"#, true),
            (r#"[{"role":"tool","content":"a"}]"#, false),
            (r#"[{"role":"user","content":[]}]"#, false),
            (r#"[{"role":"user"}]"#, false),
            (
                r#"[{"role":"user","content":"a"},{"role":"system","content":"b"}]"#,
                false,
            ),
            (r#"["text"]"#, false),
        ] {
            let text = format!("{{\"model\":\"x\",\"messages\":{messages}}}");
            std::fs::write(&path, text).unwrap();
            assert_eq!(chat.load(&path).is_ok(), fits, "{messages}");
        }
    }
}
