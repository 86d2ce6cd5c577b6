//! Sizes of the streams, and their readers.

use emberflow_models::config::{HyperConnections, ModelConfig};

/// A reader of a mixture of the streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// The mixer of a layer.
    Mixer(usize),
    /// The FFN of a layer.
    Ffn(usize),
    /// The head.
    Head,
}

/// Sizes of the streams.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamSizes {
    pub d: usize,
    pub count: usize,
    pub eps: f32,
}

impl StreamSizes {
    /// The sizes for a model.
    pub fn of(c: &ModelConfig, hyper: HyperConnections) -> Self {
        Self {
            d: c.d_model as usize,
            count: hyper.count as usize,
            eps: c.rms_eps,
        }
    }

    /// Elements of all streams of a row.
    pub fn width(self) -> usize {
        self.count * self.d
    }
}
