//! First stage of opening a model, before memory is allocated: sparsity mode, banks, planner.

use std::collections::BTreeSet;
use std::sync::Arc;

use emberflow_kernels::{Compute, DType, with_scale_per_token};
use emberflow_models::config::ModelConfig;
use emberflow_storage::container::{Container, TensorEntry};
use emberflow_storage::io::FileSource;
use emberflow_storage::mem;

use crate::ablation::Ablation;
use crate::bundle::NeuronFormat;
use crate::device::{DenseShape, Device, Devices, InUse, MOST_DEVICES, TokenScales, checked};
use crate::embedding::only_decoded;
use crate::error::Error;
use crate::ffn::{FfnShape, StoredPredictors};
use crate::limits::{MAX_BATCH, MAX_CHUNK, MAX_THREADS};
use crate::loader::name_of;
use crate::mixer::PROJECTIONS;
use crate::model::{Model, Text};
use crate::options::{Budget, Options, Sparsity};
use crate::planner::{Opened, Planner, prepare_groups};
use crate::sparsity::{SparsityChoice, choose};
use crate::store::{Known, Layout, Naming};
use crate::weights::head_role;

/// Inputs of the planner and the engine.
pub(crate) struct Parts {
    pub text: Text,
    pub options: Options,
    pub choice: SparsityChoice,
    pub stored: Option<StoredPredictors>,
    pub shape: FfnShape,
    pub naming: Naming,
    pub layout: Layout,
    pub source: FileSource,
    pub planner: Planner,
    /// The devices, which have passed their checks against the CPU.
    pub devices: Devices,
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
        if c.form.has_gate_top() && options.lab.ablation == Ablation::Mmap {
            return Err(Error::GateTop {
                what: "--policy mmap",
            });
        }
        let format = NeuronFormat::of(&container, text.meta())?;
        let stored = match options.sparsity {
            Sparsity::Auto | Sparsity::Predicted => StoredPredictors::look(&container, c)?,
            Sparsity::Dense | Sparsity::Exact => None,
        };
        let neurons: u64 = c.banks().map(|bank| u64::from(bank.neurons)).sum();
        let gate_bytes = neurons * format.gate_len() as u64;
        let choice = choose(options.sparsity, c, stored.as_ref(), gate_bytes)?;
        tracing::info!(mode = choice.sparsity.name(), reason = %choice.reason, "sparsity");
        let stored = stored.filter(|_| choice.sparsity == Sparsity::Predicted);
        let dense = skips_nothing(c, stored.as_ref(), choice.sparsity);
        let naming = match &stored {
            // The cutoff of Gaussian top-k needs all gates, even for a dense FFN.
            _ if dense && !c.form.has_gate_top() => Naming::All,
            Some(stored) if stored.predicts() => Naming::Predictor,
            _ => Naming::Gates,
        };
        let shape = FfnShape {
            format,
            kind: c.ffn_kind,
            dense,
        };
        let (mut layout, source) = Layout::new(container, format, c.ffn_layers())?;
        check_banks(&layout, c)?;
        if let Some(mixture) = &c.mixture {
            layout.set_visited(mixture.chosen as usize, mixture.shared_bank() > 0);
        }
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS)),
            n => n,
        };
        // Loaded first, so that the measured process size includes the driver.
        let devices = checked_devices(&options, &shape, &layout, c)?;
        prepare_groups(&devices, &layout, c, &options, stored.is_some())?;
        let (planner, known) = Planner::new(Opened {
            devices: &devices,
            layout: &layout,
            config: c,
            quant,
            ffn: &shape,
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
            source,
            planner,
            devices,
            known,
            threads,
            text,
            options,
        })
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
            naming: self.naming,
            devices: &self.devices,
            stored: self.stored.as_ref(),
            options: &self.options,
            threads: self.threads,
        }
    }
}

