//! `run --chat`: a conversation, on terminals with a line editor and commands, otherwise line by line.

mod commands;
mod session;
mod transcript;

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use emberflow_engine::{Error, Model, Stop, Text};

use self::commands::{COMMANDS, ChatLine, ends_chat};
use self::session::{Next, SavedChat, Session, ignores_system};
use self::transcript::Transcript;
use crate::cli::RunArgs;
use crate::editor::{Editor, TerminalInput};
use crate::generation::{Context, ROOM, Settings};
use crate::model::{Use, open_for};
use crate::prompt::PromptReader;
use crate::states::SessionFile;
use crate::tell::{tell, tell_part};
use crate::template::Renderer;
use crate::terminal::{self, Quiet};
use crate::{Failure, interrupt};

/// Runs the command.
///
/// # Errors
/// A model without a chat template, invalid options, and errors of the engine.
pub fn chat(args: &RunArgs, model: Model) -> Result<(), Failure> {
    let max = model.text().config().max_context as usize;
    let file = (args.session.as_ref())
        .map(|path| SessionFile::new(path, args.model.file()))
        .transpose()?;
    let reader = PromptReader {
        text: model.text(),
        context: args.context.map_or(max, |c| c as usize),
    };
    let once = args.prompt.is_some() || args.file.is_some();
    let message = once.then(|| reader.prompt(args)).transpose()?;
    // So that a conversation that continues, and a long message, have room for more.
    let before = file.as_ref().map_or(0, SessionFile::positions);
    let room = before + message.as_ref().map_or(0, |message| message.ids.len()) + ROOM;
    let length = args.context.map_or(room.min(max), |c| c as usize);
    let template = chat_template(args, model.text())?;
    let typed = terminal::edits_lines() && !args.json && !once;
    let settings = Settings {
        commands: typed,
        ..Settings::of(args)
    };
    settings.checked_sampling(model.text())?;
    // Input typed from now on waits for the first prompt. A terminal that cannot be configured still works.
    let quiet = typed.then(Quiet::start).and_then(Result::ok);
    let editor = typed.then(|| Editor::open(&COMMANDS)).transpose()?;
    let wanted = Use {
        context: length,
        prompt: 0,
        batch: 1,
        spans: 0,
        reserve: args.session.as_ref().map_or(0, |_| SessionFile::MEMORY),
        drafts: args.drafts.clone(),
        force: args.force,
    };
    let engine = open_for(model, &args.engine(), &wanted, args.json)?;
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::on_ctrl_c(&stop);
    let empty = engine.new_sequence()?;
    let sequence = match &file {
        Some(file) => file.restore(&engine, empty)?,
        None => empty,
    };
    let note = file.as_ref().map_or("", SessionFile::note);
    let mut session = Session {
        sequence,
        engine,
        template,
        said: Transcript::of_note(note, args.system.as_deref())?,
        settings,
        usual: settings,
        context: Context { length, max },
        saved: file.map(|file| SavedChat {
            file,
            next: Instant::now(),
        }),
        model: args.model.file().map(Into::into),
        stop,
        drawn: 0,
        statistics: None,
    };
    let ended = match (message, editor) {
        (Some(message), _) => one_answer(&mut session, &message.text),
        (None, Some(editor)) => on_terminal(&mut session, editor, quiet.as_ref()),
        (None, None) => line_by_line(&mut session),
    };
    let saved = session.save();
    if let (Err(_), Err(why)) = (&ended, &saved) {
        tell(format_args!("emberflow: {why}"));
    }
    ended.and(saved)
}

/// Answers one message.
fn one_answer(session: &mut Session, message: &str) -> Result<(), Failure> {
    if message.trim().is_empty() {
        return Err(Failure::usage(
            "the message is empty: pass text with -p or -f",
        ));
    }
    match session.ask(message)? {
        Stop::Caller => Err(Failure::Interrupted),
        _ => Ok(()),
    }
}

