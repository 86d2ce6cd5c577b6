//! Builds a [`Planner`] from a container, the options and the saved profiles.

use emberflow_kernels::{Cpu, DType, Isa};
use emberflow_models::config::ModelConfig;
use emberflow_storage::arena::Arena;
use emberflow_storage::limits::Limits;
use emberflow_storage::mem;
use emberflow_storage::profile::{Pattern, ReadCost};
use emberflow_storage::trim_heap;

use super::budget::Division;
use super::cores;
use super::facts::{BATCHES, ChunkMemory, Planner, chunks};
use super::firing::Firing;
use super::pass::{PredictorNeeds, Shape};
use super::rates::Rates;
use super::temperature::Temperature;
use crate::cluster::{CLUSTER, LEAST_BUFFERS};
use crate::error::Error;
use crate::ffn::{Ffn, FfnRoom, FfnShape, SLICE, StoredPredictors};
use crate::forward::embedding::Embedding;
use crate::forward::hyper::Hyper;
use crate::forward::layer_inputs::LayerInputs;
use crate::forward::mtp::MtpInput;
use crate::forward::ngrams::NGramLayer;
use crate::forward::router_ahead::RouterAhead;
use crate::forward::scratch_room::{ScratchRoom, product_room};
use crate::forward::streamed::Streamed;
use crate::forward::streams::{self, StreamState};
use crate::forward::weights::Weights;
use crate::lane::Lane;
use crate::loader::name_of;
use crate::memory::Needs;
use crate::meta::Quant;
use crate::mixer::{needs, state_shape};
use crate::narrow_sizes::matrices_apart;
use crate::options::{Options, Phases};
use crate::room::{Rooms, thread_floats};
use crate::state::StateShape;
use crate::store::{Known, Layout, Naming, ReadCosts, io_bytes};
use crate::tiles::{TileFfn, TileLayout, Visited, visited as visited_of, whole_bytes};

/// Bytes of stack and allocator per thread.
const PER_THREAD: u64 = 64 << 10;

/// Most stream buffers, however slow the processor is compared with storage.
const MOST_BUFFERS: u32 = 64;

/// Bytes per position outside the KV cache: token lists, latencies, the report.
const PER_POSITION: u64 = 48;

/// Facts about a model, known before memory is allocated.
#[derive(Clone, Copy)]
pub(crate) struct Opened<'a> {
    pub layout: &'a Layout,
    pub config: &'a ModelConfig,
    pub quant: &'a Quant,
    pub ffn: &'a FfnShape,
    /// The tiles, if the model has no neurons in bundles.
    pub tiles: Option<&'a TileLayout>,
    pub naming: Naming,
    /// The lane, if any.
    pub lane: Option<&'a dyn Lane>,
    /// The predictors in use.
    pub stored: Option<&'a StoredPredictors>,
    pub options: &'a Options,
    /// Most compute threads.
    pub threads: usize,
}

impl Planner {
    /// Collects the planner's inputs, including the statistics of neurons and experts.
    pub(crate) fn new(opened: Opened<'_>) -> Result<(Self, Known), Error> {
        let Opened {
            layout, options, ..
        } = opened;
        // Loaded first, so that the measured process size includes it.
        let saved = Rates::saved().filter(|_| options.lab.profiles);
        let rates = saved.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
            // Without measurements of this machine, a plan does not depend on its instruction set either.
            let isa = if options.lab.profiles {
                Cpu::detect().isa()
            } else {
                Isa::Neon
            };
            Rates::assumed(cores, isa)
        });
        let most = BATCHES.iter().fold(options.batch, |a, &b| a.max(b));
        let mut known = Temperature::read(layout, opened.config, most)?;
        let firing = opened.firing(&known);
        let always = add_always(&mut known.hot_clusters, layout, &firing);
        let device = layout.read_cost(options.lab.io, Limits::PRODUCTION.depth);
        let buffers = opened.buffers(&rates, &device);
        // A buffer is idle while its cluster is computed.
        let stream = layout.read_cost(options.lab.io, (layout.stream_depth(buffers) / 2).max(1));
        let costs = layout.read_costs(&device, firing.share());
        let chunks = opened.chunks().into_iter();
        let scratch: Vec<ChunkMemory> = chunks.map(|chunk| opened.scratched(chunk)).collect();
        let least = scratch.first().copied().unwrap_or_default();
        let hot = (known.hot_clusters.get(options.batch.max(1) - 1)).map_or(&[][..], |h| h);
        let needs = Needs {
            stream_most: buffers,
            always,
            ..opened.needs(hot, costs, least)?
        };
        let streamed = opened.streamed(&needs);
        let needs = streamed.filter(|_| options.lab.streams).unwrap_or(needs);
        tracing::info!(device = %device.origin(), machine_measured = rates.measured, "profiles");
        let planner = Self {
            needs,
            streamed,
            scratch,
            shape: opened.shape(),
            expert_misses: known.popularity.misses,
            firing: match opened.naming {
                Naming::All => Firing::always(layout.layers(), layout.neurons_visited()),
                _ => firing,
            },
            rates,
            storage: device,
            stream,
            threads: opened.threads,
            threads_fixed: options.threads != 0,
            context: options.context,
            hot_clusters: known.hot_clusters,
            batch: options.batch,
            policy: options.lab.ablation.policy(),
            gates_stay: options.lab.gates_stay,
            predictor: opened.predictor(),
            gates_first: opened.gates_first(costs),
            lane: opened.lane.map(|lane| lane.facts().clone()),
            visits: known.popularity.visits.clone(),
            io_core: options
                .lab
                .io_core
                .or_else(|| cores::io_core(opened.threads)),
        };
        Ok((
            planner,
            Known::new(known.frequencies, known.popularity.visits),
        ))
    }
}

