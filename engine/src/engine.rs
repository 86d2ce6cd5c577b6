//! [`Engine`]: opens a model under a budget, runs passes, changes the budget.

use std::sync::Arc;

use emberflow_kernels::{Compute, Cpu, with_scale_per_token};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;
use emberflow_storage::trace::{Trace, Tracer};

use crate::ablation::{Ablation, Policy};
use crate::cluster::LEAST_BUFFERS;
use crate::counters::{Counters, nanoseconds};
use crate::drafts::{Draft, DraftTotals, Drafts, Speculation};
use crate::error::Error;
use crate::ffn::{Ffn, FfnRoom};
use crate::first_tokens::FirstTokens;
use crate::forward::embedding::{Embedding, hold_tables};
use crate::forward::pass::Pass;
use crate::forward::router_ahead::RouterAhead;
use crate::forward::scratch_room::{ScratchRoom, product_room};
use crate::forward::specials::Specials;
use crate::forward::streamed::Streamed;
use crate::forward::streams;
use crate::forward::weights::Weights;
use crate::forward::{AttentionObserver, Between, Decoder, FfnObserver, Hooks, StreamRows, Times};
use crate::lane::{Hold, HostMatrix, Lane, Sharing};
use crate::matrix::Matrix;
use crate::memory::{MemoryPlan, Needs};
use crate::mixer::state_shape;
use crate::model::{Model, Text};
use crate::open::{Parts, compute};
use crate::options::{Options, Sparsity};
use crate::planner::cores::compute_cores;
use crate::planner::{Candidates, Division, Plan, Planner};
use crate::room::{LongChunk, Rooms, thread_floats};
use crate::rope::Ropes;
use crate::sparsity::SparsityChoice;
use crate::state::{Sequence, Span, StatePool};
use crate::store::{Foreseen, LayerResidency, Layout, NeuronStore, StoreSetup, region_memory};
use crate::thread_buffer;
use crate::tiles::{TileLayout, TileStore};

/// Rows whose logits the caller wants. A pass has one row per token, span after span.
pub enum Logits<'a> {
    /// None.
    None,
    /// The last row, read with [`Engine::logits`].
    Last,
    /// Every row, passed to the function as `(row, logits)`.
    Each(&'a mut dyn FnMut(usize, &[f32])),
}

/// An open model.
pub struct Engine {
    pub(crate) decoder: Decoder,
    pool: StatePool,
    /// The pass of [`Engine::forward`] and of a stepper.
    pub(crate) pass: Pass,
    text: Text,
    pub(crate) options: Options,
    pub(crate) planner: Planner,
    pub(crate) first_tokens: FirstTokens,
    pub(crate) drafts: Drafts,
    pub(crate) division: Division,
    /// The division for decode, while that for a prompt is in use.
    pub(crate) usual: Option<Box<Division>>,
    /// The lane had no memory for longer prompt chunks.
    pub(crate) short_prompts: bool,
    pub(crate) rooms: Rooms,
    /// The longest prompt chunk for which memory was divided.
    pub(crate) longest: Option<LongChunk>,
    choice: SparsityChoice,
    /// Recall of the predictors in use, as measured when they were trained.
    recall: Option<f64>,
}

impl Engine {
    /// Opens `model`: divides the budget, loads resident weights and fills the regions with the
    /// hottest neurons.
    ///
    /// # Errors
    /// An inconsistent container, a failed read or checksum, or a budget below the smallest
    /// feasible one (which the error names).
    pub fn open(model: Model, options: Options) -> Result<Self, Error> {
        Self::open_watched(model, options, |_| Ok(()))
    }

