//! Products of matrices that the host holds too.

use crate::buffers::{Bytes, Memory, Staged, begin, read, write};
use crate::forms::{Extensions, Format, Kernels, Made, Maker, Order, Variant, made_as};
use crate::handles::{Arg, Context, Event, Found, Queue};
use crate::library::Code;
use crate::tiles::{TILE_ROWS, Tiles};
use crate::work::{INVALID, Kind, MATRIX, Underway, driver};
use crate::{Block, Error, HostBytes, MatrixSpec};

/// Rows that are put in tiles at once.
const AT_ONCE: usize = 32 * TILE_ROWS;

/// A matrix, and the kernels of its format.
struct Matrix {
    bytes: Bytes,
    rows: usize,
    kernel: usize,
    /// What `bytes` may be the memory of.
    _host: HostBytes,
}

/// Input and answer, and their copies in host memory, which are not touched while work is under way.
struct Room {
    x: Bytes,
    y: Memory<f32>,
    of_x: Staged<u8>,
    answer: Staged<f32>,
}

/// The kernels for matrices of a format and width.
struct Of {
    spec: MatrixSpec,
    made: Vec<Made>,
    kernels: Kernels,
}

impl Of {
    /// Makes what is missing of some kernels.
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
    pub extensions: &'a Extensions,
    pub queue: &'a Queue,
    /// The device has the machine's memory.
    pub unified: bool,
    /// How rows lie that are not the host's.
    pub order: Order,
    /// Its longest buffer.
    pub longest: u64,
}

impl<'a> Place<'a> {
    /// What makes its kernels.
    fn maker(&self) -> Maker<'a> {
        Maker {
            device: self.device,
            context: self.context,
            extensions: self.extensions,
        }
    }
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
        let tiles = spec.tiles();
        let len = match at.order {
            Order::Rows => spec.rows * spec.row_bytes(),
            Order::Tiles => tiles.bytes(spec.rows),
        };
        if (*bytes).as_ref().len() < spec.rows * spec.row_bytes() || len as u64 > at.longest {
            return Err(Error(format!("takes no matrix of {len} bytes")));
        }
        let kernel = match self.known(at, spec) {
            Some(kernel) => kernel,
            None => self.set_kernels(at, spec, Kernels::default())?,
        };
        let memory = match at.unified {
            true => driver("share a matrix", Bytes::of_host(at.context, &bytes))?,
            false => {
                let made = Bytes::new(at.context, len);
                let mut made = driver(&format!("give {len} bytes"), made)?;
                let host = (*bytes).as_ref();
                let written = match at.order {
                    Order::Rows => write(at.queue, &mut made, 0, &host[..len]),
                    Order::Tiles => tiled(at.queue, &mut made, tiles, spec.rows, host),
                };
                driver("copy a matrix", written)?;
                made
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
            Some(place) => *place = matrix,
            None => self.matrices.push(matrix),
        }
        Ok(number)
    }

    /// Forgets a matrix. No work is under way.
    pub fn give_back(&mut self, matrix: usize) {
        self.matrices[matrix] = None;
    }

    /// The number of the kernels for matrices of a format.
    fn known(&self, at: &Place<'_>, spec: &MatrixSpec) -> Option<usize> {
        let same = |of: &Of| of.spec.options == spec.options && of.kernels.order == at.order;
        self.kernels.iter().position(same)
    }

    /// Has matrices of a format and width multiplied by these kernels; their number.
    pub fn set_kernels(
        &mut self,
        at: &Place<'_>,
        spec: &MatrixSpec,
        kernels: Kernels,
    ) -> Result<usize, Error> {
        let kernels = Kernels {
            order: at.order,
            ..kernels
        };
        let number = self.known(at, spec).unwrap_or(self.kernels.len());
        if number == self.kernels.len() {
            self.kernels.push(Of {
                spec: spec.clone(),
                made: Vec::new(),
                kernels,
            });
        }
        let made = self.kernels[number].make(&at.maker(), kernels);
        made.map(|()| number)
    }

    /// Makes buffers for inputs of `x` bytes and `y` results. No work is under way.
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
                of_x: Staged::new(context, queue, x)?,
                answer: Staged::new(context, queue, y)?,
            })
        };
        self.room = Some(driver("make buffers", make())?);
        Ok(())
    }

    /// The first `len` results of work that is done.
    pub fn answer(&self, len: usize) -> Option<&[f32]> {
        self.room.as_ref()?.answer.get(..len)
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
        let staged = room.of_x.get_mut(..x.len()).ok_or(INVALID)?;
        staged.copy_from_slice(x);
        begin(queue, &mut room.x, staged)?;
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
            of: Kind::Products,
            results: len,
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
        made,
        kernels,
    } = &mut kernels[matrix.kernel];
    let (rows, tokens) = (block.rows.len(), with.tokens);
    let (order, form) = (kernels.order, kernels.form(tokens));
    let kernel = made_as(made, Variant { order, form })?;
    if block.rows.end > matrix.rows {
        return Err(INVALID);
    }
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
    let sizes = [rows, tokens];
    // SAFETY: arguments in number, order and type as in matrix.cl. Rows lie within the matrix, tokens within
    // the input and results within their buffer, as was just checked.
    unsafe { kernel.run(queue, &args, sizes) }
}

/// Copies the rows of a matrix in tiles, some at once.
fn tiled(
    queue: &Queue,
    to: &mut Bytes,
    tiles: Tiles,
    rows: usize,
    host: &[u8],
) -> Result<(), Code> {
    let row = tiles.quants + tiles.scales;
    let mut buffer = vec![0; tiles.bytes(AT_ONCE.min(rows))];
    let host = &host[..rows * row];
    for (i, some) in host.chunks(AT_ONCE * row).enumerate() {
        let mut filled = 0;
        let places = buffer.chunks_exact_mut(tiles.len());
        for (rows, to) in some.chunks(TILE_ROWS * row).zip(places) {
            let mut all: [[&[u8]; 2]; TILE_ROWS] = [[&[]; 2]; TILE_ROWS];
            let mut len = 0;
            for (place, bytes) in all.iter_mut().zip(rows.chunks_exact(row)) {
                let (quants, scales) = bytes.split_at(tiles.quants);
                *place = [quants, scales];
                len += 1;
            }
            tiles.fill(&all[..len], to);
            filled += tiles.len();
        }
        write(queue, to, i * tiles.bytes(AT_ONCE), &buffer[..filled])?;
    }
    Ok(())
}
