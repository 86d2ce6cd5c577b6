//! The numeric kernels of Emberflow: block formats, dot products, element-wise
//! functions, quantisation, and the worker pool that runs them.
//!
//! # One answer on every machine
//!
//! Every kernel returns the same bits on every instruction set, so a logits hash
//! taken on a scalar build equals one taken with AVX2, AVX-512 or NEON. Three rules
//! make that hold:
//!
//! 1. A reduction runs over [`LANES`] virtual lanes. Element `i` belongs to lane
//!    `i % 64` and is added with one fused multiply-add. A short last chunk behaves as
//!    if it were padded with zeros. At the end lane `j` absorbs lane `j + 32`, then
//!    `j + 16`, `+ 8`, `+ 4`, `+ 2`, `+ 1`. AVX-512 holds the lanes in 4 registers,
//!    AVX2 in 8, NEON in 16, the scalar code in an array.
//! 2. A dequantised weight is exact in f32: an integer of at most 8 bits times an 11-bit f16 scale,
//!    or a small integer times a power of two (mxfp4). So the point of conversion cannot change a
//!    bit. In q4k it is a product less a minimum, both exact, and rounded once; in
//!    q8c and q4c a product, rounded once.
//! 3. Transcendental functions are polynomials with a fixed operation order ([`math`]) or come from
//!    the `libm` crate, never from the platform.
//!
//! Sums over many columns at once need no lanes: [`Cpu::axpy_rows`] and [`Cpu::mix_values`] add one
//! product per row to each element, [`Cpu::key_scores`] one per element of a head to each position,
//! by fused multiply-adds in order. Splitting such a sum into several calls changes no bit.
//!
//! A q4, q4k, q8 or mxfp4 row times *quantised* activations ([`Activations`]) follows another rule, the chain
//! rule: the 32 products of group `g` are integers, so their sum is exact in any order. As f32 it
//! is added to chain `g % 16` by one fused multiply-add, with the factor `weight scale × activation
//! scale` rounded once. In q4k the next step is another: from the chain goes the minimum times the
//! sum of the group's activations, which is stored with them. At the end chain `j` absorbs chain `j + 8`, then `j + 4`, `+ 2`, `+ 1`.
//! Decode and matrix products both follow it. It is several times faster than f32 activations,
//! which it replaces for these formats; the tests bound its loss of accuracy.
//!
//! The blocks of GGUF files follow the chain rule too: see `blocks/`.
//!
//! Rows with one scale (q8c, q4c) times activations with one scale per token follow the channel rule: one exact
//! integer for the row, and one for its outliers (`channel.rs`). The scale of such a token ignores its four largest
//! elements, which are clipped; the products of what clipping removes, with rows of any of these formats, are added in f32
//! (`excess.rs`).
//!
//! NaN is the one exception: the result is NaN everywhere, but its sign and payload depend on the
//! hardware.
//!
//! # Example
//!
//! ```
//! use emberflow_kernels::{Cpu, DType, Workers, quantize_row};
//!
//! // Four rows of 64 elements, stored as q4, scales behind each row.
//! let (dtype, n, rows) = (DType::Q4, 64, 4);
//! let stride = dtype.row_bytes(n);
//! let mut bytes = vec![0; rows * stride];
//! for row in bytes.chunks_exact_mut(stride) {
//!     let (quants, scales) = row.split_at_mut(dtype.quants_bytes(n));
//!     quantize_row(dtype, &[-0.5; 64], quants, scales)?;
//! }
//!
//! // Times a vector, one row per piece of work.
//! let (cpu, workers) = (Cpu::detect(), Workers::new(2, None));
//! let (x, mut y) = ([1.0; 64], [0.0; 4]);
//! workers.for_each_chunk_mut(&mut y, 1, &|_thread, r, y| {
//!     cpu.matvec(dtype, &bytes[r * stride..], stride, n, &x, y);
//! });
//! assert_eq!(y, [-32.0; 4]);
//! # Ok::<(), emberflow_kernels::QuantizeError>(())
//! ```
//!
//! # Where to look
//!
//! | file | what |
//! |---|---|
//! | `dtype.rs`, `row.rs`, `matrix.rs` | block formats, checked views of a row and of rows |
//! | `activations.rs` | activations as 8-bit integers, for q4, q4k, q8 and mxfp4 rows |
//! | `cpu.rs` | the [`Cpu`] token: which instruction set runs |
//! | `ops.rs`, `ops_int.rs` | every kernel as a method of [`Cpu`], with its length checks |
//! | `simd/` | one generic kernel per operation, and the registers of each ISA |
//! | `simd/int/` | integer products of q4, q4k, q8 and mxfp4 rows with quantised activations |
//! | `tests/reference/` | the kernels one element at a time: the oracle of the tests |
//! | `elementwise.rs`, `math.rs` | norms, softmax, activations, rope, exp |
//! | `delta.rs`, `scan.rs` | the gated delta rule, the scan of a state-space model |
//! | `select.rs` | the largest of many values |
//! | `signs.rs` | signs as bits, and counts of differing signs |
//! | `q4k.rs` | super-blocks of q4k, and the search for the best ones |
//! | `blocks/` | the blocks of GGUF files, one file for each format |
//! | `channel.rs` | rows with one scale (q8c, q4c), their outliers, the channel rule |
//! | `excess.rs` | outlier activations of tokens with one scale |
//! | `narrow.rs` | rows in two or three bits, widened to q4 |
//! | `copy.rs` | copies past the caches |
//! | `bandwidth.rs` | plain memory reads, the bound of most kernels |
//! | `quantize.rs` | f32 to blocks, with the bound on the error |
//! | `workers.rs`, `columns.rs` | the thread pool, and matrices it writes in blocks |
//! | `gate.rs`, `sync.rs` | synchronisation of the pool, model-checked over all interleavings |

