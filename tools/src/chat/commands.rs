//! Commands of a chat on a terminal, such as `/help`.

use std::path::PathBuf;

use crate::Failure;
use crate::generation::Settings;
use crate::suggest::nearest;

/// Text of `/help`.
pub const HELP: &str = "\
/system TEXT      set the system message; without TEXT, show it; `/system -` removes it
/set NAME VALUE   set temp, top-k, top-p, min-p, repeat-penalty, seed or n (most tokens of an answer; -1: no limit);
                  `/set NAME -` goes back to the default; without NAME, show the settings
/retry            answer the last message again, with another seed
/clear            forget the conversation
/save FILE        save the conversation as JSON
/load FILE        go on with a saved conversation
/stats            statistics of the last answer
/exit             end the chat (also /quit, /bye)
Enter sends, Alt-Enter begins a new line; \"\"\" encloses several lines; pasted text is one message.
Up and down: former messages; Ctrl-R searches them. Ctrl-C stops an answer; Ctrl-D ends the chat.
A message that begins with / needs a space before it.";

/// The commands, for completion.
pub const COMMANDS: [&str; 11] = [
    "/bye", "/clear", "/exit", "/help", "/load ", "/quit", "/retry", "/save ", "/set ", "/stats",
    "/system ",
];

/// A line of a chat.
#[derive(Debug, PartialEq)]
pub enum ChatLine<'a> {
    /// No text.
    Nothing,
    /// A message to the model.
    Message(&'a str),
    /// A command.
    Command(ChatCommand<'a>),
}

/// A command.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatCommand<'a> {
    /// `/help`
    Help,
    /// `/clear`
    Clear,
    /// `/retry`
    Retry,
    /// `/stats`
    Stats,
    /// `/exit`
    Exit,
    /// `/system`, to show the message.
    ShowSystem,
    /// `/system TEXT`; `None` removes the message.
    System(Option<&'a str>),
    /// `/set`, to show the settings.
    ShowSettings,
    /// `/set NAME VALUE`; `None` is the default.
    Set(Setting, Option<&'a str>),
    /// `/save FILE`
    Save(PathBuf),
    /// `/load FILE`
    Load(PathBuf),
}

/// A setting that `/set` changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Temperature.
    Temperature,
    /// Top-k.
    TopK,
    /// Top-p.
    TopP,
    /// Min-p.
    MinP,
    /// Repetition penalty.
    RepeatPenalty,
    /// Seed.
    Seed,
    /// Maximum tokens.
    Tokens,
}

/// The settings with the names of their options, and of llama.cpp's and Ollama's.
const SETTINGS: [(Setting, &[&str]); 7] = [
    (Setting::Temperature, &["temp", "temperature"]),
    (Setting::TopK, &["top-k", "top_k"]),
    (Setting::TopP, &["top-p", "top_p"]),
    (Setting::MinP, &["min-p", "min_p"]),
    (
        Setting::RepeatPenalty,
        &["repeat-penalty", "repeat_penalty"],
    ),
    (Setting::Seed, &["seed"]),
    (Setting::Tokens, &["n", "tokens", "num_predict"]),
];

/// Whether a line of any chat, also of one in a pipe, ends it.
pub fn ends_chat(line: &str) -> bool {
    matches!(line.trim(), "/exit" | "/quit" | "/bye")
}

impl<'a> ChatLine<'a> {
    /// Reads a line.
    ///
    /// # Errors
    /// A usage error for a command that does not exist, or whose text is missing.
    pub fn of(line: &'a str) -> Result<Self, Failure> {
        if line.trim().is_empty() {
            return Ok(Self::Nothing);
        }
        let (word, rest) = match line.split_once(char::is_whitespace) {
            Some((word, rest)) => (word, rest.trim()),
            None => (line, ""),
        };
        // Paths are messages, and so is all that begins with a space.
        let name = word.strip_prefix('/').filter(|name| !name.contains('/'));
        match name {
            Some(name) => Ok(Self::Command(ChatCommand::of(name, rest)?)),
            None => Ok(Self::Message(line)),
        }
    }
}

impl<'a> ChatCommand<'a> {
    fn of(name: &str, rest: &'a str) -> Result<Self, Failure> {
        let file = |usage: &str| match rest {
            "" => Err(Failure::usage(format!("name a file: {usage}"))),
            rest => Ok(of_home(rest)),
        };
        Ok(match name {
            "help" | "?" => Self::Help,
            "clear" => Self::Clear,
            "retry" => Self::Retry,
            "stats" => Self::Stats,
            "exit" | "quit" | "bye" => Self::Exit,
            "system" => match rest {
                "" => Self::ShowSystem,
                "-" => Self::System(None),
                text => Self::System(Some(text)),
            },
            "set" if rest.is_empty() => Self::ShowSettings,
            "set" => Self::set(rest)?,
            "save" => Self::Save(file("/save chat.json")?),
            "load" => Self::Load(file("/load chat.json")?),
            unknown => return Err(unknown_command(unknown)),
        })
    }

    /// `NAME VALUE` of `/set`.
    fn set(words: &'a str) -> Result<Self, Failure> {
        let (name, value) = match words.split_once([' ', '=', '\t']) {
            Some((name, value)) => (name, value.trim()),
            None => (words, ""),
        };
        let plain = name.trim_start_matches('-');
        let named = SETTINGS.iter().find(|(_, names)| names.contains(&plain));
        let Some(&(setting, names)) = named else {
            let all: Vec<&str> = SETTINGS.iter().map(|(_, names)| names[0]).collect();
            let all = all.join(", ");
            return Err(Failure::usage(format!(
                "there is no setting {name}; the settings are {all}"
            )));
        };
        match value {
            "" => Err(Failure::usage(format!(
                "a value is missing: /set {} VALUE",
                names[0]
            ))),
            "-" => Ok(Self::Set(setting, None)),
            value => Ok(Self::Set(setting, Some(value))),
        }
    }
}

/// A path as a shell takes it: `~/` is the home folder.
fn of_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(path),
    }
}