    /// As [`Engine::open`]. Before allocating, calls `planned` with the division of the memory,
    /// which it may reject.
    ///
    /// # Errors
    /// As [`Engine::open`], and what `planned` returns.
    pub fn open_watched<E: From<Error>>(
        model: Model,
        options: Options,
        planned: impl FnOnce(&MemoryPlan) -> Result<(), E>,
    ) -> Result<Self, E> {
        let opening = Opening::of(Parts::of(model, options)?)?;
        planned(&opening.division.memory)?;
        Ok(opening.open(None)?)
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    /// Metadata, tokenizer and chat template.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// An empty sequence with the options' context length. The plan reserves memory for
    /// [`Options::batch`] of them.
    ///
    /// # Errors
    /// [`Error::KvFull`] while that many exist.
    pub fn new_sequence(&self) -> Result<Sequence, Error> {
        self.sequence(self.options.context)
    }

    /// An empty sequence for `positions` tokens, at most the options' context length. Memory holds
    /// more sequences if they are shorter.
    ///
    /// # Errors
    /// [`Error::KvFull`] if existing sequences leave no room.
    pub fn sequence(&self, positions: usize) -> Result<Sequence, Error> {
        let positions = positions.min(self.options.context);
        self.pool.sequence(positions)
    }

    /// Longest chunk for [`Engine::forward`].
    pub fn chunk(&self) -> usize {
        self.options.lab.chunk
    }

    /// Most rows of a pass.
    pub(crate) fn most_rows(&self) -> usize {
        self.options.lab.chunk.max(self.options.batch)
    }

    /// Appends up to [`Engine::chunk`] tokens to `sequence`.
    ///
    /// # Errors
    /// A token outside the vocabulary, a full sequence, or a failed read. The sequence is unchanged
    /// after an error.
    pub fn forward(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        wanted: Logits<'_>,
    ) -> Result<(), Error> {
        self.forward_batch(&mut [Span { sequence, tokens }], wanted)
    }

    /// As [`Engine::forward`]. `observer` sees every FFN's input, the experts of each token and,
    /// with [`Lab::observe`](crate::Lab::observe), gates and hidden values. Like logits, these
    /// depend on weights and tokens only.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_observed(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        wanted: Logits<'_>,
        observer: &mut FfnObserver<'_>,
    ) -> Result<(), Error> {
        let hooks = Hooks {
            observer: Some(observer),
            ..Hooks::default()
        };
        self.forward_spans(&mut [Span { sequence, tokens }], wanted, hooks)
    }

    /// With [`Lab::count_fired`](crate::Lab::count_fired): by bank in packed order, the number of
    /// tokens for which each neuron has fired since the last call; empty otherwise.
    pub fn take_fired(&mut self) -> Vec<Vec<u64>> {
        self.decoder.ffn.take_fired()
    }

    /// Passes `rows` through the layers as the next rows of `sequence`: on entry the residual
    /// streams before the first layer, on return those after the last. Up to [`Engine::chunk`]
    /// rows. Observers see the inputs of projections and FFNs.
    ///
    /// # Errors
    /// As [`Engine::forward_observed`].
    pub fn forward_residual(
        &mut self,
        sequence: &mut Sequence,
        rows: StreamRows<'_>,
        attention: &mut AttentionObserver<'_>,
        observer: &mut FfnObserver<'_>,
    ) -> Result<(), Error> {
        let StreamRows { tokens, x, stored } = rows;
        let hooks = Hooks {
            observer: Some(observer),
            attention: Some(attention),
            between: Some(Between { x, stored }),
            ..Hooks::default()
        };
        self.forward_spans(&mut [Span { sequence, tokens }], Logits::None, hooks)?;
        streams::get(&self.decoder.config, &self.pass, x);
        Ok(())
    }

    /// As [`Engine::forward`] for several sequences in one pass. The total number of tokens is at
    /// most the larger of [`Engine::chunk`] and [`Options::batch`]. A neuron is read once for all
    /// of them. Each sequence's result equals, bit for bit, that of running it alone.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_batch(
        &mut self,
        spans: &mut [Span<'_>],
        wanted: Logits<'_>,
    ) -> Result<(), Error> {
        self.forward_spans(spans, wanted, Hooks::default())
    }

