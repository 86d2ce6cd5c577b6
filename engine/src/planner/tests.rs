use emberflow_kernels::{DType, Isa};
use emberflow_models::config::{Activation, FfnKind, Form, ModelConfig, Rope, RopeScaling};
use emberflow_storage::container::{BundleGeometry, Prefer};
use emberflow_storage::io::{Profile, SimOptions};
use emberflow_storage::profile::ReadCost;
use proptest::prelude::*;

use super::Division;
use super::facts::*;
use super::firing::Firing;
use super::pass::{Limit, PredictorNeeds, Shape};
use super::plan::Basis;
use super::rates::Rates;
use super::search::Candidates;
use crate::ablation::{Ablation, Policy};
use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::forward::scratch_room::ScratchRoom;
use crate::lane::{CpuTimes, LaneFacts, LaneOutlook, LanePart, LanePlan, LaneTimes, Widths};
use crate::memory::{Needs, SlotContents};
use crate::mixer::state_shape;
use crate::tiles::TileReads;

/// A 7B model with Bamboo's shape in q4, 4096-byte sectors.
const D: usize = 4096;
pub(super) const NEURONS: usize = 14336;
pub(super) const LAYERS: usize = 32;

pub(super) fn planner(profile: Profile, firing: Firing) -> Planner {
    let q4 = DType::Q4;
    let row = q4.row_bytes(D) as u64;
    let total = (LAYERS * NEURONS) as u64;
    let clusters = (NEURONS / CLUSTER * LAYERS) as u64;
    Planner {
        lane: None,
        streamed: None,
        visits: Vec::new(),
        needs: Needs {
            lane_clusters: 0,
            lane: 0,
            process: 20 << 20,
            process_peak: 25 << 20,
            fixed: 1 << 30,
            tables: [0; 3],
            scales: 0,
            predictor: 0,
            kv: 128 << 20,
            context: 1024,
            batch: 1,
            scratch: 16 << 20,
            gates: total * row,
            gate_len: row,
            rest_len: 2 * row,
            whole_slot: 8192,
            rest_slot: 8192,
            neurons: total,
            cluster: CLUSTER as u64,
            clusters,
            banks: LAYERS as u64,
            hot_clusters: 28 * LAYERS as u64,
            always: 0,
            tiles: 0,
            tile_slot: 0,
            least_tiles: 0,
            whole_ffn: 0,
            streamed: 0,
            two_phases: false,
            min_slots: 256,
            stream_len: (CLUSTER * 8192) as u64,
            stream_most: 16,
            gates_help: true,
            gates_must: false,
            gate_banks: LAYERS as u64,
            gates_divide: true,
            predicts: false,
        },
        scratch: [(16, 16), (128, 40), (512, 120)]
            .map(|(chunk, mib)| ChunkMemory {
                chunk,
                bytes: mib << 20,
                predictor: 0,
            })
            .to_vec(),
        shape: shape(),
        firing,
        expert_misses: None,
        rates: Rates::assumed(4, Isa::Neon),
        storage: ReadCost::simulated(&SimOptions::new(profile, 0), 32, 4 << 30),
        stream: ReadCost::simulated(&SimOptions::new(profile, 0), 4, 4 << 30),
        threads: 4,
        threads_fixed: false,
        context: 1024,
        hot_clusters: (1..=8).map(|b| vec![20 + 8 * b; LAYERS]).collect(),
        batch: 1,
        policy: Policy::FULL,
        gates_stay: false,
        predictor: PredictorNeeds::default(),
        gates_first: true,
        io_core: None,
    }
}

/// Times of a lane that computes all that it holds.
#[derive(Debug)]
struct EvenTimes;

impl LaneTimes for EvenTimes {
    fn balanced(&self, hot: u64, _: f64, _: usize) -> u64 {
        hot
    }

    fn widths(&self, _: &dyn CpuTimes, _: u64) -> Widths {
        Widths::default()
    }

    fn part(&self, cpu: &dyn CpuTimes, _: &Widths, held: u64, _: usize) -> LanePart {
        let neurons = held as usize / cpu.layers() * CLUSTER;
        LanePart {
            neurons,
            ns: neurons as f64,
            ..LanePart::default()
        }
    }

