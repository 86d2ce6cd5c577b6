//! Attention of a layer as one piece of work: the norm before it, products of Q, K and V, what lies between
//! (`attention.cl`), and the product of O.
//!
//! ```text
//! x ─▶ norm ─▶ Q K V ─▶ norms, rotation ─▶ scores ─▶ sums ─▶ mixes ─▶ merged ─▶ O
//!              all rows                    └ some rows at a time ─────────┘
//! ```
//!
//! Pages of keys and values are the host's (`pages.rs`), which writes them between pieces of work. Those of the rows' own
//! positions come back with the result: the host stores them, and a device with a copy of the pages stores them there.

pub(super) mod chain;

use std::sync::Arc;

use crate::attend::{
    Attend, AttendSpan, Attended, AttentionLayer, AttentionRoom, AttentionSpec, HostMemory, RowNorm,
};
use crate::buffers::{Bytes, Copies, Memory, Staged, begin, begin_floats, read};
use crate::handles::{Arg, Context, Event, Kernel, Queue};
use crate::library::Code;
use crate::pages::KvPages;
use crate::products::{Place, Products, Tokens};
use crate::work::{ATTENTION, INVALID, Underway, driver};
use crate::{Error, HostBytes, USUAL_GROUP};

/// Flags of attention.cl.
const BIASES: i32 = 1;
const NORMS: i32 = 2;
const VALUE_NORM: i32 = 4;
const ROTATES: i32 = 8;
const SINKS: i32 = 16;
const WHOLE: i32 = 32;

/// Numbers of a row's place there.
const PLACE: usize = 5;

/// A chunk of activations in 8 bits, as in common.cl: elements, groups, bytes.
const CHUNK: usize = 512;
const CHUNK_GROUPS: usize = 16;
const CHUNK_BYTES: usize = 768;

/// Items of the work groups of kernels with few items.
const FEW: usize = 16;

/// A layer, and its vectors on the device.
struct Layer {
    of: AttentionLayer,
    /// Weights and biases of the norm before the projections.
    norm: [Memory<f32>; 2],
    /// The same of the norm before the FFN.
    after: [Memory<f32>; 2],
    biases: Memory<f32>,
    norms: Memory<f32>,
    sinks: Memory<f32>,
}

/// Kernels, in the order in which they run.
struct Kernels {
    row_norms: Kernel,
    next_rows: Kernel,
    whole_norms: Kernel,
    heads: Kernel,
    scores: Kernel,
    sums: Kernel,
    mixes: Kernel,
    merged: Kernel,
    quantized: Kernel,
    stored: Kernel,
}

/// Buffers of a piece of work, and their copies in host memory, which are not touched while it is under way.
struct Buffers {
    room: AttentionRoom,
    /// Rows, and after the norm what the projections read.
    x: Bytes,
    angles: Memory<f32>,
    pages: Memory<u64>,
    places: Memory<i32>,
    /// All rows of Q, of K, of V, and behind them O's results.
    qkv: Memory<f32>,
    fresh: Memory<f32>,
    scores: Memory<f32>,
    states: Memory<f32>,
    mixes: Memory<f32>,
    attended: Bytes,
    /// `x` in 8 bits, later what is attended.
    quantized: Bytes,
    of_x: Staged<f32>,
    of_angles: Copies<f32>,
    of_pages: Copies<u64>,
    of_places: Copies<i32>,
    /// Keys, values and O's results.
    answer: Staged<f32>,
}

/// Everything for attention.
pub(super) struct Attention {
    // Buffers first: their host memory outlives them.
    pages: KvPages,
    spec: AttentionSpec,
    layers: Vec<Layer>,
    kernels: Kernels,
    buffers: Option<Buffers>,
    chain: Option<chain::Room>,
    /// Pages of the work under way.
    held: Vec<HostBytes>,
    rows: usize,
}