    pub(crate) fn forward_spans(
        &mut self,
        spans: &mut [Span<'_>],
        wanted: Logits<'_>,
        hooks: Hooks<'_, '_>,
    ) -> Result<(), Error> {
        let rows = check_spans(spans, self.most_rows(), self.config())?;
        let Self { decoder, pass, .. } = self;
        pass.begin(rows);
        if let Some(lane) = &mut decoder.ffn.lane {
            lane.begin_pass(None);
        }
        decoder.run(pass, spans, hooks)?;
        let in_range = (spans.iter()).try_for_each(|span| span.sequence.check_range());
        let found = in_range.and_then(|()| self.logits_of(rows, wanted));
        if found.is_err() {
            for span in spans {
                let len = span.sequence.len() - span.tokens.len();
                span.sequence.undo(span.tokens.len(), len);
            }
        }
        found
    }

    /// Computes the logits that the caller wants of a pass of `rows` rows.
    fn logits_of(&mut self, rows: usize, wanted: Logits<'_>) -> Result<(), Error> {
        let Self { decoder, pass, .. } = self;
        match wanted {
            Logits::None => {}
            Logits::Last => decoder.head(pass, rows - 1..rows)?,
            Logits::Each(sink) => {
                for first in (0..rows).step_by(decoder.most_logits()) {
                    let these = first..rows.min(first + decoder.most_logits());
                    decoder.head(pass, these.clone())?;
                    for (place, row) in these.enumerate() {
                        sink(row, decoder.logits(place));
                    }
                }
            }
        }
        Ok(())
    }

    /// Logits of the last row of the last pass, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        self.decoder.logits(0)
    }

    /// Share of the clusters that are hot with `sequences` sequences.
    pub(crate) fn hot_cut(&self, sequences: usize) -> f64 {
        let hot: u64 = (self.planner.hot(sequences).iter().copied().map(u64::from)).sum();
        hot as f64 / self.needs().clusters.max(1) as f64
    }

    /// Adapts the plan to `sequences` live sequences, at most [`Options::batch`]. In a larger batch
    /// more neurons fire in nearly every pass, so the hot region grows. The border between the
    /// regions moves gradually, without extra reads. Texts do not change.
    ///
    /// # Errors
    /// Those of planning, which succeeded before with the same budget.
    pub fn set_batch(&mut self, sequences: usize) -> Result<(), Error> {
        let batch = sequences.clamp(1, self.options.batch);
        if batch == self.division.batch {
            return Ok(());
        }
        let budget = self.division.memory.budget();
        self.division =
            (self.planner).divide_again(&self.division, budget, batch, Candidates::Current)?;
        let (memory, hot) = (&self.division.memory, self.planner.hot(batch));
        self.decoder.ffn.store.aim_border(memory, hot);
        Ok(())
    }

