//! What a sequence keeps: the geometry of keys and values, and the size of recurrent state.
//!
//! ```text
//! page       [layer] of keys and values; a multiple of 32 positions
//! keys       [kv_head][block of 32 positions][element][32 positions]
//! values     [kv_head][position][width]      width = head_dim rounded up to a multiple of 32
//! ```
//!
//! Of latent attention (MLA) there are values alone: one vector for each position, which is the key of
//! all heads, and whose first elements are their value.
//!
//! The attention kernels dictate the layout: they compute scores for 32 positions at once and read
//! both halves of a head sequentially. Elements are f16 (default) or f32.

use emberflow_kernels::{DType, GROUP};

use super::recurrent::BLOCKS;

/// Positions per attention block. Splitting by position alone makes the sums independent of
/// threads, chunks and pages.
pub(crate) const BLOCK: usize = 256;

/// Positions of the largest page: makes reads of a long context as long as those of weights.
const LARGEST: usize = BLOCK;

/// A page has at most 1/8 of a sequence's positions, which bounds the waste.
const SHARE: usize = 8;

/// What a sequence keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateShape {
    /// Keys and values of its positions.
    pub pages: KvShape,
    /// Floats of its recurrent state, whatever its length.
    pub recurrent: usize,
}

impl StateShape {
    /// Bytes of a sequence of `positions` positions, its snapshots included; saturates.
    pub fn bytes_for(self, positions: usize) -> u64 {
        let blocks = (4 * BLOCKS as u64).saturating_mul(self.recurrent as u64);
        self.pages.bytes_for(positions).saturating_add(blocks)
    }
}

/// Geometry of keys and values, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub dtype: DType,
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Positions per page: a power of two ≥ 32 that divides [`BLOCK`].
    pub page: usize,
    /// Value vectors hold the keys, too, and no others are stored.
    pub latent: bool,
}

impl KvShape {
    /// Of `layers` layers, for sequences of up to `context` positions.
    pub fn new(
        dtype: DType,
        layers: u32,
        kv_heads: usize,
        head_dim: usize,
        context: usize,
    ) -> Self {
        Self {
            dtype,
            layers: layers as usize,
            kv_heads,
            head_dim,
            page: page_for(context),
            latent: false,
        }
    }

    /// Elements of a stored value vector.
    pub fn width(self) -> usize {
        self.head_dim.next_multiple_of(GROUP)
    }

    /// Elements of a key that is stored apart.
    fn key_width(self) -> usize {
        match self.latent {
            true => 0,
            false => self.head_dim,
        }
    }

    /// Bytes of `elements` elements.
    pub fn bytes(self, elements: usize) -> usize {
        elements.saturating_mul(self.dtype.row_bytes(1))
    }

    /// Elements of one head's keys and values in a page.
    fn head(self) -> [usize; 2] {
        [self.page * self.key_width(), self.page * self.width()]
    }

    /// Byte offset of a layer's head in a page; `kind`: keys (0) or values (1).
    pub fn at(self, layer: usize, kind: usize, head: usize) -> usize {
        let [keys, values] = self.head();
        let before = layer * self.kv_heads * (keys + values)
            + kind * self.kv_heads * keys
            + head * self.head()[kind];
        self.bytes(before)
    }

    /// Bytes of a page.
    pub fn page_bytes(self) -> usize {
        let [keys, values] = self.head();
        let head = keys.saturating_add(values);
        self.bytes(
            head.saturating_mul(self.kv_heads)
                .saturating_mul(self.layers),
        )
    }

    /// Bytes per position.
    pub fn position_bytes(self) -> u64 {
        let heads = self.layers * self.kv_heads;
        (heads * self.bytes(self.key_width() + self.width())) as u64
    }

    /// Pages of `positions` positions.
    pub fn pages(self, positions: usize) -> usize {
        positions.div_ceil(self.page)
    }

    /// Bytes of the pages for `positions` positions; saturates.
    pub fn bytes_for(self, positions: usize) -> u64 {
        (self.pages(positions) as u64).saturating_mul(self.page_bytes() as u64)
    }
}

/// Page size in positions for sequences of up to `context` positions.
fn page_for(context: usize) -> usize {
    let share = (context / SHARE).max(1);
    let power = 1usize << share.ilog2();
    power.clamp(GROUP, LARGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_waste_an_eighth_at_most_and_divide_a_block() {
        for context in [
            1, 31, 32, 33, 100, 300, 1000, 1024, 2047, 2048, 5000, 16_000,
        ] {
            let page = page_for(context);
            assert!(BLOCK.is_multiple_of(page) && page.is_multiple_of(GROUP));
            let held = context.div_ceil(page) * page;
            assert!(
                held - context < GROUP.max(context / SHARE + 1),
                "{context}: {held}"
            );
        }
        assert_eq!((page_for(256), page_for(2048)), (32, 256));
    }

    #[test]
    fn the_parts_of_a_page_are_contiguous() {
        let shape = KvShape {
            dtype: DType::F16,
            layers: 3,
            kv_heads: 2,
            head_dim: 40,
            page: 64,
            latent: false,
        };
        let mut end = 0;
        for layer in 0..3 {
            for (kind, elements) in [64 * 40, 64 * 64].into_iter().enumerate() {
                for head in 0..2 {
                    assert_eq!(shape.at(layer, kind, head), end);
                    end += 2 * elements;
                }
            }
        }
        assert_eq!(shape.page_bytes(), end);
        assert_eq!(shape.position_bytes() as usize * 64, end);
        assert_eq!(shape.bytes_for(65), 2 * end as u64);
        let latent = KvShape {
            kv_heads: 1,
            head_dim: 72,
            latent: true,
            ..shape
        };
        assert_eq!(latent.position_bytes(), 3 * 2 * 96);
        assert_eq!(latent.page_bytes(), 64 * latent.position_bytes() as usize);
    }
}
