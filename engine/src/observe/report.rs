//! What a run says about itself: the JSON of `run --json` and the summary.

use emberflow_storage::mem;
use serde::Serialize;

use super::details::Details;
use crate::counters::Counters;
use crate::engine::Engine;
use crate::error::Error;
use crate::planner::{Limit, Plan};
use crate::run::{Batch, Energy, Generation, Stop};

/// Numbers of one run. Keys are a contract: add, never rename.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the model.
    pub model: String,
    /// Generated text.
    pub text: String,
    /// Generated tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of generated tokens.
    pub generated_tokens: usize,
    /// Prompt tokens per second.
    pub prefill_tokens_per_s: f64,
    /// Generated tokens per second, the first one not counted; those of all texts drawn together.
    pub decode_tokens_per_s: f64,
    /// Time to the first token.
    pub ttft_ms: f64,
    /// Time per generated token, the first one not counted; time per pass where texts are drawn
    /// together.
    pub latency_ms: Latency,
    /// Where the memory went.
    pub memory: Memory,
    /// Reads of neuron bundles after the start-up fill.
    pub io: Io,
    /// Cache behaviour after the start-up fill.
    pub cache: Cache,
    /// Which neurons were computed.
    pub sparsity: SparsityReport,
    /// The second half of the generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled: Option<Settled>,
    /// What the plan expected.
    pub plan: Expected,
    /// What the machine used, everything else that ran on it included; absent where nothing tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<EnergyReport>,
    /// Hash over the logits of every generated token.
    pub logits_hash: String,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Mechanisms in use.
    pub policy: &'static str,
    /// Why the generation ended: `eos`, `length`, `context` or `caller`.
    pub stop: &'static str,
    /// All texts that were drawn together; the rest of the report is about the best one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_of: Option<BestOf>,
    /// Each token by itself, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
}

/// Texts that were drawn together.
#[derive(Debug, Clone, Serialize)]
pub struct BestOf {
    /// Place of the best one in the list.
    pub best: usize,
    /// In the order of their seeds.
    pub samples: Vec<SampleReport>,
}

/// One of several texts.
#[derive(Debug, Clone, Serialize)]
pub struct SampleReport {
    /// Seed of its random choices.
    pub seed: u64,
    /// Mean log-probability of its tokens.
    pub score: f64,
    /// Generated text.
    pub text: String,
    /// Generated tokens.
    pub tokens: Vec<u32>,
    /// Hash over the logits of every generated token.
    pub logits_hash: String,
    /// Why it ended.
    pub stop: &'static str,
}

/// The second half of the generated tokens, for which caches hold what the text needs: what a plan
/// expects is this.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Settled {
    /// Tokens of it.
    pub tokens: usize,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Milliseconds per token in which the computation waited for reads.
    pub wait_ms: f64,
    /// Bytes read per token.
    pub bytes_per_token: f64,
    /// Share of the needed neurons outside the hot region that the cold one held.
    pub cold_hit_rate: f64,
}

/// Milliseconds per token.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// Bytes by purpose.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Memory {
    /// The budget.
    pub budget_bytes: u64,
    /// Highest resident set of the process (VmHWM); `null` when the system does not tell.
    pub peak_rss_bytes: Option<u64>,
    /// Resident weights: attention, norms, head, scales.
    pub fixed: u64,
    /// Rows of the embedding; 0 where they are read when needed.
    pub embedding: u64,
    /// Gate rows that stay resident.
    pub gates: u64,
    /// Clusters of hot neurons.
    pub hot: u64,
    /// Cache slots for neurons.
    pub cold: u64,
    /// Keys and values.
    pub kv: u64,
    /// Predictor weights.
    pub predictor: u64,
    /// Activations and buffers.
    pub scratch: u64,
    /// Share of the FFN's bytes that is resident, 0 to 1.
    pub ffn_resident_share: f64,
}

/// Reads during the run.
#[derive(Debug, Clone, Serialize)]
pub struct Io {
    /// Engine that did the reads.
    pub engine: String,
    /// Bytes read from flash.
    pub bytes_read: u64,
    /// Read requests.
    pub reads: u64,
    /// Bytes per second while the device had something to do, in GB/s.
    pub gb_per_s: f64,
    /// Share of the device's busy time that was hidden behind computation.
    pub overlap: f64,
    /// Time the computation waited for reads.
    pub wait_ms: f64,
    /// That time as a share of the run.
    pub wait_share: f64,
}

/// Hits among neurons asked for.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Cache {
    /// Share of neuron vectors found in memory.
    pub hit_rate: f64,
    /// Share of needed neurons that were in the hot region.
    pub hot_hit_rate: f64,
    /// Share of the other needed neurons that were in the cold region.
    pub cold_hit_rate: f64,
    /// Neurons read ahead by a predictor's guess; they count as misses.
    pub foreseen: u64,
    /// Share of these that were needed.
    pub foreseen_needed: f64,
    /// Neurons evicted.
    pub evictions: u64,
}