    /// The trace of all threads and the device, if the options enable it.
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.decoder.tracer.trace()
    }

    /// Most concurrent sequences.
    pub fn most_sequences(&self) -> usize {
        self.options.batch
    }

    /// The options, with automatic choices resolved.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The division for decode.
    pub(crate) fn settled(&self) -> &Division {
        self.usual.as_deref().unwrap_or(&self.division)
    }

    /// Division of the budget for decode.
    pub fn memory(&self) -> &MemoryPlan {
        &self.settled().memory
    }

    /// The plan in use, with a forecast, which takes some milliseconds.
    ///
    /// # Errors
    /// As [`Planner::forecast`].
    pub fn plan(&self) -> Result<Plan, Error> {
        self.planner.forecast(self.settled(), self.options.threads)
    }

    /// The planner.
    pub(crate) fn planner(&self) -> &Planner {
        &self.planner
    }

    /// Byte sizes on which the plan is based.
    pub fn needs(&self) -> &Needs {
        &self.settled().needs
    }

    /// The sparsity mode in use (never `Auto`).
    pub fn sparsity(&self) -> Sparsity {
        self.choice.sparsity
    }

    /// Reason for the mode.
    pub fn sparsity_reason(&self) -> &str {
        &self.choice.reason
    }

    /// Recall of the predictors in use, as measured when they were trained; `None` if unknown.
    pub fn predictor_recall(&self) -> Option<f64> {
        self.recall
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.options.threads
    }

    /// The instruction set of the kernels.
    pub fn cpu(&self) -> Cpu {
        self.decoder.on.cpu
    }

    /// Totals since the engine was opened, including warm-up.
    pub fn counters(&self) -> Counters {
        let times = self.decoder.times;
        let ffn = self.decoder.ffn.counters();
        let tiles = self.decoder.tiles.as_ref().map(TileStore::stats);
        let tiles = tiles.unwrap_or_default();
        let stream = self.decoder.weights.stream.as_ref();
        let stream = stream.map(|stream| stream.stats()).unwrap_or_default();
        Counters {
            reads: ffn.reads + stream.reads,
            commands: ffn.commands + stream.commands,
            bytes_read: ffn.bytes_read + stream.bytes + stream.gap_bytes,
            wait_ns: ffn.wait_ns + stream.wait_ns,
            stream_busy_ns: stream.busy_ns,
            hits: ffn.hits + tiles.hits,
            looked_up: ffn.looked_up + tiles.hits + tiles.misses,
            misses: ffn.misses + tiles.misses,
            evictions: ffn.evictions + tiles.evictions,
            attention_ns: nanoseconds(times.attention),
            ffn_ns: nanoseconds(times.ffn),
            head_ns: nanoseconds(times.head),
            ..ffn
        }
    }

    /// Resident neurons by layer. Looks up every neuron: milliseconds for a large model.
    pub fn resident_by_layer(&self) -> Vec<LayerResidency> {
        self.decoder.ffn.store.by_layer()
    }

    /// Bytes of keys and values per position, including the position's share of pool vectors.
    pub fn position_bytes(&self) -> u64 {
        self.pool.shape().position_bytes()
    }

    /// Counts of prefetched experts since the engine was opened; `None` without experts.
    pub fn foreseen(&self) -> Option<Foreseen> {
        self.decoder.ffn.store.foreseen()
    }

    /// Whether sequences have recurrent state, so that they continue from its snapshots only.
    pub fn is_recurrent(&self) -> bool {
        self.pool.shape().recurrent > 0
    }

    /// Uses drafts of `source` for texts that decode alone, if the options allow; in place of the last source that reads hidden
    /// states, or of the last one that does not. No text depends on it.
    pub fn set_draft(&mut self, source: Box<dyn Draft>) {
        self.drafts.set_source(source);
    }

    /// Counts of drafts since the engine was opened.
    pub fn draft_totals(&self) -> DraftTotals {
        self.drafts.totals()
    }

    /// Name of the I/O engine in use.
    pub fn io_name(&self) -> &'static str {
        self.decoder.ffn.store.io_name()
    }
}

/// A model whose memory is planned and not yet allocated.
pub(crate) struct Opening {
    parts: Parts,
    pub division: Division,
}

impl Opening {
    /// Divides the budget of the options.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn of(parts: Parts) -> Result<Self, Error> {
        let budget = parts.planner.budget(parts.options.budget);
        Self::within(parts, budget)
    }

    /// Divides `budget` bytes.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn within(mut parts: Parts, budget: u64) -> Result<Self, Error> {
        let planner = &parts.planner;
        let division = planner.divide(budget)?;
        let threads = planner.best_threads(&division)?;
        if tracing::enabled!(tracing::Level::INFO) {
            let plan = planner.forecast(&division, threads)?;
            for line in plan.explain(&division.needs) {
                tracing::info!("{line}");
            }
        }
        let o = &mut parts.options;
        (o.threads, o.lab.chunk, o.lab.io_core) = (threads, division.chunk, planner.io_core);
        Ok(Self { parts, division })
    }

    /// Loads resident weights and allocates all buffers. `head`: the output head, if it is another model's.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open(self, head: Option<Matrix>) -> Result<Engine, Error> {
        let Self { parts, division } = self;
        let recall = (parts.stored.as_ref())
            .and_then(|s| s.quality)
            .map(|q| q.recall());
        let c = parts.text.config().clone();
        let rows = parts.options.lab.chunk.max(parts.options.batch);
        let (context, batch) = (parts.options.context, parts.options.batch);
        let pool = StatePool::new(state_shape(&c, parts.options.kv, context), context, batch)?;
        let pass = Pass::new(rows, c.d_model as usize, streams::aux_width(&c));
        let (text, choice) = (parts.text.clone(), parts.choice.clone());
        // Baselines are measured without drafts.
        let speculation = match parts.options.lab.ablation {
            Ablation::Full => parts.options.speculation,
            _ => Speculation::OFF,
        };
        let (options, planner) = (parts.options.clone(), parts.planner.clone());
        let rooms = parts.opened().rooms(&division);
        let decoder = build(parts, c, &division, head)?;
        Ok(Engine {
            decoder,
            pool,
            pass,
            text,
            options,
            planner,
            first_tokens: FirstTokens::default(),
            drafts: Drafts::new(speculation),
            division,
            usual: None,
            short_prompts: false,
            rooms,
            longest: None,
            choice,
            recall,
        })
    }
}

