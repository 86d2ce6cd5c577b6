//! `emberflow train-predictor`: a copy of a container that knows which neurons fire.
//!
//! The model runs over a text; what each layer's FFN reads is kept, as many layers at a
//! time as memory allows. Then each bank gets the predictor that computes the fewest
//! neurons for the recall that was asked for: an expert one of its own, made from the tokens
//! that visit it. Finished banks are kept beside the output, so that a run that was stopped
//! goes on where it was. Containers are immutable: the result is a new file, which appears
//! when it is whole.

mod inputs;
mod report;
mod rewrite;

use std::path::PathBuf;

use emberflow_engine::meta::ContainerMeta;
use emberflow_kernels::{Compute, Cpu, DType, Narrow};
use emberflow_models::config::{Activation, Bank, ModelConfig};
use emberflow_predictor::section::{Kind, NewBank, Training, encode};
use emberflow_predictor::top_multiple;
use emberflow_predictor::train::{Design, Fires, GateLayer, Made, Texts, Trainer};
use emberflow_storage::container::Container;
use xxhash_rust::xxh3::xxh3_64;

use self::inputs::{Inputs, Windows};
use self::report::{BankReport, Trained};
use crate::cli::{PredictorArg, SparsityArg, TrainPredictorArgs};
use crate::model::{open_container, open_engine, open_model};
use crate::packed::Packed;
use crate::windows::Source;
use crate::{Failure, atomic, budget, progress};

/// Inputs that are held at once; layers beyond wait for another pass over the text.
const INPUT_BYTES: usize = 1 << 30;

/// Tokens computed at once while inputs are collected.
const CHUNK: usize = 128;

/// Fewest tokens that an expert's predictor is made from, calibrated on and measured on.
const FEWEST: [usize; 3] = [128, 16, 16];

