//! Everything decided before the first weight is read: order, geometry, metadata.

use std::collections::BTreeMap;
use std::path::Path;

use emberflow_engine::bundle::NeuronFormat;
use emberflow_engine::meta::{ContainerMeta, Order, Quant, StatsSummary};
use emberflow_models::config::{Bank, ModelConfig};
use emberflow_models::names::bundled;
use emberflow_models::tokenizer::Tokenizer;
use emberflow_models::{Checkpoint, TensorInfo, files_of};
use emberflow_predictor::order;
use emberflow_predictor::stats::ActivationStats;
use emberflow_storage::container::{
    BankSpec, BundleGeometry, Placement, ROW_CHECKSUM, Spec, TensorSpec,
};
use serde::Serialize;

use super::options::PackOptions;
use super::sector::{self, Sector};
use crate::Failure;
use crate::activity::parse;
use crate::pack::calibrate::rounded::Rounded;

/// Everything decided before the first weight is read.
pub(super) struct PackLayout {
    pub spec: Spec,
    /// Source tensors in file order, parallel to `spec.tensors`.
    pub tensors: Vec<TensorInfo>,
    pub format: NeuronFormat,
    pub sector: Sector,
    /// Packed → original neuron number per bank; empty for the original order.
    pub order: Vec<Vec<u32>>,
    kind: Order,
}

impl PackLayout {
    pub fn new(
        source: &dyn Checkpoint,
        output: &Path,
        options: &PackOptions,
        calibrated: Option<&Rounded>,
    ) -> Result<Self, Failure> {
        let c = source.config();
        let fingerprint = format!("{:016x}", source.fingerprint());
        let stats = stats_for(c, options, &fingerprint)?;
        let order = orders(c, stats.as_ref(), options.coactivation);
        let d = c.bundle_width() as usize;
        let ungated = c.ffn_kind.ungated;
        let (sector, geometry) = geometry_for(c, output, options)?;
        let format = NeuronFormat {
            dtype: options.ffn,
            d,
            inline_scales: geometry.placement == Placement::Inline,
            ungated,
        };
        let tensors: Vec<TensorInfo> = source
            .tensors()
            .iter()
            .filter(|t| !t.id.role.is_bundled())
            .cloned()
            .collect();
        // `None` if no neuron moves.
        let sorted_by = stats.as_ref().filter(|_| !order.is_empty());
        let kind = kind_of(sorted_by, options);
        let meta = ContainerMeta {
            calibration: calibrated.map(|rounded| rounded.summary().clone()),
            ..meta_of(source, options, stats.as_ref(), kind)
        };
        let packed_stats = stats.map(|s| reordered(s.without_sample(), c, &order));
        Ok(Self {
            spec: Spec {
                geometry,
                bundle_dtype: options.ffn.code(),
                meta: to_json(&meta)?,
                stats: packed_stats
                    .map(|s| s.to_bytes())
                    .transpose()
                    .map_err(Failure::stats(output))?
                    .unwrap_or_default(),
                predictor_len: 0,
                tensors: tensors.iter().map(|t| spec_of(t, c, options)).collect(),
                banks: c
                    .banks()
                    .map(|bank| BankSpec {
                        layer: bank.layer,
                        expert: bank.expert,
                        neurons: bank.neurons,
                        flags: 0,
                    })
                    .collect(),
                source: format!("{fingerprint} {:016x}", state_of(source.path())),
            },
            tensors,
            format,
            sector,
            order,
            kind,
        })
    }

    pub fn order_kind(&self) -> Order {
        self.kind
    }

    pub fn total_bytes(&self) -> u64 {
        let tensors: u64 = self.spec.tensors.iter().map(|t| t.len).sum();
        let neurons: u64 = self.spec.banks.iter().map(|b| u64::from(b.neurons)).sum();
        tensors + neurons * u64::from(self.spec.geometry.stride)
    }

    /// Bytes of all weights and scales, without padding.
    pub fn payload_bytes(&self) -> u64 {
        let tensors: u64 = self.spec.tensors.iter().map(|t| t.len).sum();
        let neurons: u64 = self.spec.banks.iter().map(|b| u64::from(b.neurons)).sum();
        let g = self.spec.geometry;
        tensors + neurons * u64::from(g.payload() + g.scales_per_neuron)
    }

    /// Original number of a packed neuron.
    pub fn original(&self, bank: usize, packed: usize) -> usize {
        let order = self.order.get(bank).filter(|order| !order.is_empty());
        order.map_or(packed, |order| order[packed] as usize)
    }
}

/// Parses the statistics given by `--stats`. Their shape must match the model, and their fingerprint, if they have
/// one, the checkpoint.
fn stats_for(
    c: &ModelConfig,
    options: &PackOptions,
    fingerprint: &str,
) -> Result<Option<ActivationStats>, Failure> {
    let Some((path, bytes)) = &options.stats else {
        return Ok(None);
    };
    let stats = parse(bytes, c).map_err(Failure::stats(path))?;
    let profile = stats.profile.as_deref();
    if let Some(profile) = profile.filter(|p| !p.model.ends_with(fingerprint)) {
        return Err(Failure::usage(format!(
            "--stats belongs to {:?}, but this checkpoint has fingerprint {fingerprint}: the neurons may be in \
             another order; pack this checkpoint without statistics and profile the result",
            profile.model
        )));
    }
    Ok(Some(stats))
}

