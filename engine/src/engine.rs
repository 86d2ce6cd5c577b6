//! Opening a container under a budget, and the numbers of a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use emberflow_kernels::{Cpu, Workers};
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::{Trace, Tracer};

use crate::choice::Choice;
use crate::counters::Counters;
use crate::embedding::Embedding;
use crate::energy::Meter;
use crate::explain::explain;
use crate::ffn::{Banks, Ffn, MAX_CHUNK, NeuronStore, Oracle};
use crate::forward::{Decoder, FfnObserver, Span, Times};
use crate::kv_cache::KvCache;
use crate::memory::{MemoryPlan, Needs};
use crate::model::{Model, Text};
use crate::options::{Options, Sparsity};
use crate::parts::Parts;
use crate::planner::cores::compute_cores;
use crate::planner::rates::Rates;
use crate::planner::{Plan, Planner};
use crate::policy::Policy;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::sequence::Sequence;
use crate::weights::Weights;
use crate::{Error, Logits};

/// A model that is open and ready to run.
pub struct Engine {
    decoder: Decoder,
    text: Text,
    options: Options,
    needs: Needs,
    planner: Planner,
    plan: Plan,
    /// Sequences the plan was made for.
    batch: usize,
    choice: Choice,
    /// Recall of the predictors in use on the text they were measured on.
    recall: Option<f64>,
    meter: Option<Meter>,
    stop: Arc<AtomicBool>,
    keeps_steps: bool,
}

impl Engine {
    /// Opens `model`: divides the budget, loads what is resident, fills the cold
    /// region with the hottest neurons.
    ///
    /// # Errors
    /// A container that does not fit its own metadata, a failed read or
    /// checksum, or a budget below the smallest that works (the error names it).
    pub fn open(model: Model, options: Options) -> Result<Self, Error> {
        Self::open_watched(model, options, |_| ())
    }

