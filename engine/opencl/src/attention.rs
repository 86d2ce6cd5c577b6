//! Attention of a layer as one piece of work: products of Q, K and V, what lies between (`attention.cl`), and the
//! product of O.
//!
//! Pages of keys and values are the host's. The device only reads them, and only while such work is under way: between
//! pieces of work their memory is mapped to the host, which writes them then. The keys and values of the rows'
//! own positions come back with the result; the host stores them.

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::buffers::{Bytes, Memory, begin, read};
use crate::handles::{Arg, Context, Event, Kernel, Lent, Queue};
use crate::library::Code;
use crate::products::{Place, Products, Tokens};
use crate::work::{ATTENTION, INVALID, Underway, driver};
use crate::{Error, HostBytes, USUAL_GROUP};

/// Flags of attention.cl.
const BIASES: i32 = 1;
const NORMS: i32 = 2;
const VALUE_NORM: i32 = 4;
const ROTATES: i32 = 8;
const SINKS: i32 = 16;

/// A chunk of activations in 8 bits, as in common.cl.
const CHUNK_BYTES: usize = 768;
const CHUNK_GROUPS: usize = 16;

/// Items of the work groups of kernels with few items.
const FEW: usize = 16;

/// Memory of the host in which pages lie; a cell gives no access by itself.
pub type HostMemory = Arc<dyn AsRef<[UnsafeCell<u8>]> + Send + Sync>;

/// What is alike in all layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Build options: the definitions that `attention.cl` asks for.
    pub options: String,
    /// Rows of O.
    pub d: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Pairs of elements that are rotated.
    pub rotary: usize,
    /// Positions whose sums are merged.
    pub block: usize,
    /// Positions of a page.
    pub page: usize,
    /// Bytes of a layer in a page.
    pub layer_bytes: usize,
}

/// The largest pieces of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttentionRoom {
    /// Most rows.
    pub rows: usize,
    /// Most positions of one.
    pub positions: usize,
    /// Bytes of a row's input: of Q, K and V.
    pub input: usize,
    /// Bytes of a row of O's input, where that is in 8 bits; else 0.
    pub quantized: usize,
}

/// A layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionLayer {
    /// Numbers of the matrices Q, K, V, O.
    pub matrices: [usize; 4],
    /// Whether O takes activations in 8 bits.
    pub quantizes: bool,
    /// Biases of Q, K and V; empty without.
    pub biases: Vec<f32>,
    /// Norms of the heads of Q and of K; empty without.
    pub norms: Vec<f32>,
    /// Whether the heads of V have a norm.
    pub value_norm: bool,
    /// Whether queries and keys are rotated.
    pub rotates: bool,
    /// Logits of the heads beside those of the positions; empty without.
    pub sinks: Vec<f32>,
    /// Where it begins in a page.
    pub first: usize,
    /// Positions that are seen, the row's own included; 0 for all.
    pub window: usize,
}

/// A row, which reads a sequence.
#[derive(Clone)]
pub struct AttendRow {
    /// Its pages, as far as its position. Nobody writes them while the work is under way.
    pub pages: Vec<HostBytes>,
    /// Its position.
    pub position: usize,
}

/// A piece of work.
#[derive(Clone, Copy)]
pub struct Attend<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Input of all rows.
    pub x: &'a [u8],
    /// Cosines and sines of each row's position.
    pub angles: &'a [f32],
    /// The rows.
    pub rows: &'a [AttendRow],
}

/// Where its results go.
pub struct Attended<'a> {
    /// O's, `[rows × d]`.
    pub out: &'a mut [f32],
    /// Keys of the rows' positions, `[rows × kv_heads · head_dim]`.
    pub keys: &'a mut [f32],
    /// Their values, the same.
    pub values: &'a mut [f32],
}

/// A layer, and its vectors on the device.
struct Layer {
    of: AttentionLayer,
    biases: Memory<f32>,
    norms: Memory<f32>,
    sinks: Memory<f32>,
}

/// Kernels, in the order in which they run.
struct Kernels {
    heads: Kernel,
    scores: Kernel,
    sums: Kernel,
    mixes: Kernel,
    merged: Kernel,
    quantized: Kernel,
}

/// Buffers of a piece of work, and their copies in host memory, which are not touched while it is under way.
struct Buffers {
    x: Bytes,
    angles: Memory<f32>,
    pages: Memory<u64>,
    places: Memory<i32>,
    qkv: Memory<f32>,
    fresh: Memory<f32>,
    scores: Memory<f32>,
    states: Memory<f32>,
    mixes: Memory<f32>,
    /// What is mixed, as floats and as integers.
    attended: Bytes,
    quantized: Bytes,
    out: Memory<f32>,
    of_x: Vec<u8>,
    of_angles: Vec<f32>,
    of_pages: Vec<u64>,
    of_places: Vec<i32>,
    answer: Vec<f32>,
    stored: Vec<f32>,
}