impl Buffers {
    fn new(
        context: &Context,
        queue: &Queue,
        spec: &AttentionSpec,
        room: &AttentionRoom,
    ) -> Result<Self, Code> {
        let (rows, blocks) = (room.rows, room.positions.div_ceil(spec.block));
        let (q, kv) = (
            rows * spec.heads * spec.head_dim,
            2 * rows * spec.kv_heads * spec.head_dim,
        );
        let queries = room.scored * spec.heads;
        let pages = room.spans * room.positions.div_ceil(spec.page);
        let angles = rows * 2 * spec.rotary;
        Ok(Self {
            room: *room,
            x: Bytes::new(context, 4 * rows * spec.d)?,
            angles: Memory::new(context, angles)?,
            pages: Memory::new(context, pages)?,
            places: Memory::new(context, PLACE * rows)?,
            qkv: Memory::new(context, q + kv + rows * spec.d)?,
            fresh: Memory::new(context, kv)?,
            scores: Memory::new(context, queries * blocks * spec.block)?,
            states: Memory::new(context, 2 * queries * blocks)?,
            mixes: Memory::new(context, queries * blocks * spec.head_dim)?,
            attended: Bytes::new(context, 4 * q)?,
            quantized: Bytes::new(context, rows * room.quantized)?,
            of_x: Staged::new(context, queue, rows * spec.d)?,
            of_angles: Copies::new(angles),
            of_pages: Copies::new(pages),
            of_places: Copies::new(PLACE * rows),
            answer: Staged::new(context, queue, kv + rows * spec.d)?,
        })
    }

    /// Takes the places of a span's rows, and where its pages begin.
    fn place(
        &mut self,
        queue: &Queue,
        pool: &mut KvPages,
        spec: &AttentionSpec,
        of: &AttentionLayer,
        span: &AttendSpan,
    ) -> Result<(), Code> {
        let end = span.first.checked_add(span.rows).ok_or(INVALID)?;
        let pages = end.div_ceil(spec.page);
        if end > self.room.positions || span.pages.len() < pages {
            return Err(INVALID);
        }
        let (of_pages, row) = (self.of_pages.next.len(), self.of_places.next.len() / PLACE);
        for position in span.first..end {
            let seen = of.first_seen(position);
            let place = [position, seen, of_pages, span.first, row];
            self.of_places.next.extend(place.map(|place| place as i32));
        }
        for page in &span.pages[..pages] {
            self.of_pages.next.push(pool.place(queue, spec, of, page)?);
        }
        Ok(())
    }
}

impl Attention {
    /// Makes kernels. `memory` is where all pages lie.
    pub fn new(at: &Place<'_>, spec: &AttentionSpec, memory: HostMemory) -> Result<Self, Error> {
        let program = (at.device)
            .build(at.context, ATTENTION, &spec.options)
            .map_err(|log| Error(format!("cannot build its kernels: {}", log.trim())))?;
        let kernels = || -> Result<Kernels, Code> {
            Ok(Kernels {
                row_norms: program.kernel("row_norms")?,
                next_rows: program.kernel("next_rows")?,
                whole_norms: program.kernel("whole_norms")?,
                heads: program.kernel("heads")?,
                scores: program.kernel("scores")?,
                sums: program.kernel("block_sums")?,
                mixes: program.kernel("block_mixes")?,
                merged: program.kernel("merged")?,
                quantized: program.kernel("quantized")?,
                stored: program.kernel("stored")?,
            })
        };
        Ok(Self {
            kernels: driver("make kernels", kernels())?,
            pages: KvPages::new(at, memory)?,
            buffers: None,
            chain: None,
            spec: spec.clone(),
            layers: Vec::new(),
            held: Vec::new(),
            rows: 0,
        })
    }

    /// Makes buffers for pieces of work up to `room`; those before are given back first.
    pub fn make_room(
        &mut self,
        context: &Context,
        queue: &Queue,
        room: &AttentionRoom,
    ) -> Result<(), Error> {
        self.buffers = None;
        let made = Buffers::new(context, queue, &self.spec, room);
        self.buffers = Some(driver("make buffers", made)?);
        Ok(())
    }

