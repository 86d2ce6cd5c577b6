//! Products of matrices that the host holds too.

use crate::buffers::{Bytes, Memory, begin, read, write};
use crate::handles::{Arg, Context, Event, Found, Kernel, Queue};
use crate::library::Code;
use crate::work::{INVALID, SOURCE, TILE, Underway, driver, with_tile};
use crate::{Block, Error, HostBytes, MatrixSpec, USUAL_GROUP};

/// A matrix, and the kernel of its format.
struct Matrix {
    bytes: Bytes,
    kernel: usize,
    /// What `bytes` may be the memory of.
    _host: HostBytes,
}

/// Input and answer, and their copies in host memory, which are not touched while work is under way.
struct Room {
    x: Bytes,
    y: Memory<f32>,
    of_x: Vec<u8>,
    answer: Vec<f32>,
}

/// The kernel for matrices of a format and width.
struct Of {
    spec: MatrixSpec,
    kernel: Kernel,
    /// Items of its work groups.
    group: usize,
}

/// Everything for products.
#[derive(Default)]
pub(super) struct Products {
    // Buffers first: their host memory outlives them.
    matrices: Vec<Option<Matrix>>,
    kernels: Vec<Of>,
    room: Option<Room>,
}

/// Where matrices are put.
pub(super) struct Place<'a> {
    pub device: &'a Found,
    pub context: &'a Context,
    pub queue: &'a Queue,
    /// The device has the machine's memory.
    pub unified: bool,
    /// Its longest buffer.
    pub longest: u64,
}

impl Products {
    /// Gives the matrices back.
    pub fn clear(&mut self) {
        self.matrices.clear();
    }

    /// Makes a matrix known; its number. Where the device has the machine's memory it is not copied.
    pub fn share(
        &mut self,
        at: &Place<'_>,
        spec: &MatrixSpec,
        bytes: HostBytes,
    ) -> Result<usize, Error> {
        let len = (*bytes).as_ref().len();
        if len < spec.rows * spec.row_bytes || len as u64 > at.longest {
            return Err(Error(format!("takes no matrix of {len} bytes")));
        }
        let kernel = self.kernel(at, spec)?;
        let memory = match at.unified {
            true => driver("share a matrix", Bytes::of_host(at.context, &bytes))?,
            false => {
                let made = Bytes::new(at.context, len, false);
                let mut made = driver(&format!("give {len} bytes"), made)?;
                let written = write(at.queue, &mut made, 0, (*bytes).as_ref());
                driver("copy a matrix", written)?;
                made
            }
        };
        let matrix = Some(Matrix {
            bytes: memory,
            kernel,
            _host: bytes,
        });
        let free = self.matrices.iter().position(Option::is_none);
        let number = free.unwrap_or(self.matrices.len());
        match self.matrices.get_mut(number) {
            Some(place) => *place = matrix,
            None => self.matrices.push(matrix),
        }
        Ok(number)
    }

    /// Forgets a matrix. No work is under way.
    pub fn give_back(&mut self, matrix: usize) {
        self.matrices[matrix] = None;
    }

    /// The number of the kernel for matrices of a format.
    pub fn kernel(&mut self, at: &Place<'_>, spec: &MatrixSpec) -> Result<usize, Error> {
        let same = |of: &Of| of.spec.options == spec.options;
        if let Some(known) = self.kernels.iter().position(same) {
            return Ok(known);
        }
        let program = (at.device)
            .build(at.context, SOURCE, &with_tile(&spec.options))
            .map_err(|log| Error(format!("cannot build its kernels: {}", log.trim())))?;
        let kernel = driver("make kernels", program.kernel("row_products"))?;
        self.kernels.push(Of {
            spec: spec.clone(),
            kernel,
            group: USUAL_GROUP,
        });
        Ok(self.kernels.len() - 1)
    }

    /// Sets the items of work groups for a matrix and those like it.
    pub fn set_group(&mut self, matrix: usize, group: usize) {
        let of = self.matrices.get(matrix).and_then(Option::as_ref);
        if let Some(of) = of.and_then(|of| self.kernels.get_mut(of.kernel)) {
            of.group = group;
        }
    }

    /// Makes buffers for inputs of `x` bytes and `y` results. No work is under way.
    pub fn make_room(&mut self, context: &Context, x: usize, y: usize) -> Result<(), Error> {
        self.room = None;
        let make = || -> Result<Room, Code> {
            Ok(Room {
                x: Bytes::new(context, x, true)?,
                y: Memory::new(context, y, true)?,
                of_x: Vec::with_capacity(x),
                answer: vec![0.0; y],
            })
        };
        self.room = Some(driver("make buffers", make())?);
        Ok(())
    }

    /// The first `len` results of work that is done.
    pub fn answer(&self, len: usize) -> Option<&[f32]> {
        self.room.as_ref()?.answer.get(..len)
    }

    /// Begins products of all rows of a matrix with tokens that are on the device.
    pub fn chained(
        &mut self,
        queue: &Queue,
        matrix: usize,
        rows: usize,
        with: Tokens<'_>,
    ) -> Result<Event, Code> {
        let block = Block {
            matrix,
            rows: 0..rows,
        };
        enqueue(queue, &self.matrices, &mut self.kernels, &block, with)
    }

    /// Begins products of blocks with `tokens` tokens, whose input is `x`.
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
        room.of_x.clear();
        room.of_x.extend_from_slice(x);
        begin(queue, &mut room.x, &room.of_x)?;
        let (mut at, mut begun) = (0, None);
        for block in blocks {
            let (x, y) = (&room.x, &room.y);
            let event = enqueue(queue, matrices, kernels, block, Tokens { x, tokens, y, at })?;
            begun.get_or_insert(event);
            at += block.rows.len() * tokens;
        }
        let done = read(queue, &room.y, 0, &mut room.answer[..len])?;
        queue.flush()?;
        Ok(Underway {
            sums: len,
            begun: begun.ok_or(INVALID)?,
            done,
        })
    }
}

/// Where the input of products is, and where they go.
pub(super) struct Tokens<'a> {
    pub x: &'a Bytes,
    pub tokens: usize,
    pub y: &'a Memory<f32>,
    /// The first result's place.
    pub at: usize,
}

/// Begins products of a block.
fn enqueue(
    queue: &Queue,
    matrices: &[Option<Matrix>],
    kernels: &mut [Of],
    block: &Block,
    with: Tokens<'_>,
) -> Result<Event, Code> {
    let matrix = matrices.get(block.matrix).and_then(Option::as_ref);
    let matrix = matrix.ok_or(INVALID)?;
    let Of {
        spec,
        kernel,
        group,
    } = &mut kernels[matrix.kernel];
    let (rows, tokens) = (block.rows.len(), with.tokens);
    matrix.bytes.fits(0, block.rows.end * spec.row_bytes)?;
    with.x.fits(0, spec.token_bytes * tokens)?;
    with.y.fits(with.at, rows * tokens)?;
    let [first, count, place] = [block.rows.start, rows, with.at].map(|n| n as i32);
    let args = [
        matrix.bytes.arg(),
        with.x.arg(),
        with.y.arg(),
        Arg::Int(first),
        Arg::Int(count),
        Arg::Int(place),
        Arg::Int(tokens as i32),
    ];
    let sizes: [&[usize]; 2] = [
        &[rows.next_multiple_of(*group), tokens.div_ceil(TILE)],
        &[*group, 1],
    ];
    // SAFETY: arguments in number, order and type as in kernels.cl. Rows lie within the matrix, tokens within
    // the input and results within their buffer, as was just checked.
    unsafe { kernel.run(queue, &args, sizes) }
}
