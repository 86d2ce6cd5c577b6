//! Metrics of a run: the JSON of `run --json`, and the summary.

use emberflow_storage::mem;
use serde::Serialize;

use super::details::Details;
use super::sampling::SamplingReport;
use super::seen::Seen;
use super::speculation::SpeculationReport;
use crate::counters::Counters;
use crate::drafts::DraftTotals;
use crate::engine::Engine;
use crate::error::Error;
use crate::lane::LaneReport;
use crate::memory::TABLES;
use crate::planner::{Limit, Plan};
use crate::run::{Batch, Energy, Generation, Repetition, Stop};
use crate::store::Foreseen;

/// Metrics of one run. Keys are a contract: add, never rename.
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
    /// Generated tokens per second without the first; in a batch, the sum of all continuations.
    pub decode_tokens_per_s: f64,
    /// Time to the first token.
    pub ttft_ms: f64,
    /// Time per generated token without the first; in a batch, per pass.
    pub latency_ms: Latency,
    /// Memory by purpose.
    pub memory: MemoryReport,
    /// Reads of neuron bundles after warm-up.
    pub io: IoReport,
    /// Cache metrics after warm-up.
    pub cache: CacheReport,
    /// Prefetched experts; absent in models without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_ahead: Option<ReadAheadReport>,
    /// Who computed beside the compute threads, if anyone did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<LaneReport>,
    /// Active sets.
    pub sparsity: SparsityReport,
    /// Drafts that were checked; absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationReport>,
    /// Metrics of the second half of the generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled: Option<Settled>,
    /// The plan's forecast.
    pub plan: Expected,
    /// Energy of the whole machine; absent without a meter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<EnergyReport>,
    /// Hash over the logits of every generated token.
    pub logits_hash: String,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: String,
    /// The ablation.
    pub policy: &'static str,
    /// Why the generation ended: `eos`, `length`, `context` or `caller`.
    pub stop: &'static str,
    /// The loop in which the text ends; absent if it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition: Option<Repetition>,
    /// Sampling parameters, if the caller passed them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<SamplingReport>,
    /// All continuations of a batch; the rest of the report covers the best one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_of: Option<BestOf>,
    /// Per-token metrics, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
}

/// Continuations of a batch.
#[derive(Debug, Clone, Serialize)]
pub struct BestOf {
    /// Index of the best one.
    pub best: usize,
    /// In the order of seeds.
    pub samples: Vec<SampleReport>,
}

/// One continuation.
#[derive(Debug, Clone, Serialize)]
pub struct SampleReport {
    /// Its sampling seed.
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

/// The second half of the generated tokens, with warm caches: comparable to the forecast.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Settled {
    /// Number of tokens.
    pub tokens: usize,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Milliseconds per token stalled on reads.
    pub wait_ms: f64,
    /// Bytes read per token.
    pub bytes_per_token: f64,
    /// Hit rate of the cold region.
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
pub struct MemoryReport {
    /// The budget.
    pub budget_bytes: u64,
    /// Peak resident set of the process (VmHWM); `null` if unknown.
    pub peak_rss_bytes: Option<u64>,
    /// Resident weights: attention, norms, head, scales.
    pub fixed: u64,
    /// The embedding; 0 if its rows are read on demand, or if it is the head, too.
    pub embedding: u64,
    /// The table of inputs by layer (Gemma 3n and 4); 0 without one, or if its rows are read on demand.
    pub layer_inputs: u64,
    /// The table of rows for the last tokens (Qwen3.8-Flash-Next); the same.
    pub ngrams: u64,
    /// Resident Gate rows.
    pub gates: u64,
    /// Hot clusters.
    pub hot: u64,
    /// Cold slots.
    pub cold: u64,
    /// Slots for tiles.
    pub tiles: u64,
    /// Keys and values.
    pub kv: u64,
    /// Predictor weights.
    pub predictor: u64,
    /// Activations and buffers.
    pub scratch: u64,
    /// Resident share of the FFN's bytes, 0 to 1.
    pub ffn_resident_share: f64,
}

/// Reads during the run.
#[derive(Debug, Clone, Serialize)]
pub struct IoReport {
    /// Name of the I/O engine.
    pub engine: String,
    /// Bytes read from flash.
    pub bytes_read: u64,
    /// Read requests.
    pub reads: u64,
    /// Throughput in GB/s while the device was busy.
    pub gb_per_s: f64,
    /// Share of the device's busy time hidden behind computation.
    pub overlap: f64,
    /// Time stalled on reads.
    pub wait_ms: f64,
    /// Stall time as a share of the run.
    pub wait_share: f64,
}

/// Hit rates.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct CacheReport {
    /// Share of the needed neuron vectors that was resident.
    pub hit_rate: f64,
    /// Share of the needed neurons in the hot region.
    pub hot_hit_rate: f64,
    /// Share of the other needed neurons in the cold region.
    pub cold_hit_rate: f64,
    /// Prefetched neurons; they count as misses.
    pub foreseen: u64,
    /// Precision: share of them that was needed.
    pub foreseen_needed: f64,
    /// Neurons evicted.
    pub evictions: u64,
}

