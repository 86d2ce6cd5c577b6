//! One layer of a checkpoint as a one-layer model, with the matrices rounded so far.

use std::path::Path;

use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::{Form, LayerInputs, Mixture, ModelConfig, NGrams, Streams};
use emberflow_models::names::{Role, TensorId, required};
use emberflow_models::{Checkpoint, Error, TensorInfo};

use super::rounded::{LayerRows, ROLES};
use super::stream;
use crate::pack::options::PackOptions;

/// Neurons of a layer run without its FFN: all zero, so that they add nothing.
const NO_FFN: u32 = 32;

/// A layer and the arguments shared by all its passes.
#[derive(Clone, Copy)]
pub struct LayerPlace<'a> {
    /// The whole model.
    pub source: &'a dyn Checkpoint,
    /// Storage formats.
    pub options: &'a PackOptions,
    /// Tokens of the rows in layers, for models with per-layer inputs or experts by token.
    pub vocabulary: &'a [u32],
    /// Layer number.
    pub layer: u32,
}

/// A one-layer checkpoint that receives residual streams as input.
pub struct OneLayer<'a> {
    at: LayerPlace<'a>,
    config: ModelConfig,
    tensors: Vec<TensorInfo>,
    /// Matrices that replace the source's.
    rounded: &'a LayerRows,
    /// Whether the FFN is included; otherwise it is all zeros.
    ffn: bool,
}

impl<'a> OneLayer<'a> {
    /// The layer `at` with the matrices of `rounded` instead of the source's. Without `ffn`, or without one in the
    /// model, its FFN is zero.
    pub fn new(at: LayerPlace<'a>, rounded: &'a LayerRows, ffn: bool) -> Self {
        let (c, layer) = (at.source.config(), at.layer);
        let ffn = ffn && c.has_ffn(layer);
        let mixture = c.mixture_of(layer).filter(|_| ffn);
        let dense = c.banks_of(layer).next().map_or(c.ffn, |bank| bank.neurons);
        let vocab = if reads_text(c, layer) {
            c.vocab
        } else {
            at.vocabulary.len() as u32
        };
        let config = ModelConfig {
            vocab,
            form: form_of(c, layer, vocab, ffn),
            layers: 1,
            ffn: match mixture {
                _ if !ffn => NO_FFN,
                Some(_) => c.ffn,
                None => dense,
            },
            experts: mixture.map_or(1, |_| c.experts),
            mixture: mixture.map(|mixture| Mixture {
                dense_layers: Vec::new(),
                dense_ffn: 0,
                by_token: mixture
                    .is_by_token(layer)
                    .then_some(0)
                    .into_iter()
                    .collect(),
                ..mixture.clone()
            }),
            window: vec![c.window[layer as usize]],
            tied_head: true,
            bos: None,
            add_bos: false,
            eos: Vec::new(),
            predictor_threshold: None,
            ..c.clone()
        };
        let tensors = required(&config).into_iter().map(|t| TensorInfo {
            id: t.id,
            source_name: t.id.to_string(),
            rows: t.rows,
            cols: t.cols,
            source_dtype: "F32".into(),
            source_bytes: (4 * t.rows * t.cols) as u64,
        });
        Self {
            at,
            tensors: tensors.collect(),
            config,
            rounded,
            ffn,
        }
    }

    /// Layer number in the whole model.
    pub fn number(&self) -> u32 {
        self.at.layer
    }

    /// Whether inactive neurons can be skipped.
    pub fn ffn_is_sparse(&self) -> bool {
        self.config.has_zeros()
    }

    /// Whether the layer has its own input, which depends on the tokens.
    fn has_input(&self) -> bool {
        self.config.form.inputs_by_layer().is_some()
    }

    /// Whether the layer reads n-gram rows, which have their own numbering.
    pub fn reads_text(&self) -> bool {
        reads_text(self.at.source.config(), self.at.layer)
    }

    /// The format of token tables: for n-gram rows that of the whole model, because their table may be most of the
    /// model.
    pub fn table_format(&self) -> DType {
        if self.reads_text() {
            self.at.options.embedding
        } else {
            DType::F32
        }
    }

    /// Whether the layer computes the residual streams from the tokens: the first layer of a model with several
    /// streams.
    pub fn embeds(&self) -> bool {
        self.at.layer == 0 && self.config.form.streams.is_some()
    }

    /// The layer whose keys and values this one reads, if it has none. Its own are zeros here and are overwritten by
    /// those.
    pub fn shares(&self) -> Option<u32> {
        let owner = self.at.source.config().kv_layer(self.at.layer);
        (owner != self.at.layer).then_some(owner)
    }

    /// Whether a tensor is replaced by zeros.
    fn is_zero(&self, id: TensorId) -> bool {
        match id.role {
            Role::Gate | Role::Up | Role::Down => !self.ffn,
            Role::GateBias | Role::UpBias | Role::DownBias => !self.ffn,
            Role::K | Role::V | Role::KBias | Role::VBias | Role::KNorm => self.shares().is_some(),
            Role::Embed => !self.has_input(),
            // Later streams come from the first layer, and are not merged here.
            Role::StreamIn => !self.embeds(),
            Role::StreamOut => true,
            _ => false,
        }
    }