/// A trace with the options' number of spans, if any.
fn tracer(options: &Options, lane: Option<&dyn Lane>) -> Tracer {
    let tracks = lane.map_or(0, |lane| lane.facts().names.len());
    match options.lab.trace {
        0 => Tracer::default(),
        room => Arc::new(Trace::new(options.threads, tracks, room)).into(),
    }
}

/// The compute threads, each with scratch for chunks of `rows` tokens.
fn threads(
    options: &Options,
    tracer: &Tracer,
    layout: &Layout,
    c: &ModelConfig,
    rows: usize,
) -> Compute {
    thread_buffer::reserve(thread_floats(c, rows));
    let cores = compute_cores(options.threads, options.lab.io_core);
    let on = compute(&layout.container, c, options.threads, cores.as_deref());
    if let Some(trace) = tracer.trace().cloned() {
        (on.workers).observe(move |thread, part| trace.around(thread, part));
    }
    on
}

/// What a lane keeps of a model.
fn hold(planner: &Planner, division: &Division, room: &FfnRoom, store: &NeuronStore) -> Hold {
    Hold {
        clusters: division.needs.lane_clusters,
        hot: store.hot_wanted(),
        visits: planner.visits.clone(),
        room: room.of_lane(store.layout.format.d),
        widths: planner.widths(division, room.threads),
        at_once: (planner.stream_buffers(division)).min((2 * room.threads).min(room.clusters)),
        layer_seconds: planner.layer_seconds(division),
        chunk: division.chunk.max(1),
        resident: division.memory.ffn_resident_share(&division.needs),
        tracer: store.tracer.clone(),
    }
}