    fn explain(&self, of: &LaneOutlook<'_>) -> Vec<LanePlan> {
        vec![LanePlan {
            values: serde_json::json!(of.held),
            text: format!("{} clusters", of.held),
        }]
    }
}

/// A lane with the machine's memory and the CPU's bits, at a nanosecond for a neuron.
pub(super) fn even_lane() -> LaneFacts {
    LaneFacts {
        names: vec!["even".into()],
        unified: true,
        memory: u64::MAX,
        asked: false,
        fixed: 0,
        cluster_len: 0,
        same_bits: true,
        at_once: 0,
        cpu_cluster: 1e-6,
        times: std::sync::Arc::new(EvenTimes),
    }
}

fn shape() -> Shape {
    let q4 = DType::Q4;
    let (row, quants) = (q4.row_bytes(D) as u64, (D + 2 * 1024) as f64);
    Shape {
        layers: LAYERS,
        d: D,
        vocab: 32000,
        neurons: NEURONS,
        visited: 1.0,
        chosen: 1,
        ffn: q4,
        attention: q4,
        head: DType::Q8,
        attention_rows: quants + D as f64,
        attention_bytes: (quants + D as f64) * row as f64,
        kv_bytes: 4096.0,
        gate_len: row as f64,
        rest_len: 2.0 * row as f64,
        gate_read: 4096,
        rest_read: 8192,
        cluster_read: 128 * 12288,
        stride: 12288,
        dense: false,
        tiles: TileReads::default(),
    }
}

pub(super) fn sparse() -> Firing {
    let rates: Vec<f32> = (0..NEURONS)
        .map(|n| 0.5 - 0.48 * n as f32 / NEURONS as f32)
        .collect();
    Firing::measured((0..LAYERS).map(|_| rates.as_slice()), Some(0.8), None)
}

#[test]
fn more_memory_is_faster_and_less_names_its_bottleneck() {
    let p = planner(Profile::Ufs4, sparse());
    let (least, full) = (p.smallest_budget(), p.full_budget());
    let speed = |budget| p.plan(budget).unwrap().decode;
    assert!(speed(full).tokens_per_s > 3.0 * speed(least).tokens_per_s);
    let slow = planner(Profile::Emmc, sparse()).plan(least).unwrap();
    assert_eq!(slow.decode.limit, Limit::SequentialReads);
    assert!(matches!(speed(full).limit, Limit::Memory | Limit::Compute));
    assert_eq!((speed(full).reads, speed(full).wait_ms), (0.0, 0.0));
    let middle = planner(Profile::Emmc, sparse())
        .plan(least + (full - least) / 4 * 3)
        .unwrap();
    let d = middle.decode;
    assert!(
        middle.gates_resident && d.limit == Limit::RandomReads,
        "{middle:?}"
    );
    let hits = middle.decode.cold_hit_rate;
    assert!(hits > 0.1 && hits < 1.0, "{middle:?}");
}

/// Between a budget without and one with all Gate rows, some layers have resident Gate rows. Speed
/// rises with memory without a drop.
#[test]
fn gate_rows_of_some_layers_bridge_the_step_to_all_of_them() {
    let p = planner(Profile::Nvme, sparse());
    let (mut budget, mut partly) = (p.smallest_budget() + (64 << 20), 0);
    let mut before: Option<f64> = None;
    let mut resident = false;
    while !resident {
        let plan = p.plan(budget).unwrap();
        resident = plan.gates_resident;
        let speed = plan.decode.tokens_per_s;
        let faster = before.map_or(1.0, |before| speed / before);
        assert!(
            (0.999..1.6).contains(&faster),
            "{faster} at {budget}: {plan:?}"
        );
        partly += usize::from(plan.memory.gates_partly());
        before = Some(speed);
        budget += budget / 16;
    }
    assert!(partly >= 4, "{partly}");
}

