//! Runs the text through one layer and gathers the inputs of its matrices.

use std::path::Path;

use emberflow_engine::{
    AttentionSeen, Budget, Choice, Engine, FfnSeen, Lab, Model, Options, Sequence, Sparsity,
    StreamRows,
};
use emberflow_kernels::{Compute, DType};
use emberflow_models::names::required;
use emberflow_predictor::rounding::Covariance;

use super::one_layer::OneLayer;
use super::rounded::OUTPUTS;
use super::stream::Stream;
use crate::pack::options::PackOptions;
use crate::pack::write::write;
use crate::{Failure, interrupt};

/// Number of Down's input columns whose errors are compensated together; the covariance takes 64 MiB. A wider FFN is
/// cut into independent blocks of this size, in the checkpoint's order.
pub const DOWN_BLOCK: usize = 4096;

/// What to gather in a pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassInputs {
    /// Inputs of Q, K and V.
    pub attention: bool,
    /// Inputs of O.
    pub mixed: bool,
    /// Inputs of Gate and Up.
    pub ffn: bool,
    /// Inputs of the experts and the routes; needs the FFN.
    pub visits: bool,
    /// Inputs of Down of a dense FFN; needs the FFN.
    pub hidden: bool,
    /// Replace the residual stream by the layer's output; needs the FFN.
    pub advance: bool,
}

impl PassInputs {
    /// Whether the FFN has to be computed.
    pub fn needs_ffn(self) -> bool {
        self.visits || self.hidden || self.advance
    }
}

/// Covariances gathered in a pass.
#[derive(Debug, Default)]
pub struct Gathered {
    /// Of the inputs of Q, K and V.
    pub attention: Option<Covariance>,
    /// Of the inputs of O.
    pub mixed: Option<Covariance>,
    /// Of the inputs of Gate and Up.
    pub ffn: Option<Covariance>,
    /// Of the inputs of Down, per block of neurons.
    pub hidden: Vec<Covariance>,
    /// Inputs of the experts.
    pub visits: Option<Visits>,
    /// Keys and values that later layers share; set if the residual stream advances.
    pub stored: Option<[Vec<f32>; 2]>,
}

/// Inputs of a layer's experts.
#[derive(Debug, Default)]
pub struct Visits {
    /// Inputs of Gate and Up, `[tokens × d]`.
    pub x: Vec<f32>,
    /// Inputs of a dense FFN in parallel with the experts, if they differ; empty otherwise.
    pub dense: Vec<f32>,
    /// Chosen experts and router weights, `[tokens × chosen]`.
    pub choices: Vec<Choice>,
    /// Experts per token.
    pub chosen: usize,
}

impl Gathered {
    fn new(wanted: PassInputs, keeps: bool, engine: &Engine) -> Self {
        let c = engine.config();
        let d = c.d_model as usize;
        let outputs = required(c).into_iter();
        let mut outputs = outputs.filter(|tensor| OUTPUTS.contains(&tensor.id.role));
        let mixed = outputs.next().map_or(0, |tensor| tensor.cols);
        let neurons = c.ffn as usize;
        let blocks = (0..neurons).step_by(DOWN_BLOCK);
        let sizes = blocks.map(|first| DOWN_BLOCK.min(neurons - first));
        Self {
            attention: wanted.attention.then(|| Covariance::new(d)),
            mixed: wanted.mixed.then(|| Covariance::new(mixed)),
            ffn: wanted
                .ffn
                .then(|| Covariance::new(c.bundle_width() as usize)),
            hidden: if wanted.hidden {
                sizes.map(Covariance::new).collect()
            } else {
                Vec::new()
            },
            visits: wanted.visits.then(|| Visits {
                chosen: c.mixture_of(0).map_or(1, |m| m.chosen as usize),
                ..Visits::default()
            }),
            stored: (wanted.advance && keeps).then(Default::default),
        }
    }
}

