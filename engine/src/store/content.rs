//! Layout of a cold slot: the part of a bundle that it holds.

use emberflow_storage::container::BundleGeometry;

use crate::bundle::NeuronFormat;

/// Alignment of direct I/O in bytes; 1 for buffered I/O.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Align {
    /// Alignment of file offsets and lengths.
    pub offset: usize,
    /// Alignment of memory addresses.
    pub memory: usize,
}

/// Bytes `[start, start + len)` of a bundle: the whole bundle, or only Up and Down if Gate rows are
/// resident.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotContent {
    /// Whether the Gate row is valid. If not, the slot may still contain Gate bytes as sector
    /// padding.
    pub has_gate: bool,
    pub start: usize,
    pub len: usize,
    /// Bytes of a bundle on flash.
    pub stride: usize,
    /// Bytes reserved for the Gate row, including padding; `gate_len` without.
    pub gate_span: usize,
    pub gate_len: usize,
    /// Bytes of Up and Down together; of Up.
    pub rest_len: usize,
    pub up_len: usize,
    /// Offset at which a read of only Up and Down begins.
    pub rest_read: usize,
    /// Bytes of a slot.
    pub slot_len: usize,
}

impl SlotContent {
    pub fn new(g: &BundleGeometry, up_len: usize, gates_resident: bool, align: Align) -> Self {
        let (stride, rest_read) = (g.stride as usize, g.rest_read() as usize);
        let start = if gates_resident { rest_read } else { 0 };
        let len = stride - start;
        let aligned = start.is_multiple_of(align.offset) && stride.is_multiple_of(align.offset);
        let cover = len.next_multiple_of(align.offset) + if aligned { 0 } else { align.offset };
        Self {
            has_gate: !gates_resident,
            start,
            len,
            stride,
            gate_span: g.gate_span as usize,
            gate_len: g.gate_len as usize,
            rest_len: g.rest_len as usize,
            up_len,
            rest_read,
            slot_len: cover.next_multiple_of(align.memory),
        }
    }

    /// Gate (empty if resident elsewhere), Up and Down of `count` bundles in flash layout.
    pub fn bundles<'a>(
        &self,
        bytes: &'a [u8],
        count: usize,
        format: NeuronFormat,
    ) -> impl Iterator<Item = [&'a [u8]; 3]> {
        let ([gate, ..], span) = (self.vectors(), self.gate_span);
        let bundles = bytes.chunks_exact(self.stride).take(count);
        bundles.map(move |bundle| {
            let (up, down) = format.split_rest(&bundle[span..]);
            [&bundle[..gate], up, down]
        })
    }

    /// Bytes of [Gate (0 if resident elsewhere), Up, Down], without padding.
    pub fn vectors(&self) -> [usize; 3] {
        let gate = if self.has_gate { self.gate_len } else { 0 };
        [gate, self.up_len, self.rest_len - self.up_len]
    }
}
