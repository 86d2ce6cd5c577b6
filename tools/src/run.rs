//! `emberflow run`: generates text.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use emberflow_engine::meta::SamplingDefaults;
use emberflow_engine::{
    Details, Engine, Generation, Progress, Report, Request, Sampling, SamplingReport, Sequence,
    Stop, Text,
};
use emberflow_models::chat::{Conversation, Message};

use crate::cli::RunArgs;
use crate::model::{Use, open_for, open_model};
use crate::prompt::{Prompt, PromptReader};
use crate::serve::stops::Stops;
use crate::tell::{tell, tell_part};
use crate::template::Renderer;
use crate::{Failure, atomic, budget, chrome, interrupt, print_json};

/// The options of a run and its context length.
#[derive(Clone, Copy)]
struct RunContext<'a> {
    args: &'a RunArgs,
    context: usize,
    /// Maximum context length of the model.
    max: usize,
}

/// Default context of a chat, and positions after the prompt if `-n` sets no limit.
const ROOM: usize = 2048;

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    if args.chat {
        return chat(args);
    }
    let reads = [args.model.file(), args.file.as_deref()];
    atomic::may_write_each([&args.record.trace], args.force, &reads)?;
    // Open the model first: a missing model is the first error to report.
    let model = open_model(&args.model)?;
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
    // The context length decides the memory plan: use what is needed, not the model's maximum.
    let needed = prompt
        .len()
        .saturating_add(args.most_tokens().unwrap_or(ROOM));
    let context = args.context.map_or(needed.min(max), |c| c as usize);
    if prompt.len() > context {
        return Err(Failure::Engine(emberflow_engine::Error::ContextFull {
            capacity: context,
            needed: prompt.len(),
            limit: max,
        }));
    }
    let asked = RunContext { args, context, max };
    let sampling = checked_sampling(args, model.text())?;
    let batch = continuations(args, &sampling)?;
    let spans = args.record.trace.as_ref().map_or(0, |_| chrome::ROOM);
    let wanted = Use {
        context,
        prompt: prompt.len(),
        batch,
        spans,
        force: args.force,
    };
    let mut engine = open_for(model, &args.engine(), &wanted, args.json)?;
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::on_ctrl_c(&stop);
    let mut sequence = engine.new_sequence()?;
    if !args.json {
        print_now(&text)?;
    }
    let may_be_interrupted = match args.best_of {
        Some(_) => {
            best_of(&mut engine, sequence, &prompt, asked, &stop)?;
            true
        }
        None => {
            let (generation, text) = generate(&mut engine, &mut sequence, &prompt, args, &stop)?;
            finish(&mut engine, &generation, text, asked)?;
            generation.stop == Stop::Caller
        }
    };
    write_trace(&engine, args)?;
    if may_be_interrupted && stop.load(Ordering::Relaxed) {
        return Err(Failure::Interrupted);
    }
    Ok(())
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

