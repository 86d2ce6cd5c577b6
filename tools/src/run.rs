//! `emberflow run`: generate text.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use emberflow_engine::{Engine, Generation, Report, Request, Sampling, Sequence, Stop};
use emberflow_models::chat::Message;

use crate::cli::RunArgs;
use crate::model::{open_container, open_engine};
use crate::{Failure, print_json};

/// What the bundled model is asked to continue when no prompt is given.
const DEFAULT_PROMPT: &str = "# Ownership\n\nOwnership is";

/// Context of a chat when none is given.
const CHAT_CONTEXT: usize = 2048;

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    if args.chat {
        return chat(args);
    }
    let text = prompt_text(args)?;
    // The prompt's length decides the context, and the context the memory plan.
    // A token has at least one byte, so this needs no tokenizer yet.
    let room = text.len() + 2 + args.tokens as usize;
    let max = model_context(args)?;
    let context = args.context.map_or(room.min(max), |c| c as usize);
    let mut engine = open_engine(&args.model, &args.engine, context)?;
    let stop = on_interrupt(&engine);
    let prompt = engine.encode(&text)?;
    let mut sequence = engine.new_sequence();
    if !args.json {
        print!("{text}");
        std::io::stdout().flush()?;
    }
    let (generation, text) = generate(&mut engine, &mut sequence, &prompt, args, &stop)?;
    finish(&engine, &generation, text, args)?;
    if generation.stop == Stop::Caller {
        return Err(Failure::Interrupted);
    }
    Ok(())
}

fn model_context(args: &RunArgs) -> Result<usize, Failure> {
    let container = open_container(&args.model)?;
    let meta = emberflow_engine::meta::ContainerMeta::parse(container.meta(), container.path())?;
    Ok(meta.config.max_context as usize)
}

fn prompt_text(args: &RunArgs) -> Result<String, Failure> {
    let text = match (&args.prompt, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) if path == Path::new("-") => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .map_err(Failure::file(path))?;
            text
        }
        (None, Some(path)) => std::fs::read_to_string(path).map_err(Failure::file(path))?,
        (None, None) if args.model.model.is_none() => DEFAULT_PROMPT.to_owned(),
        (None, None) => {
            return Err(Failure::usage(
                "no prompt: give one with -p TEXT, -f FILE or --chat",
            ));
        }
    };
    Ok(text)
}

/// Generates after `prompt`; streams the text unless `--json`.
fn generate(
    engine: &mut Engine,
    sequence: &mut Sequence,
    prompt: &[u32],
    args: &RunArgs,
    stop: &AtomicBool,
) -> Result<(Generation, String), Failure> {
    let defaults = engine.meta().sampling;
    let request = Request {
        max_tokens: args.tokens as usize,
        sampling: Sampling {
            temperature: args.temp.or(defaults.temperature).unwrap_or(0.0),
            top_k: args.top_k.or(defaults.top_k).unwrap_or(0) as usize,
            top_p: args.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: args.min_p,
            repetition_penalty: args.repeat_penalty,
            seed: args.seed,
        },
        ignore_eos: args.ignore_eos,
    };
    let tokenizer = engine.tokenizer().clone();
    let mut stream = if args.chat {
        tokenizer.stream()
    } else {
        tokenizer.stream_after_prompt()
    };
    let mut text = String::new();
    let mut failure = None;
    let quiet = args.json;
    let generation = engine.generate(sequence, prompt, &request, &mut |token| {
        let piece = stream.push(token).unwrap_or_default();
        if !quiet && !piece.is_empty() {
            let mut out = std::io::stdout().lock();
            if let Err(e) = out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
                failure = Some(e.into());
                return ControlFlow::Break(());
            }
        }
        text.push_str(&piece);
        if stop.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    if let Some(f) = failure {
        return Err(f);
    }
    if let Some(rest) = stream.finish() {
        if !quiet {
            print!("{rest}");
        }
        text.push_str(&rest);
    }
    Ok((generation, text))
}

fn finish(
    engine: &Engine,
    generation: &Generation,
    text: String,
    args: &RunArgs,
) -> Result<(), Failure> {
    let report = Report::new(engine, generation, text);
    if args.json {
        print_json(&report)
    } else {
        println!();
        eprintln!("\n{}", report.summary());
        Ok(())
    }
}

/// Ctrl-C ends the generation at the next token; a second one ends the program.
fn on_interrupt(engine: &Engine) -> Arc<AtomicBool> {
    let flag = engine.stop_flag();
    let handler = flag.clone();
    let set = ctrlc::set_handler(move || {
        if handler.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    if let Err(e) = set {
        tracing::warn!("Ctrl-C will end the program at once: {e}");
    }
    flag
}

fn chat(args: &RunArgs) -> Result<(), Failure> {
    let max = model_context(args)?;
    let context = args.context.map_or(CHAT_CONTEXT.min(max), |c| c as usize);
    let mut engine = open_engine(&args.model, &args.engine, context)?;
    let Some(template) = engine.chat_template()? else {
        return Err(Failure::usage(
            "this model has no chat template; use -p TEXT or -f FILE",
        ));
    };
    let stop = on_interrupt(&engine);
    let mut messages: Vec<Message> = args.system.iter().map(|s| message("system", s)).collect();
    let mut sequence = engine.new_sequence();
    let interactive = std::io::stdin().is_terminal() && !args.json;
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if interactive {
            eprint!("\n> ");
        }
        let Some(line) = lines.next().transpose()? else {
            return Ok(());
        };
        if line.trim().is_empty() {
            continue;
        }
        messages.push(message("user", &line));
        let rendered = template.render(&messages, true)?;
        // The template writes its own special tokens.
        let ids = engine.tokenizer().encode(&rendered, false)?;
        // What the sequence already holds is kept as far as it agrees.
        let known = sequence.tokens();
        let common = known.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        let common = common.min(ids.len() - 1);
        sequence.truncate(common);
        let (generation, text) = generate(&mut engine, &mut sequence, &ids[common..], args, &stop)?;
        messages.push(message("assistant", text.trim()));
        finish(&engine, &generation, text, args)?;
        if generation.stop == Stop::Caller {
            if !interactive {
                return Err(Failure::Interrupted);
            }
            stop.store(false, Ordering::Relaxed);
        }
    }
}

fn message(role: &str, content: &str) -> Message {
    Message {
        role: role.into(),
        content: content.into(),
    }
}