/// Experts prefetched on the guess of the previous layer's router, since the engine was opened.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadAheadReport {
    /// Share of the passes of one token that prefetched experts.
    pub passes_share: f64,
    /// Experts guessed; the share of them that was visited (`precision`).
    pub guessed: u64,
    /// See `guessed`.
    pub precision: f64,
    /// Clusters prefetched; the share of them that was used (`used_share`).
    pub clusters: u64,
    /// See `clusters`.
    pub used_share: f64,
}

impl ReadAheadReport {
    fn of(seen: Foreseen) -> Self {
        Self {
            passes_share: ratio(seen.ahead as f64, seen.passes as f64),
            guessed: seen.guessed,
            precision: ratio(seen.right as f64, seen.guessed as f64),
            clusters: seen.clusters,
            used_share: ratio(seen.used as f64, seen.clusters as f64),
        }
    }
}

/// Active sets of the run.
#[derive(Debug, Clone, Serialize)]
pub struct SparsityReport {
    /// `dense`, `exact` or `predicted`.
    pub mode: &'static str,
    /// Reason for the mode.
    pub reason: String,
    /// Share of (neuron, token) pairs whose gate fired.
    pub active_share: f64,
    /// Share of (neuron, token) pairs whose gate was computed.
    pub looked_at_share: f64,
    /// Recall of the predictors on the text they were evaluated on; `null` if unknown.
    pub predictor_recall: Option<f64>,
}

/// Energy of the run.
#[derive(Debug, Clone, Serialize)]
pub struct EnergyReport {
    /// `rapl` with the packages, or `battery` with its name.
    pub source: String,
    /// From the start to the last token.
    pub joules: f64,
    /// Per generated token without the first; `null` without further tokens.
    pub joules_per_token: Option<f64>,
}

/// Forecast of the plan.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Expected {
    /// Generated tokens per second.
    pub expected_tokens_per_s: f64,
    /// Prompt tokens per second, for prompts of whole chunks.
    pub expected_prefill_tokens_per_s: f64,
    /// Expected hit rate of the cold region.
    pub expected_cold_hit_rate: f64,
    /// Bytes read per generated token.
    pub expected_bytes_per_token: f64,
    /// Milliseconds per token of computation; stalled on reads (`expected_wait_ms`).
    pub expected_compute_ms: f64,
    /// See `expected_compute_ms`.
    pub expected_wait_ms: f64,
    /// The limiting resource.
    pub limit: Limit,
    /// Prompt tokens per pass.
    pub chunk: usize,
    /// Whether machine, device and activation statistics were measured, not assumed.
    pub measured: bool,
    /// The most relevant missing measurement; `null` if the forecast is reliable.
    pub doubt: Option<&'static str>,
    /// Number of this run's first tokens on which the forecast is based, because profiles are
    /// missing or far off; 0 if it is based on the profiles.
    pub by_first_tokens: usize,
    /// Stall per read in the first tokens, as a multiple of the plan's value; `null` with too few
    /// reads or tokens.
    pub disk_times: Option<f64>,
    /// The same for the computation of a token.
    pub compute_times: Option<f64>,
    /// Whether the disk's profile is far from the measured stalls; the machine's profile
    /// (`machine_far`).
    pub disk_far: bool,
    /// See `disk_far`.
    pub machine_far: bool,
}

/// Timings of a generation, in milliseconds.
struct ReportTimes {
    first_ms: f64,
    decode_ms: f64,
    /// Latencies after the first token, ascending.
    ms: Vec<f64>,
}

