//! Layers with a window, without rotary positions, or for multi-token prediction.

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

/// Layers with a sliding window, if `layer_types` is absent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    /// None, regardless of `layer_types`.
    None,
    /// None; the family does not use the key. In GGUF: unknown.
    Never,
    /// All.
    Every,
    /// Those from `max_window_layers` on, if `use_sliding_window` is set.
    ByLayer,
    /// None; releases disagree on what `use_sliding_window` means.
    Disputed,
    /// As in `sliding_window_layout`, with `sliding_window_size`.
    Layout,
    /// Those without rotary positions, if `use_sliding_window` is set.
    Unrotated,
    /// Every second one from the first on.
    Alternate,
    /// All but every fourth from the first on.
    AllButFourth,
    /// All but every `sliding_window_pattern`-th (this default).
    Pattern(u32),
    /// The same; the second number is the default window. Null means none.
    PatternOf(u32, u32),
    /// Chunks of `attention_chunk_size` positions (this default), in the layers with rotary
    /// positions.
    Chunks(u32),
    /// Those from `max_window_layers` (this default) on; the second number is the default window.
    /// Null means none.
    Late(u32, u32),
}

impl Windows {
    /// Whether llama.cpp derives the layers with a window from the architecture.
    pub(crate) fn have_a_key(self) -> bool {
        matches!(
            self,
            Self::AllButFourth | Self::Alternate | Self::Pattern(_)
        )
    }
}

/// Layers without rotary positions in `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct Unrotated {
    /// Key of a list with 0 for each of them.
    pub(crate) list: &'static str,
    /// Without the list: key of their interval, and its default.
    pub(crate) interval: Option<(&'static str, u32)>,
}

/// One layer of every four.
#[derive(Clone, Copy)]
pub(crate) struct EveryNth {
    /// The first of them.
    pub(crate) first: usize,
    /// Only in files with a sliding window.
    pub(crate) windowed: bool,
}

impl EveryNth {
    /// The layers.
    pub(crate) fn of(self, layers: u32) -> Vec<u32> {
        (0..layers).skip(self.first).step_by(4).collect()
    }
}