/// Layout of the bundles of a model's neurons.
fn geometry_for(
    c: &ModelConfig,
    output: &Path,
    options: &PackOptions,
) -> Result<(Sector, BundleGeometry), Failure> {
    let (d, rest) = (c.bundle_width() as usize, bundled(c).len() as u32 - 1);
    let (q, s) = (
        options.ffn.quants_bytes(d) as u32,
        options.ffn.scales_bytes(d) as u32,
    );
    let geometry =
        |sector| BundleGeometry::choose(q, s, rest * q, rest * s, sector, options.scales);
    let refused = |source| emberflow_storage::Error::Layout {
        path: output.to_path_buf(),
        source,
    };
    Ok(sector::choose(output, options.sector, geometry).map_err(refused)?)
}

/// Specification of a non-FFN tensor as stored.
fn spec_of(t: &TensorInfo, c: &ModelConfig, options: &PackOptions) -> TensorSpec {
    let dtype = options.dtype_of(t.id);
    let checksum = if t.id.role.is_table(c.tied_head) {
        ROW_CHECKSUM
    } else {
        0
    };
    TensorSpec {
        name: t.id.to_string(),
        dtype: dtype.code(),
        dims: vec![t.rows as u64, t.cols as u64],
        len: (t.rows * (dtype.row_bytes(t.cols) + checksum)) as u64,
    }
}

/// Packed → original neuron number per bank, empty for banks in the original order; an empty list if all are.
fn orders(c: &ModelConfig, stats: Option<&ActivationStats>, coactivation: bool) -> Vec<Vec<u32>> {
    let Some(stats) = stats else {
        return Vec::new();
    };
    let Some(routing) = stats.routing() else {
        let banks = c.banks().enumerate();
        return banks
            .map(|(number, bank)| order_of(stats, number, bank, coactivation))
            .collect();
    };
    let of_expert = |bank: Bank| {
        let layer = routing.layers.get(bank.place as usize)?;
        let expert = layer.neurons.get(bank.expert as usize)?;
        Some(order::by_temperature(&expert.counts))
    };
    if routing.counts_neurons() {
        c.banks()
            .map(|b| of_expert(b).unwrap_or_default())
            .collect()
    } else {
        Vec::new()
    }
}

/// The statistics with neurons in packed order.
fn reordered(mut stats: ActivationStats, c: &ModelConfig, order: &[Vec<u32>]) -> ActivationStats {
    let routing = stats.profile.as_mut().and_then(|p| p.routing.as_mut());
    let Some(routing) = routing else {
        return stats.permuted(order);
    };
    let banks = c.banks().zip(order);
    let of: BTreeMap<(u32, u32), &[u32]> = banks
        .map(|(bank, order)| ((bank.place, bank.expert), order.as_slice()))
        .collect();
    routing.permute(|layer, expert| of.get(&(layer, expert)).copied().unwrap_or(&[]));
    stats
}

/// Sort keys for [`orders`].
fn kind_of(stats: Option<&ActivationStats>, options: &PackOptions) -> Order {
    let sampled = |s: &ActivationStats| {
        let profile = s.profile.as_deref();
        profile.is_some_and(|p| !p.sample.tokens().is_empty())
    };
    match stats {
        None => Order::Original,
        Some(s) if options.coactivation && sampled(s) => Order::Coactivation,
        Some(_) => Order::Temperature,
    }
}

/// The order of one FFN's neurons: by temperature. If the statistics record coactivation, neurons of similar
/// temperature that are active together become neighbours.
fn order_of(stats: &ActivationStats, number: usize, bank: Bank, coactivation: bool) -> Vec<u32> {
    let counts = stats.counts(bank.place, bank.expert).unwrap_or_default();
    match &stats.profile {
        Some(profile) if coactivation => {
            let fired = profile.sampled(number, counts.len());
            order::by_coactivation(counts, stats.tokens, &fired)
        }
        _ => order::by_temperature(counts),
    }
}

/// Hash of names, lengths and modification times of the source's files. A pack is resumed only if it is unchanged.
/// Not stored in the container.
pub(crate) fn state_of(path: &Path) -> u64 {
    let mut files = files_of(path);
    files.sort();
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for file in files {
        if let Ok(meta) = file.metadata() {
            let state = format!(
                "{} {} {:?};",
                file.display(),
                meta.len(),
                meta.modified().ok()
            );
            hash.update(state.as_bytes());
        }
    }
    hash.digest()
}

pub(super) fn to_json(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    Ok(serde_json::to_vec(value).map_err(std::io::Error::from)?)
}

/// Builds the tokenizer, so that an invalid one is found before the model is used.
pub(super) fn check_tokenizer(source: &dyn Checkpoint) -> Result<(), Failure> {
    let path = source.path().display();
    let tokens = Tokenizer::from_json(source.tokenizer_json())
        .map_err(|e| Failure::file(source.path())(std::io::Error::other(e)))?
        .vocab_size();
    let vocab = source.config().vocab;
    if tokens > vocab {
        tracing::warn!(
            "{path}: the tokenizer has ids up to {}, but the model's vocabulary has {vocab} rows: \
             prompts with tokens beyond it will be rejected",
            tokens - 1
        );
    }
    Ok(())
}

fn meta_of(
    source: &dyn Checkpoint,
    options: &PackOptions,
    stats: Option<&ActivationStats>,
    kind: Order,
) -> ContainerMeta {
    let quant = Quant {
        ffn: options.ffn.name().into(),
        attention: options.attention.name().into(),
        embedding: options.embedding.name().into(),
        mixed: !options.mix.is_empty(),
        whole: None,
    };
    ContainerMeta {
        order: kind,
        stats: stats.map(|s| StatsSummary {
            tokens: s.tokens,
            active_share: s.active_share(),
        }),
        ..ContainerMeta::of(source, quant)
    }
}
