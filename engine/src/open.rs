//! First stage of opening a model, before memory is allocated: sparsity mode, banks, planner.

use std::collections::BTreeSet;
use std::sync::Arc;

use emberflow_kernels::{Compute, DType, with_scale_per_token};
use emberflow_models::config::ModelConfig;
use emberflow_storage::container::{Container, TensorEntry};
use emberflow_storage::io::FileSource;
use emberflow_storage::mem;

use crate::ablation::Policy;
use crate::bundle::NeuronFormat;
use crate::error::Error;
use crate::ffn::{FfnShape, StoredPredictors};
use crate::forward::embedding::only_decoded;
use crate::forward::weights::head_role;
use crate::lane::{Lane, LaneModel};
use crate::limits::{MAX_BATCH, MAX_CHUNK, MAX_THREADS};
use crate::loader::name_of;
use crate::mixer::needs;
use crate::model::{Model, Text};
use crate::options::{Budget, Options, Sparsity};
use crate::planner::{Opened, Planner, longest_pass};
use crate::sparsity::{SparsityChoice, choose};
use crate::store::{Known, Layout, Naming};
use crate::tiles::TileLayout;

/// Inputs of the planner and the engine.
pub(crate) struct Parts {
    pub text: Text,
    pub options: Options,
    pub choice: SparsityChoice,
    pub stored: Option<StoredPredictors>,
    pub shape: FfnShape,
    pub naming: Naming,
    pub layout: Layout,
    /// The tiles, if the model has no neurons in bundles.
    pub tiles: Option<Arc<TileLayout>>,
    pub source: FileSource,
    pub planner: Planner,
    /// The lane, if the options have one and it knows the model.
    pub lane: Option<Box<dyn Lane>>,
    /// Activation statistics.
    pub known: Known,
    /// Most compute threads.
    pub threads: usize,
}

impl Parts {
    /// Validates the options and collects everything that opening needs.
    pub fn of(model: Model, options: Options) -> Result<Self, Error> {
        let Model { container, text } = model;
        let (c, quant) = (text.config(), &text.meta().quant);
        check_options(&options, c)?;
        if c.form.has_gate_top() && options.lab.ablation.policy().mapped {
            return Err(Error::GateTop {
                what: "--policy mmap",
            });
        }
        let tiles = container.banks().is_empty();
        if tiles {
            check_tiles(&options, container.path())?;
        }
        let format = match tiles {
            true => NeuronFormat::unused(&container, text.meta()),
            false => NeuronFormat::of(&container, text.meta())?,
        };
        let stored = match options.sparsity {
            Sparsity::Auto | Sparsity::Predicted => StoredPredictors::look(&container, c)?,
            Sparsity::Dense | Sparsity::Exact => None,
        };
        let neurons: u64 = c.banks().map(|bank| u64::from(bank.neurons)).sum();
        let gate_bytes = neurons * format.gate_len() as u64;
        let choice = match tiles {
            true => SparsityChoice::unpacked(c),
            false => choose(options.sparsity, c, stored.as_ref(), gate_bytes)?,
        };
        tracing::info!(mode = choice.sparsity.name(), reason = %choice.reason, "sparsity");
        let stored = stored.filter(|_| choice.sparsity == Sparsity::Predicted);
        let dense = tiles || skips_nothing(c, stored.as_ref(), choice.sparsity);
        let naming = match &stored {
            // The cutoff of Gaussian top-k needs all gates, even for a dense FFN.
            _ if tiles || dense && !c.form.has_gate_top() => Naming::All,
            Some(stored) if stored.predicts() => Naming::Predictor,
            _ => Naming::Gates,
        };
        let shape = FfnShape {
            format,
            kind: c.ffn_kind,
            dense,
        };
        let (mut layout, source) = Layout::new(container, format, c.ffn_layers())?;
        let tiles = match tiles {
            true => Some(Arc::new(TileLayout::of(&layout, c, options.lab.tile))),
            false => {
                check_banks(&layout, c)?;
                None
            }
        };
        if let Some(mixture) = &c.mixture {
            layout.set_visited(mixture.chosen as usize, mixture.shared_bank() > 0);
        }
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS)),
            n => n,
        };
        let facts = (stored.is_some(), threads);
        let lane = lane(&options, &shape, &layout, c, facts)?;
        let (planner, known) = Planner::new(Opened {
            lane: lane.as_deref(),
            layout: &layout,
            config: c,
            quant,
            ffn: &shape,
            tiles: tiles.as_deref(),
            naming,
            stored: stored.as_ref(),
            options: &options,
            threads,
        })?;
        Ok(Self {
            choice,
            stored,
            shape,
            naming,
            layout,
            tiles,
            source,
            planner,
            lane,
            known,
            threads,
            text,
            options,
        })
    }
}