/// Which neurons were computed.
#[derive(Debug, Clone, Serialize)]
pub struct SparsityReport {
    /// `dense`, `exact` or `predicted`.
    pub mode: &'static str,
    /// Why that mode.
    pub reason: String,
    /// Share of (neuron, token) pairs whose gate fired.
    pub active_share: f64,
    /// Share of (neuron, token) pairs whose gate was computed.
    pub looked_at_share: f64,
    /// Recall of the predictors on the text they were measured on; `null` without.
    pub predictor_recall: Option<f64>,
}

/// Energy of the run.
#[derive(Debug, Clone, Serialize)]
pub struct EnergyReport {
    /// `rapl` with the processor packages that were added up, or `battery` with its name.
    pub source: String,
    /// From the start to the last token.
    pub joules: f64,
    /// Per generated token, the first one not counted; `null` where there is only that one.
    pub joules_per_token: Option<f64>,
}

/// What the plan expected of the run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Expected {
    /// Generated tokens per second.
    pub expected_tokens_per_s: f64,
    /// Prompt tokens per second, for prompts of whole chunks.
    pub expected_prefill_tokens_per_s: f64,
    /// Share of the needed neurons outside the hot region that the cold one holds.
    pub expected_cold_hit_rate: f64,
    /// Bytes read per generated token.
    pub expected_bytes_per_token: f64,
    /// Milliseconds of a token in which something is computed, and in which it waits for reads.
    pub expected_compute_ms: f64,
    /// See `expected_compute_ms`.
    pub expected_wait_ms: f64,
    /// The limiting resource.
    pub limit: Limit,
    /// Prompt tokens computed at once.
    pub chunk: usize,
    /// Whether machine and device were measured and the model has statistics; else the numbers
    /// above rest on assumptions.
    pub measured: bool,
    /// What was not measured and would change the numbers above much; `null` when they can be
    /// relied on.
    pub doubt: Option<&'static str>,
}

/// Milliseconds of a generation.
struct Times {
    first_ms: f64,
    decode_ms: f64,
    /// By token after the first one, ascending.
    ms: Vec<f64>,
}

impl Times {
    fn of(generation: &Generation) -> Self {
        let latencies = generation.latencies.iter();
        let mut ms: Vec<f64> = latencies.map(|l| l.as_secs_f64() * 1e3).collect();
        let decode_ms = ms.iter().sum();
        ms.sort_by(f64::total_cmp);
        Self {
            first_ms: generation.first_token.as_secs_f64() * 1e3,
            decode_ms,
            ms,
        }
    }
}

impl Memory {
    fn of(engine: &Engine) -> Self {
        let (plan, needs) = (engine.memory(), engine.needs());
        Self {
            budget_bytes: plan.budget(),
            peak_rss_bytes: mem::peak_rss(),
            fixed: needs.fixed + needs.scales,
            embedding: plan.ledger.held("embedding"),
            gates: plan.ledger.held("gates"),
            hot: plan.ledger.held("hot"),
            cold: plan.ledger.held("cold"),
            kv: needs.kv,
            predictor: needs.predictor,
            scratch: needs.scratch,
            ffn_resident_share: plan.ffn_resident_share(needs),
        }
    }
}

impl Io {
    fn of(engine: &Engine, done: &Counters, run_ms: f64) -> Self {
        let wait_ms = done.wait_ns as f64 / 1e6;
        let busy_s = done.busy_ns as f64 / 1e9;
        Self {
            engine: engine.io_name().to_string(),
            bytes_read: done.bytes_read,
            reads: done.reads,
            gb_per_s: ratio(done.bytes_read as f64 / 1e9, busy_s),
            overlap: if busy_s > 0.0 {
                (1.0 - wait_ms / 1e3 / busy_s).max(0.0)
            } else {
                1.0
            },
            wait_ms,
            wait_share: ratio(wait_ms, run_ms),
        }
    }
}

impl Cache {
    fn of(engine: &Engine, done: &Counters) -> Self {
        let hits = done.hot_hits + done.hits;
        let needed = hits + done.misses;
        let gate_rows = match engine.memory().gates_resident() {
            true => done.possible,
            false => 0,
        };
        Self {
            hit_rate: ratio(
                (gate_rows + 2 * hits) as f64,
                (gate_rows + 2 * needed) as f64,
            ),
            hot_hit_rate: ratio(done.hot_hits as f64, needed as f64),
            cold_hit_rate: ratio(done.hits as f64, (done.hits + done.misses) as f64),
            foreseen: done.guessed,
            foreseen_needed: ratio(done.guessed_needed as f64, done.guessed as f64),
            evictions: done.evictions,
        }
    }
}

impl Expected {
    fn of(plan: &Plan) -> Self {
        let decode = &plan.decode;
        Self {
            expected_tokens_per_s: decode.tokens_per_s,
            expected_prefill_tokens_per_s: plan.prefill.tokens_per_s,
            expected_cold_hit_rate: decode.cold_hit_rate,
            expected_bytes_per_token: decode.bytes_read,
            expected_compute_ms: decode.compute_ms,
            expected_wait_ms: decode.wait_ms,
            limit: decode.limit,
            chunk: plan.chunk,
            measured: plan.basis.all_measured(),
            doubt: plan.basis.doubt(decode),
        }
    }
}