/// Up to the whole model. A longer chunk may add 1/24 to the bytes that a token reads.
#[test]
fn forecasts_never_fall_with_more_memory() {
    let flat = Firing::measured((0..LAYERS).map(|_| &[0.22; NEURONS][..]), Some(0.6), None);
    for profile in [Profile::Nvme, Profile::Ufs4, Profile::Emmc] {
        for firing in [sparse(), flat.clone()] {
            let p = planner(profile, firing);
            let (least, full) = (p.smallest_budget(), p.full_budget());
            let mut most = 0.0f64;
            for step in 0..=24 {
                let budget = least + (full - least) / 24 * step;
                let plan = p.plan(budget).unwrap();
                let speed = plan.decode.tokens_per_s;
                assert!(
                    speed > 0.93 * most,
                    "{profile:?} {step}: {speed} after {most}"
                );
                most = most.max(speed);
            }
        }
    }
}

#[test]
fn speculation_hides_reads() {
    let mut p = planner(Profile::Nvme, sparse());
    (p.needs.predicts, p.needs.gates_divide) = (true, false);
    p.needs.predictor = 256 << 20;
    p.predictor = PredictorNeeds {
        bytes: 256 << 20,
        products: 0.0,
        named: 1.3,
    };
    p.gates_first = false;
    let budget = p.needs.budget_for_share(0.7);
    let ahead = p.plan(budget).unwrap();
    assert!(!ahead.gates_resident && ahead.reads_per_bundle == 1);
    p.policy = Ablation::NoPipeline.policy();
    let late = p.plan(budget).unwrap();
    assert_eq!(ahead.memory.slots, late.memory.slots);
    let [ahead, late] = [ahead.decode, late.decode];
    // False positives cost reads; predicting twice costs time.
    assert!(ahead.reads > late.reads && ahead.compute_ms < ahead.ms);
    assert!(ahead.ms < 0.97 * late.ms, "{ahead:?} {late:?}");
    // The device time remains a lower bound.
    assert!(ahead.ms > 0.99 * ahead.io_ms, "{ahead:?}");
}

#[test]
fn faster_devices_and_machines_raise_the_forecast() {
    let budget = 3 << 30;
    let speed = |p: &Planner| p.plan(budget).unwrap().decode.tokens_per_s;
    let [emmc, nvme] = [Profile::Emmc, Profile::Nvme].map(|d| planner(d, sparse()));
    assert!(speed(&nvme) > 2.0 * speed(&emmc));
    let mut slow = nvme.clone();
    slow.rates = Rates::assumed(1, Isa::Neon);
    slow.threads = 1;
    assert!(speed(&nvme) > speed(&slow));
}

/// Wake-up latency delays work that waits for reads, not overlapped computation; the wake-up call
/// costs both.
#[test]
fn a_busy_core_pays_for_wakeup_calls_not_for_latency() {
    let mut p = planner(Profile::Nvme, sparse());
    p.needs.gates_divide = false;
    // Few misses; otherwise the I/O thread uses its maximum share of a core.
    let budget = p.full_budget() - (128 << 20);
    let with = |wake: f64, tell: f64| {
        let mut p = p.clone();
        p.rates.wake_ns *= wake;
        p.rates.tell_ns *= tell;
        p.plan(budget).unwrap().decode
    };
    let (usual, sleepy, dear) = (with(1.0, 1.0), with(10.0, 1.0), with(1.0, 10.0));
    assert!(usual.reads > 0.0);
    assert!(
        sleepy.compute_ms <= usual.compute_ms,
        "{usual:?} {sleepy:?}"
    );
    assert!(sleepy.ms > usual.ms, "{usual:?} {sleepy:?}");
    assert!(dear.compute_ms > usual.compute_ms, "{usual:?} {dear:?}");
}

#[test]
fn long_chunks_are_chosen_where_they_cost_little() {
    let p = planner(Profile::Nvme, sparse());
    let chunk = |budget| p.plan(budget).unwrap().chunk;
    assert_eq!(chunk(p.smallest_budget()), 16);
    // 24 MiB is 1/32 of 768 MiB, 104 MiB of 3.3 GiB.
    let with_cache = |cache: u64| p.needs.smallest_budget() + cache;
    assert_eq!(chunk(with_cache(1200 << 20)), 128);
    assert_eq!(chunk(p.full_budget()), 512);
    assert_eq!(chunks(0, 40), [16, 32, 64]);
    assert_eq!(chunks(0, 4096), CHUNKS);
    assert_eq!(chunks(7, 4096), [7]);
}

