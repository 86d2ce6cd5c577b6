//! The positions that attention sees.

use super::ModelConfig;

/// The positions that a query sees, up to its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// All.
    All,
    /// The last positions: a sliding window of this size.
    Last(u32),
    /// The positions of its own chunk of this size, from the last multiple of it on (Llama 4).
    Chunk(u32),
}

impl Reach {
    /// The first position that the query at `position` sees.
    pub fn first(self, position: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Last(count) => (position + 1).saturating_sub(count as usize),
            Self::Chunk(count) => position - position % (count as usize).max(1),
        }
    }
}

impl ModelConfig {
    /// The reach of the queries of layer `layer`.
    pub fn reach(&self, layer: u32) -> Reach {
        match self.window.get(layer as usize) {
            None | Some(0) => Reach::All,
            Some(&count) if self.form.chunked => Reach::Chunk(count),
            Some(&count) => Reach::Last(count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sees_from_the_first_position_of_its_window_or_chunk_on() {
        let firsts = |reach: Reach| [0, 3, 4, 5, 8].map(|position| reach.first(position));
        assert_eq!(firsts(Reach::All), [0; 5]);
        assert_eq!(firsts(Reach::Last(4)), [0, 0, 1, 2, 5]);
        assert_eq!(firsts(Reach::Chunk(4)), [0, 0, 4, 4, 8]);
    }
}
