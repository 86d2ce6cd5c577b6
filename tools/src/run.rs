//! `emberflow run`: generates text.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use emberflow_engine::{Details, Engine, Model, Report, Sampling, Sequence, Stop};

use crate::cli::RunArgs;
use crate::generation::{
    Context, ROOM, Settings, continue_unless, generate, print_now, report, tell_end,
};
use crate::model::{Use, open_for, open_model};
use crate::prompt::{Prompt, PromptReader};
use crate::serve::stops::Stops;
use crate::states::SessionFile;
use crate::tell::tell;
use crate::{Failure, atomic, budget, chat, chrome, interrupt, print_json};

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    if args.chat {
        return chat::chat(args, open_model(&args.model)?);
    }
    let reads = [args.model.file(), args.file.as_deref()];
    atomic::may_write_each([&args.record.trace], args.force, &reads)?;
    // Open the model first: a missing model is the first error to report.
    let model = open_model(&args.model)?;
    if starts_chat(args, &model) {
        let args = RunArgs {
            chat: true,
            ..args.clone()
        };
        return chat::chat(&args, model);
    }
    let talks = model.text().meta().chat_template.is_some();
    if talks
        && args.prompt.is_some()
        && args.model.file().is_some()
        && !args.json
        && std::io::stderr().is_terminal()
    {
        tell("emberflow: this continues the text; for an answer, add --chat");
    }
    continue_prompt(args, model)
}

/// Whether a model that is named alone, on a terminal, is to be talked to. Bundled models have a default prompt.
fn starts_chat(args: &RunArgs, model: &Model) -> bool {
    let prompted = args.prompt.is_some() || args.file.is_some() || args.model.file().is_none();
    let recorded = args.json || args.record.trace.is_some() || args.best_of.is_some();
    let talks = model.text().meta().chat_template.is_some();
    talks && !prompted && !recorded && std::io::stdin().is_terminal()
}

/// Generates a text after the prompt.
fn continue_prompt(args: &RunArgs, model: Model) -> Result<(), Failure> {
    let max = model.text().config().max_context as usize;
    let reader = PromptReader {
        text: model.text(),
        context: args.context.map_or(max, |c| c as usize),
    };
    let Prompt { text, ids: prompt } = reader.prompt(args)?;
    if prompt.is_empty() {
        return Err(Failure::usage(
            "the prompt is empty: pass text with -p or -f",
        ));
    }
    let session = (args.session.as_ref())
        .map(|path| SessionFile::new(path, args.model.file())?.without_note())
        .transpose()?;
    // The context length decides the memory plan: use what is needed, not the model's maximum.
    let needed = prompt
        .len()
        .saturating_add(args.most_tokens().unwrap_or(ROOM));
    let needed = needed.max(session.as_ref().map_or(0, SessionFile::positions));
    let context = args.context.map_or(needed.min(max), |c| c as usize);
    if prompt.len() > context {
        return Err(Failure::Engine(emberflow_engine::Error::ContextFull {
            capacity: context,
            needed: prompt.len(),
            limit: max,
        }));
    }
    let (how, length) = (Settings::of(args), context);
    let sampling = how.checked_sampling(model.text())?;
    let batch = continuations(args, &sampling)?;
    let spans = args.record.trace.as_ref().map_or(0, |_| chrome::ROOM);
    let wanted = Use {
        context,
        prompt: prompt.len(),
        batch,
        spans,
        reserve: args.session.as_ref().map_or(0, |_| SessionFile::MEMORY),
        drafts: args.drafts.clone(),
        force: args.force,
    };
    let mut engine = open_for(model, &args.engine(), &wanted, args.json)?;
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::on_ctrl_c(&stop);
    let empty = engine.new_sequence()?;
    let mut sequence = match &session {
        Some(file) => file.restore(&engine, empty)?,
        None => empty,
    };
    let known = reuse(&mut sequence, &prompt);
    if !args.json {
        print_now(&text)?;
    }
    let asked = Asked {
        how,
        context: Context { length, max },
    };
    let may_be_interrupted = match args.best_of {
        Some(samples) => {
            best_of(&mut engine, sequence, &prompt, asked, samples, &stop)?;
            true
        }
        None => {
            let made = generate(&mut engine, &mut sequence, &prompt[known..], &how, &stop)?;
            let report = report(&mut engine, &made, &how)?;
            asked.finish(&report, made.generation.stop)?;
            if let Some(file) = &session {
                file.save(&engine, &sequence, String::new())?;
            }
            made.generation.stop == Stop::Caller
        }
    };
    write_trace(&engine, args)?;
    if may_be_interrupted && stop.load(Ordering::Relaxed) {
        return Err(Failure::Interrupted);
    }
    Ok(())
}

/// Cuts a sequence to what it has in common with the beginning of `prompt`, whose last token is computed in any case.
/// Returns the number of tokens that it has then.
fn reuse(sequence: &mut Sequence, prompt: &[u32]) -> usize {
    let both = sequence.tokens().iter().zip(prompt);
    let common = both.take_while(|(a, b)| a == b).count();
    sequence.truncate(common.min(prompt.len() - 1))
}

/// The number of continuations that are drawn together.
fn continuations(args: &RunArgs, sampling: &Sampling) -> Result<usize, Failure> {
    match args.best_of.map_or(1, usize::from) {
        2.. if sampling.temperature == 0.0 => Err(Failure::usage(
            "--best-of needs a temperature above 0: use --temp",
        )),
        batch => Ok(batch),
    }
}

fn write_trace(engine: &Engine, args: &RunArgs) -> Result<(), Failure> {
    match (engine.trace(), &args.record.trace) {
        (Some(trace), Some(path)) => chrome::write(trace, path),
        _ => Ok(()),
    }
}

/// How a text is asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    how: Settings,
    context: Context,
}

impl Asked {
    /// Prints the report, or the end of a text that was printed.
    fn finish(self, report: &Report, stop: Stop) -> Result<(), Failure> {
        if self.how.json {
            return print_json(report);
        }
        print_now("\n")?;
        tell_end(report, stop, &self.how, self.context);
        tell(format_args!("\n{}", report.summary()));
        Ok(())
    }
}

/// Generates several texts after `prompt` and prints the best one.
fn best_of(
    engine: &mut Engine,
    sequence: Sequence,
    prompt: &[u32],
    asked: Asked,
    samples: u16,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    let how = asked.how;
    let request = how.request(engine.text());
    let samples = usize::from(samples);
    let mut on_pass = || continue_unless(stop);
    let batch = engine.generate_batch(sequence, prompt, &request, samples, &mut on_pass)?;
    let tokenizer = engine.text().tokenizer();
    let texts = batch.samples.iter().map(|sample| {
        let mut stops = Stops::new(engine.text().rules().stop_strings.clone());
        let mut stream = tokenizer.stream_after_prompt();
        let mut text = String::new();
        for &token in &sample.tokens {
            let passed = stops.push_token(&mut stream, token);
            text.push_str(&passed.text);
            if passed.stopped {
                return text;
            }
        }
        text.push_str(&stops.finish());
        text.extend(stream.finish());
        text
    });
    let mut report = Report::of_batch(engine, &batch, texts.collect())?;
    report.sampling = Some(how.sampling_report(engine.text()));
    if how.details {
        report.details = Some(Details::new(
            engine,
            batch.samples.len(),
            &batch.steps,
            &batch.latencies,
        ));
    }
    if !how.json {
        print_now(&report.text)?;
    }
    asked.finish(&report, batch.samples[batch.best()].stop)
}
