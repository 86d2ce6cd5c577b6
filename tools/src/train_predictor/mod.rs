//! `emberflow train-predictor`: a copy of a container that knows which neurons fire.
//!
//! The model runs over a text; what each layer's FFN reads is kept, as many layers at a
//! time as memory allows. Then each layer gets the predictor that computes the fewest
//! neurons for the recall that was asked for. Finished layers are kept beside the output,
//! so that a run that was stopped goes on where it was. Containers are immutable: the
//! result is a new file, which appears when it is whole.

mod args;
mod inputs;
mod report;
mod rewrite;

use std::path::PathBuf;

use emberflow_engine::meta::ContainerMeta;
use emberflow_kernels::{Compute, Cpu, DType};
use emberflow_models::config::{Activation, ModelConfig};
use emberflow_predictor::section::{Kind, NewLayer, Training, encode};
use emberflow_predictor::train::{Design, GateLayer, Made, Texts, Trainer};
use emberflow_storage::container::Container;
use xxhash_rust::xxh3::xxh3_64;

pub use self::args::{PredictorArg, TrainPredictorArgs};
use self::inputs::{Inputs, Windows};
use self::report::{LayerReport, Trained};
use crate::cli::SparsityArg;
use crate::model::{open_container, open_engine, open_model};
use crate::packed::Packed;
use crate::{Failure, atomic, budget, progress};

/// Inputs that are held at once; layers beyond wait for another pass over the text.
const INPUT_BYTES: usize = 1 << 30;

/// Tokens computed at once while inputs are collected.
const CHUNK: u16 = 128;

/// Runs the command.
pub fn command(args: &TrainPredictorArgs) -> Result<(), Failure> {
    check(args)?;
    let container = open_container(&args.model)?;
    let meta = ContainerMeta::parse(container.meta(), container.path())?;
    let c = meta.config;
    let text = std::fs::read(&args.file).map_err(Failure::file(&args.file))?;
    let job = Job::new(args, &c, &container, &text)?;
    let windows = Windows::choose(open_model(&args.model)?.text(), &text, args)?;
    drop(text);
    std::fs::create_dir_all(&job.folder).map_err(Failure::file(&job.folder))?;
    let (layers, reports) = train(args, &job, &container, &windows)?;
    let [trained_on, _, measured_on] = windows.tokens();
    let training = Training {
        trained_on: trained_on as u64,
        measured_on: measured_on as u64,
        target: args.recall as f32,
    };
    let section = encode(c.d_model as usize, c.ffn as usize, training, &layers);
    rewrite::with_predictors(&container, &args.output, &section)?;
    std::fs::remove_dir_all(&job.folder).map_err(Failure::file(&job.folder))?;
    let qualities: Vec<_> = layers.iter().map(|l| l.quality).collect();
    let bytes = section.len();
    Trained::new(args, &container, bytes, training, &qualities, reports).print(args.json)
}

fn check(args: &TrainPredictorArgs) -> Result<(), Failure> {
    budget::may_take(&args.engine, args.force)?;
    let output = &args.output;
    if let Some(model) = args.model.file()
        && std::fs::canonicalize(model).ok() == std::fs::canonicalize(output).ok()
        && output.exists()
    {
        return Err(Failure::usage(
            "the output is the model itself; containers are immutable, name another file with -o",
        ));
    }
    atomic::may_create(output, args.force)
}

/// What does not change from layer to layer.
struct Job {
    /// Designs to try.
    designs: Vec<Design>,
    /// A gate fires above this.
    fires_above: f32,
    /// Where finished layers wait, and what their names begin with.
    folder: PathBuf,
    fingerprint: String,
}

impl Job {
    fn new(
        args: &TrainPredictorArgs,
        c: &ModelConfig,
        container: &Container,
        text: &[u8],
    ) -> Result<Self, Failure> {
        let (d, neurons) = (c.d_model as usize, c.ffn as usize);
        let share = args.bytes / 100.0 / f64::from(c.layers);
        let most = ((container.file_len() - container.predictor_len()) as f64 * share) as usize;
        let low_rank = Design::low_rank_within(most, d, neurons, DType::Q4);
        let wants = |kind| args.kind == kind || args.kind == PredictorArg::Auto;
        let mut designs = Vec::new();
        if c.ffn_kind.activation.is_sparse() {
            designs.extend(wants(PredictorArg::Sign).then_some(Design::Sign));
            designs.extend(low_rank.filter(|_| wants(PredictorArg::LowRank)));
            designs.extend(wants(PredictorArg::Coarse).then_some(Design::Coarse));
            designs.retain(|design| design.bytes(d, neurons) <= most);
            if designs.is_empty() {
                return Err(Failure::usage(format!(
                    "no predictor of this kind fits in {most} bytes per layer, {} % of the model; \
                     give it more with --bytes",
                    args.bytes
                )));
            }
        } else if !wants(PredictorArg::Magnitude) {
            return Err(Failure::usage(format!(
                "{:?} has no exact zeros to predict; use --kind magnitude with --cut",
                c.ffn_kind.activation
            )));
        }
        let mut folder = args.output.as_os_str().to_owned();
        folder.push(".layers");
        let mut state = xxh3_64(text).to_le_bytes().to_vec();
        state.extend(xxh3_64(container.meta()).to_le_bytes());
        state.extend(
            format!(
                "{} {designs:?} {} {} {} {}",
                container.file_len(),
                args.recall,
                args.floor,
                args.cut,
                args.tokens
            )
            .bytes(),
        );
        Ok(Self {
            designs,
            fires_above: match c.ffn_kind.activation {
                Activation::FatRelu { threshold } => threshold,
                _ => 0.0,
            },
            folder: PathBuf::from(folder),
            fingerprint: format!("{:016x}", xxh3_64(&state)),
        })
    }