fn unknown_command(name: &str) -> Failure {
    let names = COMMANDS.map(|command| command.trim_start_matches('/').trim_end());
    let similar = match nearest(name, names) {
        Some(similar) => format!("did you mean /{similar}? "),
        None => String::new(),
    };
    Failure::usage(format!(
        "there is no command /{name}; {similar}/help lists them; with a space before it, it is a message"
    ))
}

impl Setting {
    /// Sets it to `value`, or to its default in `usual`.
    ///
    /// # Errors
    /// A value of another type, or out of range.
    pub fn apply(
        self,
        value: Option<&str>,
        settings: &mut Settings,
        usual: &Settings,
    ) -> Result<(), Failure> {
        let chosen = &mut settings.chosen;
        match self {
            Self::Temperature => chosen.temperature = parsed(value, "a number, 0 for greedy")?,
            Self::TopK => chosen.top_k = parsed(value, "a whole number, 0 for off")?,
            Self::TopP => chosen.top_p = parsed(value, "a number above 0 and at most 1")?,
            Self::MinP => chosen.min_p = parsed(value, "a number from 0 to 1")?,
            Self::RepeatPenalty => {
                chosen.repetition_penalty = parsed(value, "a number above 0, 1 for off")?;
            }
            Self::Seed => {
                settings.seed = parsed(value, "a whole number of 0 or more")?.unwrap_or(usual.seed)
            }
            Self::Tokens => {
                let most: Option<i64> = parsed(value, "a number of tokens, -1 for no limit")?;
                if let Some(wrong) = most.filter(|&most| most < -1 || most == 0) {
                    return Err(Failure::usage(format!(
                        "n is {wrong}; expected at least 1, or -1 for no limit"
                    )));
                }
                settings.most = match most {
                    None => usual.most,
                    Some(most) => usize::try_from(most).ok(),
                };
                settings.ends_loops = most.is_none() && usual.ends_loops;
            }
        }
        Ok(())
    }
}

