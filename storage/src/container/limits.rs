//! Limits of the container format, each with its reason. The reader rejects what exceeds them
//! before it allocates or multiplies anything.

/// Alignment of sections and banks: the page size, and the largest sector that direct I/O needs.
pub const SECTION_ALIGN: u64 = 4096;
/// Alignment of dense tensors: a cache line, so that rows can be used in place.
pub const TENSOR_ALIGN: u64 = 64;
/// Sector sizes that direct I/O may need.
pub const SECTORS: [u32; 4] = [512, 1024, 2048, 4096];
/// JSON metadata in bytes. It holds the tokenizer; the largest in use are near 20 MiB.
pub const MAX_META: u64 = 256 << 20;
/// Activation statistics in bytes; a few bytes per neuron.
pub const MAX_STATS: u64 = 1 << 30;
/// Predictor weights in bytes; the largest published predictor set is below 30 GB.
pub const MAX_PREDICTOR: u64 = 1 << 36;
/// Dense tensors. Each matrix of an expert may be one: Kimi K2 has about 70 000.
pub const MAX_TENSORS: u64 = 1 << 18;
/// Bytes of a tensor name, fixed in the record.
pub const MAX_NAME: usize = 64;
/// Dimensions of a tensor, fixed in the record.
pub const MAX_DIMS: usize = 4;
/// Banks, one per layer and expert; the largest models have about 25 000.
pub const MAX_BANKS: u64 = 1 << 17;
/// Layers; also bounds tables that are indexed by layer.
pub const MAX_LAYERS: u32 = 1 << 12;
/// Experts of one layer.
pub const MAX_EXPERTS: u32 = 1 << 12;
/// Neurons of one bank; the widest dense FFN has about 60 000.
pub const MAX_NEURONS: u32 = 1 << 20;
/// Neurons of the whole model. The checksum table takes eight bytes per neuron and stays in RAM.
pub const MAX_TOTAL_NEURONS: u64 = 1 << 27;
/// Bytes of one bundle; 16384 elements of f32 in three vectors take 196 608.
pub const MAX_STRIDE: u32 = 1 << 20;
/// Bytes of resident scales of one neuron.
pub const MAX_SCALES_PER_NEURON: u32 = 1 << 18;
/// Bytes of the file. Keeps sums of offsets far from overflow.
pub const MAX_FILE: u64 = 1 << 46;
/// Size of the write buffer: large sequential writes are several times faster than bundle-sized
/// ones.
pub const WRITE_BUFFER: usize = 2 << 20;
/// Size of the read buffer for streaming.
pub const READ_BUFFER: usize = 2 << 20;
/// Problems that `verify` describes one by one; it only counts the rest.
pub const MAX_PROBLEMS: usize = 64;

const _: () = {
    assert!(SECTION_ALIGN.is_multiple_of(TENSOR_ALIGN));
    assert!(SECTION_ALIGN.is_multiple_of(SECTORS[SECTORS.len() - 1] as u64));
    // A buffer holds at least one bundle of any legal size.
    assert!(READ_BUFFER >= MAX_STRIDE as usize && WRITE_BUFFER >= MAX_STRIDE as usize);
    // The largest bank section fits the file bound check without overflow.
    assert!((MAX_TOTAL_NEURONS as u128) * (MAX_STRIDE as u128) < u64::MAX as u128);
};