    /// Reads a row of a residual-stream tensor, rounded to its storage format.
    fn read_row(&self, id: TensorId, number: usize, out: &mut [f32]) -> Result<(), Error> {
        let LayerPlace {
            source,
            options,
            vocabulary,
            layer,
        } = self.at;
        let inputs = source.config().form.inputs_by_layer();
        let read = |id, number, row: &mut [f32]| {
            source.read_rows(id, number, 1, row)?;
            // Packing the whole model reports what cannot be stored.
            let _ = stream::round(options.dtype_of(id), row);
            Ok(())
        };
        let part = layer as usize * out.len();
        let token = vocabulary.get(number).copied().unwrap_or(0);
        match id.role {
            Role::Embed => read(id, token as usize, out),
            Role::LayerInputs => {
                let known = inputs.is_some_and(|inputs| token < inputs.vocab);
                let mut row = vec![0.0; source.config().layers as usize * out.len()];
                read(id, if known { token as usize } else { 0 }, &mut row)?;
                out.copy_from_slice(&row[part..][..out.len()]);
                Ok(())
            }
            Role::LayerInputsProj => {
                let each = inputs.map_or(0, |inputs| inputs.width as usize);
                read(id, layer as usize * each + number, out)
            }
            _ => read(id, number, out),
        }
    }
}

/// Whether a layer reads n-gram rows.
fn reads_text(c: &ModelConfig, layer: u32) -> bool {
    (c.form.ngrams.as_ref()).is_some_and(|ngrams| ngrams.layer == layer)
}

/// The form of a single layer, `layer`.
fn form_of(c: &ModelConfig, layer: u32, vocab: u32, ffn: bool) -> Form {
    // The residual stream already has position embeddings, and there is no head.
    let nope = c.form.nope_layers.contains(&layer).then_some(0);
    let top = c.form.gate_top.get(layer as usize);
    let top = top.filter(|&&share| ffn && share > 0.0);
    let mut form = Form {
        learned_positions: None,
        nope_layers: nope.into_iter().collect(),
        head_bias: false,
        shared_kv: 0,
        shared_kv_ffn: 0,
        layer_inputs: c
            .form
            .layer_inputs
            .map(|inputs| LayerInputs { vocab, ..inputs }),
        gate_top: top.into_iter().copied().collect(),
        activations: c
            .form
            .activations
            .get(layer as usize)
            .copied()
            .into_iter()
            .collect(),
        ngrams: (c.form.ngrams.as_ref().filter(|of| of.layer == layer)).map(|of| NGrams {
            layer: 0,
            ..of.clone()
        }),
        without_mixer: (!c.has_mixer(layer)).then_some(0).into_iter().collect(),
        without_ffn: Vec::new(),
        streams: c.form.streams.map(|streams| Streams {
            per_layer_vocab: vocab,
            ..streams
        }),
        ..c.form.clone()
    };
    form.keep_mixer(layer);
    form
}

impl Checkpoint for OneLayer<'_> {
    fn path(&self) -> &Path {
        self.at.source.path()
    }

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tokenizer_json(&self) -> &str {
        self.at.source.tokenizer_json()
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn read_rows(
        &self,
        id: TensorId,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        if self.is_zero(id) {
            out.fill(0.0);
            return Ok(());
        }
        if let Some(rows) = self.rounded.get(id) {
            let cpu = Cpu::detect();
            let stored = rows.bytes.chunks_exact(rows.dtype.row_bytes(rows.cols));
            let stored = stored.skip(first).take(count);
            for (row, out) in stored.zip(out.chunks_exact_mut(rows.cols)) {
                cpu.dequantize(Row::inline(rows.dtype, rows.cols, row), out);
            }
            return Ok(());
        }
        let id = match id.role {
            Role::FinalNorm | Role::FinalNormBias | Role::Embed | Role::NGramTable => id,
            // unused, as the streams are not merged here
            Role::HyperHeadNorm
            | Role::HyperHeadDown
            | Role::HyperHeadUp
            | Role::HyperHeadMix
            | Role::HyperHeadBase
            | Role::HyperHeadScale => id,
            Role::StreamIn | Role::LayerInputs | Role::LayerInputsProj | Role::LayerInputsNorm => {
                id
            }
            _ => TensorId {
                layer: self.at.layer,
                ..id
            },
        };
        if id.role == Role::TokenExperts {
            let tokens = self.at.vocabulary.iter().skip(first).take(count);
            let rows = out.chunks_exact_mut(out.len() / count.max(1));
            return (tokens.zip(rows)).try_for_each(|(&token, row)| {
                (self.at.source).read_rows(id, token as usize, 1, row)
            });
        }
        if ROLES.contains(&id.role) || !self.has_input() || count == 0 {
            return self.at.source.read_rows(id, first, count, out);
        }
        let rows = out.chunks_exact_mut(out.len() / count);
        (first..first + count)
            .zip(rows)
            .try_for_each(|(number, row)| self.read_row(id, number, row))
    }

    fn fingerprint(&self) -> u64 {
        self.at.source.fingerprint()
    }
}
