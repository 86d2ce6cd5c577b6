//! Whole layers one after the other as one piece of work: what one layer adds to the residual stream the next one reads,
//! and the host waits once, for the last.
//!
//! ```text
//! x ─▶ residual ┬▶ norm ─▶ Q K V … O ─▶ + ┬▶ norm ─▶ FFN ─▶ + ┬▶ norm ─▶ …          ─▶ x, all keys and values
//!               └──────────────────────── ┴────────────────── ┴─────────
//! ```

use super::{Attention, quantize};
use crate::attend::{Attend, Chain, ChainLayer, ChainRoom, Chained, RowNorm};
use crate::buffers::{Memory, Scratch, Staged, begin, read};
use crate::ffn::{Prepared, enqueue};
use crate::handles::{Arg, Context, Event, Queue};
use crate::library::Code;
use crate::parts::Part;
use crate::products::{Place, Products};
use crate::work::{INVALID, Underway, driver};
use crate::{Error, Sums, Work};

/// Buffers of chains.
pub(super) struct Room {
    of: ChainRoom,
    /// Rows of the residual stream, and behind them keys and values of all layers.
    outcome: Memory<f32>,
    of_x: Staged<f32>,
    answer: Staged<f32>,
    /// Of the FFN.
    scratch: Scratch,
    /// Layers of the chain under way.
    layers: usize,
}

/// What a layer is computed with.
pub(in super::super) struct Others<'a> {
    pub queue: &'a Queue,
    pub context: &'a Context,
    pub products: &'a mut Products,
    pub prepared: &'a mut Prepared,
    pub parts: &'a mut [Part],
}

impl Attention {
    /// Makes buffers for chains; those before are given back first.
    pub fn make_chain_room(
        &mut self,
        at: &Place<'_>,
        prepared: &Prepared,
        of: &ChainRoom,
    ) -> Result<(), Error> {
        let (context, queue) = (at.context, at.queue);
        self.chain = None;
        let kv = self.spec.kv_heads * self.spec.head_dim;
        let len = of.rows * (self.spec.d + 2 * of.layers * kv);
        let make = || -> Result<Room, Code> {
            Ok(Room {
                of: *of,
                outcome: Memory::new(context, len)?,
                of_x: Staged::new(context, queue, of.rows * self.spec.d)?,
                answer: Staged::new(context, queue, len)?,
                scratch: Scratch::between(context, queue, &prepared.spec, of)?,
                layers: 0,
            })
        };
        self.chain = Some(driver("make buffers", make())?);
        Ok(())
    }

    /// Begins a chain. Nothing else of attention is under way.
    pub fn chain(&mut self, with: &mut Others<'_>, work: &Chain<'_>) -> Result<Underway, Code> {
        let mut room = self.chain.take().ok_or(INVALID)?;
        let begun = self.begin_chain(&mut room, with, work);
        self.chain = Some(room);
        begun
    }

    fn begin_chain(
        &mut self,
        room: &mut Room,
        with: &mut Others<'_>,
        work: &Chain<'_>,
    ) -> Result<Underway, Code> {
        let (queue, d) = (with.queue, self.spec.d);
        let kv = self.spec.kv_heads * self.spec.head_dim;
        let (rows, layers) = (work.x.len() / d, work.layers.len());
        // Kernels may write pages only in a copy of them.
        if !self.pages.copied
            || !(1..=room.of.rows).contains(&rows)
            || !(1..=room.of.layers).contains(&layers)
        {
            return Err(INVALID);
        }
        self.held.clear();
        room.layers = layers;
        let x = room.of_x.get_mut(..work.x.len()).ok_or(INVALID)?;
        x.copy_from_slice(work.x);
        begin(queue, &mut room.outcome, x)?;
        let mut begun = None;
        for (i, layer) in work.layers.iter().enumerate() {
            let of = layer.attention;
            self.place(
                queue,
                &Attend {
                    layer: of,
                    x: work.x,
                    angles: layer.angles,
                    spans: layer.spans,
                },
                i > 0,
            )?;
            let event = self.next_rows(queue, room, Step::before(of, i > 0))?;
            begun.get_or_insert(event);
            self.layer(queue, with.products, of)?;
            let at = rows * (d + 2 * i * kv);
            self.store(queue, of, Some((&room.outcome, at)))?;
            self.next_rows(queue, room, Step::after(of))?;
            self.feed(room, with, layer, i + 1 < layers)?;
            if i + 1 == layers {
                // Adds the last FFN; the norm that comes with it is not used.
                self.next_rows(queue, room, Step::before(of, true))?;
            }
        }
        let len = rows * (d + 2 * layers * kv);
        let answer = room.answer.get_mut(..len).ok_or(INVALID)?;
        read(queue, &room.outcome, 0, answer)?;
        let counted = Sums::Total {
            begins: true,
            ends: false,
        };
        let done = room.scratch.read(queue, counted, rows, 0)?;
        queue.flush()?;
        Ok(Underway {
            sums: len,
            begun: begun.ok_or(INVALID)?,
            done,
        })
    }

