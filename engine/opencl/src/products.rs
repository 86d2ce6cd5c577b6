//! Products of matrices with tokens, by blocks of rows.

use crate::buffers::{Bytes, Memory, Staged, begin, read, write};
use crate::forms::{Extensions, Format, Kernels, Made, Maker, Order, Variant, made_as};
use crate::handles::{Arg, Context, Event, Found, Queue};
use crate::library::Code;
use crate::tiles::{TILE_ROWS, Tiles};
use crate::work::{INVALID, Kind, MATRIX, Underway, driver};
use crate::{Block, Error, HostBytes, MatrixSpec};

/// Rows that are tiled per copy.
const ROWS_PER_COPY: usize = 32 * TILE_ROWS;

/// A registered matrix.
struct Matrix {
    bytes: Bytes,
    rows: usize,
    /// Index in [`Products::kernels`].
    kernel: usize,
    /// Keeps host memory alive that `bytes` may share.
    _host: HostBytes,
}

/// Input and results of products, and their staging memory, which is not touched while work runs.
struct Room {
    x: Bytes,
    y: Memory<f32>,
    staged_x: Staged<u8>,
    answer: Staged<f32>,
}

/// Compiled kernels for matrices of one format and width.
struct FormatKernels {
    spec: MatrixSpec,
    made: Vec<Made>,
    kernels: Kernels,
}

impl FormatKernels {
    /// Selects `kernels`, and compiles those that are missing.
    fn make(&mut self, maker: &Maker<'_>, kernels: Kernels) -> Result<(), Error> {
        let (options, grouped) = (&self.spec.options[..], self.spec.scales > 0);
        for variant in kernels.variants() {
            if !self.made.iter().any(|made| made.is(variant)) {
                let (source, format) = ([MATRIX, "row_products"], Format { options, grouped });
                self.made.push(maker.kernel(source, format, variant)?);
            }
        }
        self.kernels = kernels;
        Ok(())
    }
}

/// Matrices, kernels and buffers of products.
#[derive(Default)]
pub(super) struct Products {
    // Dropped first: buffers must not outlive the host memory that they share.
    matrices: Vec<Option<Matrix>>,
    kernels: Vec<FormatKernels>,
    room: Option<Room>,
}

/// What products use of their device.
pub(super) struct Place<'a> {
    pub device: &'a Found,
    pub context: &'a Context,
    pub extensions: &'a Extensions,
    pub queue: &'a Queue,
    /// The device shares the machine's memory.
    pub unified: bool,
    /// Layout of rows in the device's own memory.
    pub order: Order,
    /// Size of the largest buffer.
    pub longest: u64,
}

impl<'a> Place<'a> {
    /// Compiler of kernels.
    fn maker(&self) -> Maker<'a> {
        Maker {
            device: self.device,
            context: self.context,
            extensions: self.extensions,
        }
    }
}

impl Products {
    /// Frees all matrices.
    pub fn clear(&mut self) {
        self.matrices.clear();
    }

    /// Registers a matrix and returns its number. It is copied only to devices with separate memory.
    pub fn share(
        &mut self,
        place: &Place<'_>,
        spec: &MatrixSpec,
        bytes: HostBytes,
    ) -> Result<usize, Error> {
        let tiles = spec.tiles();
        let len = match place.order {
            Order::Rows => spec.rows * spec.row_bytes(),
            Order::Tiles => tiles.bytes(spec.rows),
        };
        if (*bytes).as_ref().len() < spec.rows * spec.row_bytes() || len as u64 > place.longest {
            return Err(Error(format!("takes no matrix of {len} bytes")));
        }
        let kernel = match self.known(place, spec) {
            Some(kernel) => kernel,
            None => self.set_kernels(place, spec, Kernels::default())?,
        };
        let memory = match place.unified {
            true => driver("share a matrix", Bytes::of_host(place.context, &bytes))?,
            false => {
                let buffer = Bytes::new(place.context, len);
                let mut buffer = driver(&format!("give {len} bytes"), buffer)?;
                let host = (*bytes).as_ref();
                let written = match place.order {
                    Order::Rows => write(place.queue, &mut buffer, 0, &host[..len]),
                    Order::Tiles => tiled(place.queue, &mut buffer, tiles, spec.rows, host),
                };
                driver("copy a matrix", written)?;
                buffer
            }
        };
        let matrix = Some(Matrix {
            bytes: memory,
            rows: spec.rows,
            kernel,
            _host: bytes,
        });
        let free = self.matrices.iter().position(Option::is_none);
        let number = free.unwrap_or(self.matrices.len());
        match self.matrices.get_mut(number) {
            Some(slot) => *slot = matrix,
            None => self.matrices.push(matrix),
        }
        Ok(number)
    }

    /// Frees a matrix. No work is running.
    pub fn give_back(&mut self, matrix: usize) {
        self.matrices[matrix] = None;
    }

    /// Index of the kernels for a format and width.
    fn known(&self, place: &Place<'_>, spec: &MatrixSpec) -> Option<usize> {
        let same = |known: &FormatKernels| {
            known.spec.options == spec.options && known.kernels.order == place.order
        };
        self.kernels.iter().position(same)
    }

    /// Selects the kernels for a format and width and returns their index.
    pub fn set_kernels(
        &mut self,
        place: &Place<'_>,
        spec: &MatrixSpec,
        kernels: Kernels,
    ) -> Result<usize, Error> {
        let kernels = Kernels {
            order: place.order,
            ..kernels
        };
        let number = self.known(place, spec).unwrap_or(self.kernels.len());
        if number == self.kernels.len() {
            self.kernels.push(FormatKernels {
                spec: spec.clone(),
                made: Vec::new(),
                kernels,
            });
        }
        let made = self.kernels[number].make(&place.maker(), kernels);
        made.map(|()| number)
    }

