//! What a slot of the cold region holds of a bundle.

use emberflow_storage::container::BundleGeometry;

/// Alignment of direct I/O, in bytes; 1 where reads are buffered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Align {
    /// Of offsets in the file and of lengths.
    pub offset: usize,
    /// Of addresses in memory.
    pub memory: usize,
}

/// The bytes `[start, start + len)` of a bundle: all of it, or Up and Down where the bank's Gate
/// rows are resident.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotContent {
    /// Whether the Gate part belongs to it; where that does not fill whole sectors, its bytes may
    /// lie in the slot all the same.
    pub has_gate: bool,
    pub start: usize,
    pub len: usize,
    /// Bytes of a bundle on flash.
    pub stride: usize,
    /// Bytes reserved for the Gate part, and those of them that are not padding.
    pub gate_span: usize,
    pub gate_len: usize,
    /// Bytes of Up and Down.
    pub rest_len: usize,
    /// First byte of a bundle that a read of Up and Down alone asks for.
    pub rest_read: usize,
    /// Bytes of a slot for it.
    pub slot_len: usize,
}

impl SlotContent {
    pub fn new(g: &BundleGeometry, gates_resident: bool, align: Align) -> Self {
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
            rest_read,
            slot_len: cover.next_multiple_of(align.memory),
        }
    }

    /// Bytes of a neuron without padding: its Gate where it belongs to it, its Up and its Down.
    pub fn vectors(&self) -> [usize; 3] {
        let gate = if self.has_gate { self.gate_len } else { 0 };
        [gate, self.rest_len / 2, self.rest_len / 2]
    }
}