/// A dense model of 4 GB in tiles.
fn tiled() -> Planner {
    let mut p = planner(Profile::Nvme, Firing::always(LAYERS, NEURONS));
    (p.shape.dense, p.shape.neurons) = (true, 0);
    p.shape.tiles = TileReads {
        dense: 4e9,
        experts: 0.0,
        visited: 0.0,
        len: 1 << 19,
    };
    p.needs = Needs {
        neurons: 0,
        banks: 0,
        clusters: 0,
        hot_clusters: 0,
        gates: 0,
        min_slots: 0,
        gate_banks: 0,
        gates_help: false,
        tiles: 8000,
        tile_slot: 1 << 19,
        least_tiles: 8,
        ..p.needs
    };
    p
}

/// A chunk reads each missing tile once, so chunks are longer where more is missing.
#[test]
fn tiles_that_are_missing_ask_for_longer_chunks() {
    let p = tiled();
    let [half, most] = [0.5, 0.99].map(|share| {
        let tiles = (8000.0 * share) as u64 * p.needs.tile_slot;
        p.plan(p.needs.smallest_budget() + tiles).unwrap()
    });
    assert!(half.chunk > most.chunk, "{} and {}", half.chunk, most.chunk);
    assert!((half.ffn_resident_share - 0.5).abs() < 0.05);
    assert!(half.memory.tiles_missing() > 0.4);
    let missing = half.decode.bytes_read / 4e9;
    let expected = half.memory.tiles_missing();
    assert!((missing - expected).abs() < 0.01, "{missing}, {expected}");
    assert!(half.decode.tokens_per_s < most.decode.tokens_per_s);
}

