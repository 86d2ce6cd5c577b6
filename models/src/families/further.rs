//! Weights for multi-token prediction, which are skipped.

/// Location of weights for multi-token prediction in a family's releases.
#[derive(Clone, Copy)]
pub(crate) enum FurtherTokens {
    /// None.
    Absent,
    /// Layers after the last one of the decoder.
    PastLast,
    /// Tensors with one of these in their names.
    Named(&'static [&'static str]),
    /// Layers after the last one of the decoder; also, tensors with this in their names are
    /// skipped.
    PastLastOr(&'static str),
}

impl FurtherTokens {
    /// Whether a tensor is one of them: `layer` is the layer in its name, `layers` the number in
    /// the decoder.
    pub(crate) fn have(self, name: &str, layer: Option<u32>, layers: u32) -> bool {
        match self {
            Self::Absent => false,
            Self::PastLast => layer.is_some_and(|layer| layer >= layers),
            Self::Named(parts) => parts.iter().any(|part| name.contains(part)),
            Self::PastLastOr(part) => {
                name.contains(part) || layer.is_some_and(|layer| layer >= layers)
            }
        }
    }
}
