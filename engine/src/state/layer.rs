//! One layer's keys and values: read by attention threads, written one position at a time.

use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{Cpu, DType, GROUP};

use super::page::Page;
use super::shape::KvShape;

const KEYS: usize = 0;
const VALUES: usize = 1;

/// One layer of a sequence's keys and values.
#[derive(Clone, Copy)]
pub(crate) struct LayerKv<'a> {
    shape: KvShape,
    pages: &'a [Arc<Page>],
    layer: usize,
}

impl<'a> LayerKv<'a> {
    pub(super) fn new(shape: KvShape, pages: &'a [Arc<Page>], layer: usize) -> Self {
        Self {
            shape,
            pages,
            layer,
        }
    }

    /// Element format.
    pub fn dtype(self) -> DType {
        self.shape.dtype
    }

    /// Whether a value vector holds the key, too.
    pub fn is_latent(self) -> bool {
        self.shape.latent
    }

    /// Elements of a stored value vector, padding included.
    pub fn width(self) -> usize {
        self.shape.width(self.layer)
    }

    /// Splits `positions` at page borders, in order.
    pub fn pieces(self, positions: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let page = self.shape.page;
        let last = positions.end.div_ceil(page);
        (positions.start / page..last)
            .map(move |p| positions.start.max(p * page)..positions.end.min((p + 1) * page))
    }

    /// The key blocks of one head that cover `positions`, all in one page, and the first position
    /// of the first block.
    pub fn keys(self, head: usize, positions: Range<usize>) -> (&'a [u8], usize) {
        let shape = self.shape;
        let (page, first) = self.page_of(&positions);
        let start = positions.start / GROUP * GROUP;
        let end = positions.end.next_multiple_of(GROUP);
        let base = shape.at(self.layer, KEYS, head);
        let [from, to] =
            [start, end].map(|p| base + shape.bytes((p - first) * shape.head_dim(self.layer)));
        (&page[from..to], start)
    }

    /// The value vectors of one head at `positions`, all in one page.
    pub fn values(self, head: usize, positions: Range<usize>) -> &'a [u8] {
        let shape = self.shape;
        let (page, first) = self.page_of(&positions);
        let base = shape.at(self.layer, VALUES, head);
        let ends = [positions.start, positions.end];
        let [from, to] = ends.map(|p| base + shape.bytes((p - first) * shape.width(self.layer)));
        &page[from..to]
    }

    /// The page of `positions`, and the page's first position.
    fn page_of(self, positions: &Range<usize>) -> (&'a [u8], usize) {
        let page = positions.start / self.shape.page;
        (self.pages[page].bytes(), page * self.shape.page)
    }
}

/// Writes one position of a page.
pub(crate) struct PageWriter<'a> {
    shape: KvShape,
    page: &'a mut [u8],
    /// The position in the sequence, and its index in the page.
    position: usize,
    place: usize,
    /// The first position with a number that is infinite in the page's format.
    overflow: &'a mut Option<usize>,
}

impl<'a> PageWriter<'a> {
    pub(super) fn new(
        shape: KvShape,
        page: &'a mut Page,
        position: usize,
        overflow: &'a mut Option<usize>,
    ) -> Self {
        Self {
            shape,
            page: page.bytes_mut(),
            position,
            place: position % shape.page,
            overflow,
        }
    }

    /// Records whether all numbers of the position could be stored.
    fn record(&mut self, fits: bool) {
        if !fits {
            let first = self.overflow.unwrap_or(self.position);
            *self.overflow = Some(first.min(self.position));
        }
    }

    /// Stores one head's key.
    pub fn store_key(&mut self, cpu: Cpu, layer: usize, head: usize, key: &[f32]) {
        let shape = self.shape;
        let block = self.place / GROUP * GROUP * shape.head_dim(layer) + self.place % GROUP;
        let offset = shape.at(layer, KEYS, head) + shape.bytes(block);
        let (step, size) = (shape.bytes(GROUP), shape.bytes(1));
        let places = self.page[offset..].chunks_mut(step);
        let mut elements = [0u8; 4 * GROUP];
        let mut fits = true;
        let mut places = places.map(|place| &mut place[..size]);
        for part in key.chunks(GROUP) {
            let elements = &mut elements[..shape.bytes(part.len())];
            fits &= write(cpu, shape.dtype, part, elements);
            for (element, place) in elements.chunks_exact(size).zip(&mut places) {
                place.copy_from_slice(element);
            }
        }
        self.record(fits);
    }

    /// Stores one head's value.
    pub fn store_value(&mut self, cpu: Cpu, layer: usize, head: usize, value: &[f32]) {
        let shape = self.shape;
        let offset = shape.at(layer, VALUES, head) + shape.bytes(self.place * shape.width(layer));
        let stored = &mut self.page[offset..offset + shape.bytes(value.len())];
        let fits = write(cpu, shape.dtype, value, stored);
        self.record(fits);
    }
}

/// Bits of an infinite f16, and the bit of its sign.
const INFINITE: u16 = 0x7c00;
/// See [`INFINITE`].
const SIGN: u16 = 0x8000;

/// Converts floats to the page format. Returns whether all finite ones stay finite.
fn write(cpu: Cpu, dtype: DType, from: &[f32], to: &mut [u8]) -> bool {
    if dtype == DType::F16 {
        cpu.f32_to_f16_bytes(from, to);
        let ends = |half: u16, v: f32| half & !SIGN == INFINITE && v.is_finite();
        let halves = to
            .as_chunks()
            .0
            .iter()
            .map(|&half| u16::from_le_bytes(half));
        // No early exit, so that it is vectorised.
        !(halves.zip(from)).fold(false, |any, (half, &v)| any | ends(half, v))
    } else {
        for (bytes, v) in to.chunks_exact_mut(4).zip(from) {
            bytes.copy_from_slice(&v.to_le_bytes());
        }
        true
    }
}