/// Candidate chunks, ascending.
fn candidate_chunks(options: &Options) -> Vec<usize> {
    let prompt = match options.prompt {
        0 => options.context,
        tokens => tokens.min(options.context),
    };
    chunks(options.lab.chunk, prompt)
}

/// Rows of the longest pass.
pub(crate) fn longest_pass(options: &Options) -> usize {
    let longest = candidate_chunks(options).last().copied();
    longest.unwrap_or(1).max(options.batch)
}

/// Adds all clusters of layers that need all neurons to each bank's `hot` ones. Returns their
/// number.
fn add_always(hot: &mut [Vec<u32>], layout: &Layout, firing: &Firing) -> u64 {
    let clusters = layout.clusters_of_each();
    let whole = (0..clusters.len()).filter(|&bank| firing.is_always(bank));
    for bank in whole.clone() {
        hot.iter_mut().for_each(|hot| hot[bank] = clusters[bank]);
    }
    whole.map(|bank| u64::from(clusters[bank])).sum()
}

impl Opened<'_> {
    /// Dimensions of the FFN's buffers.
    pub(crate) fn room(&self, chunk: usize, threads: usize) -> FfnRoom {
        FfnRoom {
            rows: chunk.max(self.options.batch),
            neurons: self.layout.neurons_at_once(),
            clusters: self.layout.clusters_at_once(),
            chosen: self
                .config
                .mixture
                .as_ref()
                .map_or(0, |m| m.chosen as usize),
            threads,
            observe: self.options.lab.observe,
            counts: self.options.lab.count_fired,
        }
    }

    /// Dimensions of all buffers.
    pub(crate) fn rooms(&self, division: &Division) -> Rooms {
        Rooms {
            ffn: self.room(division.chunk, self.options.threads),
            gates: self.gates(),
        }
    }

    /// Candidate chunks, ascending.
    fn chunks(&self) -> Vec<usize> {
        candidate_chunks(self.options)
    }

    /// Number of Gate rows per layer that may be resident.
    pub(crate) fn gates(&self) -> usize {
        match self.naming {
            Naming::Gates => self.layout.neurons_at_once(),
            Naming::All | Naming::Predictor => 0,
        }
    }

    /// Host memory for a lane's buffers.
    fn lane_room(&self, room: &FfnRoom) -> u64 {
        let products = product_room(
            self.config,
            room.rows,
            self.options.logit_rows(),
            self.gates(),
        );
        let room = room.of_lane(self.config.bundle_width() as usize);
        self.lane
            .map_or(0, |lane| lane.host_bytes(&room, &products))
    }

    /// Clusters that a lane computes whatever the plan, and their bytes in the machine's memory.
    fn fixed_part(&self) -> [u64; 2] {
        self.lane.map_or([0; 2], |lane| {
            let facts = lane.facts();
            let unified = u64::from(facts.unified);
            [facts.fixed, unified * facts.fixed * facts.cluster_len]
        })
    }

    /// Shape of a text's state.
    fn state(&self) -> StateShape {
        state_shape(self.config, self.options.kv, self.options.context)
    }

    /// The predictors, if they determine the active set.
    fn naming_predictors(&self) -> Option<&StoredPredictors> {
        self.stored.filter(|_| self.naming == Naming::Predictor)
    }

    /// Firing statistics, as far as known. For a model with experts: of the neurons that one token
    /// visits.
    fn firing(&self, known: &Temperature) -> Firing {
        let layout = self.layout;
        let (banks, neurons) = (layout.layers(), layout.neurons_visited());
        let measured = |often: &[Vec<f32>], persistence, misses| {
            Firing::measured(often.iter().map(Vec::as_slice), persistence, misses)
        };
        let firing = match () {
            () if !known.visited.is_empty() => measured(&known.visited, None, None),
            () if layout.has_experts() => Firing::even(banks, neurons, self.firing_share()),
            () if !known.frequencies.is_empty() => {
                measured(&known.frequencies, known.persistence, known.misses)
            }
            () if self.config.form.has_gate_top() => Firing::by_layer(self.config),
            () => Firing::unknown(banks, neurons),
        };
        firing.with_always(self.always())
    }

    /// By layer: every token needs all neurons, while other layers are sparse (GELU layers of a
    /// model with Gaussian top-k; layers without a predictor).
    fn always(&self) -> Vec<bool> {
        let (c, stored) = (self.config, self.naming_predictors());
        let predicted = |layer: usize| stored.is_some_and(|s| s.predicting()[layer]);
        let always = |layer: usize| match self.naming {
            _ if self.layout.has_experts() => false,
            Naming::All => false,
            Naming::Gates => c.form.has_gate_top() && !c.is_sparse(layer as u32),
            Naming::Predictor => !predicted(layer),
        };
        (0..self.layout.layers()).map(always).collect()
    }

    fn predictor(&self) -> PredictorNeeds {
        let needs = |stored: &StoredPredictors| PredictorNeeds {
            bytes: (stored.bytes as f64 * stored.visited()) as u64,
            products: stored.products * stored.visited(),
            named: 1.0 / stored.quality.map_or(0.6, |q| q.precision()).max(0.05),
        };
        self.naming_predictors().map(needs).unwrap_or_default()
    }

    /// Share of the neurons that fire, if predictors were measured.
    fn firing_share(&self) -> Option<f64> {
        let quality = self.naming_predictors()?.quality?;
        Some(quality.active_share()).filter(|&share| share > 0.0)
    }

    /// Whether missing neurons are read in two phases, Gate row first, if Gate rows are not
    /// resident.
    fn gates_first(&self, costs: ReadCosts) -> bool {
        let Some(stored) = self.naming_predictors() else {
            return true;
        };
        match self.options.lab.phases {
            Phases::One => false,
            Phases::Two => true,
            Phases::Auto => costs.gate_first(stored.quality.map_or(1.0, |q| q.precision())),
        }
    }

    fn shape(&self) -> Shape {
        let (c, ffn) = (self.config, self.ffn);
        let attention = dtype(&self.quant.attention);
        let d = c.d_model as usize;
        let layers = self.layout.layers().max(1);
        // per layer with an FFN, on average
        let container = &self.layout.container;
        let of_layer = |layer| {
            let mixer = needs(c, layer).matrices.into_iter();
            let mixer = mixer.map(move |spec| {
                let entry = container.tensor(&name_of(spec.role, layer));
                let assumed = (spec.rows * attention.row_bytes(spec.cols)) as u64;
                (spec.rows, entry.map_or(assumed, |entry| entry.len))
            });
            let apart = matrices_apart(c, layer).into_iter();
            let apart = apart.filter(|[rows, _]| *rows > 0);
            let apart = apart.map(|[rows, cols]| (rows, (rows * attention.row_bytes(cols)) as u64));
            mixer.chain(apart)
        };
        let visited = (0..c.layers).filter(|_| self.tiles.is_some());
        let visited: Vec<Visited> =
            (visited.map(|layer| visited_of(container, c, layer))).collect();
        let rows: usize = (0..c.layers).flat_map(of_layer).map(|(rows, _)| rows).sum();
        let bytes: u64 = (0..c.layers)
            .flat_map(of_layer)
            .map(|(_, bytes)| bytes)
            .sum();
        let rows = rows as f64 + visited.iter().map(|of| of.rows).sum::<f64>();
        let bytes = bytes + visited.iter().map(|of| of.bytes).sum::<u64>();
        let g = self.layout.container.geometry();
        let kv_bytes = self.state().position_bytes() / layers as u64;
        Shape {
            layers: self.layout.layers(),
            d,
            vocab: c.vocab as usize,
            neurons: self.layout.neurons_visited(),
            visited: (self.layout.layers() * self.layout.neurons_visited()) as f64
                / (self.layout.total() as f64).max(1.0),
            chosen: (c.mixture.as_ref())
                .map_or(1, |m| (m.chosen + u32::from(m.shared_bank() > 0)) as usize),
            ffn: ffn.format.dtype,
            attention,
            head: dtype(&self.quant.embedding),
            attention_rows: rows / layers as f64,
            attention_bytes: bytes as f64 / layers as f64,
            kv_bytes: kv_bytes as f64,
            gate_len: ffn.format.gate_len() as f64,
            rest_len: ffn.format.rest_len() as f64,
            gate_read: g.gate_read().into(),
            rest_read: (g.stride - g.rest_read()).into(),
            cluster_read: self.layout.stream_len() as u64,
            stride: g.stride.into(),
            dense: self.naming == Naming::All,
            tiles: (self.tiles.map(|tiles| tiles.reads(c))).unwrap_or_default(),
        }
    }

    /// Number of stream buffers that keep storage busy: reads completed within one latency and
    /// within the longest time between two polls (attention), plus buffers being computed. Doubled,
    /// because reads complete in groups. SiLU 1B at 25, 50 and 75 % in memory: a third faster with
    /// 16 than with 8.
    fn buffers(&self, rates: &Rates, device: &ReadCost) -> u32 {
        let shape = self.shape();
        let len = shape.cluster_read;
        let cluster = CLUSTER as f64 * (shape.gate_len + shape.rest_len);
        let computed = (SLICE * self.threads) as u32;
        let bytes = shape.attention_bytes + f64::from(computed) * cluster;
        let away_ns = match rates.with_threads(self.threads) {
            Some(rates) => bytes / rates.read.at(bytes * shape.layers as f64).max(0.1),
            None => 0.0,
        };
        let each_ns = device.read_ns(len, Pattern::Sequential).max(1.0);
        let filled = ((device.latency_ns(len) + away_ns) / each_ns).ceil() as u32;
        (2 * (computed + filled)).clamp(LEAST_BUFFERS, MOST_BUFFERS)
    }

    /// Memory of chunks of `chunk` tokens, without the weights.
    fn scratched(&self, chunk: usize) -> ChunkMemory {
        let (o, room) = (self.options, self.room(chunk, self.threads));
        let beside = self.lane.map_or(0, |lane| lane.facts().names.len());
        let tracks = (self.threads + emberflow_storage::trace::OTHERS + beside) as u64;
        let batch = o.batch as u64;
        let row = self.config.d_model as usize + streams::aux_width(self.config);
        let parts = [
            ScratchRoom {
                rows: room.rows,
                logit_rows: o.logit_rows(),
                replayed: o.speculation.logit_rows(),
                drafts: o.speculation.memory,
                context: o.context,
                threads: self.threads,
                tiles: self.tiles.is_some(),
            }
            .bytes(self.config),
            // The residual stream; a second one if a pass can be preempted.
            4 * (1 + u64::from(o.preemption)) * (room.rows * row) as u64,
            StreamState::bytes_for(self.config, room.rows),
            Hyper::bytes_for(self.config, room.rows),
            NGramLayer::bytes_for(self.config, room.rows),
            MtpInput::bytes_for(self.config, room.rows),
            LayerInputs::bytes_for(self.config, room.rows),
            4 * (self.threads * thread_floats(self.config, room.rows)) as u64,
            Ffn::bytes_for(self.ffn, &room),
            // Counts of fired and of cached uses, per neuron.
            if o.lab.count_fired {
                16 * self.layout.total()
            } else {
                0
            },
            RouterAhead::bytes_for(self.config, self.threads),
            self.tiles.map_or(0, TileFfn::bytes_for),
            io_bytes(self.layout, LEAST_BUFFERS, o.lab.ablation.policy().mapped),
            PER_THREAD * self.threads as u64,
            PER_POSITION * o.context as u64 * batch,
            // The tokens of a text that has drafts.
            4 * o.context as u64,
            // Candidates of each sampler, and a copy for sorting.
            20 * u64::from(self.config.vocab) * batch,
            tracks * o.lab.trace as u64 * size_of::<emberflow_storage::trace::Span>() as u64,
            o.reserve,
            self.lane_room(&room),
        ];
        ChunkMemory {
            chunk,
            bytes: parts.into_iter().fold(0, u64::saturating_add),
            predictor: self.stored.map_or(0, |s| s.memory(room.rows, self.threads)),
        }
    }

    fn needs(&self, hot: &[u32], costs: ReadCosts, least: ChunkMemory) -> Result<Needs, Error> {
        let (layout, c, o) = (self.layout, self.config, self.options);
        // Freed heap memory would count twice: in the process size and in the allocation that
        // replaces it.
        trim_heap();
        // The budget cannot be enforced without these.
        let (Some(process), Some(process_peak)) = (mem::rss(), mem::peak_rss()) else {
            return Err(Error::NoMemoryFacts);
        };
        let two_phases = match o.lab.phases {
            Phases::Auto => costs.two_phases(CLUSTER),
            Phases::One => false,
            Phases::Two => true,
        };
        let sparse = self.naming != Naming::All;
        let tables = Embedding::bytes_for(layout, c, false);
        let eviction = o.lab.ablation.policy().keep.eviction();
        let format = &self.ffn.format;
        let [lane_clusters, lane] = self.fixed_part();
        Ok(Needs {
            process,
            process_peak,
            fixed: Weights::bytes_for(&layout.container, c) + tables.always,
            tables: tables.all,
            scales: layout.resident_scales(),
            predictor: least.predictor,
            predicts: self.naming == Naming::Predictor,
            kv: self
                .state()
                .bytes_for(o.context)
                .saturating_mul(o.batch as u64),
            context: o.context,
            batch: o.batch,
            scratch: least.bytes,
            gates: layout.gate_bytes(),
            gate_len: format.gate_len() as u64,
            rest_len: format.rest_len() as u64,
            whole_slot: layout.slot_charge(false, eviction),
            rest_slot: layout.slot_charge(true, eviction),
            neurons: layout.total(),
            banks: layout.banks() as u64,
            cluster: CLUSTER as u64,
            clusters: layout.total_clusters(),
            lane_clusters,
            lane,
            hot_clusters: hot.iter().map(|&n| u64::from(n)).sum(),
            always: 0,
            streamed: 0,
            whole_ffn: self.tiles.map_or(0, |_| whole_bytes(&layout.container)),
            tiles: self.tiles.map_or(0, TileLayout::tiles),
            tile_slot: self.tiles.map_or(0, TileLayout::slot_charge),
            least_tiles: self.tiles.map_or(0, TileLayout::least_slots),
            two_phases: sparse && two_phases,
            min_slots: layout.min_slots(),
            stream_len: Arena::charge(1, layout.stream_len()),
            stream_most: LEAST_BUFFERS,
            gates_help: sparse,
            gates_must: c.form.has_gate_top() && self.naming == Naming::Gates,
            gate_banks: layout.banks() as u64,
            gates_divide: self.naming == Naming::Gates
                && !two_phases
                && !c.form.has_gate_top()
                && !layout.has_experts()
                && layout.sizes().windows(2).all(|pair| pair[0] == pair[1]),
        })
    }
}

impl Opened<'_> {
    /// `needs` with projections and output head read for every pass; `None` if that saves no memory.
    fn streamed(&self, needs: &Needs) -> Option<Needs> {
        self.tiles?;
        let (layout, c) = (self.layout, self.config);
        let of = Streamed::of(layout, c, self.options.lab.tile);
        let tables = Embedding::bytes_for(layout, c, of.has_head(c));
        let all = Weights::bytes_for(&layout.container, c) + tables.always;
        let fixed = all.saturating_sub(of.resident()) + of.bytes_for(layout);
        (of.bytes() > 0 && (self.options.lab.streams || fixed < needs.fixed)).then_some(Needs {
            fixed,
            streamed: of.bytes(),
            ..*needs
        })
    }
}

/// The format of that name.
fn dtype(name: &str) -> DType {
    DType::parse(name).unwrap_or(DType::F32)
}
