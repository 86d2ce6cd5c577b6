//! One point of a benchmark: this program, started again as `point --json --details`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use emberflow_engine::{Details, Sparsity};
use serde::Deserialize;

use super::cap::Cap;
use crate::Failure;
use crate::cli::BenchArgs;

/// What the runs continue, unless told otherwise.
const PROMPT: &str = "A vector is a growable list: it";

/// The parts of `run --json` that benchmarks look at, as [`emberflow_engine::Report`] has them.
#[derive(Debug, Clone, Deserialize)]
pub struct Run {
    /// Name of the model.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were made.
    pub generated_tokens: usize,
    /// Speed of the prompt.
    pub prefill_tokens_per_s: f64,
    /// Speed of what follows it.
    pub decode_tokens_per_s: f64,
    /// Memory.
    pub memory: Memory,
    /// Reads.
    pub io: Io,
    /// What was planned.
    pub plan: Planned,
    /// Hash of the bits of all logits.
    pub logits_hash: String,
    /// Mechanisms that were at work.
    pub policy: String,
    /// Token by token.
    pub details: Details,
    /// The texts, where there were several.
    pub best_of: Option<BestOf>,
}

/// Memory of a run.
#[derive(Debug, Clone, Deserialize)]
pub struct Memory {
    /// The budget.
    pub budget_bytes: u64,
    /// Highest resident set; `None` where the system does not tell.
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

/// What was planned for a run.
#[derive(Debug, Clone, Deserialize)]
pub struct Planned {
    /// Prompt tokens per pass.
    pub chunk: usize,
}

/// Several texts of a run.
#[derive(Debug, Clone, Deserialize)]
pub struct BestOf {
    /// Each of them.
    pub samples: Vec<Sample>,
}

/// One of several texts.
#[derive(Debug, Clone, Deserialize)]
pub struct Sample {
    /// Hash of the bits of its logits.
    pub logits_hash: String,
}

impl Run {
    /// Milliseconds of a decoded token.
    pub fn ms_per_token(&self) -> f64 {
        mean(&self.details.ms)
    }

    /// Share of the decoding in which the computation waited for reads.
    pub fn wait_share(&self) -> f64 {
        mean(&self.details.wait_ms) / mean(&self.details.ms).max(1e-9)
    }

    /// Share of the needed neurons found in memory while decoding, each counted once.
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

    /// Whether the resident set stayed within the budget; `None` where the system does not tell.
    pub fn within_budget(&self) -> Option<bool> {
        Some(self.memory.peak_rss_bytes? <= self.memory.budget_bytes)
    }
}

/// Mean of some values, 0 without any.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// What became of a run.
pub enum Outcome {
    /// It ended well.
    Done(Box<Run>),
    /// It did not begin, or memory did not suffice: why.
    Refused(String),
}

/// What a run decodes, and how.
#[derive(Clone, Copy)]
pub struct Decoding<'a> {
    /// The text that is continued.
    pub prompt: &'a str,
    /// Tokens to make.
    pub tokens: u32,
    /// How to read from flash.
    pub io: &'a str,
    /// Share of the FFN in memory.
    pub share: f64,
}

impl<'a> Decoding<'a> {
    /// Of the usual prompt, with everything in memory.
    pub fn of(args: &'a BenchArgs, tokens: u32, io: &'a str) -> Self {
        Self {
            prompt: Child::prompt(args),
            tokens,
            io,
            share: 1.0,
        }
    }

    /// As arguments of `run`, and `more` of them.
    pub fn with(&self, more: &[&str]) -> Vec<String> {
        let (tokens, share) = (self.tokens.to_string(), self.share.to_string());
        let own = ["-p", self.prompt, "-n", &tokens, "--io", self.io];
        let all = own.iter().chain(more);
        let mut all: Vec<String> = all.map(|&argument| argument.to_owned()).collect();
        all.extend(["--ffn-resident".to_owned(), share]);
        all
    }
}

/// How runs of a benchmark are started.
pub struct Child {
    program: PathBuf,
    model: Option<PathBuf>,
    common: Vec<OsString>,
}

impl Child {
    /// Runs with these arguments; each continues the prompt with sampled tokens of a fixed seed, as
    /// greedy decoding of a random model goes in circles.
    pub fn new(args: &BenchArgs) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|e| Failure::Child(format!("the path of this program is not known: {e}")))?;
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

    /// The text that is continued unless a command makes its own.
    pub fn prompt(args: &BenchArgs) -> &str {
        args.prompt.as_deref().unwrap_or(PROMPT)
    }

    /// One run, in `cap`'s memory where there is one.
    pub fn run(&self, extra: &[String], cap: Option<&Cap>) -> Result<Outcome, Failure> {
        let mut command = match cap {
            Some(cap) => cap.command(&self.program),
            None => Command::new(&self.program),
        };
        command.arg("point").args(&self.model).args(&self.common);
        let output = (command.args(extra).stdin(Stdio::null()).output())
            .map_err(Failure::file(&self.program))?;
        let said = String::from_utf8_lossy(&output.stderr);
        // What it had to say last is why it ended.
        let why = said.lines().last().unwrap_or("nothing was said");
        let why = why.trim_start_matches("emberflow: ").to_owned();
        match output.status.code() {
            Some(0) => {}
            // Killed by the system, which has no memory to give within the cap.
            None if cap.is_some() => return Ok(Outcome::Refused("killed for memory".into())),
            Some(1) if why.contains("is too small for this model") => {
                return Ok(Outcome::Refused(why));
            }
            Some(2) if why.contains("which is more than the") => {
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
            .map_err(|e| Failure::Child(format!("run {}: its JSON: {e}", extra.join(" "))))?;
        Ok(Outcome::Done(Box::new(run)))
    }
}