/// Refuses what needs neurons in bundles.
fn check_tiles(options: &Options, path: &std::path::Path) -> Result<(), Error> {
    let what = match options.sparsity {
        Sparsity::Exact => Some("--sparsity exact"),
        Sparsity::Predicted => Some("--sparsity predicted"),
        Sparsity::Auto | Sparsity::Dense => None,
    };
    let mapped = options.lab.ablation.policy().mapped;
    let what = what.or(mapped.then_some("--policy mmap"));
    let what = what.or(options.lab.observe.then_some("observing neurons"));
    let what = what.or(options.lane.as_ref().map(|_| "a device"));
    match what {
        Some(what) => Err(Error::Unpacked {
            path: path.to_path_buf(),
            what,
        }),
        None => Ok(()),
    }
}

/// Whether no neuron can be skipped: neither exact zeros nor a threshold.
fn skips_nothing(c: &ModelConfig, stored: Option<&StoredPredictors>, mode: Sparsity) -> bool {
    match stored {
        Some(stored) => !c.has_zeros() && !stored.cuts(),
        None => mode == Sparsity::Dense,
    }
}

impl Parts {
    /// Inputs of planning and of buffer sizes.
    pub fn opened(&self) -> Opened<'_> {
        Opened {
            layout: &self.layout,
            config: self.text.config(),
            quant: &self.text.meta().quant,
            ffn: &self.shape,
            tiles: self.tiles.as_deref(),
            naming: self.naming,
            lane: self.lane.as_deref(),
            stored: self.stored.as_ref(),
            options: &self.options,
            threads: self.threads,
        }
    }
}

/// Opens the options' lane for a model. Done before memory is measured, so that the process includes its driver.
fn lane(
    options: &Options,
    shape: &FfnShape,
    layout: &Layout,
    c: &ModelConfig,
    (predicted, threads): (bool, usize),
) -> Result<Option<Box<dyn Lane>>, Error> {
    let Some(opens) = &options.lane else {
        return Ok(None);
    };
    let of_gates = (!shape.dense).then_some((shape.format.dtype, shape.format.d));
    let multiplied = multiplied(&layout.container, c).into_iter().chain(of_gates);
    let multiplied: BTreeSet<(DType, usize)> = multiplied.collect();
    let matrices: Vec<(DType, usize)> = multiplied.into_iter().collect();
    opens.open(&LaneModel {
        config: c,
        identity: layout.container.identity(),
        banks: &layout.banks,
        full: options.lab.ablation.policy() == Policy::FULL,
        observed: options.lab.observe,
        counted: options.lab.count_fired,
        predicted,
        matrices: &matrices,
        one_scale: has_rows_with_one_scale(&layout.container, c),
        rows: longest_pass(options),
        threads,
    })
}

/// Whether rows that are multiplied have one scale, in whatever matrix: then activations have one per token. Tables whose
/// rows are only decoded do not count.
pub fn has_rows_with_one_scale(container: &Container, c: &ModelConfig) -> bool {
    let decoded: Vec<String> = only_decoded(c).map(|role| name_of(role, 0)).collect();
    let tensors = container.tensors().iter();
    let multiplied = tensors.filter(|entry| !decoded.contains(&entry.name));
    let mut dtypes = (multiplied.map(|entry| entry.dtype)).chain([container.bundle_dtype()]);
    dtypes.any(|code| DType::from_code(code).is_some_and(DType::is_per_channel))
}

/// Compute threads, on `cores` if given, that quantise activations as the model's products read them.
pub fn compute(
    container: &Container,
    c: &ModelConfig,
    threads: usize,
    cores: Option<&[usize]>,
) -> Compute {
    let mut on = Compute::new(threads, cores);
    on.cpu = with_scale_per_token(on.cpu, has_rows_with_one_scale(container, c));
    on
}

/// Formats and widths of the matrices that a lane may multiply: projections and head.
fn multiplied(container: &Container, c: &ModelConfig) -> BTreeSet<(DType, usize)> {
    let projections = (0..c.layers).flat_map(|layer| {
        let shared = needs(c, layer).matrices.into_iter();
        let shared = shared.filter(|spec| spec.is_shared());
        shared.map(move |spec| name_of(spec.role, layer))
    });
    let names = projections.chain([name_of(head_role(c), 0)]);
    let entries = names.filter_map(|name| container.tensor(&name));
    let of = |entry: &TensorEntry| match (DType::from_code(entry.dtype), entry.dims()) {
        (Some(dtype), [_, cols]) => Some((dtype, *cols as usize)),
        _ => None,
    };
    entries.filter_map(of).collect()
}