/// Writes text to standard output and flushes it.
fn print_now(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Sampling options from the command line.
fn cli_sampling(args: &RunArgs) -> SamplingDefaults {
    SamplingDefaults {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repeat_penalty,
        ..SamplingDefaults::default()
    }
}

/// Sampling: command line, else the checkpoint's recommendation, else greedy.
fn sampling(args: &RunArgs, text: &Text) -> Sampling {
    Sampling {
        seed: args.seed,
        ..text.sampling(cli_sampling(args))
    }
}

/// As [`sampling`], checked.
fn checked_sampling(args: &RunArgs, text: &Text) -> Result<Sampling, Failure> {
    let sampling = sampling(args, text);
    sampling.validate().map_err(Failure::usage)?;
    Ok(sampling)
}

/// The sampling parameters and where each comes from.
fn sampling_report(args: &RunArgs, text: &Text) -> SamplingReport {
    SamplingReport::new(
        sampling(args, text),
        cli_sampling(args),
        text.meta().sampling,
    )
}

/// The engine's request.
fn request(engine: &Engine, args: &RunArgs) -> Request {
    Request {
        max_tokens: args.most_tokens().unwrap_or(usize::MAX),
        sampling: sampling(args, engine.text()),
        ignore_eos: args.ignore_eos,
        keep_steps: args.record.details,
        ..Request::default()
    }
}

/// Breaks if Ctrl-C has set `stop`.
fn continue_unless(stop: &AtomicBool) -> ControlFlow<()> {
    if stop.load(Ordering::Relaxed) {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// Generates several texts after `prompt` and prints the best one.
fn best_of(
    engine: &mut Engine,
    sequence: Sequence,
    prompt: &[u32],
    asked: RunContext<'_>,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    let args = asked.args;
    let request = request(engine, args);
    let samples = args.best_of.map_or(1, usize::from);
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
    report.sampling = Some(sampling_report(args, engine.text()));
    if args.record.details {
        report.details = Some(Details::new(
            engine,
            batch.samples.len(),
            &batch.steps,
            &batch.latencies,
        ));
    }
    if args.json {
        return print_json(&report);
    }
    print_now(&report.text)?;
    print_now("\n")?;
    let winner = &batch.samples[batch.best()];
    tell_end(winner.stop, winner.tokens.len(), asked);
    tell(format_args!("\n{}", report.summary()));
    Ok(())
}

/// Generates after `prompt`; streams the text unless `--json`.
fn generate(
    engine: &mut Engine,
    sequence: &mut Sequence,
    prompt: &[u32],
    args: &RunArgs,
    stop: &AtomicBool,
) -> Result<(Generation, String), Failure> {
    let request = request(engine, args);
    let tokenizer = engine.text().tokenizer().clone();
    let mut stream = if args.chat {
        tokenizer.stream()
    } else {
        tokenizer.stream_after_prompt()
    };
    let mut stops = Stops::new(engine.text().rules().stop_strings.clone());
    let mut stopped = false;
    let mut text = String::new();
    let mut failure = None;
    let quiet = args.json;
    let mut generation = engine.generate(sequence, prompt, &request, &mut |progress| {
        let Progress::Token(token) = progress else {
            return continue_unless(stop);
        };
        let passed = stops.push_token(&mut stream, token);
        let piece = passed.text;
        if !quiet
            && !piece.is_empty()
            && let Err(e) = print_now(&piece)
        {
            failure = Some(e);
            return ControlFlow::Break(());
        }
        text.push_str(&piece);
        stopped = passed.stopped;
        if stopped {
            ControlFlow::Break(())
        } else {
            continue_unless(stop)
        }
    })?;
    if let Some(f) = failure {
        return Err(f);
    }
    if stopped {
        generation.stop = Stop::Complete;
        return Ok((generation, text));
    }
    let rest = stops.finish() + &stream.finish().unwrap_or_default();
    if !rest.is_empty() {
        if !quiet {
            print_now(&rest)?;
        }
        text.push_str(&rest);
    }
    Ok((generation, text))
}

fn finish(
    engine: &mut Engine,
    generation: &Generation,
    text: String,
    asked: RunContext<'_>,
) -> Result<(), Failure> {
    let args = asked.args;
    let mut report = Report::new(engine, generation, text)?;
    report.sampling = Some(sampling_report(args, engine.text()));
    if args.record.details {
        let (steps, latencies) = (&generation.steps, &generation.latencies);
        report.details = Some(Details::new(engine, 1, steps, latencies));
    }
    if args.json {
        return print_json(&report);
    }
    print_now("\n")?;
    tell_end(generation.stop, generation.tokens.len(), asked);
    if args.chat && !tracing::enabled!(tracing::Level::INFO) {
        tell(format_args!(
            "({} tokens, {:.1} tokens/s)",
            report.generated_tokens, report.decode_tokens_per_s
        ))
    } else {
        tell(format_args!("\n{}", report.summary()))
    }
    Ok(())
}

/// Says why the text is shorter than requested, or why a chat answer was cut. In a chat, an answer that ends with EOS
/// needs no message; otherwise neither does one of the requested length.
fn tell_end(stop: Stop, tokens: usize, asked: RunContext<'_>) {
    let (chat, most) = (asked.args.chat, asked.args.most_tokens());
    match (stop, most) {
        (Stop::Eos, Some(most)) if !chat && tokens < most => tell(format_args!(
            "\nthe model ended the text (EOS) after {tokens} of {most} tokens; \
             --ignore-eos continues"
        )),
        (Stop::Length, Some(most)) if chat => tell(format_args!(
            "(answer cut after {most} tokens by -n; without -n it runs to its end)"
        )),
        (Stop::Context, _) if asked.context < asked.max => tell(format_args!(
            "\nthe context of {} tokens is full; use --context for more, up to {}",
            asked.context, asked.max
        )),
        (Stop::Context, _) => tell(format_args!(
            "\nthe context of {} tokens is full, which is the model's maximum",
            asked.context
        )),
        _ => {}
    }
}

/// A conversation with an optional system message.
fn start_conversation(system: Option<&str>) -> Conversation {
    let system = system.map(|text| Message::new("system", text));
    Conversation {
        messages: system.into_iter().collect(),
        add_generation_prompt: true,
        ..Conversation::default()
    }
}

fn chat(args: &RunArgs) -> Result<(), Failure> {
    let model = open_model(&args.model)?;
    let max = model.text().config().max_context as usize;
    let context = args.context.map_or(ROOM.min(max), |c| c as usize);
    let template = chat_template(args, model.text())?;
    checked_sampling(args, model.text())?;
    let wanted = Use {
        context,
        prompt: 0,
        batch: 1,
        spans: 0,
        force: args.force,
    };
    let mut engine = open_for(model, &args.engine(), &wanted, args.json)?;
    let stop = Arc::new(AtomicBool::new(false));
    interrupt::on_ctrl_c(&stop);
    let asked = RunContext { args, context, max };
    let mut said = start_conversation(args.system.as_deref());
    let first_turn = said.messages.len();
    let mut sequence = engine.new_sequence()?;
    let interactive = std::io::stdin().is_terminal() && !args.json;
    let mut input = std::io::stdin().lock();
    let text = engine.text().clone();
    let reader = PromptReader {
        text: &text,
        context,
    };
    if interactive {
        print_greeting(args, engine.text());
    }
    loop {
        if interactive {
            tell_part("\n> ");
        }
        let Some(line) = reader.line(&mut input)? else {
            return Ok(());
        };
        // Ctrl-C while waiting for input.
        if stop.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" | "/bye" => return Ok(()),
            _ => {}
        }
        said.messages.push(Message::new("user", &line));
        let ids = loop {
            let ids = rendered(&template, &said, &text)?;
            if !drop_oldest(&mut said.messages, first_turn, ids.len(), context) {
                break ids;
            }
        };
        // Reuse the KV cache for the longest common prefix.
        let both = sequence.tokens().iter().zip(&ids);
        let common = (both.take_while(|(a, b)| a == b).count()).min(ids.len() - 1);
        let common = sequence.truncate(common);
        let (generation, text) = generate(&mut engine, &mut sequence, &ids[common..], args, &stop)?;
        said.messages.push(Message::new("assistant", text.trim()));
        finish(&mut engine, &generation, text, asked)?;
        if generation.stop == Stop::Caller {
            if !interactive {
                return Err(Failure::Interrupted);
            }
            stop.store(false, Ordering::Relaxed);
        }
    }
}

/// Tokens of a conversation. The template writes its special tokens itself.
fn rendered(template: &Renderer, said: &Conversation, text: &Text) -> Result<Vec<u32>, Failure> {
    let ids = text.tokens(&template.render(said)?)?;
    if ids.is_empty() {
        Err(Failure::usage("the chat template renders an empty text"))
    } else {
        Ok(ids)
    }
}

fn chat_template(args: &RunArgs, text: &Text) -> Result<Renderer, Failure> {
    let template = text.chat_template()?.map(Renderer::new);
    let missing = "this model has no chat template; use -p TEXT or -f FILE";
    let template = template.ok_or_else(|| Failure::usage(missing))?;
    if let Some(system) = &args.system {
        let mut probe = start_conversation(Some(system));
        probe.messages.push(Message::new("user", "u"));
        if !template.render(&probe)?.contains(system.trim()) {
            tell(
                "emberflow: this model's chat template ignores system messages: --system has no effect",
            );
        }
    }
    Ok(template)
}

/// Prints the model's name, the sampling parameters and the keys of the chat.
fn print_greeting(args: &RunArgs, text: &Text) {
    tell(format_args!(
        "{}, sampling {}\nCtrl-C stops an answer; Ctrl-D or /exit quits.",
        text.config().name,
        sampling_report(args, text).summary()
    ));
}

/// If `tokens` leave less than a quarter of the context for the answer, drops the oldest exchange after `first_turn`.
/// Returns false if nothing was dropped.
fn drop_oldest(
    messages: &mut Vec<Message>,
    first_turn: usize,
    tokens: usize,
    context: usize,
) -> bool {
    if tokens < context - context / 4 || messages.len() <= first_turn + 1 {
        return false;
    }
    tell("(the context is nearly full: dropping the oldest exchange)");
    messages.drain(first_turn..(first_turn + 2).min(messages.len() - 1));
    true
}