impl Report {
    /// The numbers of `generation`, made by `engine`. `text` is the decoded output.
    ///
    /// # Errors
    /// Those of the forecast that it is held against.
    pub fn new(engine: &Engine, generation: &Generation, text: String) -> Result<Self, Error> {
        let times = Times::of(generation);
        let done = generation.counters;
        Ok(Self {
            model: engine.config().name.clone(),
            text,
            tokens: generation.tokens.clone(),
            prompt_tokens: generation.prompt_tokens,
            generated_tokens: generation.tokens.len(),
            prefill_tokens_per_s: ratio(generation.prompt_tokens as f64, times.first_ms / 1e3),
            decode_tokens_per_s: ratio(times.ms.len() as f64, times.decode_ms / 1e3),
            ttft_ms: times.first_ms,
            latency_ms: Latency {
                mean: ratio(times.decode_ms, times.ms.len() as f64),
                p50: percentile(&times.ms, 0.50),
                p90: percentile(&times.ms, 0.90),
                p99: percentile(&times.ms, 0.99),
            },
            memory: Memory::of(engine),
            io: Io::of(engine, &done, times.first_ms + times.decode_ms),
            cache: Cache::of(engine, &done),
            sparsity: SparsityReport {
                mode: engine.sparsity().name(),
                reason: engine.sparsity_reason().to_string(),
                active_share: done.active_share(),
                looked_at_share: done.looked_at_share(),
                predictor_recall: engine.predictor_recall(),
            },
            settled: settled(generation),
            plan: Expected::of(&engine.plan()?),
            energy: energy(generation.energy.as_ref(), times.ms.len()),
            logits_hash: hash(generation.logits_hash),
            threads: engine.threads(),
            isa: engine.cpu().name().to_string(),
            policy: engine.ablation().name(),
            stop: name(generation.stop),
            best_of: None,
            details: None,
        })
    }

    /// The numbers of texts that were drawn together, about the best one where they are about
    /// one. `texts` are the decoded outputs in order.
    ///
    /// # Errors
    /// As [`Report::new`].
    pub fn of_batch(engine: &Engine, batch: &Batch, mut texts: Vec<String>) -> Result<Self, Error> {
        let best = batch.best();
        let winner = &batch.samples[best];
        let generation = Generation {
            tokens: winner.tokens.clone(),
            prompt_tokens: batch.prompt_tokens,
            first_token: batch.first_token,
            latencies: batch.latencies.clone(),
            logits_hash: winner.logits_hash,
            stop: winner.stop,
            counters: batch.counters,
            steps: Vec::new(),
            energy: batch.energy.clone(),
            settled: None,
        };
        texts.resize(batch.samples.len(), String::new());
        let mut report = Self::new(engine, &generation, texts[best].clone())?;
        let seconds: f64 = batch.latencies.iter().map(|l| l.as_secs_f64()).sum();
        let further = batch.tokens().saturating_sub(batch.samples.len());
        report.decode_tokens_per_s = ratio(further as f64, seconds);
        report.energy = energy(batch.energy.as_ref(), further);
        let samples = batch.samples.iter().zip(texts);
        report.best_of = Some(BestOf {
            best,
            samples: samples
                .map(|(sample, text)| SampleReport {
                    seed: sample.seed,
                    score: sample.score(),
                    text,
                    tokens: sample.tokens.clone(),
                    logits_hash: hash(sample.logits_hash),
                    stop: name(sample.stop),
                })
                .collect(),
        });
        Ok(report)
    }
}

/// Energy, where it was told; `further` tokens were generated after the first.
fn energy(energy: Option<&Energy>, further: usize) -> Option<EnergyReport> {
    let energy = energy?;
    Some(EnergyReport {
        source: energy.source.clone(),
        joules: energy.prefill_joules + energy.decode_joules,
        joules_per_token: (further > 0).then(|| energy.decode_joules / further as f64),
    })
}

/// The second half of a generation.
fn settled(generation: &Generation) -> Option<Settled> {
    let (before, done) = generation.settled?;
    let times = generation.latencies.get(before..)?;
    let tokens = times.len();
    let seconds: f64 = times.iter().map(std::time::Duration::as_secs_f64).sum();
    (tokens > 0).then(|| Settled {
        tokens,
        tokens_per_s: ratio(tokens as f64, seconds),
        wait_ms: done.wait_ns as f64 / 1e6 / tokens as f64,
        bytes_per_token: done.bytes_read as f64 / tokens as f64,
        cold_hit_rate: ratio(done.hits as f64, (done.hits + done.misses) as f64),
    })
}

fn hash(hash: u64) -> String {
    format!("{hash:016x}")
}

fn name(stop: Stop) -> &'static str {
    match stop {
        Stop::Eos => "eos",
        Stop::Length => "length",
        Stop::Context => "context",
        Stop::Caller => "caller",
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// Nearest-rank percentile of an ascending list; 0 when empty.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let rank = (p * sorted.len() as f64).ceil() as usize;
    sorted
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or_default()
}
