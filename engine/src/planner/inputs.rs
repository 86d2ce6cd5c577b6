//! From an opened container, the options and the saved profiles to a [`Planner`].

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_storage::io::trim_heap;
use emberflow_storage::limits::Limits;
use emberflow_storage::mem;

use super::cost::Shape;
use super::firing::Firing;
use super::rates::Rates;
use super::{BATCHES, Planner, PredictorNeeds, Scratched, chunks, cores};
use crate::Error;
use crate::embedding::Embedding;
use crate::ffn::{Banks, CLUSTER, Ffn, FfnShape, ReadCosts, StoredPredictors, Temperature};
use crate::kv_cache::KvCache;
use crate::memory::{Needs, Residency};
use crate::meta::Quant;
use crate::options::{Options, Phases};
use crate::scratch::Scratch;
use crate::weights::Weights;

/// Bytes of a thread's stack and allocator that a pool thread comes to touch.
const PER_THREAD: u64 = 64 << 10;

/// Bytes per position outside the KV cache: token lists, latencies, the report.
const PER_POSITION: u64 = 48;

impl Planner {
    /// Reads what the plan depends on. `threads` is the number that computes at most. With the
    /// planner comes, by bank, the share of tokens for which each neuron fires; empty without
    /// statistics.
    pub(crate) fn new(
        banks: &Banks,
        c: &ModelConfig,
        quant: &Quant,
        ffn: &FfnShape,
        options: &Options,
        threads: usize,
        stored: Option<&StoredPredictors>,
    ) -> Result<(Self, Vec<Vec<f32>>), Error> {
        // Before the process is measured: what they allocate is a part of it.
        let rates = Rates::saved().unwrap_or_else(|| {
            Rates::assumed(std::thread::available_parallelism().map_or(1, |n| n.get() as u32))
        });
        let most = BATCHES.iter().fold(options.batch, |a, &b| a.max(b));
        let Temperature {
            hot_clusters,
            rates: often,
            again,
        } = Temperature::read(banks, most)?;
        let firing = if often.is_empty() {
            Firing::unknown(banks.count, banks.neurons)
        } else {
            Firing::from_rates(often.iter().map(Vec::as_slice), &again)
        };
        let device = banks.read_cost(options.io, Limits::PRODUCTION.depth);
        // A buffer is empty while its cluster is computed.
        let stream = banks.read_cost(options.io, (banks.stream_depth() / 2).max(1));
        let costs = banks.read_costs(&device, firing.share());
        let prompt = match options.prompt {
            0 => options.context,
            tokens => tokens.min(options.context),
        };
        let scratch: Vec<Scratched> = chunks(options.chunk, prompt)
            .into_iter()
            .map(|chunk| Scratched {
                chunk,
                bytes: scratch_bytes(banks, c, ffn, options, threads, chunk),
                predictor: stored.map_or(0, |s| s.memory(chunk.max(options.batch))),
            })
            .collect();
        let least = scratch.first().copied().unwrap_or_default();
        let hot = (hot_clusters.get(options.batch.max(1) - 1)).map_or(&[][..], |h| h);
        let needs = needs(banks, c, ffn, options, hot, costs, least)?;
        tracing::info!(device = %device.origin(), machine_measured = rates.measured, "profiles");
        let planner = Self {
            needs,
            scratch,
            shape: shape(banks, c, quant, ffn, options),
            firing: if ffn.dense {
                Firing::always(banks.count, banks.neurons)
            } else {
                firing
            },
            rates,
            device,
            stream,
            threads,
            threads_fixed: options.threads != 0,
            context: options.context,
            hot_clusters,
            batch: options.batch,
            policy: options.policy,
            predictor: match stored {
                Some(stored) if banks.predicts => PredictorNeeds {
                    bytes: stored.memory(1),
                    named: 1.0 / stored.quality.map_or(0.6, |q| q.precision()).max(0.05),
                },
                _ => PredictorNeeds::default(),
            },
            gates_first: match stored {
                Some(stored) if banks.predicts => {
                    gates_first_of_wanted(options.phases, costs, stored)
                }
                _ => true,
            },
            io_core: options.io_core.or_else(|| cores::io_core(threads)),
        };
        Ok((planner, often))
    }

    /// What reads cost, for the choices that are made while the model runs.
    pub(crate) fn read_costs(&self, banks: &Banks) -> ReadCosts {
        banks.read_costs(&self.device, self.firing.share())
    }
}