/// A value; `None` for the default.
fn parsed<T: std::str::FromStr>(value: Option<&str>, expected: &str) -> Result<Option<T>, Failure> {
    let read = |value: &str| {
        let wrong = || Failure::usage(format!("{value} is not a value; expected {expected}"));
        value.parse().map_err(|_| wrong())
    };
    value.map(read).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &str) -> ChatCommand<'_> {
        match ChatLine::of(line) {
            Ok(ChatLine::Command(command)) => command,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn refusal(line: &str) -> String {
        ChatLine::of(line).unwrap_err().to_string()
    }

    #[test]
    fn lines_are_messages_unless_they_begin_with_a_command() {
        for message in [
            "Hello",
            "a /help b",
            " /help",
            "/etc/passwd is a file",
            "//",
            "\n/help",
        ] {
            assert_eq!(ChatLine::of(message).unwrap(), ChatLine::Message(message));
        }
        for nothing in ["", "  ", "\n\t"] {
            assert_eq!(ChatLine::of(nothing).unwrap(), ChatLine::Nothing);
        }
        for (line, meant) in [
            ("/help", ChatCommand::Help),
            ("/?", ChatCommand::Help),
            ("/clear ", ChatCommand::Clear),
            ("/retry", ChatCommand::Retry),
            ("/stats", ChatCommand::Stats),
            ("/bye", ChatCommand::Exit),
            ("/system", ChatCommand::ShowSystem),
            ("/system -", ChatCommand::System(None)),
            (
                "/system Be  short.\nAlways.",
                ChatCommand::System(Some("Be  short.\nAlways.")),
            ),
            ("/save a b.json", ChatCommand::Save("a b.json".into())),
            ("/load x", ChatCommand::Load("x".into())),
        ] {
            assert_eq!(command(line), meant, "{line}");
        }
        assert!(ends_chat(" /exit ") && !ends_chat("/exit now"));
    }

    #[test]
    fn every_command_is_in_the_help_and_every_refusal_says_what_to_do() {
        for name in COMMANDS.iter().filter(|name| **name != "/help") {
            assert!(HELP.contains(name.trim_end()), "{name}");
        }
        assert!(refusal("/hepl").contains("did you mean /help?"));
        assert!(refusal("/xyzzy").contains("/help lists them"));
        assert!(refusal("/save").contains("/save chat.json"));
        assert!(refusal("/load ").contains("/load chat.json"));
        assert!(refusal("/set speed 3").contains("temp, top-k"));
        assert!(refusal("/set temp").contains("/set temp VALUE"));
    }

    #[test]
    fn settings_are_set_and_go_back() {
        let usual = Settings::chat();
        let mut settings = usual;
        let mut set = |line: &str| {
            let ChatCommand::Set(setting, value) = command(line) else {
                panic!("{line}");
            };
            let applied = setting.apply(value, &mut settings, &usual);
            applied.map(|()| settings).map_err(|why| why.to_string())
        };
        assert_eq!(set("/set temp 0.5").unwrap().chosen.temperature, Some(0.5));
        assert_eq!(set("/set --top-k 7").unwrap().chosen.top_k, Some(7));
        assert_eq!(set("/set top_p=0.5").unwrap().chosen.top_p, Some(0.5));
        assert_eq!(set("/set min-p 0.1").unwrap().chosen.min_p, Some(0.1));
        let all = set("/set repeat-penalty 1.1").unwrap();
        assert_eq!(all.chosen.repetition_penalty, Some(1.1));
        assert_eq!(set("/set seed 9").unwrap().seed, 9);
        let limited = set("/set n 20").unwrap();
        assert_eq!((limited.most, limited.ends_loops), (Some(20), false));
        let unlimited = set("/set n -1").unwrap();
        assert_eq!((unlimited.most, unlimited.ends_loops), (None, false));
        for name in [
            "temp",
            "top-k",
            "top-p",
            "min-p",
            "repeat-penalty",
            "seed",
            "n",
        ] {
            set(&format!("/set {name} -")).unwrap();
        }
        assert_eq!(set("/set seed -").unwrap(), usual);
        assert!(set("/set temp warm").unwrap_err().contains("0 for greedy"));
        assert!(set("/set n 0").unwrap_err().contains("-1 for no limit"));
        assert!(set("/set top-k -3").unwrap_err().contains("0 for off"));
    }
}