/// The memory of all pages. The buffer is given back first.
struct Pool {
    bytes: Bytes,
    /// While it is the host's.
    lent: Option<Lent>,
    memory: HostMemory,
}

/// Everything for attention.
pub(super) struct Attention {
    // Buffers first: their host memory outlives them.
    pool: Pool,
    spec: AttentionSpec,
    room: AttentionRoom,
    layers: Vec<Layer>,
    kernels: Kernels,
    buffers: Buffers,
    /// Pages of the work under way.
    held: Vec<HostBytes>,
    rows: usize,
}

impl Buffers {
    fn new(context: &Context, spec: &AttentionSpec, room: &AttentionRoom) -> Result<Self, Code> {
        let (rows, blocks) = (room.rows, room.positions.div_ceil(spec.block));
        let (q, kv) = (
            rows * spec.heads * spec.head_dim,
            2 * rows * spec.kv_heads * spec.head_dim,
        );
        let queries = rows * spec.heads;
        let pages = rows * room.positions.div_ceil(spec.page);
        let angles = rows * 2 * spec.rotary;
        Ok(Self {
            x: Bytes::new(context, rows * room.input, true)?,
            angles: Memory::new(context, angles, true)?,
            pages: Memory::new(context, pages, true)?,
            places: Memory::new(context, 3 * rows, true)?,
            qkv: Memory::new(context, q + kv, true)?,
            fresh: Memory::new(context, kv, false)?,
            scores: Memory::new(context, queries * blocks * spec.block, false)?,
            states: Memory::new(context, 2 * queries * blocks, false)?,
            mixes: Memory::new(context, queries * blocks * spec.head_dim, false)?,
            attended: Bytes::new(context, 4 * q, false)?,
            quantized: Bytes::new(context, rows * room.quantized, false)?,
            out: Memory::new(context, rows * spec.d, true)?,
            of_x: Vec::with_capacity(rows * room.input),
            of_angles: Vec::with_capacity(angles),
            of_pages: Vec::with_capacity(pages),
            of_places: Vec::with_capacity(3 * rows),
            answer: vec![0.0; rows * spec.d],
            stored: vec![0.0; kv],
        })
    }
}

impl Pool {
    fn new(at: &Place<'_>, memory: HostMemory) -> Result<Self, Error> {
        let len = (*memory).as_ref().len();
        if len as u64 > at.longest {
            return Err(Error(format!(
                "has no buffers of {len} bytes, as many as the keys and values have"
            )));
        }
        // SAFETY: `memory` is kept longer than the buffer. Kernels only read it, and of it only pages that the
        // work holds, so that nobody writes them.
        let bytes = unsafe { Bytes::of_cells(at.context, (*memory).as_ref()) };
        let bytes = driver("share keys and values", bytes)?;
        let (lent, event) = driver("map keys and values", at.queue.lend(bytes.mem(), len))?;
        driver("map keys and values", event.wait())?;
        Ok(Self {
            bytes,
            lent: Some(lent),
            memory,
        })
    }

    /// Where a page begins, if it lies here.
    fn place_of(&self, page: &HostBytes, len: usize) -> Option<usize> {
        let (all, page): (&[_], &[u8]) = ((*self.memory).as_ref(), (**page).as_ref());
        let at = page.as_ptr().addr().checked_sub(all.as_ptr().addr())?;
        (page.len() >= len && at.checked_add(page.len())? <= all.len()).then_some(at)
    }
}

impl Attention {
    /// Makes kernels and buffers. `memory` is where all pages lie.
    pub fn new(
        at: &Place<'_>,
        spec: &AttentionSpec,
        room: AttentionRoom,
        memory: HostMemory,
    ) -> Result<Self, Error> {
        let program = (at.device)
            .build(at.context, ATTENTION, &spec.options)
            .map_err(|log| Error(format!("cannot build its kernels: {}", log.trim())))?;
        let kernels = || -> Result<Kernels, Code> {
            Ok(Kernels {
                heads: program.kernel("heads")?,
                scores: program.kernel("scores")?,
                sums: program.kernel("block_sums")?,
                mixes: program.kernel("block_mixes")?,
                merged: program.kernel("merged")?,
                quantized: program.kernel("quantized")?,
            })
        };
        Ok(Self {
            kernels: driver("make kernels", kernels())?,
            pool: Pool::new(at, memory)?,
            buffers: driver("make buffers", Buffers::new(at.context, spec, &room))?,
            spec: spec.clone(),
            room,
            layers: Vec::new(),
            held: Vec::new(),
            rows: 0,
        })
    }

