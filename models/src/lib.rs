//! What a checkpoint is: its configuration, its tensors, its tokenizer and its
//! chat template.
//!
//! [`open`] reads a Hugging Face folder or a GGUF file (PowerInfer's too) and
//! answers with a [`Checkpoint`]: a checked [`ModelConfig`](config::ModelConfig),
//! the list of tensors under canonical names ([`names`]), and their rows as
//! f32, streamed. No caller sees a family's own keys or names.
#![forbid(unsafe_code)]

pub mod chat;
pub mod checkpoint;
pub mod config;
mod error;
pub mod gguf;
pub mod gguf_vocab;
pub mod hf;
pub mod names;
pub mod tokenizer;

pub use checkpoint::{Checkpoint, SamplingDefaults, TensorInfo, open};
pub use error::Error;
