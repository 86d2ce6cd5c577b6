//! `emberflow train-predictor`: copies a container and adds predictors of active neurons.
//!
//! The model runs on a text, and the inputs of the FFNs are recorded, for as many layers at a time as memory allows.
//! For each bank (each expert has its own, trained on the tokens that visit it) the predictor is chosen that computes
//! the fewest neurons at the target recall. Finished banks are saved next to the output, so that an interrupted run
//! can be resumed. Containers are immutable: the result is a new file, written atomically.

mod inputs;
mod report;

use std::path::PathBuf;

use emberflow_engine::meta::ContainerMeta;
use emberflow_engine::{compute, ffn_hidden};
use emberflow_kernels::{Cpu, DType, Narrow};
use emberflow_models::config::{Activation, Bank, ModelConfig};
use emberflow_predictor::section::{Kind, NewBank, Training, encode};
use emberflow_predictor::top_multiple;
use emberflow_predictor::train::{Design, Fires, GateLayer, Made, Texts, Trainer};
use emberflow_storage::container::Container;
use xxhash_rust::xxh3::xxh3_64;

use self::inputs::{Inputs, Windows};
use self::report::{BankReport, Trained};
use crate::cli::{PredictorArg, SparsityArg, TrainPredictorArgs};
use crate::model::{open_bundles, open_engine, open_model};
use crate::packed::Packed;
use crate::rewrite::{self, Changed};
use crate::windows::Source;
use crate::{Failure, atomic, budget, progress};

/// Memory for recorded inputs; further layers need another pass over the text.
const INPUT_BYTES: usize = 1 << 30;

/// Chunk length while inputs are recorded.
const CHUNK: usize = 128;

/// Minimum tokens of an expert for training, calibration and measurement.
const FEWEST: [usize; 3] = [128, 16, 16];

/// Runs the command.
pub fn command(args: &TrainPredictorArgs) -> Result<(), Failure> {
    check(args)?;
    let container = open_bundles(&args.model)?;
    let meta = ContainerMeta::parse(container.meta(), container.path())?;
    let c = meta.config;
    let text = Source::open(&args.file)?;
    let job = BankTrainer::new(args, &c, &container, &text)?;
    let windows = Windows::choose(open_model(&args.model)?.text(), &text, args)?;
    drop(text);
    std::fs::create_dir_all(&job.folder).map_err(Failure::file(&job.folder))?;
    let (banks, reports) = train(args, &job, &container, &windows)?;
    let [trained_on, _, measured_on] = windows.tokens();
    let training = Training {
        trained_on: trained_on as u64,
        measured_on: measured_on as u64,
        target: args.recall as f32,
    };
    let neurons: Vec<usize> = c.banks().map(|bank| bank.neurons as usize).collect();
    let section = encode(c.bundle_width() as usize, &neurons, training, &banks);
    let changed = Changed {
        predictors: Some(&section),
        ..Changed::default()
    };
    // Another process may have created the output by now.
    check(args)?;
    rewrite::copy(&container, &args.output, changed)?;
    std::fs::remove_dir_all(&job.folder).map_err(Failure::file(&job.folder))?;
    let qualities: Vec<_> = banks.iter().map(|b| b.quality).collect();
    let bytes = section.len();
    Trained::new(args, &container, bytes, training, &qualities, reports).print(args.json)
}

fn check(args: &TrainPredictorArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    let reads = [args.model.file(), Some(args.file.as_path())];
    atomic::may_create(&args.output, args.force, &reads)
}

/// Settings shared by all banks.
struct BankTrainer {
    /// Kind of predictor.
    kind: PredictorArg,
    /// Whether neurons are predicted; otherwise small gates are dropped.
    predicts: bool,
    /// Input width.
    d: usize,
    /// Maximum bytes of predictor per neuron.
    per_neuron: f64,
    /// By layer, the active gates; `None` for dense layers of a sparse model.
    fires: Vec<Option<Fires>>,
    /// Folder for finished banks, and the prefix of their names.
    folder: PathBuf,
    fingerprint: String,
}

