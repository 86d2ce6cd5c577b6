//! A `config.json` alone: the configuration, and the types of the weights that it belongs to.

use std::path::Path;

use serde_json::Value;

use super::text_part::text_part;
use super::{config, model_name, quant};
use crate::checkpoint::TensorInfo;
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::file::need_text;
use crate::json::{self, Keys, MAX_CONFIG};
use crate::names::{Role, TensorId, required};
use crate::store::source_bytes;

/// A model without weights, as its `config.json` describes it.
#[derive(Debug, Clone)]
pub struct Description {
    /// The configuration.
    pub config: ModelConfig,
    types: Types,
}

/// Types of the neurons in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Types {
    /// Those of experts that tokens choose.
    experts: DType,
    /// Those of shared experts and of dense FFNs.
    others: DType,
    /// Bits per weight with scales, in eighths, if they do not follow from the type.
    eighths: Option<u64>,
}

impl Description {
    /// The tensors of the checkpoint. Only neurons have the types that `quantization_config` names. It says
    /// of which other matrices they are too in words that differ from release to release, so these are
    /// BF16; in a checkpoint with quantized neurons the format of a container is the same for both.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let all = required(&self.config).into_iter();
        all.map(|t| {
            let dtype = self.dtype(t.id);
            TensorInfo {
                id: t.id,
                source_name: t.id.to_string(),
                rows: t.rows,
                cols: t.cols,
                source_dtype: dtype.name().into(),
                source_bytes: match self.types.eighths.filter(|_| dtype == self.types.experts) {
                    Some(eighths) => (t.rows as u64)
                        .saturating_mul(t.cols as u64)
                        .saturating_mul(eighths)
                        .div_ceil(64),
                    None => source_bytes(dtype, t.rows, t.cols),
                },
            }
        })
        .collect()
    }

    fn dtype(&self, id: TensorId) -> DType {
        let config = &self.config;
        match id.role {
            Role::TokenExperts => DType::I64,
            role if !role.is_bundled() => DType::Bf16,
            _ if config.mixture_of(id.layer).is_some() && id.expert < config.experts => {
                self.types.experts
            }
            _ => self.types.others,
        }
    }
}

impl Types {
    const FLOATS: Self = Self {
        experts: DType::Bf16,
        others: DType::Bf16,
        eighths: None,
    };

    /// The types that `quantization_config` names. Only methods that are read get here.
    fn read(keys: &Keys) -> Result<Self, Error> {
        if let Some(method) = quant::method(keys)? {
            let (dtype, eighths) = method.usual();
            return Ok(Self {
                experts: dtype,
                others: dtype,
                eighths: Some(eighths),
            });
        }
        let Some(how) = keys.object("quantization_config", "quantization_config.")? else {
            return Ok(Self::FLOATS);
        };
        let mut of_experts = None;
        for keys in [keys, &how] {
            of_experts = of_experts.or(keys.str("expert_dtype")?);
        }
        Ok(match (how.str("quant_method")?, of_experts) {
            (Some("fp8"), Some("fp4")) => Self {
                experts: DType::Mxfp4Pairs,
                others: DType::F8E4M3,
                eighths: None,
            },
            (Some("fp8"), Some(other)) if other != "fp8" => {
                return Err(keys.unsupported("expert_dtype", "experts in FP8 or FP4 are read"));
            }
            (Some("fp8"), _) => Self {
                experts: DType::F8E4M3,
                others: DType::F8E4M3,
                eighths: None,
            },
            (Some("mxfp4"), _) => Self {
                experts: DType::Mxfp4Pairs,
                others: DType::Bf16,
                eighths: None,
            },
            _ => Self::FLOATS,
        })
    }
}

/// The model described by a `config.json`.
pub(crate) fn describe(path: &Path) -> Result<Description, Error> {
    let folder = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let text = need_text(path, MAX_CONFIG, "it describes the model")?;
    let stem = path
        .file_stem()
        .map(|stem| stem.to_string_lossy().into_owned());
    let named = stem.filter(|stem| stem != "config");
    let name = named.unwrap_or_else(|| model_name(folder.unwrap_or(Path::new("."))));
    describe_text(path, &text, name)
}

/// The same for its text, read from `path`.
pub(crate) fn describe_text(path: &Path, text: &str, name: String) -> Result<Description, Error> {
    let value: Value = json::parse(path, text)?;
    let config = config::model_config(path, &value, name)?;
    config.validate(path)?;
    let (part, _) = text_part(path, &value)?;
    let types = Types::read(&Keys::new(path, &part)?)?;
    Ok(Description { config, types })
}
