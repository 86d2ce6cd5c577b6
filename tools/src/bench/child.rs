//! Runs one point of a benchmark in a child process: `emberflow point --json --details`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use emberflow_engine::{Details, Sparsity};
use serde::Deserialize;

use super::cap::Cap;
use crate::Failure;
use crate::cli::BenchArgs;

/// Default prompt.
const PROMPT: &str = "A vector is a growable list: it";

/// The members of `run --json` that benchmarks use; see [`emberflow_engine::Report`].
#[derive(Debug, Clone, Deserialize)]
pub struct Run {
    /// Model name.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// Prefill speed.
    pub prefill_tokens_per_s: f64,
    /// Decode speed.
    pub decode_tokens_per_s: f64,
    /// Memory.
    pub memory: Memory,
    /// Reads.
    pub io: Io,
    /// Memory plan.
    pub plan: Planned,
    /// Hash of all logits.
    pub logits_hash: String,
    /// Ablation.
    pub policy: String,
    /// Per-token details.
    pub details: Details,
    /// Samples of `--best-of`.
    pub best_of: Option<BestOf>,
}

/// Memory of a run.
#[derive(Debug, Clone, Deserialize)]
pub struct Memory {
    /// The budget.
    pub budget_bytes: u64,
    /// Peak resident set; `None` if unknown.
    pub peak_rss_bytes: Option<u64>,
    /// Bytes of the hot region.
    pub hot: u64,
    /// Share of the FFN in memory.
    pub ffn_resident_share: f64,
}

/// Reads of a run.
#[derive(Debug, Clone, Deserialize)]
pub struct Io {
    /// Bytes read.
    pub bytes_read: u64,
}

/// Memory plan of a run.
#[derive(Debug, Clone, Deserialize)]
pub struct Planned {
    /// Prefill chunk in tokens.
    pub chunk: usize,
}

/// Samples of `--best-of`.
#[derive(Debug, Clone, Deserialize)]
pub struct BestOf {
    /// All samples.
    pub samples: Vec<Sample>,
}

/// One sample.
#[derive(Debug, Clone, Deserialize)]
pub struct Sample {
    /// Hash of its logits.
    pub logits_hash: String,
}

impl Run {
    /// Milliseconds per decoded token.
    pub fn ms_per_token(&self) -> f64 {
        mean(&self.details.ms)
    }

    /// Share of decode time spent waiting for reads.
    pub fn wait_share(&self) -> f64 {
        mean(&self.details.wait_ms) / mean(&self.details.ms).max(1e-9)
    }

    /// Share of needed neurons that were in memory during decoding.
    pub fn hit_rate(&self) -> f64 {
        let d = &self.details;
        let needed: f64 = d.needed_share.iter().sum();
        let hits = d.hit_rate.iter().zip(&d.needed_share).map(|(h, n)| h * n);
        if needed > 0.0 {
            hits.sum::<f64>() / needed
        } else {
            1.0
        }
    }

    /// Whether the peak stayed within the budget; `None` if unknown.
    pub fn within_budget(&self) -> Option<bool> {
        Some(self.memory.peak_rss_bytes? <= self.memory.budget_bytes)
    }
}

/// Mean; 0 if there are no values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Result of a run.
pub enum Outcome {
    /// It succeeded.
    Done(Box<Run>),
    /// The budget was rejected or memory ran out, with the reason.
    Refused(String),
}

/// Decoding arguments of a run.
#[derive(Clone, Copy)]
pub struct Decoding<'a> {
    /// Prompt.
    pub prompt: &'a str,
    /// Tokens to generate.
    pub tokens: u32,
    /// I/O engine.
    pub io: &'a str,
    /// Share of the FFN in memory.
    pub share: f64,
}

impl<'a> Decoding<'a> {
    /// The default prompt, with everything in memory.
    pub fn of(args: &'a BenchArgs, tokens: u32, io: &'a str) -> Self {
        Self {
            prompt: Child::prompt(args),
            tokens,
            io,
            share: 1.0,
        }
    }

    /// As arguments of `run`, followed by `more`.
    pub fn with(&self, more: &[&str]) -> Vec<String> {
        let (tokens, share) = (self.tokens.to_string(), self.share.to_string());
        let own = ["-p", self.prompt, "-n", &tokens, "--io", self.io];
        let all = own.iter().chain(more);
        let mut all: Vec<String> = all.map(|&argument| argument.to_owned()).collect();
        all.extend(["--ffn-resident".to_owned(), share]);
        all
    }
}

/// Starts the runs of a benchmark.
pub struct Child {
    program: PathBuf,
    model: Option<PathBuf>,
    common: Vec<OsString>,
}

impl Child {
    /// Sets the arguments common to all runs. Tokens are sampled with a fixed seed, because greedy decoding of random
    /// weights soon repeats itself.
    pub fn new(args: &BenchArgs) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|e| Failure::Child(format!("cannot find the path of this program: {e}")))?;
        let mut common: Vec<OsString> = ["--json", "--details", "--ignore-eos", "--temp", "1"]
            .iter()
            .map(OsString::from)
            .collect();
        if let Some(threads) = args.threads {
            common.extend(["--threads".into(), threads.to_string().into()]);
        }
        if let Some(sparsity) = args.sparsity {
            common.extend(["--sparsity".into(), Sparsity::from(sparsity).name().into()]);
        }
        Ok(Self {
            program,
            model: args.model.model.clone(),
            common,
        })
    }

    /// The prompt.
    pub fn prompt(args: &BenchArgs) -> &str {
        args.prompt.as_deref().unwrap_or(PROMPT)
    }

    /// Runs once, in `cap`'s control group if there is one.
    pub fn run(&self, extra: &[String], cap: Option<&Cap>) -> Result<Outcome, Failure> {
        let mut command = match cap {
            Some(cap) => cap.command(&self.program),
            None => Command::new(&self.program),
        };
        command.arg("point").args(&self.model).args(&self.common);
        let output = (command.args(extra).stdin(Stdio::null()).output())
            .map_err(Failure::file(&self.program))?;
        let said = String::from_utf8_lossy(&output.stderr);
        // The last line of stderr is the error.
        let why = said.lines().last().unwrap_or("no error message");
        let why = why.trim_start_matches("emberflow: ").to_owned();
        match output.status.code() {
            Some(0) => {}
            // Killed by the kernel for exceeding the limit.
            None if cap.is_some() => return Ok(Outcome::Refused("killed: out of memory".into())),
            Some(1) if why.contains("is too small for this model") => {
                return Ok(Outcome::Refused(why));
            }
            Some(2) if why.contains(" needs ") && why.contains(", more than the ") => {
                return Ok(Outcome::Refused(why));
            }
            Some(2) => return Err(Failure::Usage(why)),
            Some(130) => return Err(Failure::Interrupted),
            _ => {
                let how = output.status;
                return Err(Failure::Child(format!(
                    "run {}: {how}: {why}",
                    extra.join(" ")
                )));
            }
        }
        let run = serde_json::from_slice(&output.stdout)
            .map_err(|e| Failure::Child(format!("run {}: invalid JSON: {e}", extra.join(" "))))?;
        Ok(Outcome::Done(Box::new(run)))
    }
}