    /// Adds what came last to the residual stream, if it does, and begins a norm of it.
    fn next_rows(&mut self, queue: &Queue, room: &Room, step: Step) -> Result<Event, Code> {
        let (rows, at, team) = (self.rows, self.out_at(), self.spec.team);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let layer = self.layers.get(step.layer).ok_or(INVALID)?;
        let (norm, vectors) = match step.norm {
            Norm::Before => (&layer.of.norm, &layer.norm),
            Norm::After => (&layer.of.after, &layer.after),
        };
        let norm: &RowNorm = norm.as_ref().ok_or(INVALID)?;
        let (plus, at) = match step.norm {
            Norm::Before => (&room.scratch.totals, 0),
            Norm::After => (&b.qkv, at),
        };
        let args = [
            room.outcome.arg(),
            plus.arg(),
            Arg::Long(at as u64),
            Arg::Int(step.adds.into()),
            b.x.arg(),
            vectors[0].arg(),
            vectors[1].arg(),
            Arg::Float(norm.eps),
            Arg::Int((!norm.biases.is_empty()).into()),
        ];
        let items: [&[usize]; 2] = [&[team, rows], &[team, 1]];
        // SAFETY: arguments in number, order and type as in attention.cl. All buffers are made for so many rows or
        // more, as `place` and `begin_chain` have checked, and `share` has refused vectors of other lengths.
        unsafe { self.kernels.next_rows.run(queue, &args, items) }
    }

    /// Begins a layer's FFN, of the rows in `x`.
    fn feed(
        &mut self,
        room: &mut Room,
        with: &mut Others<'_>,
        layer: &ChainLayer<'_>,
        counts_on: bool,
    ) -> Result<(), Code> {
        let (queue, d, rows) = (with.queue, self.spec.d, self.rows);
        let b = self.buffers.as_ref().ok_or(INVALID)?;
        let spec = &with.prepared.spec;
        let clusters = layer.neurons.div_ceil(spec.cluster);
        if spec.d != d || clusters > room.of.clusters {
            return Err(INVALID);
        }
        let x = match spec.grouped {
            true => {
                quantize(queue, &mut self.kernels, [&b.x, &b.quantized], [rows, d])?;
                &b.quantized
            }
            false => &b.x,
        };
        x.fits(0, spec.token_bytes * rows)?;
        let part = with.parts.get_mut(layer.part).ok_or(INVALID)?;
        let part = part.arg(with.context).map_err(|_| INVALID)?;
        let work = Work {
            part: layer.part,
            neurons: layer.neurons,
            first: 0,
            clusters,
            rows,
            x: &[],
            mask: None,
            gate_bias: &[],
            up_bias: &[],
            cut: 0.0,
            end: layer.neurons,
            sums: Sums::Total {
                begins: true,
                ends: true,
            },
        };
        let inputs = [part, x.arg()];
        enqueue(
            queue,
            with.prepared,
            &room.scratch,
            inputs,
            &work,
            counts_on,
        )?;
        Ok(())
    }

    /// Copies the results of a chain that is done; how many pairs fired.
    pub fn take_chain(&mut self, to: Chained<'_>) -> Result<u64, Error> {
        self.held.clear();
        let (d, kv) = (self.spec.d, self.spec.kv_heads * self.spec.head_dim);
        let room = self.chain.as_ref();
        let answer = room.and_then(|room| {
            let (x, stored) = (self.rows * d, 2 * room.layers * self.rows * kv);
            let (_, fired) = room.scratch.answer(0)?;
            let fits = to.x.len() == x && to.stored.len() == stored;
            let answer = room.answer.get(..x + stored).filter(|_| fits)?;
            Some((answer.split_at(x), fired))
        });
        let ((x, stored), fired) =
            answer.ok_or_else(|| Error("was asked for other rows of a chain".into()))?;
        to.x.copy_from_slice(x);
        to.stored.copy_from_slice(stored);
        Ok(fired.into())
    }
}

/// Which norm of a layer.
#[derive(Clone, Copy)]
enum Norm {
    /// Before the projections; what was added last is the FFN of the layer before.
    Before,
    /// Before the FFN; what was added last is O's.
    After,
}

/// From one part of a layer to the next.
#[derive(Clone, Copy)]
struct Step {
    /// Whose norm it is.
    layer: usize,
    norm: Norm,
    /// What came last is added before.
    adds: bool,
}

impl Step {
    fn before(layer: usize, adds: bool) -> Self {
        Self {
            layer,
            norm: Norm::Before,
            adds,
        }
    }

    fn after(layer: usize) -> Self {
        Self {
            layer,
            norm: Norm::After,
            adds: true,
        }
    }
}