    /// Allocates buffers for `x` input bytes and `y` results. No work is running.
    pub fn make_room(
        &mut self,
        [x, y]: [usize; 2],
        context: &Context,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.room = None;
        let make = || -> Result<Room, Code> {
            Ok(Room {
                x: Bytes::new(context, x)?,
                y: Memory::new(context, y)?,
                staged_x: Staged::new(context, queue, x)?,
                answer: Staged::new(context, queue, y)?,
            })
        };
        self.room = Some(driver("make buffers", make())?);
        Ok(())
    }

    /// The first `len` results of finished work.
    pub fn answer(&self, len: usize) -> Option<&[f32]> {
        self.room.as_ref()?.answer.get(..len)
    }

    /// Starts the products of `blocks` with `tokens` tokens, whose input is `x`.
    pub fn begin(
        &mut self,
        queue: &Queue,
        blocks: &[Block],
        tokens: usize,
        x: &[u8],
    ) -> Result<Underway, Code> {
        let Self {
            matrices,
            kernels,
            room,
        } = self;
        let room = room.as_mut().ok_or(INVALID)?;
        let len: usize = blocks.iter().map(|block| block.rows.len() * tokens).sum();
        room.y.fits(0, len)?;
        for block in blocks {
            let matrix = matrices.get(block.matrix).and_then(Option::as_ref);
            let spec = &kernels[matrix.ok_or(INVALID)?.kernel].spec;
            if x.len() != spec.token_bytes * tokens {
                return Err(INVALID);
            }
        }
        let staged = room.staged_x.get_mut(..x.len()).ok_or(INVALID)?;
        staged.copy_from_slice(x);
        begin(queue, &mut room.x, staged)?;
        let (mut start, mut begun) = (0, None);
        for block in blocks {
            let (x, y) = (&room.x, &room.y);
            let input = Tokens {
                x,
                tokens,
                y,
                start,
            };
            let event = enqueue(queue, matrices, kernels, block, input)?;
            begun.get_or_insert(event);
            start += block.rows.len() * tokens;
        }
        let done = read(queue, &room.y, 0, &mut room.answer[..len])?;
        queue.flush()?;
        Ok(Underway {
            kind: Kind::Products,
            results: len,
            begun: begun.ok_or(INVALID)?,
            done,
        })
    }
}

/// Input and output of the products of a block.
pub(super) struct Tokens<'a> {
    pub x: &'a Bytes,
    pub tokens: usize,
    pub y: &'a Memory<f32>,
    /// Index of the first result in `y`.
    pub start: usize,
}

/// Starts the products of a block.
fn enqueue(
    queue: &Queue,
    matrices: &[Option<Matrix>],
    kernels: &mut [FormatKernels],
    block: &Block,
    input: Tokens<'_>,
) -> Result<Event, Code> {
    let matrix = matrices.get(block.matrix).and_then(Option::as_ref);
    let matrix = matrix.ok_or(INVALID)?;
    let FormatKernels {
        spec,
        made,
        kernels,
    } = &mut kernels[matrix.kernel];
    let (rows, tokens) = (block.rows.len(), input.tokens);
    let (order, form) = (kernels.order, kernels.form(tokens));
    let kernel = made_as(made, Variant { order, form })?;
    if block.rows.end > matrix.rows {
        return Err(INVALID);
    }
    input.x.fits(0, spec.token_bytes * tokens)?;
    input.y.fits(input.start, rows * tokens)?;
    let [first, count, start] = [block.rows.start, rows, input.start].map(|n| n as i32);
    let args = [
        matrix.bytes.arg(),
        input.x.arg(),
        input.y.arg(),
        Arg::Int(first),
        Arg::Int(count),
        Arg::Int(start),
        Arg::Int(tokens as i32),
    ];
    let sizes = [rows, tokens];
    // SAFETY: the arguments match matrix.cl in number, order and type. The checks above keep rows within the
    // matrix, tokens within the input, and results within their buffer.
    unsafe { kernel.run(queue, &args, sizes) }
}

/// Copies a matrix in tiles, [`ROWS_PER_COPY`] rows at a time.
fn tiled(
    queue: &Queue,
    target: &mut Bytes,
    tiles: Tiles,
    rows: usize,
    host: &[u8],
) -> Result<(), Code> {
    let row = tiles.quants + tiles.scales;
    let mut buffer = vec![0; tiles.bytes(ROWS_PER_COPY.min(rows))];
    let host = &host[..rows * row];
    for (i, chunk) in host.chunks(ROWS_PER_COPY * row).enumerate() {
        let mut filled = 0;
        let tile_buffers = buffer.chunks_exact_mut(tiles.len());
        for (rows, tile) in chunk.chunks(TILE_ROWS * row).zip(tile_buffers) {
            let mut split_rows: [[&[u8]; 2]; TILE_ROWS] = [[&[]; 2]; TILE_ROWS];
            let mut len = 0;
            for (split_row, bytes) in split_rows.iter_mut().zip(rows.chunks_exact(row)) {
                let (quants, scales) = bytes.split_at(tiles.quants);
                *split_row = [quants, scales];
                len += 1;
            }
            tiles.fill(&split_rows[..len], tile);
            filled += tiles.len();
        }
        let offset = i * tiles.bytes(ROWS_PER_COPY);
        write(queue, target, offset, &buffer[..filled])?;
    }
    Ok(())
}