/// A chat on a terminal.
fn on_terminal(
    session: &mut Session,
    mut editor: Editor,
    quiet: Option<&Quiet>,
) -> Result<(), Failure> {
    greet(
        session,
        "/help lists commands; Ctrl-C stops an answer, Ctrl-D ends.",
    );
    loop {
        tell("");
        let typed = editor.read("> ")?;
        if let Some(quiet) = quiet {
            quiet.mark_pastes();
        }
        session.stop.store(false, Ordering::Relaxed);
        let next = match typed {
            TerminalInput::Message(message) => take(session, &message),
            TerminalInput::Interrupt => {
                tell("(Ctrl-D or /exit ends the chat)");
                continue;
            }
            TerminalInput::End => return Ok(()),
        };
        match next {
            Ok(Next::End) => return Ok(()),
            Ok(Next::Answered(Stop::Caller)) => {
                tell("(answer stopped; /retry answers again)");
            }
            Ok(Next::Message | Next::Answered(_)) => {}
            Err(why) if goes_on(&why) => tell(format_args!("emberflow: {why}")),
            Err(why) => return Err(why),
        }
    }
}

/// Answers a message or runs a command.
fn take(session: &mut Session, line: &str) -> Result<Next, Failure> {
    match ChatLine::of(line)? {
        ChatLine::Nothing => Ok(Next::Message),
        ChatLine::Command(command) => session.run(command),
        ChatLine::Message(message) => {
            let text = session.engine.text().clone();
            let context = session.context.length;
            let reader = PromptReader {
                text: &text,
                context,
            };
            reader.check(message)?;
            Ok(Next::Answered(session.ask(message)?))
        }
    }
}

/// Whether a chat on a terminal continues after an error: one of the input, not of the engine.
fn goes_on(why: &Failure) -> bool {
    matches!(
        why,
        Failure::Usage(_)
            | Failure::File { .. }
            | Failure::Model(_)
            | Failure::Engine(Error::ContextFull { .. } | Error::PromptTooLong { .. })
    )
}

/// A chat whose messages are the lines of a pipe, or of a terminal without an editor.
fn line_by_line(session: &mut Session) -> Result<(), Failure> {
    let interactive = std::io::stdin().is_terminal() && !session.settings.json;
    let mut input = std::io::stdin().lock();
    let text = session.engine.text().clone();
    let reader = PromptReader {
        text: &text,
        context: session.context.length,
    };
    if interactive {
        greet(session, "Ctrl-C stops an answer; Ctrl-D or /exit quits.");
    }
    loop {
        if interactive {
            tell_part("\n> ");
        }
        let Some(line) = reader.line(&mut input)? else {
            return Ok(());
        };
        // Ctrl-C while waiting for input.
        if session.stop.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        if line.trim().is_empty() {
            continue;
        }
        if ends_chat(&line) {
            return Ok(());
        }
        if session.ask(&line)? == Stop::Caller {
            if !interactive {
                return Err(Failure::Interrupted);
            }
            session.stop.store(false, Ordering::Relaxed);
        }
    }
}

fn chat_template(args: &RunArgs, text: &Text) -> Result<Renderer, Failure> {
    let template = text.chat_template()?.map(Renderer::new);
    let missing = "this model has no chat template; use -p TEXT or -f FILE";
    let template = template.ok_or_else(|| Failure::usage(missing))?;
    if let Some(system) = &args.system
        && ignores_system(&template, system)?
    {
        tell(
            "emberflow: this model's chat template ignores system messages: --system has no effect",
        );
    }
    Ok(template)
}

/// Prints the model's name, the sampling parameters and the keys of the chat.
fn greet(session: &Session, keys: &str) {
    let text = session.engine.text();
    tell(format_args!(
        "{}, sampling {}\n{keys}",
        text.config().name,
        session.settings.sampling_report(text).summary()
    ));
}
