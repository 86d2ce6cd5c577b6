//! Generates one text: streams it to standard output, with messages on standard error.

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use emberflow_engine::meta::SamplingDefaults;
use emberflow_engine::{
    Details, Engine, Generation, Progress, Report, Request, Sampling, SamplingReport, Sequence,
    Stop, Tail, Text,
};

use crate::Failure;
use crate::cli::RunArgs;
use crate::serve::stops::Stops;
use crate::tell::tell;

/// Default context of a chat, and positions after the prompt if `-n` sets no limit.
pub const ROOM: usize = 2048;

/// Tokens of a loop after which an answer without `-n` is ended.
const LOOP: usize = 512;

/// How texts are generated: from the command line, in a chat also by `/set`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// The sampling parameters that were given.
    pub chosen: SamplingDefaults,
    /// Seed of the next text.
    pub seed: u64,
    /// Maximum tokens; `None` if only the context limits them.
    pub most: Option<usize>,
    /// Whether a loop ends the text: in chats without a limit.
    pub ends_loops: bool,
    /// Whether the text answers a message.
    pub chat: bool,
    /// Whether the chat takes commands, so that `/set` is named instead of options.
    pub commands: bool,
    /// Whether texts continue after an end-of-text token.
    pub ignore_eos: bool,
    /// Whether each token's metrics are reported.
    pub details: bool,
    /// Whether texts are printed in reports only.
    pub json: bool,
}

impl Settings {
    /// From the command line.
    pub fn of(args: &RunArgs) -> Self {
        Self {
            chosen: SamplingDefaults {
                temperature: args.temp,
                top_k: args.top_k,
                top_p: args.top_p,
                min_p: args.min_p,
                repetition_penalty: args.repeat_penalty,
                ..SamplingDefaults::default()
            },
            seed: args.seed,
            most: args.most_tokens(),
            ends_loops: args.chat && args.tokens.is_none(),
            chat: args.chat,
            commands: false,
            ignore_eos: args.ignore_eos,
            details: args.record.details,
            json: args.json,
        }
    }

    /// The defaults of a chat.
    #[cfg(test)]
    pub fn chat() -> Self {
        Self {
            chosen: SamplingDefaults::default(),
            seed: 0,
            most: None,
            ends_loops: true,
            chat: true,
            commands: true,
            ignore_eos: false,
            details: false,
            json: false,
        }
    }

    /// Sampling: as given, else as the checkpoint recommends, else greedy, or as chats do.
    pub fn sampling(&self, text: &Text) -> Sampling {
        let sampling = match self.chat {
            true => text.chat_sampling(self.chosen),
            false => text.sampling(self.chosen),
        };
        Sampling {
            seed: self.seed,
            ..sampling
        }
    }

    /// As [`sampling`](Self::sampling), checked.
    ///
    /// # Errors
    /// A value out of range.
    pub fn checked_sampling(&self, text: &Text) -> Result<Sampling, Failure> {
        let sampling = self.sampling(text);
        sampling.validate().map_err(Failure::usage)?;
        Ok(sampling)
    }

    /// The sampling parameters and where each comes from.
    pub fn sampling_report(&self, text: &Text) -> SamplingReport {
        let sampling = self.sampling(text);
        SamplingReport::new(sampling, self.chosen, text.meta().sampling)
    }

    /// The engine's request.
    pub fn request(&self, text: &Text) -> Request {
        Request {
            max_tokens: self.most.unwrap_or(usize::MAX),
            sampling: self.sampling(text),
            ignore_eos: self.ignore_eos,
            keep_steps: self.details,
            ..Request::default()
        }
    }
}

/// The context of a run.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Its length.
    pub length: usize,
    /// The model's maximum.
    pub max: usize,
}

