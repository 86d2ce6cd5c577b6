//! Matrices and their products. They are resident, or read for every pass.

mod beside;
mod cut;
mod stream;

use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{Columns, Compute, Cpu, DType, Row, matmul_scratch, matmul_scratch_q};
use emberflow_storage::arena::{ArenaPages, Slot};

use crate::input::Input;
use crate::lane::LaneMatrix;
pub(crate) use cut::{FileRange, ROWS_PER_CHUNK, TiledMatrix, rows_of_tile};
use stream::StreamedRows;
pub(crate) use stream::{MatrixStream, StreamFile};

/// A `[rows × cols]` matrix in one block format, row-major.
#[derive(Debug)]
pub struct Matrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    stored: Stored,
    /// Those that multiply some of the rows beside the compute threads.
    lane: Option<LaneMatrix>,
}

/// Where a matrix's rows are.
#[derive(Debug, Clone)]
enum Stored {
    /// In memory.
    Held(Arc<Slot>),
    /// In a file.
    Streamed(StreamedRows),
}

impl Matrix {
    /// A matrix whose rows are in `bytes`.
    pub(crate) fn new(dtype: DType, rows: usize, cols: usize, bytes: Arc<Slot>) -> Self {
        Self {
            dtype,
            rows,
            cols,
            stored: Stored::Held(bytes),
            lane: None,
        }
    }

    /// The matrix of that name, read for every product; `None` if `stream` does not have it.
    pub(crate) fn streamed(stream: &Arc<MatrixStream>, name: &str) -> Option<Self> {
        let rows = stream.rows(name)?;
        let of = rows.of();
        Some(Self {
            dtype: of.dtype,
            rows: of.rows,
            cols: of.cols,
            stored: Stored::Streamed(rows),
            lane: None,
        })
    }

    /// The same rows in the same place, multiplied by the compute threads alone.
    pub(crate) fn shared(&self) -> Self {
        Self {
            stored: self.stored.clone(),
            lane: None,
            ..*self
        }
    }