    fn file(&self, layer: usize) -> PathBuf {
        self.folder.join(format!("{}-{layer}", self.fingerprint))
    }
}

/// All layers, those of an earlier run first.
fn train(
    args: &TrainPredictorArgs,
    job: &Job,
    container: &Container,
    windows: &Windows,
) -> Result<(Vec<NewLayer>, Vec<LayerReport>), Failure> {
    let packed = Packed::new(container)?;
    let c = packed.config();
    let (all, d) = (c.layers as usize, c.d_model as usize);
    let mut done: Vec<Option<(NewLayer, LayerReport)>> =
        (0..all).map(|l| report::load(&job.file(l), c)).collect();
    let resumed = done.iter().flatten().count();
    if resumed > 0 {
        tracing::info!(resumed, "layers of an earlier run");
    }
    let at_once = (INPUT_BYTES / (2 * d * windows.total()).max(1)).max(1);
    let threads = args.engine.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, |n| n.get()),
        usize::from,
    );
    let missing: Vec<usize> = (0..all).filter(|&l| done[l].is_none()).collect();
    for group in missing.chunks(at_once) {
        let mut engine_args = args.engine.clone();
        engine_args.chunk = Some(engine_args.chunk.unwrap_or(CHUNK).max(CHUNK));
        engine_args.sparsity = match c.ffn_kind.activation.is_sparse() {
            true => SparsityArg::Exact,
            false => SparsityArg::Dense,
        };
        let model = open_model(&args.model)?;
        let mut engine = open_engine(model, &engine_args, windows.longest(), args.force)?;
        let inputs = Inputs::collect(&mut engine, windows, group)?;
        drop(engine);
        // one bar at a time: reading the text has its own
        let bar = progress::steps("predictors", all as u64);
        bar.set_position(done.iter().flatten().count() as u64);
        let on = Compute::new(threads, None);
        let trainer = Trainer::new(&on);
        for (i, &l) in group.iter().enumerate() {
            let mut gate = Vec::with_capacity(c.ffn as usize * d);
            packed.neurons(l, &mut |_, neuron| {
                gate.extend_from_slice(&neuron.gate);
                Ok(())
            })?;
            let [train, calibrate, measure] = inputs.layer(i);
            let layer = GateLayer {
                d,
                gate: &gate,
                fires_above: job.fires_above,
                texts: Texts {
                    train: &train,
                    calibrate: &calibrate,
                    measure: &measure,
                },
                recall: args.recall,
            };
            let made = make(args, job, &trainer, c, &layer)?;
            let (made, report) = report::judged(l, made, args.floor);
            report::save(&job.file(l), c, &made, &report, measure.len() / d)?;
            done[l] = Some((made, report));
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    Ok(done.into_iter().flatten().unzip())
}

/// A layer's candidates, the best one last.
fn make(
    args: &TrainPredictorArgs,
    job: &Job,
    trainer: &Trainer<'_>,
    c: &ModelConfig,
    layer: &GateLayer<'_>,
) -> Result<Vec<(&'static str, Made)>, Failure> {
    if job.designs.is_empty() {
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
            layer: NewLayer {
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
    for &design in &job.designs {
        let candidate = trainer.make(design, layer, &covariance).ok_or_else(|| {
            Failure::Fault("a gate row or an input of the model is not finite".into())
        })?;
        made.push((design.name(), candidate));
    }
    // the one that looks at the fewest neurons; what misses the floor only if all do
    made.sort_by(|(_, a), (_, b)| {
        let key = |m: &Made| {
            (
                m.layer.quality.recall() < args.floor,
                m.layer.quality.overhead(),
            )
        };
        let (a, b) = (key(a), key(b));
        b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    Ok(made)
}
