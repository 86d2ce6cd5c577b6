//! Shape of a sequence's state: the geometry of keys and values, and the size of recurrent state.
//!
//! ```text
//! page       [layer] of keys and values, layers with equal heads together; a multiple of 32 positions
//! keys       [kv_head][block of 32 positions][element][32 positions]
//! values     [kv_head][position][width]      width = head_dim rounded up to a multiple of 32
//! ```
//!
//! Latent attention (MLA) has only values: one vector per position, which is the key of all heads and
//! whose first elements are their value.
//!
//! The layout follows from the attention kernels: they compute scores for 32 positions at once and
//! read both halves of a head sequentially. Elements are f16 (default) or f32.

use std::ops::Range;

use emberflow_kernels::{DType, GROUP};

use super::recurrent::BLOCKS;

/// Positions per attention block. Splitting by position alone makes the sums independent of
/// threads, chunks and pages.
pub(crate) const BLOCK: usize = 256;

/// Positions of the largest page: makes reads of a long context as long as those of weights.
const LARGEST: usize = BLOCK;

/// A page has at most 1/8 of a sequence's positions, which bounds the waste.
const SHARE: usize = 8;

/// Shape of a sequence's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateShape {
    /// Keys and values of its positions.
    pub pages: KvShape,
    /// Vectors of pools of positions, by pool size.
    pub pools: [PoolShape; 2],
    /// Floats of its recurrent state, independent of its length.
    pub recurrent: usize,
}

/// Vectors of pools of positions, in separate pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolShape {
    /// Positions of a pool; 0 for none.
    pub size: usize,
    pub pages: KvShape,
}

impl PoolShape {
    /// Number of pools completed by `positions` positions.
    pub fn pools(self, positions: usize) -> usize {
        positions.checked_div(self.size).unwrap_or(0)
    }
}

impl StateShape {
    /// Bytes that a position adds: its keys and values, and its share of pool vectors.
    pub fn position_bytes(self) -> u64 {
        let pool_bytes = |shape: PoolShape| {
            let bytes = shape.pages.position_bytes();
            bytes.checked_div(shape.size as u64).unwrap_or(0)
        };
        self.pages.position_bytes() + self.pools.into_iter().map(pool_bytes).sum::<u64>()
    }

    /// Bytes of a sequence of `positions` positions, its snapshots included; saturates.
    pub fn bytes_for(self, positions: usize) -> u64 {
        let blocks = (4 * BLOCKS as u64).saturating_mul(self.recurrent as u64);
        let pools = |shape: PoolShape| shape.pages.bytes_for(shape.pools(positions));
        let pages = self.pages.bytes_for(positions).saturating_add(blocks);
        pages.saturating_add(self.pools.into_iter().map(pools).sum())
    }
}

/// Layers with equal heads of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HeadLayers {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Geometry of keys and values, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub dtype: DType,
    /// The layers, grouped by kind.
    pub kinds: [HeadLayers; 2],
    /// Positions per page: a power of two ≥ 32 that divides [`BLOCK`].
    pub page: usize,
    /// Value vectors also hold the keys; no separate keys are stored.
    pub latent: bool,
}

impl KvShape {
    /// The geometry of these layers, for sequences of up to `context` positions.
    pub fn new(dtype: DType, kinds: [HeadLayers; 2], context: usize) -> Self {
        Self {
            dtype,
            kinds,
            page: page_for(context),
            latent: false,
        }
    }

    /// Number of layers.
    pub fn layers(self) -> usize {
        self.kinds.iter().map(|kind| kind.layers).sum()
    }

    /// The kind of a layer, and its index among those of its kind.
    fn kind(self, layer: usize) -> (HeadLayers, usize) {
        let [first, second] = self.kinds;
        match layer.checked_sub(first.layers) {
            Some(place) => (second, place),
            None => (first, layer),
        }
    }

    /// Heads of keys and values of a layer.
    pub fn kv_heads(self, layer: usize) -> usize {
        self.kind(layer).0.kv_heads
    }

    /// Elements of a layer's key.
    pub fn head_dim(self, layer: usize) -> usize {
        self.kind(layer).0.head_dim
    }

    /// Elements of a layer's stored value vector.
    pub fn width(self, layer: usize) -> usize {
        self.head_dim(layer).next_multiple_of(GROUP)
    }

    /// Bytes of `elements` elements.
    pub fn bytes(self, elements: usize) -> usize {
        elements.saturating_mul(self.dtype.row_bytes(1))
    }

    /// Elements of a position's key, if stored separately, and of its value in one head.
    fn vectors(self, kind: HeadLayers) -> [usize; 2] {
        let keys = if self.latent { 0 } else { kind.head_dim };
        [keys, kind.head_dim.next_multiple_of(GROUP)]
    }