    /// All rows in memory; none if they are read for every product.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.stored {
            Stored::Held(bytes) => bytes.as_slice(),
            Stored::Streamed(_) => &[],
        }
    }

    /// All rows, for writing; `None` while a lane shares them, or if they are not in memory.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.stored {
            Stored::Held(bytes) => Arc::get_mut(bytes).map(Slot::as_mut_slice),
            Stored::Streamed(_) => None,
        }
    }

    /// The memory of the rows; `None` if they are not in memory.
    pub(crate) fn pages(&self) -> Option<ArenaPages> {
        match &self.stored {
            Stored::Held(bytes) => Some(bytes.pages()),
            Stored::Streamed(_) => None,
        }
    }

    /// Number of weights.
    pub(crate) fn weights(&self) -> f64 {
        (self.rows * self.cols) as f64
    }

    fn stride(&self) -> usize {
        self.dtype.row_bytes(self.cols)
    }

    /// Its format.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether it is read for every product.
    pub(crate) fn is_streamed(&self) -> bool {
        matches!(self.stored, Stored::Streamed(_))
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of all rows.
    pub(crate) fn len(&self) -> u64 {
        (self.rows * self.stride()) as u64
    }

    /// One row of a matrix in memory.
    pub fn row(&self, r: usize) -> Row<'_> {
        let s = self.stride();
        Row::inline(self.dtype, self.cols, &self.bytes()[r * s..(r + 1) * s])
    }

    /// `y[t] = self · x[t]` for every token t of `input`; `y` is `[tokens × rows]`. `scratch` has
    /// [`scratch_len`](Self::scratch_len) elements per thread. A token's result does not depend on
    /// other tokens, the thread count, or a lane.
    pub(crate) fn matmul(
        &self,
        on: &Compute,
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    ) {
        Self::matmul_all(on, &mut [(self, y)], input, scratch);
    }

    /// [`Matrix::matmul`] of at most [`MATRICES`](crate::lane::MATRICES) matrices with the same input.
    pub(crate) fn matmul_all(
        on: &Compute,
        products: &mut [(&Self, &mut [f32])],
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
    ) {
        let tokens = input.tokens();
        if Self::matmul_beside(on, products, input, scratch) {
            return;
        }
        for (matrix, y) in products.iter_mut() {
            let y = &mut y[..tokens * matrix.rows];
            match &matrix.stored {
                Stored::Held(_) => matrix.matmul_rows(on, input, 0..matrix.rows, scratch, y),
                Stored::Streamed(of) => of.each(&mut |rows, bytes| {
                    matrix.product(on, input, rows, bytes, scratch, y);
                }),
            }
        }
    }

    /// Products of a range of rows of a matrix in memory; `y` is `[tokens × rows]` for all rows.
    pub(crate) fn matmul_rows(
        &self,
        on: &Compute,
        input: Input<'_>,
        range: Range<usize>,
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    ) {
        let stride = self.stride();
        let bytes = &self.bytes()[range.start * stride..range.end * stride];
        self.product(on, input, range, bytes, scratch, y);
    }

    /// Products of the rows `range`, which are in `bytes`; `y` is `[tokens × rows]` for all rows.
    fn product(
        &self,
        on: &Compute,
        input: Input<'_>,
        range: Range<usize>,
        bytes: &[u8],
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    ) {
        let (cpu, workers) = (on.cpu, &on.workers);
        let (rows, cols, stride) = (self.rows, self.cols, self.stride());
        let (x, tokens) = (input.x, input.tokens());
        let quantized = reads_8_bits(self.dtype);
        if range.is_empty() {
            return;
        }
        // A tile of a wide matrix has few rows.
        let each = match self.is_streamed() {
            true => (range.len().div_ceil(workers.threads())).next_multiple_of(16),
            false => ROWS_PER_CHUNK,
        };
        let each = each.min(ROWS_PER_CHUNK);
        if tokens == 1 {
            workers.for_each_part_mut(&mut y[range], each, &|_, unit, out| {
                let first = unit * each;
                let part = &bytes[first * stride..(first + out.len()) * stride];
                if quantized {
                    cpu.matvec_q(self.dtype, part, stride, input.quantized, out);
                } else {
                    cpu.matvec(self.dtype, part, stride, cols, x, out);
                }
            });
            return;
        }
        let y = Columns::new(&mut y[range.start..], tokens, rows, range.len());
        workers.for_each_column_block(y, each, scratch, &|scratch, first, mut block| {
            let bytes = &bytes[first * stride..(first + block.width()) * stride];
            multiply(cpu, self.dtype, cols, bytes, input, &mut block, scratch);
        });
    }

    /// Products of blocks of rows, each with its own input: `y[t]` is `self[b] · x[b·tokens + t]`,
    /// block after block, `[tokens × rows]`, of a matrix in memory. `input` has the tokens of block 0, then those of block
    /// 1.
    pub(crate) fn matmul_blocks(
        &self,
        on: &Compute,
        blocks: usize,
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    ) {
        let stride = self.stride();
        let (tokens, rows) = (input.tokens() / blocks, self.rows / blocks);
        let y = Columns::new(y, tokens, self.rows, self.rows);
        let bytes = self.bytes();
        (on.workers).for_each_column_block(y, rows, scratch, &|scratch, first, mut y| {
            let bytes = &bytes[first * stride..(first + rows) * stride];
            let input = input.range(first / rows * tokens, tokens);
            multiply(on.cpu, self.dtype, self.cols, bytes, input, &mut y, scratch);
        });
    }

    /// Elements of a row.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Scratch elements per thread for rows of `cols` elements.
    pub(crate) fn scratch_len(cols: usize) -> usize {
        matmul_scratch(cols).max(matmul_scratch_q(cols))
    }
}

/// Whether products use activations quantised to 8 bits.
fn reads_8_bits(dtype: DType) -> bool {
    dtype.is_grouped() || dtype.is_blocks()
}

/// Products of the rows in `bytes` with all tokens of `input`: `y` is `[tokens × rows]`.
pub(crate) fn multiply(
    cpu: Cpu,
    dtype: DType,
    cols: usize,
    bytes: &[u8],
    input: Input<'_>,
    y: &mut Columns<'_, f32>,
    scratch: &mut [f32],
) {
    let stride = dtype.row_bytes(cols);
    match (reads_8_bits(dtype), input.tokens()) {
        (true, 1) => cpu.matvec_q(dtype, bytes, stride, input.quantized, y.row_mut(0)),
        (false, 1) => cpu.matvec(dtype, bytes, stride, cols, input.x, y.row_mut(0)),
        (true, _) => cpu.matmul_q(dtype, bytes, stride, input.quantized, y, scratch),
        (false, _) => cpu.matmul_columns(dtype, bytes, stride, cols, input.x, y, scratch),
    }
}