    /// As [`Engine::open`]. Before memory is taken, `planned` is told how many bytes will be read into
    /// it at most: the resident set grows by as many until the engine is open.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_watched(
        model: Model,
        options: Options,
        planned: impl FnOnce(u64),
    ) -> Result<Self, Error> {
        let Parts {
            text,
            mut options,
            choice,
            stored,
            shape,
            mut banks,
            source,
            planner,
            rates,
        } = Parts::of(model, options)?;
        let c = text.config().clone();
        let plan = planner.plan(planner.budget(options.budget))?;
        for line in explain(&plan, &planner.needs) {
            tracing::info!("{line}");
        }
        planned(plan.memory.loaded());
        (options.threads, options.chunk) = (plan.compute_threads, plan.chunk);
        options.io_core = plan.io_core;
        banks.stream = Banks::stream_for(plan.chunk);
        let tracer = match options.trace {
            0 => Tracer::default(),
            room => Arc::new(Trace::new(options.threads, room)).into(),
        };

        let mut embedding = Embedding::open(&banks, &c)?;
        let weights = Weights::load(&banks.container, &c)?;
        let recall = stored.as_ref().and_then(|s| s.quality).map(|q| q.recall());
        let cores = compute_cores(options.threads, options.io_core);
        let workers = Workers::new(options.threads, cores.as_deref());
        if let Some(trace) = tracer.trace().cloned() {
            workers.observe(move |thread, part| trace.around(thread, part));
        }
        let (batch, rows) = (options.batch, options.chunk.max(options.batch));
        let costs = planner.read_costs(&banks);
        let hot = planner.hot(batch).to_vec();
        let predictors = stored
            .map(|s| s.load(&banks.container, &c, rows))
            .transpose()?;
        let tracer_of_store = tracer.clone();
        let store = NeuronStore::open(
            banks,
            source,
            &plan.memory,
            (hot, rates),
            (costs, planner.gates_first),
            &options,
            tracer_of_store,
        )?;
        if let Some(embedding) = &mut embedding {
            embedding.hold(&store.banks().container, plan.memory.embedding)?;
        }
        Ok(Self {
            decoder: Decoder {
                embedding,
                cpu: Cpu::detect(),
                workers,
                rope: RopeTable::new(&c.rope, rows),
                scratch: Scratch::new(&c, rows, batch, options.threads),
                ffn: Ffn::new(
                    shape,
                    store,
                    predictors,
                    (rows, options.threads),
                    options.observe,
                ),
                weights,
                times: Times::default(),
                config: c,
            },
            text,
            needs: planner.needs_with(options.chunk),
            meter: Meter::find(&options.sysfs),
            options,
            planner,
            plan,
            batch,
            choice,
            recall,
            stop: Arc::new(AtomicBool::new(false)),
            keeps_steps: false,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    /// Metadata, tokenizer, chat template.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// An empty sequence with room for the options' context. The plan has memory for as many
    /// as the options say.
    pub fn new_sequence(&self) -> Sequence {
        let c = self.config();
        Sequence::new(KvCache::new(self.options.kv, c, self.options.context))
    }

    /// Longest chunk that [`Engine::forward`] accepts.
    pub fn chunk(&self) -> usize {
        self.options.chunk
    }

    /// Runs up to [`Engine::chunk`] tokens at the end of `sequence`.
    ///
    /// # Errors
    /// A token outside the vocabulary, no room left, or a failed read; after an
    /// error the sequence is as before.
    pub fn forward(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        wanted: Logits<'_>,
    ) -> Result<(), Error> {
        self.pass(&mut [Span { sequence, tokens }], wanted, None)
    }

    /// As [`Engine::forward`]; `observer` sees every FFN: what it reads and, with
    /// [`Options::observe`], its gates and hidden values. What is seen depends on
    /// weights and tokens only, as the logits do.
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
        self.pass(&mut [Span { sequence, tokens }], wanted, Some(observer))
    }

    /// As [`Engine::forward`] for several sequences in one pass, each with its own tokens;
    /// all tokens together are at most [`Engine::chunk`] or as many as there may be
    /// sequences. A neuron is read and computed once for all of them. What comes out for a
    /// sequence is what it would give alone, bit for bit.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_batch(
        &mut self,
        spans: &mut [Span<'_>],
        wanted: Logits<'_>,
    ) -> Result<(), Error> {
        self.pass(spans, wanted, None)
    }

    fn pass(
        &mut self,
        spans: &mut [Span<'_>],
        wanted: Logits<'_>,
        observer: Option<&mut FfnObserver<'_>>,
    ) -> Result<(), Error> {
        let vocab = self.config().vocab;
        let (mut rows, most) = (0, self.options.chunk.max(self.options.batch));
        for span in &*spans {
            if let Some(&token) = span.tokens.iter().find(|&&t| t >= vocab) {
                return Err(Error::Token { token, vocab });
            }
            self.check_room(span.sequence, span.tokens.len())?;
            rows += span.tokens.len();
        }
        if rows == 0 || rows > most || spans.iter().any(|span| span.tokens.is_empty()) {
            let lens = spans.iter().map(|span| span.tokens.len()).collect();
            return Err(Error::Pass { lens, most });
        }
        self.decoder.forward(spans, wanted, observer)
    }

    pub(crate) fn check_room(&self, sequence: &Sequence, tokens: usize) -> Result<(), Error> {
        if tokens <= sequence.room() {
            return Ok(());
        }
        Err(Error::ContextFull {
            capacity: sequence.len() + sequence.room(),
            needed: sequence.len() + tokens,
            limit: self.config().max_context as usize,
        })
    }

    /// Logits of the last row of the last pass, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        self.decoder.logits()
    }

    /// Plans for `sequences` at once, at most as many as the options say: the more there are,
    /// the more neurons fire for one of them in nearly every pass, and belong in the hot
    /// region. Nothing is read for it, and the border between the regions moves a little with
    /// each pass. No result depends on it.
    ///
    /// # Errors
    /// Those of the plan, which has been made before with the same budget.
    pub fn set_batch(&mut self, sequences: usize) -> Result<(), Error> {
        let batch = sequences.clamp(1, self.options.batch);
        if batch == self.batch {
            return Ok(());
        }
        self.batch = batch;
        let hot = self.planner.hot(batch).to_vec();
        self.needs.hot_clusters = hot.iter().map(|&n| u64::from(n)).sum();
        self.plan = self.replan(self.plan.memory.budget())?;
        self.decoder.ffn.store.aim_border(&self.plan.memory, &hot);
        Ok(())
    }

    /// The plan for another budget. A peak of the past cannot be taken back and does not bind
    /// the future.
    fn replan(&self, bytes: u64) -> Result<Plan, Error> {
        let needs = Needs {
            process_peak: 0,
            ..self.needs
        };
        let chunk = self.options.chunk;
        self.planner.plan_with(bytes, &needs, chunk, self.batch)
    }

    /// The record of what every thread and the device did, where the options ask for one.
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.decoder.ffn.store.tracer().trace()
    }

    /// Most sequences at once.
    pub fn most_sequences(&self) -> usize {
        self.options.batch
    }

    /// Logits of one row of the last pass, `[vocab]`, where all rows were asked for and are no
    /// more than there may be sequences.
    pub(crate) fn row_logits(&self, row: usize) -> &[f32] {
        self.decoder.row_logits(row)
    }

    /// Changes the budget between two calls of [`Engine::forward`]. A smaller one
    /// gives memory back to the system before this returns, a larger one is
    /// filled as neurons are needed. No result depends on it.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`], with nothing changed; or a failed read.
    pub fn set_budget(&mut self, bytes: u64) -> Result<(), Error> {
        let plan = self.replan(bytes)?;
        let Decoder { embedding, ffn, .. } = &mut self.decoder;
        // What is given back goes before what comes.
        if let Some(embedding) = embedding.as_mut().filter(|_| !plan.memory.embedding) {
            embedding.hold(&ffn.store.banks().container, false)?;
        }
        ffn.store.set_plan(&plan.memory)?;
        self.plan = plan;
        if let Some(embedding) = embedding {
            let hold = self.plan.memory.embedding;
            embedding.hold(&ffn.store.banks().container, hold)?;
        }
        Ok(())
    }

    /// A flag that ends the running generation at the next token when set.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    pub(crate) fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// How the budget is divided.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan.memory
    }

    /// The plan in use: the memory, the ways to read, and how fast that should be.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Milliseconds that a machine with these rates would compute a token, and the layers of it.
    pub(crate) fn expected_with(&self, rates: &Rates) -> Result<(f64, usize), Error> {
        let planner = Planner {
            rates: rates.clone(),
            ..self.planner.clone()
        };
        let plan = planner.plan(self.plan.memory.budget())?;
        Ok((plan.decode.compute_ms, self.config().layers as usize))
    }

    /// What the plan was made from.
    pub fn needs(&self) -> &Needs {
        &self.needs
    }

    /// The sparsity mode in use (never `Auto`).
    pub fn sparsity(&self) -> Sparsity {
        self.choice.sparsity
    }

    /// Why that mode.
    pub fn sparsity_reason(&self) -> &str {
        &self.choice.reason
    }

    /// Recall of the predictors in use, on the text that they were measured on when they
    /// were made; `None` without predictors, or where nobody has measured it.
    pub fn predictor_recall(&self) -> Option<f64> {
        self.recall
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.options.threads
    }

    /// The instruction set of the kernels.
    pub fn cpu(&self) -> Cpu {
        self.decoder.cpu
    }

    /// What was done since the engine was opened, the start-up fill included.
    pub fn counters(&self) -> Counters {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let times = self.decoder.times;
        Counters {
            attention_ns: ns(times.attention),
            ffn_ns: ns(times.ffn),
            head_ns: ns(times.head),
            ..self.decoder.ffn.counters()
        }
    }

    /// From the next generation on keeps what each of its passes did. Their memory, some 150
    /// bytes each, is not part of the budget.
    pub fn keep_steps(&mut self) {
        self.keeps_steps = true;
    }

    pub(crate) fn keeps_steps(&self) -> bool {
        self.keeps_steps
    }

    /// Joules that the machine has used since the engine was opened (see [`crate::energy`]);
    /// `None` where nothing tells.
    pub fn joules(&mut self) -> Option<f64> {
        self.meter.as_mut()?.joules()
    }

    /// What tells the energy: `rapl` or `battery`, and which.
    pub fn energy_source(&self) -> Option<&str> {
        Some(self.meter.as_ref()?.name())
    }

    /// Follows the meter through a long generation: its counters start over now and then.
    pub(crate) fn watch_energy(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.look();
        }
    }

    /// From the next pass on keeps which neurons each layer needs, for
    /// [`Engine::replay_active`].
    pub fn record_active(&mut self) {
        self.decoder.ffn.oracle = Oracle::Recording(Vec::new());
    }

    /// From the next pass on takes the recorded active sets for granted instead of finding
    /// them out: for the same tokens after the same context this is the time that a perfect
    /// predictor which costs nothing would give.
    pub fn replay_active(&mut self) {
        self.decoder.ffn.oracle.replay();
    }

    /// Bytes per second at which the compute threads read the weights of attention and
    /// the FFN weights that are in the hot region, without computing anything: the bound of
    /// decoding from memory.
    pub fn read_bandwidth(&mut self, time: Duration) -> f64 {
        let Decoder {
            cpu,
            workers,
            ffn,
            weights,
            ..
        } = &mut self.decoder;
        let mut buffers = weights.attention_bytes();
        buffers.extend(ffn.store.hot_bytes());
        emberflow_kernels::read_bandwidth(*cpu, workers, &buffers, time)
    }

    /// Bytes of weights outside the FFNs that every token is computed from: attention,
    /// norms and head.
    pub fn dense_bytes(&self) -> u64 {
        self.decoder.weights.bytes_per_token()
    }

    /// Bytes of keys and values of one position.
    pub fn position_bytes(&self) -> u64 {
        let (kv, context) = (self.options.kv, self.options.context.max(1));
        KvCache::bytes_for(kv, self.config(), context) / context as u64
    }

    /// Which mechanisms are at work.
    pub fn policy(&self) -> Policy {
        self.options.policy
    }

    /// Name of the I/O engine in use.
    pub fn io_name(&self) -> &'static str {
        self.decoder.ffn.store.io_name()
    }
}

/// Most sequences at once. Few enough that all of them fit in one pass.
pub const MAX_BATCH: usize = 64;

const _: () = assert!(MAX_BATCH <= MAX_CHUNK);