impl ReportTimes {
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

impl MemoryReport {
    fn of(engine: &Engine) -> Self {
        let (plan, needs) = (engine.memory(), engine.needs());
        let [embedding, layer_inputs, ngrams] = TABLES.map(|table| plan.ledger.held(table));
        Self {
            budget_bytes: plan.budget(),
            peak_rss_bytes: mem::peak_rss(),
            fixed: needs.fixed + needs.scales,
            embedding,
            layer_inputs,
            ngrams,
            gates: plan.ledger.held("gates"),
            hot: plan.ledger.held("hot"),
            cold: plan.ledger.held("cold"),
            tiles: plan.ledger.held("tiles"),
            kv: needs.kv,
            predictor: needs.predictor,
            scratch: needs.scratch,
            ffn_resident_share: plan.ffn_resident_share(needs),
        }
    }
}

impl IoReport {
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

impl CacheReport {
    fn of(engine: &Engine, done: &Counters) -> Self {
        let hits = done.hot_hits + done.hits;
        let needed = hits + done.misses;
        let memory = engine.memory();
        let gate_rows = done.possible * memory.gate_banks / memory.banks.max(1);
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
    fn of(plan: &Plan, chunk: usize) -> Self {
        let decode = &plan.decode;
        Self {
            expected_tokens_per_s: decode.tokens_per_s,
            expected_prefill_tokens_per_s: plan.prefill.tokens_per_s,
            expected_cold_hit_rate: decode.cold_hit_rate,
            expected_bytes_per_token: decode.bytes_read,
            expected_compute_ms: decode.compute_ms,
            expected_wait_ms: decode.wait_ms,
            limit: decode.limit,
            chunk,
            measured: plan.basis.all_measured(),
            doubt: plan.basis.doubt(decode),
            by_first_tokens: 0,
            disk_times: None,
            compute_times: None,
            disk_far: false,
            machine_far: false,
        }
    }

    /// The plan's forecast, or the forecast corrected by this run's first tokens if profiles are
    /// missing, doubtful or far off.
    fn after(engine: &Engine, generation: &Generation) -> Result<Self, Error> {
        let plan = engine.plan()?;
        let expected = Self::of(&plan, engine.prompt_chunk());
        let Some(seen) = Seen::of(generation, &plan.decode) else {
            return Ok(expected);
        };
        let basis = &plan.basis;
        let expected = Self {
            disk_times: seen.disk(&plan.decode),
            compute_times: Some(seen.compute),
            disk_far: basis.device_measured
                && !basis.device_doubtful
                && seen.disk_is_far(&plan.decode),
            machine_far: basis.machine_measured && seen.machine_is_far(),
            ..expected
        };
        let fits = expected.doubt.is_none() && !seen.is_off(&plan.decode);
        // Without statistics the hit rate is unknown at any speed.
        if fits || !basis.statistics || basis.neurons_assumed {
            return Ok(expected);
        }
        let corrected = seen.correct(&plan.decode);
        Ok(Self {
            expected_tokens_per_s: corrected.tokens_per_s,
            expected_compute_ms: corrected.compute_ms,
            expected_wait_ms: corrected.wait_ms,
            by_first_tokens: seen.tokens,
            doubt: None,
            ..expected
        })
    }
}

impl Report {
    /// The metrics of `generation` by `engine`. `text` is the decoded output.
    ///
    /// # Errors
    /// Those of the forecast.
    pub fn new(engine: &Engine, generation: &Generation, text: String) -> Result<Self, Error> {
        let times = ReportTimes::of(generation);
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
            memory: MemoryReport::of(engine),
            io: IoReport::of(engine, &done, times.first_ms + times.decode_ms),
            cache: CacheReport::of(engine, &done),
            read_ahead: engine.foreseen().map(ReadAheadReport::of),
            sparsity: SparsityReport {
                mode: engine.sparsity().name(),
                reason: engine.sparsity_reason().to_string(),
                active_share: done.active_share(),
                looked_at_share: done.looked_at_share(),
                predictor_recall: engine.predictor_recall(),
            },
            speculation: SpeculationReport::of(generation),
            settled: settled(generation),
            plan: Expected::after(engine, generation)?,
            energy: energy(generation.energy.as_ref(), times.ms.len()),
            logits_hash: hash(generation.logits_hash),
            threads: engine.threads(),
            isa: engine.cpu().name().to_string(),
            device: engine.lane(),
            policy: engine.options().lab.ablation.name(),
            stop: name(generation.stop),
            repetition: Repetition::of(&generation.tokens),
            sampling: None,
            best_of: None,
            details: None,
        })
    }

    /// The metrics of a batch; single-sequence metrics are those of the best continuation. `texts`
    /// are the decoded outputs in order.
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
            drafts: DraftTotals::default(),
            logits_hash: winner.logits_hash,
            stop: winner.stop,
            counters: batch.counters,
            steps: Vec::new(),
            energy: batch.energy.clone(),
            settled: None,
            // Forecasts are for one text.
            early: None,
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

/// Energy, if measured. `further`: tokens generated after the first.
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
        Stop::Complete => "complete",
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
