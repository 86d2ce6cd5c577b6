//! A conversation with a model: messages, answers and commands.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use emberflow_engine::{Engine, Report, Sequence, Stop};

use super::commands::{ChatCommand, HELP, Setting};
use super::transcript::Transcript;
use crate::generation::{Context, Generated, Settings, generate, print_now, report, tell_end};
use crate::states::SessionFile;
use crate::tell::tell;
use crate::template::Renderer;
use crate::{Failure, print_json, size};

/// Time between two saves of a chat's session, at least. Each one writes the whole file.
const SAVED_EVERY: Duration = Duration::from_secs(30);
/// A save takes at most one part of so many of the time.
const SAVING_PART: u32 = 20;

/// Where a chat saves its conversation.
pub struct SavedChat {
    /// The file.
    pub file: SessionFile,
    /// When it is saved next, after an answer.
    pub next: Instant,
}

/// A chat with a model.
pub struct Session {
    /// The engine.
    pub engine: Engine,
    /// The conversation's keys and values.
    pub sequence: Sequence,
    /// The chat template.
    pub template: Renderer,
    /// The messages.
    pub said: Transcript,
    /// How answers are generated.
    pub settings: Settings,
    /// The settings of the command line.
    pub usual: Settings,
    /// The context.
    pub context: Context,
    /// Where it is saved, with `--session`.
    pub saved: Option<SavedChat>,
    /// The model's file, which is never written to; `None` for a bundled one.
    pub model: Option<PathBuf>,
    /// Set by Ctrl-C.
    pub stop: Arc<AtomicBool>,
    /// Answers since the seed was set; each one has its own seed.
    pub drawn: u64,
    /// Statistics of the last answer.
    pub statistics: Option<String>,
}

/// Next step after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next message.
    Message,
    /// The next message, after an answer that ended for this reason.
    Answered(Stop),
    /// The end of the chat.
    End,
}