    /// Makes a layer known; its number.
    pub fn share(&mut self, at: &Place<'_>, of: AttentionLayer) -> Result<usize, Error> {
        let AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.spec;
        let fits = |values: &[f32], len| values.is_empty() || values.len() == len;
        if !fits(&of.biases, (heads + 2 * kv_heads) * head_dim)
            || !fits(&of.norms, 2 * head_dim)
            || !fits(&of.sinks, heads)
        {
            return Err(Error("takes no such vectors of attention".into()));
        }
        let vector = |values: &[f32]| -> Result<Memory<f32>, Code> {
            let mut memory = Memory::new(at.context, values.len(), true)?;
            begin(at.queue, &mut memory, values)?;
            Ok(memory)
        };
        let make = || -> Result<[Memory<f32>; 3], Code> {
            Ok([vector(&of.biases)?, vector(&of.norms)?, vector(&of.sinks)?])
        };
        let made = driver("share vectors of attention", make());
        // What was begun reads `of`.
        driver("finish", at.queue.finish())?;
        let [biases, norms, sinks] = made?;
        self.layers.push(Layer {
            of,
            biases,
            norms,
            sinks,
        });
        Ok(self.layers.len() - 1)
    }

    /// Begins to compute.
    pub fn begin(
        &mut self,
        queue: &Queue,
        products: &mut Products,
        work: &Attend<'_>,
    ) -> Result<Underway, Code> {
        let blocks = self.fill(queue, work)?;
        let rows = work.rows.len();
        let lent = self.pool.lent.take().ok_or(INVALID)?;
        queue.take_back(self.pool.bytes.mem(), lent)?;
        let begun = self.project(queue, products, work)?;
        self.between(queue, work, blocks)?;
        let (of, spec) = (&self.layers[work.layer].of, &self.spec);
        let buffers = &mut self.buffers;
        let x = match of.quantizes {
            true => &buffers.quantized,
            false => &buffers.attended,
        };
        let with = Tokens {
            x,
            tokens: rows,
            y: &buffers.out,
            at: 0,
        };
        products.chained(queue, of.matrices[3], spec.d, with)?;
        read(queue, &buffers.out, 0, &mut buffers.answer[..rows * spec.d])?;
        let kv = 2 * rows * spec.kv_heads * spec.head_dim;
        let first = rows * spec.heads * spec.head_dim;
        read(queue, &buffers.qkv, first, &mut buffers.stored[..kv])?;
        let (lent, done) = queue.lend(self.pool.bytes.mem(), self.pool.bytes.len())?;
        self.pool.lent = Some(lent);
        queue.flush()?;
        Ok(Underway {
            sums: rows * spec.d,
            begun,
            done,
        })
    }

    /// Begins to copy the inputs, whose sizes it checks. The number of blocks that the rows see at most.
    fn fill(&mut self, queue: &Queue, work: &Attend<'_>) -> Result<usize, Code> {
        let (spec, room) = (&self.spec, &self.room);
        let layer = &self.layers.get(work.layer).ok_or(INVALID)?.of;
        let rows = work.rows.len();
        let angles = if layer.rotates { 2 * spec.rotary } else { 0 };
        if rows == 0
            || rows > room.rows
            || work.x.len() > rows * room.input
            || work.angles.len() != rows * angles
        {
            return Err(INVALID);
        }
        let buffers = &mut self.buffers;
        buffers.of_pages.clear();
        buffers.of_places.clear();
        self.held.clear();
        let mut blocks = 0;
        for row in work.rows {
            let pages = row.position / spec.page + 1;
            if row.position >= room.positions || row.pages.len() < pages {
                return Err(INVALID);
            }
            let first = match layer.window {
                0 => 0,
                window => (row.position + 1).saturating_sub(window),
            };
            let places = [row.position, first, buffers.of_pages.len()];
            buffers.of_places.extend(places.map(|place| place as i32));
            blocks = blocks.max(row.position / spec.block - first / spec.block + 1);
            for page in &row.pages[..pages] {
                let len = layer.first + spec.layer_bytes;
                let at = self.pool.place_of(page, len).ok_or(INVALID)?;
                buffers.of_pages.push((at + layer.first) as u64);
                self.held.push(Arc::clone(page));
            }
        }
        buffers.of_x.clear();
        buffers.of_x.extend_from_slice(work.x);
        buffers.of_angles.clear();
        buffers.of_angles.extend_from_slice(work.angles);
        begin(queue, &mut buffers.x, &buffers.of_x)?;
        begin(queue, &mut buffers.angles, &buffers.of_angles)?;
        begin(queue, &mut buffers.pages, &buffers.of_pages)?;
        begin(queue, &mut buffers.places, &buffers.of_places)?;
        self.rows = rows;
        Ok(blocks)
    }

