//! Checkpoints: configuration, tensors, tokenizer and chat template.
//!
//! [`open`] reads a Hugging Face folder or a GGUF file (including PowerInfer's) and returns a
//! [`Checkpoint`]: a validated [`ModelConfig`](config::ModelConfig), the list of tensors under
//! canonical names ([`names`]), and their rows as f32, streamed. Callers never see a family's own
//! keys or names.
#![forbid(unsafe_code)]

pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod demo;
mod dequant;
mod dtype;
mod error;
mod families;
mod file;
mod fused;
mod gguf;
pub mod gguf_vocab;
mod hf;
mod json;
mod limits;
mod metadata;
mod mixers;
mod mtp;
pub mod names;
mod open;
mod role;
mod rules;
mod special;
mod stacked;
mod store;
mod stored_tensors;
mod tensor_id;
mod text_index;
pub mod tokenizer;

pub use checkpoint::{Checkpoint, SamplingDefaults, TensorInfo};
pub use error::Error;
pub use gguf::gguf_header_len;
pub use gguf::write::{Encoding, GgufFile, GgufTensor, GgufValue, GgufWriter};
pub use hf::Description;
pub use hf::write::{Folder, RowSink, write_folder};
pub use open::{
    describe, describe_text, files_of, is_mtp_head, mtp_head_beside, open, open_mtp_head,
};
pub use rules::TextRules;
pub use stored_tensors::{Bands, StoredTensor, StoredTensors};

#[cfg(test)]
mod testing;