    /// Makes a layer known; its number.
    pub fn share(&mut self, at: &Place<'_>, of: AttentionLayer) -> Result<usize, Error> {
        let spec = &self.spec;
        let (heads, kv_heads, head_dim) = (spec.heads, spec.kv_heads, spec.head_dim);
        let norms = match of.whole {
            true => (heads + kv_heads) * head_dim,
            false => 2 * head_dim,
        };
        let fits = |values: &[f32], len| values.is_empty() || values.len() == len;
        if !fits(&of.biases, (heads + 2 * kv_heads) * head_dim)
            || !fits(&of.norms, norms)
            || !fits(&of.sinks, heads)
            || [&of.norm, &of.after]
                .into_iter()
                .flatten()
                .any(|norm| norm.weights.len() != spec.d || !fits(&norm.biases, spec.d))
        {
            return Err(Error("takes no such vectors of attention".into()));
        }
        let vector = |values: &[f32]| -> Result<Memory<f32>, Code> {
            let mut memory = Memory::new(at.context, values.len())?;
            begin(at.queue, &mut memory, values)?;
            Ok(memory)
        };
        let both = |norm: &Option<RowNorm>| -> Result<_, Code> {
            let none = RowNorm::default();
            let RowNorm {
                weights, biases, ..
            } = norm.as_ref().unwrap_or(&none);
            Ok([vector(weights)?, vector(biases)?])
        };
        let make = || -> Result<_, Code> {
            let norms = [both(&of.norm)?, both(&of.after)?];
            let others = [vector(&of.biases)?, vector(&of.norms)?, vector(&of.sinks)?];
            Ok((norms, others))
        };
        let made = driver("share vectors of attention", make());
        // What was begun reads `of`.
        driver("finish", at.queue.finish())?;
        let ([norm, after], [biases, norms, sinks]) = made?;
        self.layers.push(Layer {
            of,
            norm,
            after,
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
        self.fill(queue, work)?;
        self.pages.take_back(queue)?;
        let norm = self.norm(queue, work.layer)?;
        let begun = self.layer(queue, products, work.layer)?;
        if self.pages.copied {
            self.store(queue, work.layer, None)?;
        }
        let begun = norm.unwrap_or(begun);
        let copied = self.end(queue)?;
        let done = self.pages.lend(queue)?.unwrap_or(copied);
        queue.flush()?;
        Ok(Underway {
            sums: self.rows * self.spec.d,
            begun,
            done,
        })
    }

    /// Begins what lies between the norm and the residual stream; the first of it.
    fn layer(
        &mut self,
        queue: &Queue,
        products: &mut Products,
        layer: usize,
    ) -> Result<Event, Code> {
        let begun = self.project(queue, products, layer)?;
        self.heads(queue, layer)?;
        let scored = self.buffers.as_ref().map_or(1, |b| b.room.scored);
        for first in (0..self.rows).step_by(scored) {
            let count = scored.min(self.rows - first);
            self.mix(queue, layer, [first, count])?;
        }
        self.multiply_by_o(queue, products, layer)?;
        Ok(begun)
    }

    /// Begins to copy the inputs, whose sizes it checks.
    fn fill(&mut self, queue: &Queue, work: &Attend<'_>) -> Result<(), Code> {
        self.held.clear();
        self.place(queue, work, false)?;
        let buffers = self.buffers.as_mut().ok_or(INVALID)?;
        let x = buffers.of_x.get_mut(..work.x.len()).ok_or(INVALID)?;
        x.copy_from_slice(work.x);
        begin_floats(queue, &mut buffers.x, x)
    }

    /// Begins to copy places and angles. The work before may be under way.
    fn place(&mut self, queue: &Queue, work: &Attend<'_>, busy: bool) -> Result<(), Code> {
        let spec = &self.spec;
        let buffers = self.buffers.as_mut().ok_or(INVALID)?;
        let layer = &self.layers.get(work.layer).ok_or(INVALID)?.of;
        let (rows, room) = (work.rows(), &buffers.room);
        let angles = if layer.rotates { rows * spec.rotary } else { 0 };
        if rows == 0
            || rows > room.rows
            || work.x.len() != rows * spec.d
            || work.angles.iter().any(|of| of.len() != angles)
        {
            return Err(INVALID);
        }
        buffers.of_pages.next.clear();
        buffers.of_places.next.clear();
        for span in work.spans {
            let pages = span.pages.iter().map(|page| Arc::clone(&page.bytes));
            self.held.extend(pages);
            buffers.place(queue, &mut self.pages, spec, layer, span)?;
        }
        if layer.rotates {
            buffers.of_angles.next.clear();
            (work.angles.iter()).for_each(|of| buffers.of_angles.next.extend_from_slice(of));
            buffers.of_angles.begin(queue, &mut buffers.angles, busy)?;
        }
        buffers.of_pages.begin(queue, &mut buffers.pages, busy)?;
        buffers.of_places.begin(queue, &mut buffers.places, busy)?;
        self.rows = rows;
        Ok(())
    }

    /// Begins the norm before the projections, if there is one.
    fn norm(&mut self, queue: &Queue, layer: usize) -> Result<Option<Event>, Code> {
        let (spec, rows) = (&self.spec, self.rows);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let (layer, k) = (&self.layers[layer], &mut self.kernels);
        let Some(norm) = &layer.of.norm else {
            return Ok(None);
        };
        let [weights, biases] = &layer.norm;
        let centred = Arg::Int((!norm.biases.is_empty()).into());
        let eps = Arg::Float(norm.eps);
        let args = [b.x.arg(), weights.arg(), biases.arg(), eps, centred];
        let items: [&[usize]; 2] = [&[spec.team, rows], &[spec.team, 1]];
        // SAFETY: arguments in number, order and type as in attention.cl. `place` has refused more rows than
        // the buffers were made for, and `share` vectors of other lengths.
        let begun = unsafe { k.row_norms.run(queue, &args, items)? };
        Ok(Some(begun))
    }

    /// Begins the products of Q, K and V; the first of all that.
    fn project(
        &mut self,
        queue: &Queue,
        products: &mut Products,
        layer: usize,
    ) -> Result<Event, Code> {
        let (spec, rows) = (&self.spec, self.rows);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let (layer, k) = (&self.layers[layer], &mut self.kernels);
        let mut begun = None;
        if layer.of.quantizes[..3].contains(&true) {
            let event = quantize(queue, k, [&b.x, &b.quantized], [rows, spec.d])?;
            begun.get_or_insert(event);
        }
        let heads = [spec.heads, spec.kv_heads, spec.kv_heads];
        let mut at = 0;
        for (i, heads) in heads.into_iter().enumerate() {
            let of_rows = heads * spec.head_dim;
            let with = Tokens {
                x: if layer.of.quantizes[i] {
                    &b.quantized
                } else {
                    &b.x
                },
                tokens: rows,
                y: &b.qkv,
                at,
            };
            let event = products.chained(queue, layer.of.matrices[i], of_rows, with)?;
            begun.get_or_insert(event);
            at += of_rows * rows;
        }
        begun.ok_or(INVALID)
    }

    /// Begins norms and rotation of heads.
    fn heads(&mut self, queue: &Queue, layer: usize) -> Result<(), Code> {
        let (spec, k) = (&self.spec, &mut self.kernels);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let layer = &self.layers[layer];
        let (qkv, biases, norms) = (b.qkv.arg(), layer.biases.arg(), layer.norms.arg());
        let (rows, team) = (self.rows, spec.team);
        let [of_rows, flags] = [rows as i32, flags(&layer.of)].map(Arg::Int);
        // SAFETY: as in `norm`.
        unsafe {
            if layer.of.whole && !layer.of.norms.is_empty() {
                let args = [qkv, biases, norms, of_rows, flags];
                let items: [&[usize]; 2] = [&[2 * team, rows], &[team, 1]];
                k.whole_norms.run(queue, &args, items)?;
            }
            let heads = spec.heads + 2 * spec.kv_heads;
            let (angles, fresh) = (b.angles.arg(), b.fresh.arg());
            let args = [qkv, biases, norms, angles, fresh, of_rows, flags];
            let items: [&[usize]; 2] = [&[heads * team, rows], &[team, 1]];
            k.heads.run(queue, &args, items)?;
        }
        Ok(())
    }

    /// Begins attention of `count` rows from `first` on.
    fn mix(&mut self, queue: &Queue, layer: usize, [first, count]: [usize; 2]) -> Result<(), Code> {
        let (spec, layer) = (&self.spec, &self.layers[layer]);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let places = b.of_places.next.chunks_exact(PLACE).skip(first).take(count);
        let of_row =
            |place: &[i32]| place[0] as usize / spec.block - place[1] as usize / spec.block;
        let blocks = places.map(of_row).max().unwrap_or(0) + 1;
        let [of_first, of_blocks, stride] =
            [first, blocks, blocks * spec.block].map(|n| Arg::Int(n as i32));
        let (flags, pool) = (Arg::Int(flags(&layer.of)), self.pages.arg());
        let (qkv, fresh, pages, places) =
            (b.qkv.arg(), b.fresh.arg(), b.pages.arg(), b.places.arg());
        let (scores, states, mixes) = (b.scores.arg(), b.states.arg(), b.mixes.arg());
        let (sinks, attended) = (layer.sinks.arg(), b.attended.arg());
        let queries = count * spec.heads;
        let elements = spec.head_dim.next_multiple_of(FEW);
        let begins = Arg::Long(layer.of.first as u64);
        let k = &mut self.kernels;
        // SAFETY: arguments in number, order and type as in attention.cl. `place` has refused rows and positions
        // beyond what the buffers were made for and pages that do not lie in the pool; `count` is at most the
        // number of rows whose scores they hold.
        unsafe {
            let args = [
                qkv, fresh, pool, pages, places, scores, begins, of_first, stride,
            ];
            let items = [blocks * spec.block, queries];
            k.scores.run(queue, &args, [&items, &[USUAL_GROUP, 1]])?;
            let args = [places, scores, states, of_first, stride, of_blocks];
            let items: [&[usize]; 2] = [&[blocks * spec.team, queries], &[spec.team, 1]];
            k.sums.run(queue, &args, items)?;
            let args = [
                fresh, pool, pages, places, scores, mixes, begins, of_first, stride, of_blocks,
            ];
            let items = [elements, blocks, queries];
            k.mixes.run(queue, &args, [&items, &[FEW, 1, 1]])?;
            let args = [
                places, states, mixes, sinks, attended, of_first, of_blocks, flags,
            ];
            k.merged
                .run(queue, &args, [&[elements, queries], &[FEW, 1]])?;
        }
        Ok(())
    }

    /// Begins the product of O.
    fn multiply_by_o(
        &mut self,
        queue: &Queue,
        products: &mut Products,
        layer: usize,
    ) -> Result<(), Code> {
        let (spec, rows, at) = (&self.spec, self.rows, self.out_at());
        let of = &self.layers[layer].of;
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let width = spec.heads * spec.head_dim;
        let x = match of.quantizes[3] {
            true => {
                let k = &mut self.kernels;
                quantize(queue, k, [&b.attended, &b.quantized], [rows, width])?;
                &b.quantized
            }
            false => &b.attended,
        };
        let (tokens, y) = (rows, &b.qkv);
        let with = Tokens { x, tokens, y, at };
        products.chained(queue, of.matrices[3], spec.d, with)?;
        Ok(())
    }

    /// Where O's results begin in `qkv`.
    fn out_at(&self) -> usize {
        let spec = &self.spec;
        self.rows * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    }

    /// Begins to put the rows' keys and values into the copy of their pages; and into a log, from an element on.
    fn store(
        &mut self,
        queue: &Queue,
        layer: usize,
        log: Option<(&Memory<f32>, usize)>,
    ) -> Result<(), Code> {
        let (spec, rows) = (&self.spec, self.rows);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let kv = spec.kv_heads * spec.head_dim;
        let (to, at) = log.unwrap_or((&b.fresh, 0));
        to.fits(at, 2 * rows * kv)?;
        let args = [
            b.fresh.arg(),
            self.pages.arg(),
            b.pages.arg(),
            b.places.arg(),
            Arg::Long(self.layers[layer].of.first as u64),
            to.arg(),
            Arg::Long(at as u64),
            Arg::Int(log.is_some().into()),
        ];
        let items: [&[usize]; 2] = [&[kv.next_multiple_of(FEW), rows], &[FEW, 1]];
        // SAFETY: as in `mix`; `Buffers::place` has put the pages of these rows there too, and the log is long enough.
        unsafe { self.kernels.stored.run(queue, &args, items)? };
        Ok(())
    }

    /// Begins to copy back keys, values and O's results.
    fn end(&mut self, queue: &Queue) -> Result<Event, Code> {
        let (rows, spec) = (self.rows, &self.spec);
        let kv = 2 * rows * spec.kv_heads * spec.head_dim;
        let first = self.out_at() - kv;
        let b = self.buffers.as_mut().ok_or(INVALID)?;
        let answer = b.answer.get_mut(..kv + rows * spec.d);
        read(queue, &b.qkv, first, answer.ok_or(INVALID)?)
    }

    /// Copies the results of work that is done.
    pub fn take(&mut self, to: Attended<'_>) -> Result<(), Error> {
        self.held.clear();
        let spec = &self.spec;
        let (out, kv) = (
            self.rows * spec.d,
            self.rows * spec.kv_heads * spec.head_dim,
        );
        let buffers = self.buffers.as_ref();
        match buffers {
            Some(b) if [to.out.len(), to.keys.len(), to.values.len()] == [out, kv, kv] => {
                to.keys.copy_from_slice(&b.answer[..kv]);
                to.values.copy_from_slice(&b.answer[kv..2 * kv]);
                to.out.copy_from_slice(&b.answer[2 * kv..][..out]);
                Ok(())
            }
            _ => Err(Error("was asked for other rows of attention".into())),
        }
    }

    /// Lets go of the pages of work that failed.
    pub fn give_up(&mut self) {
        self.held.clear();
    }
}

/// Begins to make rows of `width` elements integers of 8 bits.
fn quantize(
    queue: &Queue,
    kernels: &mut Kernels,
    [from, to]: [&Bytes; 2],
    [rows, width]: [usize; 2],
) -> Result<Event, Code> {
    let groups = width.div_ceil(CHUNK) * CHUNK_GROUPS;
    from.fits(0, 4 * rows * width)?;
    to.fits(0, rows * groups / CHUNK_GROUPS * CHUNK_BYTES)?;
    let args = [from.arg(), to.arg(), Arg::Int(width as i32)];
    let items: [&[usize]; 2] = [&[groups, rows], &[FEW, 1]];
    // SAFETY: arguments in number, order and type as in attention.cl, and both buffers fit, as was just checked.
    unsafe { kernels.quantized.run(queue, &args, items) }
}

fn flags(of: &AttentionLayer) -> i32 {
    let all = [
        (!of.biases.is_empty(), BIASES),
        (!of.norms.is_empty(), NORMS),
        (of.value_norm, VALUE_NORM),
        (of.rotates, ROTATES),
        (!of.sinks.is_empty(), SINKS),
        (of.whole, WHOLE),
    ];
    all.iter().filter(|flag| flag.0).map(|flag| flag.1).sum()
}