/// A budget that is too small for resident projections reads them for every pass.
#[test]
fn projections_are_read_if_there_is_no_room() {
    let mut p = tiled();
    let resident = p.smallest_budget();
    let streamed = p.needs.fixed / 2;
    p.streamed = Some(Needs {
        fixed: p.needs.fixed - streamed,
        streamed,
        ..p.needs
    });
    let smallest = p.smallest_budget();
    assert!(smallest < resident - streamed / 2);
    let [small, large] = [resident - 1, resident].map(|budget| p.plan(budget).unwrap());
    assert_eq!([small.streamed_bytes, large.streamed_bytes], [streamed, 0]);
    // What the projections leave holds FFNs and buffers of longer chunks.
    let more = small.decode.bytes_read - large.decode.bytes_read;
    assert!(more.abs() < 0.3 * streamed as f64, "{more} of {streamed}");
    let least = p.plan(smallest).unwrap();
    let more = least.decode.bytes_read - large.decode.bytes_read;
    assert!(
        (more / streamed as f64 - 1.0).abs() < 0.1,
        "{more} of {streamed}"
    );
    assert!(least.decode.tokens_per_s < large.decode.tokens_per_s);
    let settled = p.divide(smallest).unwrap();
    let again = p.divide_again(&settled, 2 * resident, 1, Candidates::All);
    assert_eq!(
        again.unwrap().needs.streamed,
        streamed,
        "what is open stays so"
    );
    match p.plan(smallest - 1) {
        Err(Error::BudgetTooSmall {
            smallest: named,
            full,
            ..
        }) => {
            assert_eq!((named, full), (smallest, p.needs.full_budget()));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dense_model_is_read_sequentially() {
    let mut p = planner(Profile::Nvme, Firing::always(LAYERS, NEURONS));
    p.shape.dense = true;
    p.needs.gates_help = false;
    let plan = p.plan(p.smallest_budget() + (1 << 30)).unwrap();
    assert!(!plan.gates_resident && plan.prefetch_clusters > 0);
    assert_eq!(plan.reads_per_bundle, 1);
    let all = (NEURONS / CLUSTER * LAYERS) as f64;
    let read = plan.decode.reads + plan.memory.hot_clusters as f64;
    assert!((read / all - 1.0).abs() < 0.02, "{read} of {all}");
}

#[test]
fn hot_cuts_grow_with_the_batch() {
    let plan = planner(Profile::Nvme, sparse()).plan(3 << 30).unwrap();
    let shares: Vec<f64> = plan.hot_cut.iter().map(|c| c.share).collect();
    assert!(
        shares.windows(2).all(|w| w[0] <= w[1]) && shares[3] > shares[0],
        "{shares:?}"
    );
}

#[test]
fn a_forecast_on_assumptions_names_what_to_measure() {
    let p = planner(Profile::Nvme, sparse());
    let [least, full] =
        [p.smallest_budget(), p.full_budget()].map(|budget| p.plan(budget).unwrap().decode);
    let basis = |machine_measured, device_measured, statistics| Basis {
        machine_measured,
        machine_doubt: None,
        device_measured,
        device_doubtful: false,
        device: String::new(),
        statistics,
        neurons_assumed: false,
    };
    let says = |basis: Basis, forecast, what: Option<&str>| {
        let doubt = basis.doubt(forecast);
        assert_eq!(doubt.is_some(), what.is_some(), "{doubt:?}");
        assert!(doubt.unwrap_or_default().contains(what.unwrap_or_default()));
    };
    says(basis(true, true, true), &least, None);
    says(basis(false, false, false), &full, Some("machine"));
    says(basis(true, false, true), &least, Some("disk"));
    says(basis(true, false, true), &full, None);
    let under_load = Basis {
        device_doubtful: true,
        ..basis(true, true, true)
    };
    assert!(!under_load.all_measured());
    says(under_load, &least, Some("under load"));
    let disturbed = Basis {
        machine_doubt: Some("others".into()),
        ..basis(true, true, true)
    };
    assert!(!disturbed.all_measured());
    says(disturbed, &full, Some("machine was measured under load"));
    says(basis(true, true, false), &least, Some("pack it with"));
    let assumed = Basis {
        neurons_assumed: true,
        ..basis(true, true, true)
    };
    assert!(!assumed.all_measured());
    says(assumed.clone(), &least, Some("experts' neurons"));
    says(assumed, &full, None);
}

/// With a cold region for half of the neurons and small bundles, merging makes fewer commands than
/// neurons and reads no more than a scan.
#[test]
fn merged_reads_cost_less_than_single_ones() {
    let mut p = planner(Profile::Nvme, sparse());
    let budget = p.smallest_budget() + (2 << 30);
    let apart = p.plan(budget).unwrap().decode;
    // Bundles so short that a merge gap covers several.
    (p.shape.stride, p.shape.rest_read, p.shape.cluster_read) = (1024, 1024, 128 << 10);
    let joined = p.plan(budget).unwrap().decode;
    assert!(
        apart.reads > 0.0 && joined.io_ms < apart.io_ms,
        "{apart:?} {joined:?}"
    );
    let all = (LAYERS * NEURONS * 1024) as f64;
    assert!(joined.bytes_read < all, "{joined:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn every_budget_that_works_has_a_sound_plan(extra in 0u64..8 << 30, emmc: bool) {
        let p = planner(if emmc { Profile::Emmc } else { Profile::Ufs4 }, sparse());
        let plan = p.plan(p.smallest_budget() + extra).unwrap();
        prop_assert!(plan.memory.ledger.used() <= plan.memory.budget());
        let d = plan.decode;
        prop_assert!(d.tokens_per_s.is_finite() && d.tokens_per_s > 0.0);
        prop_assert!(d.ms + 1e-9 >= d.compute_ms && d.wait_ms >= 0.0);
        prop_assert!((0.0..=1.0).contains(&d.cold_hit_rate));
        prop_assert!(plan.compute_threads >= 1 && plan.compute_threads <= 4);
        prop_assert!(p.plan(p.smallest_budget() - 1).is_err());
    }
}

/// Needs of an MoE model with a KV cache of 1,024 positions.
fn published_needs(c: &ModelConfig) -> Needs {
    let (d, ffn, q4) = (D, c.ffn as usize, DType::Q4);
    let banks = u64::from(c.layers * c.experts);
    let neurons = banks * u64::from(c.ffn);
    let [quants, scales] = [q4.quants_bytes(d), q4.scales_bytes(d)].map(|n| n as u32);
    let g = BundleGeometry::choose(
        quants,
        scales,
        2 * quants,
        2 * scales,
        4096,
        Prefer::Resident,
    )
    .unwrap();
    let row = |n: usize| q4.row_bytes(n) as u64;
    let kv_rows = u64::from(c.kv_heads * c.head_dim);
    let attention = (2 * d as u64 + 2 * kv_rows) * row(d);
    let router = u64::from(c.experts) * 4 * d as u64;
    let embedding = u64::from(c.vocab) * row(d);
    let fixed = u64::from(c.layers) * (attention + router) + embedding;
    // Low rank, two matrices per expert; the rank results in the published size.
    let rank = 1024;
    let predictor = banks * (rank * row(d) + ffn as u64 * row(rank as usize));
    let kv = state_shape(c, DType::F16, 1024).bytes_for(1024);
    let runtime = 300 << 20;
    let room = ScratchRoom {
        rows: 128,
        logit_rows: 1,
        replayed: 1,
        drafts: false,
        context: 1024,
        threads: 4,
        tiles: false,
    };
    let scratch = room.bytes(c);
    Needs {
        lane_clusters: 0,
        lane: 0,
        process: runtime - scratch,
        process_peak: 0,
        fixed,
        tables: [embedding, 0, 0],
        scales: neurons * u64::from(g.scales_per_neuron),
        predictor,
        kv,
        context: 1024,
        batch: 1,
        scratch,
        gates: neurons * u64::from(g.gate_len),
        gate_len: g.gate_len.into(),
        rest_len: g.rest_len.into(),
        whole_slot: g.stride.into(),
        rest_slot: (g.stride - g.rest_read()).into(),
        neurons,
        banks,
        cluster: CLUSTER as u64,
        clusters: banks * (ffn / CLUSTER) as u64,
        hot_clusters: 0,
        always: 0,
        tiles: 0,
        tile_slot: 0,
        least_tiles: 0,
        whole_ffn: 0,
        streamed: 0,
        two_phases: true,
        min_slots: 2 * CLUSTER as u64,
        stream_len: CLUSTER as u64 * u64::from(g.stride),
        stream_most: 16,
        gates_help: true,
        gates_must: false,
        gate_banks: 2,
        gates_divide: true,
        predicts: true,
    }
}

/// PowerInfer-2 §7.2.3: TurboSparse-Mixtral-47B in 7 GB: 1 GB for other layers and the KV cache,
/// 2.6 GB predictors, 2.7 GB scales, 0.3 GB run time; the rest caches 1.8 % of the FFN weights.
#[test]
fn the_published_split_of_a_47b_model() {
    const GB: f64 = 1e9;
    let c = mixtral();
    let needs = published_needs(&c);
    let embedding = u64::from(c.vocab) * DType::Q4.row_bytes(D) as u64;
    let plan = needs.plan(7 << 30).unwrap();
    let held = |what: &str| plan.ledger.held(what) as f64;
    let close_to = |what: &str, found: f64, published: f64, within: f64| {
        assert!(
            (found / published - 1.0).abs() < within,
            "{what}: {found:.3e}"
        );
    };
    // The published number includes the embedding, which is read from flash here.
    let other = held("fixed") + held("kv") + embedding as f64;
    assert_eq!(held("embedding"), 0.0);
    close_to("other layers", other, 1.0 * GB, 0.15);
    close_to("predictors", held("predictor"), 2.6 * GB, 0.1);
    close_to("scales", held("scales"), 2.7 * GB, 0.05);
    close_to("run time", held("process") + held("scratch"), 0.3 * GB, 0.1);
    // All gates take 7.5 GB, so they stay on flash; the rest caches neurons.
    assert_eq!(plan.residency(), SlotContents::Bundles);
    let cache = held("cold") + held("hot");
    assert!((0.3 * GB..0.8 * GB).contains(&cache), "{cache:.3e}");
    let share = plan.ffn_resident_share(&needs);
    assert!((0.01..0.035).contains(&share), "{share}");
}

fn mixtral() -> ModelConfig {
    ModelConfig {
        family: "mixtral".into(),
        name: "TurboSparse-Mixtral-47B".into(),
        vocab: 32064,
        d_model: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 14336,
        experts: 8,
        ffn_kind: FfnKind {
            activation: Activation::Relu,
            relu_on_up: true,
            ungated: false,
        },
        rms_eps: 1e-5,
        rope: Rope {
            theta: 1e6,
            dims: 128,
            scaling: RopeScaling::None,
        },
        window: vec![0; 32],
        qkv_bias: false,
        o_bias: false,
        qk_norm: false,
        tied_head: false,
        max_context: 32768,
        bos: None,
        add_bos: false,
        eos: Vec::new(),
        predictor_threshold: None,
        mixture: None,
        qk_norm_whole: false,
        clip_qkv: None,
        form: Form::default(),
    }
}

/// Division runs again whenever a sequence joins or leaves.
#[test]
fn a_division_made_again_has_the_same_budget() {
    let p = planner(Profile::Nvme, sparse());
    let budget = p.smallest_budget() + (p.full_budget() - p.smallest_budget()) / 2;
    let division = p.divide(budget).unwrap();
    for i in 0..50 {
        let again = p
            .divide_again(&division, budget, 1 + i % 2, Candidates::Current)
            .unwrap();
        assert_eq!(again.memory.budget(), budget);
    }
}

/// In a dense model every missing neuron is streamed for every token.
#[test]
fn streams_depend_on_the_budget_and_the_device_and_not_on_the_prompt() {
    let mut p = planner(Profile::Nvme, Firing::always(LAYERS, NEURONS));
    p.shape.dense = true;
    p.needs.gates_help = false;
    let longest = p.scratch.clone();
    let mut chunks = Vec::new();
    for share in [0.2, 0.5, 0.9] {
        p.scratch = longest.clone();
        let budget = p.needs.budget_for_share(share);
        let long = p.divide(budget).unwrap();
        p.scratch.truncate(1);
        let short = p.divide(budget).unwrap();
        assert_eq!(short.chunk, 16);
        assert_eq!(long.memory.stream_buffers, short.memory.stream_buffers);
        assert_eq!(short.memory.stream_buffers, p.needs.stream_most);
        // A longer chunk hardly changes what a token reads.
        let missing = |d: &Division| (d.needs.clusters - d.memory.hot_clusters) as f64;
        assert!(missing(&long) < 1.05 * missing(&short), "{share}");
        chunks.push(long.chunk);
    }
    // The more each pass reads, the longer the chunk.
    assert_eq!(chunks, [128, 128, 16]);
}

#[test]
fn what_a_lane_holds_is_in_no_other_region() {
    let mut p = planner(Profile::Ufs4, sparse());
    let budget = p.needs.budget_for_share(0.5);
    let plain = p.divide(budget).unwrap();
    let cluster_len = CLUSTER as u64 * (p.needs.gate_len + p.needs.rest_len);
    for unified in [true, false] {
        p.lane = Some(LaneFacts {
            unified,
            memory: 40 * cluster_len + 5,
            asked: true,
            cluster_len,
            ..even_lane()
        });
        let division = p.divide(budget).unwrap();
        let (needs, memory) = (&division.needs, &division.memory);
        assert_eq!(needs.lane_clusters, 40);
        let charged = if unified { 40 * cluster_len } else { 0 };
        assert_eq!(memory.ledger.held("device"), charged);
        let whole = p.divide(p.full_budget()).unwrap();
        assert!(whole.is_resident() && whole.needs.lane_clusters == 40);
        assert!(memory.ledger.used() <= budget);
        let [with, without] = [&division, &plain].map(|d| d.memory.ffn_resident_share(&d.needs));
        if unified {
            // Gate rows are stored twice.
            assert!((with - without).abs() < 0.01, "{with} {without}")
        } else {
            assert!(with > without)
        }
    }
}