/// Fills a store's memory and what a lane holds, which also multiplies the store's Gate rows.
fn warm(
    store: &mut NeuronStore,
    plan: &MemoryPlan,
    lane: Option<(&mut Box<dyn Lane>, Hold, &mut Sharing<'_>)>,
) -> Result<(), Error> {
    let Some((lane, hold, sharing)) = lane else {
        let outside = store.outside.clone();
        return store.warm(plan, outside, &mut |_, _| Ok(()));
    };
    let outside = lane.hold(hold)?;
    store.warm(plan, outside, &mut |of, rows| lane.upload(of, rows))?;
    lane.settle(&mut store.outside)?;
    if let Some(gates) = store.naming_gates() {
        let mut gates = gates.matrices_mut().map(|of| of as &mut dyn HostMatrix);
        lane.multiply(&mut gates, sharing, true)?;
    }
    Ok(())
}

/// Loads resident weights and allocates all buffers.
fn build(
    parts: Parts,
    c: ModelConfig,
    division: &Division,
    head: Option<Matrix>,
) -> Result<Decoder, Error> {
    let of = parts.opened();
    let Rooms { ffn: room, gates } = of.rooms(division);
    let Parts {
        text,
        options,
        stored,
        shape,
        naming,
        layout,
        tiles,
        source,
        planner,
        known,
        mut lane,
        ..
    } = parts;
    let (tracer, rows) = (tracer(&options, lane.as_deref()), room.rows);
    let lock = region_memory(options.lock);
    let streamed =
        (division.needs.streamed > 0).then(|| Streamed::of(&layout, &c, options.lab.tile));
    let streams = streamed.as_ref().is_some_and(|of| of.has_head(&c));
    let (io, core) = (options.lab.io, options.lab.io_core);
    let stream = streamed.map(|of| of.open(&layout, io, core, lock));
    let stream = stream.transpose()?;
    let mut embedding = Embedding::open(&layout, &c, Role::Embed, streams)?;
    let tiled = tiles.as_deref();
    let mut weights = Weights::load(&layout.container, tiled, text.meta(), head, stream)?;
    let mut specials = Specials::load(&layout, &c, rows)?;
    let mut on = threads(&options, &tracer, &layout, &c, rows);
    if weights.head.dtype().is_per_channel() {
        // The head may be another model's.
        on.cpu = with_scale_per_token(on.cpu, true);
    }
    let predictors = (stored.map(|its| its.load(&layout.container, &c, rows))).transpose()?;
    let mut scratch = ScratchRoom::of(&options, rows, tiles.is_some()).scratch(&c);
    let mut sharing = Sharing {
        on: &on,
        scratch: &mut scratch.rows,
        room: product_room(&c, rows, options.logit_rows(), gates),
        tracer: tracer.clone(),
        spare: planner.lane_spare(division),
    };
    if let Some(lane) = &mut lane {
        let mut large = weights.large().map(|of| of as &mut dyn HostMatrix);
        lane.multiply(&mut large, &mut sharing, false)?;
    }
    let mut store = NeuronStore::open(StoreSetup {
        costs: layout.read_costs(&planner.storage, planner.firing.share()),
        hot_wanted: planner.hot(options.batch).to_vec(),
        gates_first: planner.gates_first,
        always: planner.firing.always.clone(),
        layout,
        source,
        memory: &division.memory,
        naming,
        buffers: division.needs.stream_most.max(LEAST_BUFFERS),
        known: &known,
        policy: Policy {
            reads_inline: planner.policy.reads_inline
                && tiles.as_deref().is_none_or(TileLayout::is_small),
            ..planner.policy
        },
        options: &options,
        tracer: tracer.clone(),
    })?;
    let held = lane.as_mut().map(|lane| {
        let hold = hold(&planner, division, &room, &store);
        (lane, hold, &mut sharing)
    });
    warm(&mut store, &division.memory, held)?;
    let [inputs, ngrams] = specials.tables_mut();
    let mut tables = [embedding.as_mut(), inputs, ngrams];
    let container = &store.layout.container;
    hold_tables(&mut tables, container, |at, _| division.memory.tables[at])?;
    Ok(Decoder {
        embedding,
        specials,
        on,
        tracer,
        rope: Ropes::new(&c, rows, options.context),
        scratch,
        ffn: Ffn::new(shape, store, lane, predictors, room).with_layers(&c, rows),
        tiles: (tiles.map(|of| TileStore::new(of, division.memory.tile_slots, lock)))
            .transpose()?,
        ahead: RouterAhead::new(&c, options.threads),
        weights,
        times: Times::default(),
        config: c,
    })
}

/// Validates the rows of a pass against the limit `most`; returns their number.
fn check_spans(spans: &[Span<'_>], most: usize, config: &ModelConfig) -> Result<usize, Error> {
    let mut rows = 0;
    for span in spans {
        check_tokens(span.tokens, config)?;
        span.sequence.check_room(span.tokens.len(), config)?;
        rows += span.tokens.len();
    }
    if rows == 0 || rows > most || spans.iter().any(|span| span.tokens.is_empty()) {
        let lens = spans.iter().map(|span| span.tokens.len()).collect();
        return Err(Error::Pass { lens, most });
    }
    Ok(rows)
}

/// Rejects tokens outside the vocabulary.
pub(crate) fn check_tokens(tokens: &[u32], config: &ModelConfig) -> Result<(), Error> {
    let vocab = config.vocab;
    match tokens.iter().find(|&&t| t >= vocab) {
        Some(&token) => Err(Error::Token { token, vocab }),
        None => Ok(()),
    }
}
