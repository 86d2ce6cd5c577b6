//! `emberflow pack --calibrate`: rounds weights to minimize the output error on a text.
//!
//! The text runs through the model layer by layer, through the layers as rounded so far. With the covariance of a
//! matrix's inputs, the rounding error of one weight is compensated by the remaining weights of its row
//! (`emberflow_predictor::rounding`). Rounded layers and the residual stream after the last one are stored in a
//! folder next to the output, so that an interrupted run can be resumed; the packer reads them from there.
//!
//! The engine runs each layer as a one-layer model. Each expert is rounded against the tokens that visit it
//! (`experts.rs`). A layer that shares keys and values is given those of the layer that computes them, and models
//! with several residual streams pass all of them on.

mod experts;
mod matrices;
mod one_layer;
mod pass;
pub(crate) mod rounded;
mod stream;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use emberflow_engine::meta;
use emberflow_kernels::Compute;
use emberflow_models::names::{Role, TensorId};
use emberflow_models::tokenizer::Tokenizer;
use emberflow_models::{Checkpoint, TensorInfo};
use xxhash_rust::xxh3::xxh3_64;

use self::experts::ExpertCalibrator;
use self::matrices::Calibrator;
pub(crate) use self::matrices::is_calibrated;
use self::one_layer::{LayerPlace, OneLayer};
use self::pass::{Gathered, PassInputs, run};
pub use self::rounded::Rounded;
use self::rounded::{INPUTS, LayerRows, OUTPUTS, ROLES};
use self::stream::Stream;
use crate::pack::layout::state_of;
use crate::pack::options::PackOptions;
use crate::windows::{self, Amount, Source};
use crate::{Failure, interrupt, progress};

/// Bump it when the same input gives different bytes.
const VERSION: u32 = 2;

/// Calibration text and its use.
#[derive(Debug, Clone, Copy)]
pub struct Calibration<'a> {
    /// The text.
    pub text: &'a Source,
    /// Tokens to use.
    pub tokens: u32,
    /// CPU threads. The result does not depend on them.
    pub threads: usize,
}

/// Result of a calibration.
#[derive(Debug)]
pub struct Calibrated {
    /// Rounded matrices.
    pub rounded: Rounded,
    /// Layers resumed from an interrupted run.
    pub resumed: u32,
}

/// The folder next to `output` that holds rounded layers.
pub fn folder(output: &Path) -> PathBuf {
    interrupt::with_suffix(output, ".layers")
}

/// Rounds the matrices of `source` against the text, into files in [`folder`], which the caller removes once they are
/// packed. Matrices that `options` stores in floats, q8c or MXFP4 are skipped.
///
/// # Errors
/// A usage error for formats that cannot be calibrated; checkpoint read errors, weights that the format cannot
/// represent, lack of memory or disk space.
pub fn calibrate(
    source: &dyn Checkpoint,
    output: &Path,
    options: &PackOptions,
    how: Calibration<'_>,
) -> Result<Calibrated, Failure> {
    let c = source.config();
    let rounds = |t: &TensorInfo| is_calibrated(source.config(), t.id.role, options.dtype_of(t.id));
    if !source.tensors().iter().any(rounds) {
        return Err(Failure::usage(
            "--calibrate rounds to q4, q4k, q4c and q8, and none of them is requested: leave it out, or \
             choose one with --quant",
        ));
    }
    let tokenizer = Tokenizer::from_json(source.tokenizer_json())?;
    let amount = Amount {
        tokens: how.tokens as usize,
        least: 1,
    };
    let windows = windows::choose(&tokenizer, c, how.text, amount)?;
    drop(tokenizer);
    let folder = folder(output);
    std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
    let formats = ROLES.map(|role| options.dtype(role).name());
    let mix = &options.mix;
    let mut what = format!(
        "{VERSION} {:016x} {:016x} {formats:?} {}{} ",
        source.fingerprint(),
        state_of(source.path()),
        options.dtype_of(TensorId::global(Role::Embed)).name(),
        if mix.is_empty() {
            String::new()
        } else {
            format!("{mix:?}")
        },
    )
    .into_bytes();
    what.extend(windows.iter().flatten().flat_map(|t| t.to_le_bytes()));
    let job = Calibrator {
        source,
        options,
        on: Compute::new(how.threads, None),
        vocabulary: stream::vocabulary(c, &windows),
        folder,
        name: format!("{:016x}", xxh3_64(&what)),
    };
    let mut stream = Stream::embed(source, options, &windows, &job.vocabulary)?;
    let resumed = job.all_layers(&mut stream)?;
    let paths = (0..c.layers).map(|l| job.file(l)).collect();
    let summary = meta::Calibration {
        tokens: windows.iter().map(|w| w.len() as u64).sum(),
        hash: job.name.clone(),
    };
    let stored =
        |id: TensorId| Some(options.dtype_of(id)).filter(|&dtype| is_calibrated(c, id.role, dtype));
    Ok(Calibrated {
        rounded: Rounded::open(paths, c, summary, &stored)?,
        resumed,
    })
}