/// Writes text to standard output and flushes it.
///
/// # Errors
/// I/O errors.
pub fn print_now(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Breaks if Ctrl-C has set `stop`.
pub fn continue_unless(stop: &AtomicBool) -> ControlFlow<()> {
    if stop.load(Ordering::Relaxed) {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// A generated text.
#[derive(Debug)]
pub struct Generated {
    /// Tokens and timings.
    pub generation: Generation,
    /// The text.
    pub text: String,
}

/// Why a text was ended before the engine did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CutShort {
    /// A stop string.
    Stopped,
    /// A loop.
    Looped,
}

/// Generates after `prompt`; streams the text unless it is printed as JSON.
///
/// # Errors
/// Errors of the engine and of standard output.
pub fn generate(
    engine: &mut Engine,
    sequence: &mut Sequence,
    prompt: &[u32],
    how: &Settings,
    stop: &AtomicBool,
) -> Result<Generated, Failure> {
    let request = how.request(engine.text());
    let tokenizer = engine.text().tokenizer().clone();
    let mut stream = if how.chat {
        tokenizer.stream()
    } else {
        tokenizer.stream_after_prompt()
    };
    let mut stops = Stops::new(engine.text().rules().stop_strings.clone());
    let (mut ended, mut tail) = (None, Tail::default());
    let mut text = String::new();
    let mut failure = None;
    let quiet = how.json;
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
        tail.push(token);
        let looped = how.ends_loops && tail.repetition().is_some_and(|it| it.tokens >= LOOP);
        ended = match (passed.stopped, looped) {
            (true, _) => Some(CutShort::Stopped),
            (false, true) => Some(CutShort::Looped),
            (false, false) => return continue_unless(stop),
        };
        ControlFlow::Break(())
    })?;
    if let Some(f) = failure {
        return Err(f);
    }
    if ended == Some(CutShort::Stopped) {
        generation.stop = Stop::Complete;
        return Ok(Generated { generation, text });
    }
    if ended == Some(CutShort::Looped) {
        generation.stop = Stop::Length;
    }
    let rest = stops.finish() + &stream.finish().unwrap_or_default();
    if !rest.is_empty() {
        if !quiet {
            print_now(&rest)?;
        }
        text.push_str(&rest);
    }
    Ok(Generated { generation, text })
}

/// The report of a text.
///
/// # Errors
/// Errors of the forecast.
pub fn report(engine: &mut Engine, made: &Generated, how: &Settings) -> Result<Report, Failure> {
    let mut report = Report::new(engine, &made.generation, made.text.clone())?;
    report.sampling = Some(how.sampling_report(engine.text()));
    if how.details {
        let (steps, latencies) = (&made.generation.steps, &made.generation.latencies);
        report.details = Some(Details::new(engine, 1, steps, latencies));
    }
    Ok(report)
}

/// Says why the text is shorter than requested, or why a chat answer was cut. In a chat, an answer that ends with EOS
/// needs no message; otherwise neither does one of the requested length.
pub fn tell_end(report: &Report, stop: Stop, how: &Settings, context: Context) {
    let (chat, tokens) = (how.chat, report.generated_tokens);
    match (stop, how.most) {
        (Stop::Eos, Some(most)) if !chat && tokens < most => tell(format_args!(
            "\nthe model ended the text (EOS) after {tokens} of {most} tokens; \
             --ignore-eos continues"
        )),
        (Stop::Length, Some(most)) if how.commands => tell(format_args!(
            "(answer cut after {most} tokens by -n; /set n -1 lets the next one run to its end)"
        )),
        (Stop::Length, Some(most)) if chat => tell(format_args!(
            "(answer cut after {most} tokens by -n; without -n it runs to its end)"
        )),
        (Stop::Context, _) if context.length < context.max => tell(format_args!(
            "\nthe context of {} tokens is full; use --context for more, up to {}",
            context.length, context.max
        )),
        (Stop::Context, _) => tell(format_args!(
            "\nthe context of {} tokens is full, which is the model's maximum",
            context.length
        )),
        _ => {}
    }
    tell_loop(report, stop, how);
}

/// Says that the text ends in a loop, and what to do.
fn tell_loop(report: &Report, stop: Stop, how: &Settings) {
    let Some(repetition) = report.repetition else {
        return;
    };
    let greedy = (report.sampling).is_some_and(|it| it.sampling.temperature == 0.0);
    let [against, unlimited] = match (greedy, how.commands) {
        (true, true) => ["/set temp 0.8", "/set n -1"],
        (false, true) => ["/set repeat-penalty 1.1", "/set n -1"],
        (true, false) => ["--temp 0.8", "-n -1"],
        (false, false) => ["--repeat-penalty 1.1", "-n -1"],
    };
    let (opens, closes) = if how.chat { ("(", ")") } else { ("\n", "") };
    let ended = how.chat && stop == Stop::Length && how.most.is_none();
    let goes_on = match ended {
        true => format!(", so it was ended; {unlimited} lets loops go on"),
        false => String::new(),
    };
    let what = if how.chat { "answer" } else { "text" };
    tell(format_args!(
        "{opens}the {what} ends in a loop, {repetition}{goes_on}; {against} may help{closes}"
    ));
}