/// Prepares the options' devices for the model's FFN and checks them against the CPU.
fn checked_devices(
    options: &Options,
    shape: &FfnShape,
    layout: &Layout,
    c: &ModelConfig,
) -> Result<Devices, Error> {
    let dense = DenseShape::of(&shape.format, shape.kind);
    let one_scale = has_rows_with_one_scale(&layout.container, c);
    let scales = match one_scale {
        true => TokenScales::One,
        false => TokenScales::ByGroup,
    };
    let reads = |device: &Device| !one_scale || device.facts().per_channel;
    let knows =
        |device: &Device| reads(device) && !c.form.has_gate_top() && dense.unsupported().is_none();
    let wanted = |device: &&Device| {
        let wanted = !device.is_optional() || knows(device);
        if !wanted {
            let device = &device.facts().name;
            tracing::warn!(device, "left out, as it does not know this model");
        }
        wanted
    };
    let wanted: Vec<&Device> = options.devices.iter().filter(wanted).collect();
    let refused = match () {
        () if wanted.is_empty() => return Ok(Devices::new()),
        // A device activates each gate independently.
        () if c.form.has_gate_top() => Some("models without Gaussian top-k"),
        () if options.lab.ablation != Ablation::Full => Some("--policy full only"),
        () if options.lab.observe => Some("models that are not observed"),
        () => None,
    };
    if let Some(what) = refused {
        return Err(Error::DeviceUse(what));
    }
    if wanted.len() > MOST_DEVICES {
        return Err(Error::DeviceUse("a list of three devices at most"));
    }
    let of_gates = (!shape.dense).then_some((shape.format.dtype, shape.format.d));
    let multiplied = multiplied(&layout.container, c).into_iter().chain(of_gates);
    let multiplied: BTreeSet<(DType, usize)> = multiplied.collect();
    let mut devices = Devices::new();
    for (number, device) in wanted.iter().enumerate() {
        if !reads(device) {
            return Err(Error::DeviceScales(device.facts().name.clone()));
        }
        let device = checked_device(device, number, &dense, scales, &multiplied)?;
        if wanted.len() > 1 {
            together(&device)?;
        }
        devices.push(Arc::new(device));
    }
    Ok(devices)
}

/// Refuses a device that cannot compute together with others: which of them computes a cluster follows from times, and all
/// read the same bytes.
fn together(device: &InUse) -> Result<(), Error> {
    let what = match device.verdict.same_bits {
        _ if !device.facts().unified => "has a memory of its own, which others cannot read",
        false => "does not compute the CPU's bits, and times must not decide on a text",
        true => return Ok(()),
    };
    Err(device
        .failed(&format!("{what}: name it alone in --device"))
        .into())
}

/// Prepares a device for an FFN and for products, and checks it against the CPU, for tokens with such scales.
fn checked_device(
    device: &Device,
    number: usize,
    shape: &DenseShape,
    scales: TokenScales,
    multiplied: &BTreeSet<(DType, usize)>,
) -> Result<InUse, Error> {
    let lease = device.lease()?;
    let verdict = checked(&lease, shape, scales)?;
    let name = &device.facts().name;
    tracing::info!(device = name, ?verdict, "checked against the CPU");
    // Done now, so that the measured process size includes the driver's code. Devices with other bits compute no
    // products.
    let mut products = BTreeSet::new();
    if verdict.same_bits {
        let known = |of: &&(DType, usize)| device.facts().multiplies(of.0);
        for &(dtype, cols) in multiplied.iter().filter(known) {
            if lease.prepare_products(dtype, cols, scales)? {
                products.insert((dtype, cols));
            } else {
                tracing::warn!(%dtype, cols, "products have other bits: left to the CPU");
            }
        }
    }
    Ok(InUse::new(lease, number, verdict, products))
}

/// Whether rows that are multiplied have one scale, in whatever matrix: then activations have one per token. Tables whose
/// rows are only decoded do not count.
pub fn has_rows_with_one_scale(container: &Container, c: &ModelConfig) -> bool {
    let decoded: Vec<String> = only_decoded(c).map(|role| name_of(role, 0)).collect();
    let tensors = container.tensors().iter();
    let multiplied = tensors.filter(|entry| !decoded.contains(&entry.name));
    let mut all = (multiplied.map(|entry| entry.dtype)).chain([container.bundle_dtype()]);
    all.any(|code| DType::from_code(code).is_some_and(DType::is_per_channel))
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

/// Formats and widths of the matrices that a device may multiply: projections and head.
fn multiplied(container: &Container, c: &ModelConfig) -> BTreeSet<(DType, usize)> {
    let projections = (0..c.layers).flat_map(|layer| PROJECTIONS.map(|role| name_of(role, layer)));
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
    let smallest = needs.smallest_budget();
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