/// Runs the command.
pub fn command(args: &TrainPredictorArgs) -> Result<(), Failure> {
    check(args)?;
    let container = open_container(&args.model)?;
    let meta = ContainerMeta::parse(container.meta(), container.path())?;
    let c = meta.config;
    let text = Source::open(&args.file)?;
    let job = Job::new(args, &c, &container, &text)?;
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
    let section = encode(c.d_model as usize, &neurons, training, &banks);
    rewrite::with_predictors(&container, &args.output, &section)?;
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

/// What does not change from bank to bank.
struct Job {
    /// The predictor that is wanted.
    kind: PredictorArg,
    /// Whether neurons are predicted; else small gates are cut.
    predicts: bool,
    /// Elements of an input.
    d: usize,
    /// Bytes for a neuron's part of its predictor, at most.
    per_neuron: f64,
    /// By layer: which gates fire; `None` where all are used, in a model that has others.
    fires: Vec<Option<Fires>>,
    /// Where finished banks wait, and what their names begin with.
    folder: PathBuf,
    fingerprint: String,
}

impl Job {
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
            d: c.d_model as usize,
            per_neuron: bytes / (neurons as f64).max(1.0),
            fires: (0..c.layers).map(|layer| fires(c, layer)).collect(),
            folder: PathBuf::from(folder),
            fingerprint: format!("{:016x}", xxh3_64(&state)),
        };
        let none = |bank: &Bank| job.names(bank.layer) && job.designs(bank).is_empty();
        match c.banks().find(none) {
            None => Ok(job),
            Some(bank) => Err(Failure::usage(format!(
                "no predictor of this kind fits in {} bytes per {}, {} % of the model; give it \
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

    /// Bytes for the predictor of a bank of so many neurons.
    fn most(&self, neurons: usize) -> usize {
        (self.per_neuron * neurons as f64) as usize
    }

    /// Whether the neurons of a layer are to be named.
    fn names(&self, layer: u32) -> bool {
        self.predicts && self.fires[layer as usize].is_some()
    }

    /// The designs to try for a bank: those that fit; none where gates are cut or all used.
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
                // a cutoff is nearer to the mean of the gates than noise of two bits is small
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

/// Which gates of a layer fire; `None` where all are used, in a model that has others.
fn fires(c: &ModelConfig, layer: u32) -> Option<Fires> {
    let share = c.form.gate_top.get(layer as usize).copied();
    match c.ffn_kind.activation {
        _ if share.unwrap_or(0.0) > 0.0 => share.map(|share| Fires::Top(top_multiple(share))),
        _ if c.form.has_gate_top() => None,
        Activation::FatRelu { threshold } => Some(Fires::Above(threshold)),
        _ => Some(Fires::Above(0.0)),
    }
}

/// Whether the arguments suit the activation of the model's neurons.
fn check_activation(args: &TrainPredictorArgs, c: &ModelConfig) -> Result<(), Failure> {
    let activation = c.ffn_kind.activation;
    match args.kind {
        PredictorArg::Sign | PredictorArg::LowRank if c.form.has_gate_top() => Err(Failure::usage(
            "the neurons of this model fire above a cutoff of their token, which only --kind \
                 coarse can tell",
        )),
        _ if c.has_zeros() => Ok(()),
        _ if c.mixture.is_some() => Err(Failure::usage(format!(
            "the experts of {} have {activation:?}, which is never exactly zero: there is nothing to \
             predict, and their neurons are read with the whole expert; what can stay in memory are the \
             experts that are chosen often, see emberflow profile",
            c.name
        ))),
        PredictorArg::Auto | PredictorArg::Magnitude => Ok(()),
        _ => Err(Failure::usage(format!(
            "{activation:?} has no exact zeros to predict; use --kind magnitude with --cut"
        ))),
    }
}

/// All banks, those of an earlier run first.
fn train(
    args: &TrainPredictorArgs,
    job: &Job,
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
    let missing: Vec<u32> = (0..c.layers).filter(missing).collect();
    for group in missing.chunks(at_once) {
        let inputs = collect(args, c, windows, group)?;
        // one bar at a time: reading the text has its own
        let bar = progress::steps("predictors", banks.len() as u64);
        bar.set_position(done.iter().flatten().count() as u64);
        let on = Compute::new(threads, None);
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

/// Whether tokens visit a bank that a router chooses.
fn is_routed(c: &ModelConfig, bank: &Bank) -> bool {
    c.mixture_of(bank.layer).is_some() && bank.expert < c.experts
}

/// A bank's predictor, or none where none is wanted or good enough.
fn of_bank(
    args: &TrainPredictorArgs,
    job: &Job,
    trainer: &Trainer<'_>,
    c: &ModelConfig,
    bank: &Bank,
    layer: &GateLayer<'_>,
) -> Result<(NewBank, BankReport), Failure> {
    let used = job.predicts && !job.names(bank.layer);
    let made = match used || is_routed(c, bank) && too_few(layer) {
        true => Vec::new(),
        false => make(args, job, trainer, c, bank, layer)?,
    };
    let expert = c.mixture.is_some().then_some(bank.expert);
    let (made, report) = report::judged(bank.layer, expert, made, args.floor);
    match matches!(layer.fires, Fires::Top(_)) && made.kind == Kind::None {
        true => Err(below_floor(bank.layer, &made, args.floor)),
        false => Ok((made, report)),
    }
}

/// Without a predictor nothing tells the cutoff of a token's gates but all of them.
fn below_floor(layer: u32, made: &NewBank, floor: f64) -> Failure {
    Failure::usage(format!(
        "layer {layer}: of the neurons that fire {:.1} % are named, less than {:.1} %, and without a \
         predictor this layer cannot tell which ones do; give more text with --tokens, or a lower \
         --floor",
        100.0 * made.quality.recall(),
        100.0 * floor
    ))
}

/// Whether too few tokens visit an expert to make a predictor from them.
fn too_few(expert: &GateLayer<'_>) -> bool {
    let texts = expert.texts;
    let parts = [texts.train, texts.calibrate, texts.measure];
    let mut parts = parts.iter().zip(FEWEST);
    parts.any(|(part, least)| part.len() / expert.d < least)
}

/// What `layers` read of the windows.
fn collect(
    args: &TrainPredictorArgs,
    c: &ModelConfig,
    windows: &Windows,
    layers: &[u32],
) -> Result<Inputs, Failure> {
    let mut engine_args = args.engine.clone();
    engine_args.lab.chunk = CHUNK;
    engine_args.sparsity = match c.has_zeros() {
        true => SparsityArg::Exact,
        false => SparsityArg::Dense,
    };
    let model = open_model(&args.model)?;
    let mut engine = open_engine(model, &engine_args, windows.longest(), args.force)?;
    let layers: Vec<usize> = layers.iter().map(|&layer| layer as usize).collect();
    Inputs::collect(&mut engine, windows, &layers)
}

/// A bank's candidates, the best one last.
fn make(
    args: &TrainPredictorArgs,
    job: &Job,
    trainer: &Trainer<'_>,
    c: &ModelConfig,
    bank: &Bank,
    layer: &GateLayer<'_>,
) -> Result<Vec<(&'static str, Made)>, Failure> {
    if !job.predicts {
        let activation = c.ffn_kind.activation;
        let activate = move |gates: &mut [f32]| {
            let cpu = Cpu::detect();
            match activation {
                Activation::Gelu => cpu.gelu(gates),
                Activation::GeluTanh => cpu.gelu_tanh(gates),
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
    // the one that looks at the fewest neurons; what misses the floor only if all do
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