impl BankTrainer {
    fn new(
        args: &TrainPredictorArgs,
        c: &ModelConfig,
        container: &Container,
        text: &Source,
    ) -> Result<Self, Failure> {
        let sparse = c.has_zeros();
        let named = |bank: &Bank| fires(c, bank.layer).is_some();
        let neurons: u64 = (c.banks().filter(named).map(|bank| u64::from(bank.neurons))).sum();
        let model = container.file_len() - container.predictor_len();
        let bytes = model as f64 * args.bytes / 100.0;
        check_activation(args, c)?;
        let mut folder = args.output.as_os_str().to_owned();
        folder.push(".layers");
        let mut state = text.hash()?.to_le_bytes().to_vec();
        state.extend(xxh3_64(container.meta()).to_le_bytes());
        state.extend(
            format!(
                "{} {:?} {} {} {} {} {}",
                container.file_len(),
                args.kind,
                args.bytes,
                args.recall,
                args.floor,
                args.cut,
                args.tokens
            )
            .bytes(),
        );
        let job = Self {
            kind: args.kind,
            predicts: sparse,
            d: c.bundle_width() as usize,
            per_neuron: bytes / (neurons as f64).max(1.0),
            fires: (0..c.layers).map(|layer| fires(c, layer)).collect(),
            folder: PathBuf::from(folder),
            fingerprint: format!("{:016x}", xxh3_64(&state)),
        };
        let none = |bank: &Bank| job.names(bank.layer) && job.designs(bank).is_empty();
        match c.banks().find(none) {
            None => Ok(job),
            Some(bank) => Err(Failure::usage(format!(
                "no predictor of this kind fits in {} bytes per {}, {} % of the model; allow \
                 more with --bytes",
                job.most(bank.neurons as usize),
                if c.mixture.is_some() {
                    "expert"
                } else {
                    "layer"
                },
                args.bytes
            ))),
        }
    }

    /// Maximum bytes of the predictor of a bank with this many neurons.
    fn most(&self, neurons: usize) -> usize {
        (self.per_neuron * neurons as f64) as usize
    }

    /// Whether a layer gets a predictor of neurons.
    fn names(&self, layer: u32) -> bool {
        self.predicts && self.fires[layer as usize].is_some()
    }

    /// Designs to try for a bank: all that fit; empty if gates are dropped or all neurons are used.
    fn designs(&self, bank: &Bank) -> Vec<Design> {
        let (d, neurons) = (self.d, bank.neurons as usize);
        let most = self.most(neurons);
        let low_rank = Design::low_rank_within(most, d, neurons, DType::Q4);
        let above_cutoff = matches!(self.fires[bank.layer as usize], Some(Fires::Top(_)));
        let wants = |kind| self.kind == kind || self.kind == PredictorArg::Auto;
        let mut designs = Vec::new();
        if self.names(bank.layer) {
            if !above_cutoff {
                designs.extend(wants(PredictorArg::Sign).then_some(Design::Sign));
                designs.extend(low_rank.filter(|_| wants(PredictorArg::LowRank)));
            }
            if wants(PredictorArg::Coarse) {
                // Gaussian top-k needs 3 bits: its cutoff is so near the mean that the noise of 2 bits matters.
                designs.extend(above_cutoff.then_some(Design::Coarse(Narrow::Three)));
                designs.push(Design::Coarse(Narrow::Two));
            }
            designs.retain(|design| design.bytes(d, neurons) <= most);
        }
        designs
    }

    fn file(&self, bank: usize) -> PathBuf {
        self.folder.join(format!("{}-{bank}", self.fingerprint))
    }
}

/// The active gates of a layer; `None` for dense layers of a sparse model.
fn fires(c: &ModelConfig, layer: u32) -> Option<Fires> {
    let share = c.form.gate_top.get(layer as usize).copied();
    match c.ffn_kind.activation {
        _ if share.unwrap_or(0.0) > 0.0 => share.map(|share| Fires::Top(top_multiple(share))),
        _ if c.form.has_gate_top() => None,
        Activation::FatRelu { threshold } => Some(Fires::Above(threshold)),
        _ => Some(Fires::Above(0.0)),
    }
}