/// Verifies that the banks match the model.
fn check_banks(layout: &Layout, c: &ModelConfig) -> Result<(), Error> {
    let bad = |reason: String| Error::Bundles {
        path: layout.container.path().to_path_buf(),
        reason,
    };
    let expected = c.banks().count();
    if layout.banks() != expected {
        return Err(bad(format!(
            "{} banks, expected {expected}",
            layout.banks()
        )));
    }
    for (place, layer) in c.ffn_layers().enumerate() {
        let (found, of_layer) = (layout.banks_of(place), c.banks_of(layer));
        if found.len() != of_layer.clone().count() {
            let expected = of_layer.count();
            return Err(bad(format!(
                "layer {layer} has {} banks, expected {expected}",
                found.len()
            )));
        }
        for (bank, expected) in found.zip(of_layer) {
            if layout.neurons(bank) != expected.neurons as usize {
                return Err(bad(format!(
                    "expert {} of layer {layer} has {} neurons, expected {}",
                    expected.expert,
                    layout.neurons(bank),
                    expected.neurons
                )));
            }
        }
    }
    Ok(())
}

impl Planner {
    /// The planner for a model and options, without loading weights.
    ///
    /// # Errors
    /// As [`crate::Engine::open`], except for the budget.
    pub fn open(model: Model, options: Options) -> Result<Self, Error> {
        Ok(Parts::of(model, options)?.planner)
    }

    /// Resolves a budget to bytes.
    pub fn budget(&self, budget: Budget) -> u64 {
        match budget {
            Budget::Bytes(bytes) => bytes,
            Budget::Auto => auto_budget(self),
            // Everything, including the chunk chosen then.
            Budget::FfnShare(share) if share >= 1.0 => self.full_budget(),
            Budget::FfnShare(share) => self.budget_for_share(share),
        }
    }
}

/// The full budget, limited to what the machine can safely provide. If that is too small, the
/// smallest feasible budget, provided the machine has it.
fn auto_budget(planner: &Planner) -> u64 {
    let full = planner.full_budget();
    let Some(safe) = mem::auto_budget() else {
        return full;
    };
    let conceded = mem::Mem::system().conceded();
    let reach = conceded.map_or(u64::MAX, |limit| limit.bytes);
    let needs = planner.needs_with(planner.needs(), planner.longest_chunk());
    let smallest = match needs.smallest_budget() {
        smallest if smallest <= reach => smallest,
        _ => planner.smallest_budget(),
    };
    let floor = if smallest <= reach { smallest } else { safe };
    safe.max(floor).min(full)
}

/// Validates the options.
fn check_options(o: &Options, c: &ModelConfig) -> Result<(), Error> {
    if o.lab.observe && c.mixture.is_some() {
        return Err(Error::Experts);
    }
    let (found, most) = (o.threads, MAX_THREADS);
    if found > most {
        return Err(Error::Threads { found, most });
    }
    let (found, most) = (o.context, c.max_context);
    if found == 0 || found > most as usize {
        return Err(Error::Context { found, most });
    }
    let (found, most) = (o.lab.chunk, MAX_CHUNK);
    if found > most {
        return Err(Error::Chunk { found, most });
    }
    let (found, most) = (o.batch, MAX_BATCH);
    if found == 0 || found > most {
        return Err(Error::Sequences { found, most });
    }
    if !matches!(o.kv, DType::F16 | DType::F32) {
        let found = o.kv.name();
        return Err(Error::KvFormat { found });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each invalid option has its own error, with the valid range.
    #[test]
    fn invalid_options_have_distinct_errors() {
        let model = Model::demo().unwrap();
        let c = model.text().config();
        let refused = |change: &dyn Fn(&mut Options)| {
            let mut options = Options::default();
            change(&mut options);
            check_options(&options, c).unwrap_err()
        };
        let errors = [
            refused(&|o| o.threads = MAX_THREADS + 1),
            refused(&|o| o.context = 0),
            refused(&|o| o.context = c.max_context as usize + 1),
            refused(&|o| o.lab.chunk = MAX_CHUNK + 1),
            refused(&|o| o.batch = 0),
            refused(&|o| o.kv = DType::Q8),
        ];
        assert!(matches!(
            errors[0],
            Error::Threads {
                found: 257,
                most: 256
            }
        ));
        assert!(matches!(errors[1], Error::Context { found: 0, .. }));
        assert!(matches!(errors[2], Error::Context { most, .. } if most == c.max_context));
        assert!(matches!(
            errors[3],
            Error::Chunk {
                most: MAX_CHUNK,
                ..
            }
        ));
        assert!(matches!(errors[4], Error::Sequences { found: 0, .. }));
        assert!(matches!(errors[5], Error::KvFormat { found: "q8" }));
        let texts = errors.map(|e| e.to_string());
        assert_eq!(texts[0], "257 threads, expected at most 256");
        assert_eq!(texts[5], "key/value format q8, expected f16 or f32");
    }
}