impl Session {
    /// Saves the conversation and its state, with `--session`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&mut self) -> Result<(), Failure> {
        let Some(saved) = &mut self.saved else {
            return Ok(());
        };
        let start = Instant::now();
        let written = saved
            .file
            .save(&self.engine, &self.sequence, self.said.note()?);
        saved.next = Instant::now() + SAVED_EVERY.max(start.elapsed() * SAVING_PART);
        written
    }

    /// Saves the conversation if the last save is some time ago. The chat goes on if that fails.
    fn save_if_due(&mut self) {
        let due = |saved: &SavedChat| saved.next <= Instant::now();
        if self.saved.as_ref().is_some_and(due)
            && let Err(why) = self.save()
        {
            tell(format_args!("emberflow: the session is not saved: {why}"));
        }
    }

    /// Answers a message. Returns why the answer ended.
    ///
    /// # Errors
    /// Errors of the template and the engine, after which the message is removed.
    pub fn ask(&mut self, message: &str) -> Result<Stop, Failure> {
        self.said.ask(message);
        let answered = self.answer();
        if answered.is_err() {
            self.said.take_back_question();
        }
        answered
    }

    /// Answers the last message.
    fn answer(&mut self) -> Result<Stop, Failure> {
        let ids = self.prompt()?;
        // Reuse the KV cache for the longest common prefix.
        let both = self.sequence.tokens().iter().zip(&ids);
        let common = (both.take_while(|(a, b)| a == b).count()).min(ids.len() - 1);
        let common = self.sequence.truncate(common);
        let how = Settings {
            seed: self.settings.seed.wrapping_add(self.drawn),
            ..self.settings
        };
        let (engine, sequence) = (&mut self.engine, &mut self.sequence);
        let made = generate(engine, sequence, &ids[common..], &how, &self.stop)?;
        self.drawn += 1;
        self.said.answer(made.text.trim());
        self.finish(&made, &how)?;
        self.save_if_due();
        Ok(made.generation.stop)
    }

    /// Tokens of the conversation, without its oldest exchanges if they leave less than a quarter of the context for the
    /// answer. If the last message alone is longer than the context, nothing is dropped: it will be refused.
    fn prompt(&mut self) -> Result<Vec<u32>, Failure> {
        let context = self.context.length;
        let mut whole = None;
        loop {
            let rendered = self.template.render(self.said.conversation())?;
            // The template writes its special tokens itself.
            let ids = self.engine.text().tokens(&rendered)?;
            if ids.is_empty() {
                return Err(Failure::usage("the chat template renders an empty text"));
            }
            if ids.len() < context - context / 4 || self.said.turns() < 2 {
                match whole {
                    Some(whole) if ids.len() >= context => self.said = whole,
                    Some(_) => {
                        tell("(the context is nearly full: the oldest exchanges are dropped)")
                    }
                    None => {}
                }
                return Ok(ids);
            }
            whole.get_or_insert_with(|| self.said.clone());
            self.said.drop_oldest();
        }
    }

    /// Prints notes and statistics after an answer.
    fn finish(&mut self, made: &Generated, how: &Settings) -> Result<(), Failure> {
        let report = report(&mut self.engine, made, how)?;
        if how.json {
            return print_json(&report);
        }
        print_now("\n")?;
        tell_end(&report, made.generation.stop, how, self.context);
        if tracing::enabled!(tracing::Level::INFO) {
            tell(format_args!("\n{}", report.summary()));
        }
        self.statistics = Some(self.line(&report));
        Ok(())
    }

    /// An answer's statistics in one line.
    fn line(&self, report: &Report) -> String {
        let repeats = match report.repetition {
            Some(loops) => format!(", ends in a loop, {loops}"),
            None => String::new(),
        };
        format!(
            "{}{repeats}; prompt {} tokens in {:.2} s; context {} of {}; peak memory {} of {}",
            speed(report),
            report.prompt_tokens,
            report.ttft_ms / 1e3,
            self.sequence.len(),
            self.context.length,
            size::show(report.memory.peak_rss_bytes.unwrap_or(0)),
            size::show(report.memory.budget_bytes),
        )
    }

    /// Runs a command.
    ///
    /// # Errors
    /// Errors of answers and files, and invalid values.
    pub fn run(&mut self, command: ChatCommand<'_>) -> Result<Next, Failure> {
        match command {
            ChatCommand::Help => tell(HELP),
            ChatCommand::Exit => return Ok(Next::End),
            ChatCommand::Clear => {
                self.said.clear();
                self.sequence.clear();
                tell("(the conversation is forgotten)");
            }
            ChatCommand::Retry => {
                let before = self.said.take_back_answer()?;
                if self.settings.sampling(self.engine.text()).temperature == 0.0 {
                    tell("(greedy, so the answer is the same; /set temp 0.8 for others)");
                }
                let answered = self.answer();
                if answered.is_err() {
                    self.said.put_back_answer(before);
                }
                return Ok(Next::Answered(answered?));
            }
            ChatCommand::Stats => match &self.statistics {
                Some(line) => tell(format_args!("({line})")),
                None => tell("(nothing was answered yet)"),
            },
            ChatCommand::ShowSystem => match self.said.system() {
                Some(text) => tell(text),
                None => tell("(no system message; /system TEXT sets one)"),
            },
            ChatCommand::System(text) => {
                self.said.set_system(text);
                if let Some(text) = text
                    && ignores_system(&self.template, text)?
                {
                    tell("(this model's chat template ignores system messages: it has no effect)");
                }
            }
            ChatCommand::ShowSettings => self.tell_settings(),
            ChatCommand::Set(setting, value) => self.set(setting, value)?,
            ChatCommand::Save(path) => {
                self.said.save(&path, self.model.as_deref())?;
                let count = self.said.turns();
                tell(format_args!(
                    "({count} messages saved to {})",
                    path.display()
                ));
            }
            ChatCommand::Load(path) => {
                self.said.load(&path)?;
                self.sequence.clear();
                let count = self.said.turns();
                tell(format_args!(
                    "({count} messages loaded from {})",
                    path.display()
                ));
            }
        }
        Ok(Next::Message)
    }

    /// Sets or resets a setting; invalid values change nothing.
    fn set(&mut self, setting: Setting, value: Option<&str>) -> Result<(), Failure> {
        let mut changed = self.settings;
        setting.apply(value, &mut changed, &self.usual)?;
        changed.checked_sampling(self.engine.text())?;
        if setting == Setting::Seed {
            self.drawn = 0;
        }
        self.settings = changed;
        self.tell_settings();
        Ok(())
    }

    fn tell_settings(&self) {
        let sampling = self.settings.sampling_report(self.engine.text()).summary();
        let most = match self.settings.most {
            Some(most) => format!("at most {most} tokens"),
            None => "no limit but the context".to_owned(),
        };
        tell(format_args!("({sampling}; {most})"));
    }
}

/// Tokens and their speed.
fn speed(report: &Report) -> String {
    format!(
        "{} tokens, {:.1} tokens/s",
        report.generated_tokens, report.decode_tokens_per_s
    )
}

/// Whether the chat template does not show a system message to the model.
///
/// # Errors
/// Errors of the template.
pub fn ignores_system(template: &Renderer, system: &str) -> Result<bool, Failure> {
    let mut probe = Transcript::new(Some(system));
    probe.ask("u");
    Ok(!template
        .render(probe.conversation())?
        .contains(system.trim()))
}