#[cfg(not(target_endian = "little"))]
compile_error!(
    "rows are little-endian and are read in place: big-endian targets are not supported"
);

mod activations;
mod bandwidth;
mod blocks;
mod bounds;
mod channel;
mod columns;
mod compute;
mod copy;
mod cpu;
mod cut;
mod delta;
mod dtype;
mod elementwise;
mod error;
mod excess;
mod gate;
mod groups;
pub mod math;
mod matrix;
mod narrow;
mod ops;
mod ops_int;
mod q4k;
mod quantize;
mod row;
mod scan;
mod select;
mod signs;
mod simd;
mod sync;
mod workers;

pub use activations::{Activations, ActivationsRef, Chunk};
pub use bandwidth::{prefetch, read_bandwidth};
pub use blocks::{Block, Group, block_group, decode_blocks};
pub use channel::{ChannelRow, Outliers, outlier_channels, quantize_q4c};
pub use columns::Columns;
pub use compute::Compute;
pub use copy::PastCaches;
pub use cpu::{Cpu, Isa, with_scale_per_token};
pub use delta::{Decay, DeltaToken};
pub use dtype::{DType, GROUP, LONGEST, SUPER_GROUPS, mxfp4_scale, outliers};
pub use error::QuantizeError;
pub use math::argmax;
pub use narrow::{NARROW_GROUP, Narrow};
pub use ops::{delta_rule, matmul_scratch, scale_by_sigmoid, selective_scan, soft_cap};
pub use ops_int::{dot_of_sums, matmul_scratch_q};
pub use q4k::{SIX_BITS, SuperBlock, best_super_block, nibble, store_q4k_row, super_blocks};
pub use quantize::{error_bound, mxfp4_group, quantize_row, store_q4_row};
pub use row::Row;
pub use scan::ScanToken;
pub use signs::sign_bytes;
pub use workers::{BlockList, Lane, Lanes, Workers};

/// Number of virtual lanes a reduction runs over, on every instruction set.
pub const LANES: usize = 64;