impl Calibrator<'_> {
    fn file(&self, layer: u32) -> PathBuf {
        self.folder.join(format!("{}-{layer}", self.name))
    }

    /// Rounds the layers missing from an earlier run and returns the number of resumed ones.
    fn all_layers(&self, stream: &mut Stream) -> Result<u32, Failure> {
        let layers = self.source.config().layers;
        let state = self.folder.join(format!("{}-stream", self.name));
        let begun = stream.load(&state).unwrap_or(0);
        if begun > 0 {
            tracing::info!(layers = begun, "rounded by an earlier run");
        }
        let bar = progress::steps("rounding layers", layers.into());
        bar.set_position(begun.into());
        for layer in begun..layers {
            let rows = self.layer(layer, stream)?;
            rows.save(&self.file(layer))?;
            stream.save(&state, layer + 1)?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(begun)
    }

    /// Rounds one layer, each matrix against its inputs after the matrices before it are rounded, and advances the
    /// residual stream past the layer.
    fn layer(&self, number: u32, stream: &mut Stream) -> Result<LayerRows, Failure> {
        let mut rows = LayerRows::default();
        let none = PassInputs::default();
        let c = self.source.config();
        let (mixes, experts) = (c.has_mixer(number), c.mixture_of(number).is_some());
        let visited = self.calibrates_ffn(number);
        let dense = c.has_ffn(number) && !experts;
        let steps = [
            PassInputs {
                attention: mixes,
                ..none
            },
            PassInputs {
                mixed: mixes,
                ..none
            },
            PassInputs {
                ffn: dense,
                visits: experts && visited,
                ..none
            },
            PassInputs {
                hidden: dense,
                ..none
            },
            PassInputs {
                advance: true,
                ..none
            },
        ];
        for wanted in steps.into_iter().filter(|&wanted| wanted != none) {
            let layer = OneLayer::new(self.place(number), &rows, wanted.needs_ffn());
            let seen = self.pass(&layer, stream, wanted)?;
            self.round(number, seen, &mut rows)?;
        }
        Ok(rows)
    }

    fn place(&self, layer: u32) -> LayerPlace<'_> {
        LayerPlace {
            source: self.source,
            options: self.options,
            vocabulary: &self.vocabulary,
            layer,
        }
    }

    /// Runs the residual stream through a layer and stores keys and values that later layers share.
    fn pass(
        &self,
        layer: &OneLayer<'_>,
        stream: &mut Stream,
        wanted: PassInputs,
    ) -> Result<Gathered, Failure> {
        let mut seen = run(&self.on, layer, &self.folder, stream, wanted)?;
        if let Some(stored) = seen.stored.take() {
            stream.stored.insert(layer.number(), stored);
        }
        Ok(seen)
    }

    /// Rounds the matrices whose inputs were gathered.
    fn round(&self, layer: u32, seen: Gathered, rows: &mut LayerRows) -> Result<(), Failure> {
        let groups = [
            (seen.attention, &INPUTS[..]),
            (seen.mixed, &OUTPUTS),
            (seen.ffn, &[Role::Gate, Role::Up]),
        ];
        for (covariance, roles) in groups {
            let has = |role| self.shape(TensorId::layer(role, layer)).0 > 0;
            let c = self.source.config();
            let takes = |&role: &Role| has(role) && is_calibrated(c, role, self.dtype(role, layer));
            let ids = roles.iter().filter(|role| takes(role));
            let ids: Vec<TensorId> = ids.map(|&role| TensorId::layer(role, layer)).collect();
            if let Some(covariance) = covariance.filter(|_| !ids.is_empty()) {
                self.rows(&ids, covariance, rows)?;
            }
        }
        if !seen.hidden.is_empty()
            && is_calibrated(
                self.source.config(),
                Role::Down,
                self.dtype(Role::Down, layer),
            )
        {
            let id = TensorId::layer(Role::Down, layer);
            rows.put(id, self.down(id, seen.hidden)?);
        }
        if let Some(visits) = seen.visits {
            ExpertCalibrator { calibrator: self }.round(layer, &visits, rows)?;
        }
        Ok(())
    }

    /// Whether the FFN of a layer is calibrated.
    fn calibrates_ffn(&self, layer: u32) -> bool {
        is_calibrated(
            self.source.config(),
            Role::Gate,
            self.dtype(Role::Gate, layer),
        )
    }
}