/// Checks that the options suit the model's activation.
fn check_activation(args: &TrainPredictorArgs, c: &ModelConfig) -> Result<(), Failure> {
    let activation = c.ffn_kind.activation;
    match args.kind {
        PredictorArg::Sign | PredictorArg::LowRank if c.form.has_gate_top() => Err(Failure::usage(
            "this model uses Gaussian top-k, whose cutoff only --kind \
                 coarse can predict",
        )),
        _ if c.has_zeros() => Ok(()),
        _ if c.mixture.is_some() => Err(Failure::usage(format!(
            "the experts of {} use {activation:?}, which is never exactly zero: there is nothing to \
             predict, and an expert is read whole. Experts that are chosen often can stay in memory; \
             see emberflow profile",
            c.name
        ))),
        PredictorArg::Auto | PredictorArg::Magnitude => Ok(()),
        _ => Err(Failure::usage(format!(
            "{activation:?} has no exact zeros to predict; use --kind magnitude with --cut"
        ))),
    }
}

/// Trains all banks, those of an earlier run first.
fn train(
    args: &TrainPredictorArgs,
    job: &BankTrainer,
    container: &Container,
    windows: &Windows,
) -> Result<(Vec<NewBank>, Vec<BankReport>), Failure> {
    let packed = Packed::new(container)?;
    let c = packed.config();
    let banks: Vec<Bank> = c.banks().collect();
    let mut done: Vec<Option<(NewBank, BankReport)>> = (banks.iter().enumerate())
        .map(|(b, bank)| report::load(&job.file(b), job.d, bank.neurons as usize))
        .collect();
    let resumed = done.iter().flatten().count();
    if resumed > 0 {
        tracing::info!(resumed, "banks of an earlier run");
    }
    let at_once = (INPUT_BYTES / (2 * job.d * windows.total()).max(1)).max(1);
    let threads = args.engine.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, |n| n.get()),
        usize::from,
    );
    let missing = |layer: &u32| {
        let mut banks = banks.iter().zip(&done);
        banks.any(|(bank, done)| bank.layer == *layer && done.is_none())
    };
    let missing: Vec<u32> = c.ffn_layers().filter(missing).collect();
    for group in missing.chunks(at_once) {
        let inputs = collect(args, c, windows, group)?;
        // One progress bar at a time: reading the text has its own.
        let bar = progress::steps("predictors", banks.len() as u64);
        bar.set_position(done.iter().flatten().count() as u64);
        let on = compute(container, c, threads, None);
        let trainer = Trainer::new(&on);
        for (b, bank) in banks.iter().enumerate() {
            let of_group = group.iter().position(|&layer| layer == bank.layer);
            let Some(place) = of_group.filter(|_| done[b].is_none()) else {
                continue;
            };
            let mut gate = Vec::with_capacity(bank.neurons as usize * job.d);
            packed.neurons(b, &mut |_, neuron| {
                gate.extend_from_slice(&neuron.gate);
                Ok(())
            })?;
            let routed = is_routed(c, bank);
            let [train, calibrate, measure] = &inputs.of(place, routed.then_some(bank.expert));
            let layer = GateLayer {
                d: job.d,
                gate: &gate,
                fires: job.fires[bank.layer as usize].unwrap_or(Fires::Above(0.0)),
                texts: Texts {
                    train,
                    calibrate,
                    measure,
                },
                pruned: packed.meta.prunes(bank.layer),
                recall: args.recall,
            };
            let (made, report) = of_bank(args, job, &trainer, c, bank, &layer)?;
            report::save(&job.file(b), &layer, &made, &report)?;
            done[b] = Some((made, report));
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    Ok(done.into_iter().flatten().unzip())
}

/// Whether a bank is a routed expert.
fn is_routed(c: &ModelConfig, bank: &Bank) -> bool {
    c.mixture_of(bank.layer).is_some() && bank.expert < c.experts
}

/// Trains a bank's predictor; none if it is not requested or not good enough.
fn of_bank(
    args: &TrainPredictorArgs,
    job: &BankTrainer,
    trainer: &Trainer<'_>,
    c: &ModelConfig,
    bank: &Bank,
    layer: &GateLayer<'_>,
) -> Result<(NewBank, BankReport), Failure> {
    let used = job.predicts && !job.names(bank.layer);
    let made = if used || is_routed(c, bank) && too_few(layer) {
        Vec::new()
    } else {
        make(args, job, trainer, c, bank, layer)?
    };
    let expert = c.mixture.is_some().then_some(bank.expert);
    let (made, report) = report::judged(bank.layer, expert, made, args.floor);
    if matches!(layer.fires, Fires::Top(_)) && made.kind == Kind::None {
        Err(below_floor(bank.layer, &made, args.floor))
    } else {
        Ok((made, report))
    }
}

/// The error for a Gaussian top-k layer whose predictor is too poor: without one, all gates are needed.
fn below_floor(layer: u32, made: &NewBank, floor: f64) -> Failure {
    Failure::usage(format!(
        "layer {layer}: recall {:.1} % is below the floor of {:.1} %, and without a \
         predictor this layer needs all gates; use more text with --tokens, or a lower \
         --floor",
        100.0 * made.quality.recall(),
        100.0 * floor
    ))
}

/// Whether too few tokens visit an expert to train a predictor.
fn too_few(expert: &GateLayer<'_>) -> bool {
    let texts = expert.texts;
    let parts = [texts.train, texts.calibrate, texts.measure];
    let mut parts = parts.iter().zip(FEWEST);
    parts.any(|(part, least)| part.len() / expert.d < least)
}

/// Records the inputs of `layers`.
fn collect(
    args: &TrainPredictorArgs,
    c: &ModelConfig,
    windows: &Windows,
    layers: &[u32],
) -> Result<Inputs, Failure> {
    let mut engine_args = args.engine.clone();
    engine_args.lab.chunk = CHUNK;
    engine_args.sparsity = if c.has_zeros() {
        SparsityArg::Exact
    } else {
        SparsityArg::Dense
    };
    let model = open_model(&args.model)?;
    let mut engine = open_engine(model, &engine_args, windows.longest(), args.force)?;
    let layers: Vec<usize> = layers.iter().map(|&layer| c.ffn_place(layer)).collect();
    Inputs::collect(&mut engine, windows, &layers)
}

/// Trains a bank's candidates, best last.
fn make(
    args: &TrainPredictorArgs,
    job: &BankTrainer,
    trainer: &Trainer<'_>,
    c: &ModelConfig,
    bank: &Bank,
    layer: &GateLayer<'_>,
) -> Result<Vec<(&'static str, Made)>, Failure> {
    if !job.predicts {
        let kind = c.ffn_kind_of(bank.layer);
        let activate = move |gates: &mut [f32]| {
            let cpu = Cpu::detect();
            match kind.activation {
                Activation::Gelu => cpu.gelu(gates),
                Activation::GeluTanh => cpu.gelu_tanh(gates),
                Activation::Xielu { .. } => ffn_hidden(kind, cpu, gates, &[]),
                _ => cpu.silu(gates),
            }
        };
        let (threshold, quality) = trainer.magnitude(layer, 1.0 - args.cut, &activate);
        let made = Made {
            bank: NewBank {
                kind: Kind::Magnitude { threshold },
                quality,
                parts: Vec::new(),
            },
            ns_per_token: 0.0,
        };
        return Ok(vec![("magnitude", made)]);
    }
    let covariance = trainer.covariance(layer.d, layer.texts.train);
    let mut made = Vec::new();
    for design in job.designs(bank) {
        let candidate = trainer.make(design, layer, &covariance).ok_or_else(|| {
            Failure::Fault("a gate row or an input of the model is not finite".into())
        })?;
        made.push((design.name(), candidate));
    }
    // Sort so that the best is last: candidates below the floor first, then by the number of predicted neurons.
    made.sort_by(|(_, a), (_, b)| {
        let key = |m: &Made| {
            (
                m.bank.quality.recall() < args.floor,
                m.bank.quality.overhead(),
            )
        };
        let (a, b) = (key(a), key(b));
        b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    Ok(made)
}