/// Runs the windows of the residual stream through `layer`, which is packed into `folder` first.
///
/// # Errors
/// The layer cannot be packed or run.
pub fn run(
    on: &Compute,
    layer: &OneLayer<'_>,
    folder: &Path,
    stream: &mut Stream,
    wanted: PassInputs,
) -> Result<Gathered, Failure> {
    let mut engine = open(on, layer, folder, stream, wanted)?;
    let mut gathered = Gathered::new(wanted, stream.keeps(layer.number()), &engine);
    let width = engine.config().heads_of(0).stored();
    let mut sequence = engine.new_sequence()?;
    let mut row = Vec::new();
    let mut at = 0;
    for &rows in &stream.windows {
        let these = at..at + rows;
        let x = &mut stream.x[at * stream.width..these.end * stream.width];
        row.clear();
        if !layer.embeds() {
            row.extend_from_slice(x);
        }
        let stored = layer.shares().and_then(|owner| stream.stored.get(&owner));
        sequence.clear();
        gathered.window(
            on,
            &mut engine,
            &mut sequence,
            StreamRows {
                tokens: if layer.reads_text() {
                    &stream.text[these.clone()]
                } else {
                    &stream.tokens[these.clone()]
                },
                x: &mut row,
                stored: stored.map(|both| {
                    both.each_ref()
                        .map(|all| &all[at * width..][..rows * width])
                }),
            },
        )?;
        if wanted.advance {
            x.copy_from_slice(&row);
        }
        at = these.end;
    }
    Ok(gathered)
}

impl Gathered {
    /// Runs one window through the layer.
    fn window(
        &mut self,
        on: &Compute,
        engine: &mut Engine,
        sequence: &mut Sequence,
        rows: StreamRows<'_>,
    ) -> Result<(), Failure> {
        let mut of_attention = |seen: &AttentionSeen<'_>| {
            (self.attention.iter_mut()).for_each(|sum| sum.add(on, seen.x));
            (self.mixed.iter_mut()).for_each(|sum| sum.add(on, seen.mixed));
            for (all, seen) in self.stored.iter_mut().flatten().zip(seen.stored) {
                all.extend_from_slice(seen);
            }
        };
        let mut of_ffn = |seen: &FfnSeen<'_>| {
            self.ffn.iter_mut().for_each(|sum| sum.add(on, seen.x));
            if let Some(visits) = &mut self.visits {
                visits.x.extend_from_slice(seen.x);
                visits.dense.extend_from_slice(seen.dense);
                visits.choices.extend_from_slice(seen.choices);
            }
            let blocks = seen.hidden.chunks(DOWN_BLOCK * seen.tokens);
            for (sum, block) in self.hidden.iter_mut().zip(blocks) {
                sum.add_turned(on, block);
            }
        };
        engine.forward_residual(sequence, rows, &mut of_attention, &mut of_ffn)?;
        Ok(())
    }
}

/// Packs the layer and opens it with room for whole windows. One window is one chunk, so that the result does not
/// depend on free memory.
fn open(
    on: &Compute,
    layer: &OneLayer<'_>,
    folder: &Path,
    stream: &Stream,
    wanted: PassInputs,
) -> Result<Engine, Failure> {
    let path = folder.join("layer.ember");
    // Files left by an interrupted run belong to another step.
    for ending in ["", ".partial", ".partial.journal"] {
        let old = interrupt::with_suffix(&path, ending);
        if old.exists() {
            std::fs::remove_file(&old).map_err(Failure::file(&old))?;
        }
    }
    let options = PackOptions {
        sector: Some(4096),
        embedding: layer.table_format(),
        ..PackOptions::new(DType::F32)
    };
    write(layer, &path, &options, None, &mut |_, _| {})?;
    let window = stream.windows.iter().copied().max().unwrap_or(1);
    let sparse = layer.ffn_is_sparse();
    let options = Options {
        threads: on.threads(),
        sparsity: if sparse {
            Sparsity::Exact
        } else {
            Sparsity::Dense
        },
        context: window,
        lab: Lab {
            chunk: window,
            observe: wanted.hidden,
            ..Lab::default()
        },
        ..Options::new(Budget::Auto)
    };
    let engine = Engine::open(Model::load(&path)?, options)?;
    // The open file stays readable.
    std::fs::remove_file(&path).map_err(Failure::file(&path))?;
    if engine.chunk() < window {
        return Err(Failure::usage(format!(
            "calibration runs {window} tokens through a layer at once, but free memory allows only \
             {}; free some memory",
            engine.chunk()
        )));
    }
    Ok(engine)
}
