//! One layer of a checkpoint as a model of its own, some of its matrices rounded.

use std::path::Path;

use emberflow_kernels::{Cpu, Row};
use emberflow_models::config::{Form, Mixture, ModelConfig};
use emberflow_models::names::{Role, TensorId, required};
use emberflow_models::{Checkpoint, Error, SamplingDefaults, TensorInfo};

use super::rounded::LayerRows;

/// Neurons of a layer without its FFN: zeros, none of which fires or adds anything.
const NO_FFN: u32 = 32;

/// A checkpoint of one layer, without a vocabulary to speak of: it is given residual streams.
pub struct OneLayer<'a> {
    source: &'a dyn Checkpoint,
    layer: u32,
    config: ModelConfig,
    tensors: Vec<TensorInfo>,
    /// What replaces the source's rows.
    rounded: &'a LayerRows,
    /// Whether the layer has its FFN.
    ffn: bool,
}

impl<'a> OneLayer<'a> {
    /// Layer `layer` of `source` with the matrices of `rounded` in place of its own, and `ffn` or
    /// nothing in its place.
    pub fn new(source: &'a dyn Checkpoint, layer: u32, rounded: &'a LayerRows, ffn: bool) -> Self {
        let c = source.config();
        let mixture = c.mixture_of(layer).filter(|_| ffn);
        let dense = c.mixture.as_ref().map_or(c.ffn, |m| m.dense_ffn);
        // Positions are in the stream already, and there is no head to speak of.
        let nope = c.form.nope_layers.contains(&layer).then_some(0);
        let form = Form {
            learned_positions: None,
            nope_layers: nope.into_iter().collect(),
            head_bias: false,
            ..c.form.clone()
        };
        let config = ModelConfig {
            vocab: 1,
            form,
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
        });
        Self {
            source,
            layer,
            tensors: tensors.collect(),
            config,
            rounded,
            ffn,
        }
    }

    /// Whether neurons that do not fire can be left out.
    pub fn ffn_is_sparse(&self) -> bool {
        self.config.ffn_kind.activation.is_sparse()
    }
}

impl Checkpoint for OneLayer<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tokenizer_json(&self) -> &str {
        self.source.tokenizer_json()
    }

    fn chat_template(&self) -> Option<&str> {
        None
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        SamplingDefaults::default()
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
        let is_ffn = id.role.is_bundled()
            || matches!(id.role, Role::GateBias | Role::UpBias | Role::DownBias);
        if id.role == Role::Embed || (is_ffn && !self.ffn) {
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
            Role::FinalNorm | Role::FinalNormBias => id,
            _ => TensorId {
                layer: self.layer,
                ..id
            },
        };
        self.source.read_rows(id, first, count, out)
    }

    fn fingerprint(&self) -> u64 {
        self.source.fingerprint()
    }
}
