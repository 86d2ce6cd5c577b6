//! Scratch shared by attention and FFN.

use emberflow_models::config::ModelConfig;

use crate::{attention, ffn};

/// Floats of a thread's buffer for passes of `rows` rows.
pub(crate) fn thread_floats(c: &ModelConfig, rows: usize) -> usize {
    let group = c.heads as usize / c.kv_heads.max(1) as usize;
    let attention = attention::thread_floats(c.head_dim as usize, group, rows);
    attention.max(ffn::thread_floats(c.d_model as usize, rows))
}