    /// Byte offset of a layer's head in a page; `part`: keys (0) or values (1).
    pub fn at(self, layer: usize, part: usize, head: usize) -> usize {
        let (kind, place) = self.kind(layer);
        let before = if layer < self.kinds[0].layers {
            0
        } else {
            self.position(self.kinds[0])
        };
        let vectors = self.vectors(kind);
        let [keys, values] = vectors;
        let inside = place * kind.kv_heads * (keys + values)
            + part * kind.kv_heads * keys
            + head * vectors[part];
        self.bytes(self.page * (before + inside))
    }

    /// Elements of a position in the layers of a kind; saturates.
    fn position(self, kind: HeadLayers) -> usize {
        let [keys, values] = self.vectors(kind);
        (keys.saturating_add(values))
            .saturating_mul(kind.kv_heads)
            .saturating_mul(kind.layers)
    }

    /// Elements of a position; saturates.
    fn elements(self) -> usize {
        let [first, second] = self.kinds.map(|kind| self.position(kind));
        first.saturating_add(second)
    }

    /// Bytes of a page.
    pub fn page_bytes(self) -> usize {
        self.bytes(self.elements().saturating_mul(self.page))
    }

    /// Bytes per position.
    pub fn position_bytes(self) -> u64 {
        self.bytes(self.elements()) as u64
    }

    /// Visits the bytes of `positions`, as a page's number and a range in it: group by group of [`GROUP`] positions, and
    /// in each by layer, keys before values, and head. Their number and order do not depend on the page size, and nothing
    /// of other positions is among them.
    pub fn visit<E>(
        self,
        positions: Range<usize>,
        mut each: impl FnMut(usize, Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut first = positions.start;
        while first < positions.end {
            let inside = first % GROUP;
            let count = (GROUP - inside).min(positions.end - first);
            let (page, group) = (first / self.page, first % self.page - inside);
            let mut piece =
                |start: usize, elements: usize| each(page, start..start + self.bytes(elements));
            for layer in 0..self.layers() {
                let (width, head_dim) = (self.width(layer), self.head_dim(layer));
                for head in (0..self.kv_heads(layer)).filter(|_| !self.latent) {
                    let keys = self.at(layer, 0, head) + self.bytes(group * head_dim);
                    if count == GROUP {
                        piece(keys, GROUP * head_dim)?;
                        continue;
                    }
                    for element in 0..head_dim {
                        piece(keys + self.bytes(element * GROUP + inside), count)?;
                    }
                }
                for head in 0..self.kv_heads(layer) {
                    let values = self.at(layer, 1, head);
                    piece(values + self.bytes((group + inside) * width), count * width)?;
                }
            }
            first += count;
        }
        Ok(())
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

    /// The state of 64 positions is 64 times what one adds, if they complete all pools and pages.
    #[test]
    fn pools_are_counted_by_position() {
        let kv_pages = |layers, page| KvShape {
            dtype: DType::F16,
            kinds: [
                HeadLayers {
                    layers,
                    kv_heads: 1,
                    head_dim: 32,
                },
                HeadLayers::default(),
            ],
            page,
            latent: true,
        };
        let pools = [(2, 5), (16, 3)].map(|(size, layers)| PoolShape {
            size,
            pages: kv_pages(layers, 4),
        });
        let state = StateShape {
            pages: kv_pages(7, 32),
            pools,
            recurrent: 0,
        };
        assert_eq!(state.position_bytes(), 64 * 7 + 64 * 5 / 2 + 64 * 3 / 16);
        assert_eq!(state.bytes_for(64), 64 * state.position_bytes());
        let none = StateShape {
            pools: pools.map(|pool| PoolShape { size: 0, ..pool }),
            ..state
        };
        assert_eq!(none.bytes_for(64), 64 * 64 * 7);
        assert_eq!(none.position_bytes(), 64 * 7);
    }

    #[test]
    fn the_parts_of_a_page_are_contiguous() {
        let kind_of = |layers, kv_heads, head_dim| HeadLayers {
            layers,
            kv_heads,
            head_dim,
        };
        let shape = KvShape {
            dtype: DType::F16,
            kinds: [kind_of(3, 2, 40), kind_of(2, 1, 72)],
            page: 64,
            latent: false,
        };
        let mut end = 0;
        for (layer, heads, sizes) in (0..3)
            .map(|layer| (layer, 2, [64 * 40, 64 * 64]))
            .chain((3..5).map(|layer| (layer, 1, [64 * 72, 64 * 96])))
        {
            for (part, elements) in sizes.into_iter().enumerate() {
                for head in 0..heads {
                    assert_eq!(shape.at(layer, part, head), end);
                    end += 2 * elements;
                }
            }
        }
        assert_eq!(shape.page_bytes(), end);
        assert_eq!(shape.position_bytes() as usize * 64, end);
        assert_eq!(shape.bytes_for(65), 2 * end as u64);
        let latent = KvShape {
            kinds: [kind_of(3, 1, 72), kind_of(0, 0, 0)],
            latent: true,
            ..shape
        };
        assert_eq!(latent.position_bytes(), 3 * 2 * 96);
        assert_eq!(latent.page_bytes(), 64 * latent.position_bytes() as usize);
    }
}