/// Whether the Gate part of a neuron that a predictor wants is read before the rest.
fn gates_first_of_wanted(phases: Phases, costs: ReadCosts, stored: &StoredPredictors) -> bool {
    match phases {
        Phases::One => false,
        Phases::Two => true,
        Phases::Auto => costs.gate_first(stored.quality.map_or(1.0, |q| q.precision())),
    }
}

fn shape(banks: &Banks, c: &ModelConfig, quant: &Quant, ffn: &FfnShape, o: &Options) -> Shape {
    let dtype = |name: &str| DType::parse(name).unwrap_or(DType::F32);
    let attention = dtype(&quant.attention);
    let d = c.d_model as usize;
    let q = c.heads as usize * c.head_dim as usize;
    let kv = c.kv_heads as usize * c.head_dim as usize;
    let bytes = (q + 2 * kv) * attention.row_bytes(d) + d * attention.row_bytes(q);
    let g = banks.container.geometry();
    let positions = o.context.max(1) as u64;
    let kv_bytes = KvCache::bytes_for(o.kv, c, o.context) / u64::from(c.layers.max(1)) / positions;
    Shape {
        layers: banks.count,
        d,
        vocab: c.vocab as usize,
        neurons: banks.neurons,
        ffn: ffn.format.dtype,
        attention,
        head: dtype(&quant.embedding),
        attention_rows: (q + 2 * kv + d) as f64,
        attention_bytes: bytes as f64,
        kv_bytes: kv_bytes as f64,
        gate_len: ffn.format.gate_len() as f64,
        rest_len: ffn.format.rest_len() as f64,
        gate_read: g.gate_read().into(),
        rest_read: (g.stride - g.rest_read()).into(),
        cluster_read: banks.stream_len() as u64,
        stride: g.stride.into(),
        dense: ffn.dense,
    }
}

/// Bytes of working memory for chunks of `chunk` tokens.
fn scratch_bytes(
    banks: &Banks,
    c: &ModelConfig,
    shape: &FfnShape,
    o: &Options,
    threads: usize,
    chunk: usize,
) -> u64 {
    let (batch, rows) = (o.batch as u64, chunk.max(o.batch));
    let lanes = threads as u64 + 2;
    let trace = lanes * o.trace as u64 * size_of::<emberflow_storage::trace::Span>() as u64;
    let parts = [
        Scratch::bytes_for(c, rows, o.batch, threads),
        Ffn::bytes_for(shape, rows, threads, o.observe),
        banks.io_bytes(chunk),
        PER_THREAD * threads as u64,
        PER_POSITION * o.context as u64 * batch,
        // a candidate list of each sampler
        12 * u64::from(c.vocab) * batch,
        trace,
        o.reserve,
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

fn needs(
    banks: &Banks,
    c: &ModelConfig,
    shape: &FfnShape,
    o: &Options,
    hot: &[u32],
    costs: ReadCosts,
    least: Scratched,
) -> Result<Needs, Error> {
    // What was freed meanwhile would be counted as the process's, and again as what takes its place.
    trim_heap();
    // Without them the budget could not be kept.
    let (Some(process), Some(process_peak)) = (mem::rss(), mem::peak_rss()) else {
        return Err(Error::NoMemoryFacts);
    };
    let two_phases = match o.phases {
        Phases::Auto => costs.two_phases(CLUSTER),
        Phases::One => false,
        Phases::Two => true,
    };
    let (rows_kept, embedding) = Embedding::bytes_for(banks, c);
    Ok(Needs {
        process,
        process_peak,
        fixed: Weights::bytes_for(&banks.container, c) + rows_kept,
        embedding,
        scales: banks.resident_scales(),
        predictor: least.predictor,
        predicts: banks.predicts,
        kv: KvCache::bytes_for(o.kv, c, o.context).saturating_mul(o.batch as u64),
        scratch: least.bytes,
        gates: banks.gate_bytes(),
        gate_len: shape.format.gate_len() as u64,
        rest_len: shape.format.rest_len() as u64,
        whole_slot: banks.slot_charge(Residency::Bundles),
        rest_slot: banks.slot_charge(Residency::GatesResident),
        neurons: banks.total(),
        banks: banks.count as u64,
        cluster: CLUSTER as u64,
        clusters: banks.total_clusters(),
        hot_clusters: hot.iter().map(|&n| u64::from(n)).sum(),
        two_phases: !shape.dense && two_phases,
        min_slots: banks.min_slots(),
        gates_help: !shape.dense,
    })
}