    /// Begins the products of Q, K and V; the first of them.
    fn project(
        &mut self,
        queue: &Queue,
        products: &mut Products,
        work: &Attend<'_>,
    ) -> Result<Event, Code> {
        let (spec, buffers, tokens) = (&self.spec, &self.buffers, work.rows.len());
        let heads = [spec.heads, spec.kv_heads, spec.kv_heads];
        let (mut at, mut begun) = (0, None);
        for (matrix, heads) in self.layers[work.layer].of.matrices.into_iter().zip(heads) {
            let rows = heads * spec.head_dim;
            let with = Tokens {
                x: &buffers.x,
                tokens,
                y: &buffers.qkv,
                at,
            };
            let event = products.chained(queue, matrix, rows, with)?;
            begun.get_or_insert(event);
            at += rows * tokens;
        }
        begun.ok_or(INVALID)
    }

    /// Begins what lies between the products.
    fn between(&mut self, queue: &Queue, work: &Attend<'_>, blocks: usize) -> Result<(), Code> {
        let (spec, b, rows) = (&self.spec, &self.buffers, work.rows.len());
        let layer = &self.layers[work.layer];
        let flags = layer.of.flags();
        let [of_rows, of_blocks, stride] =
            [rows, blocks, blocks * spec.block].map(|n| Arg::Int(n as i32));
        let (flags, pool) = (Arg::Int(flags), self.pool.bytes.arg());
        let (qkv, fresh, pages, places) =
            (b.qkv.arg(), b.fresh.arg(), b.pages.arg(), b.places.arg());
        let (scores, states, mixes) = (b.scores.arg(), b.states.arg(), b.mixes.arg());
        let (biases, norms, sinks) = (layer.biases.arg(), layer.norms.arg(), layer.sinks.arg());
        let (angles, attended, small) = (b.angles.arg(), b.attended.arg(), b.quantized.arg());
        let queries = rows * spec.heads;
        let heads = (spec.heads + 2 * spec.kv_heads).next_multiple_of(FEW);
        let elements = spec.head_dim.next_multiple_of(FEW);
        let groups = self.room.quantized / CHUNK_BYTES * CHUNK_GROUPS;
        let k = &mut self.kernels;
        // SAFETY: arguments in number, order and type as in attention.cl. `fill` has refused rows and positions
        // beyond what the buffers were made for and pages that do not lie in the pool.
        unsafe {
            let args = [qkv, biases, norms, angles, fresh, of_rows, flags];
            k.heads.run(queue, &args, [&[heads, rows], &[FEW, 1]])?;
            let args = [qkv, fresh, pool, pages, places, scores, stride];
            let items = [blocks * spec.block, queries];
            k.scores.run(queue, &args, [&items, &[USUAL_GROUP, 1]])?;
            let args = [places, scores, states, stride, of_blocks];
            k.sums.run(queue, &args, [&[blocks, queries], &[1, 1]])?;
            let args = [fresh, pool, pages, places, scores, mixes, stride, of_blocks];
            let items = [elements, blocks, queries];
            k.mixes.run(queue, &args, [&items, &[FEW, 1, 1]])?;
            let args = [places, states, mixes, sinks, attended, of_blocks, flags];
            k.merged
                .run(queue, &args, [&[elements, queries], &[FEW, 1]])?;
            if layer.of.quantizes {
                let items = [groups, rows];
                k.quantized
                    .run(queue, &[attended, small], [&items, &[FEW, 1]])?;
            }
        }
        Ok(())
    }

    /// Copies the results of work that is done.
    pub fn take(&mut self, to: Attended<'_>) -> Result<(), Error> {
        self.held.clear();
        let (buffers, spec) = (&self.buffers, &self.spec);
        let (out, kv) = (
            self.rows * spec.d,
            self.rows * spec.kv_heads * spec.head_dim,
        );
        if [to.out.len(), to.keys.len(), to.values.len()] != [out, kv, kv] {
            return Err(Error("was asked for other rows of attention".into()));
        }
        to.out.copy_from_slice(&buffers.answer[..out]);
        to.keys.copy_from_slice(&buffers.stored[..kv]);
        to.values.copy_from_slice(&buffers.stored[kv..2 * kv]);
        Ok(())
    }

    /// Lets go of the pages of work that failed.
    pub fn give_up(&mut self) {
        self.held.clear();
    }
}

impl AttentionLayer {
    fn flags(&self) -> i32 {
        let all = [
            (!self.biases.is_empty(), BIASES),
            (!self.norms.is_empty(), NORMS),
            (self.value_norm, VALUE_NORM),
            (self.rotates, ROTATES),
            (!self.sinks.is_empty(), SINKS),
        ];
        all.iter().filter(|flag| flag.0).map(|flag| flag.1).sum()
    }
}
