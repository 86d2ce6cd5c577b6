//! A prompt's pass in parts: the compute threads mix one part while devices compute the FFN of another (llm.npu, §3.4).
//!
//! ```text
//! calling thread   mixer(0, 0)  mixer(1, 0)  mixer(0, 1)  mixer(1, 1) …
//! its FFN thread                ffn(0, 0)    ffn(1, 0)    ffn(0, 1)   …      all rows on devices
//! ```
//!
//! A row's bits do not depend on the other rows of its pass, and keys, values and recurrent states are extended in the
//! order of parts, so no bit changes. Which part comes next, a [`Scheduler`](crate::schedule::Scheduler) decides whenever
//! an operation ends. One piece of a device's work is under way at a time, begun by the FFN thread: so devices multiply
//! either no projections meanwhile, or all of a model whose mixers are plain attention, of which the calling thread then
//! computes the rest. A pass that is to yield, or has lost its device, goes on to the end of the layers that have begun;
//! then it is as one that ran layer by layer.

use std::slice::ChunksMut;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;

use super::{Decoder, Hooks, lap};
use crate::device::Multiplies;
use crate::error::Error;
use crate::ffn::{BankWork, Bias, Ffn, LayerInput, Rows};
use crate::input::Input;
use crate::lanes::DeviceLane;
use crate::mixer::{HeadRows, LayerPass, Mixer};
use crate::norm::{add_output, rows_or_copy};
use crate::part_room::{PartRoom, STACK, can_run_in_parts};
use crate::pass::Pass;
use crate::rope::Ropes;
use crate::schedule::{CPU, DEVICE, Execution, InParts, PartGraph, PartPlace, PartStep};
use crate::scratch::Scratch;
use crate::state::Span;
use crate::trace;
use crate::weights::LayerWeights;

/// The state of a part.
struct PartRows<'x> {
    /// Its residual stream.
    x: &'x mut [f32],
    /// What attention makes of it, if devices multiply projections.
    heads: Option<HeadRows<'x>>,
}

/// A part of which devices are to compute something.
struct PartJob<'x> {
    operation: usize,
    place: PartPlace,
    /// Its first row in the pass.
    first: usize,
    part: PartRows<'x>,
}

/// The FFN thread.
struct FfnThread<'a> {
    on: &'a Compute,
    config: &'a ModelConfig,
    layers: &'a [LayerWeights],
    ffn: &'a mut Ffn,
    room: &'a mut PartRoom,
}

impl FfnThread<'_> {
    /// Computes parts until there are no more.
    fn run(mut self, pass: &PassInParts<'_, '_>) {
        Tracer::leave_lane();
        let _over = Over(pass);
        while let Some(mut job) = pass.next_job() {
            let outcome = match job.place.step {
                PartStep::Project => self.project(&mut job),
                PartStep::Mix | PartStep::Feed => self.feed(&mut job),
            };
            let lost = self.ffn.lanes.iter().any(DeviceLane::has_failed);
            pass.done(job, outcome, lost);
        }
    }

    /// Computes the queries, keys and values of a part.
    fn project(&mut self, job: &mut PartJob<'_>) -> Result<(), Error> {
        let (on, room, layer) = (self.on, &mut *self.room, &self.layers[job.place.layer]);
        let PartRows { x, heads } = &mut job.part;
        let (Mixer::Attention(attention), Some(heads)) = (&layer.mixer, heads) else {
            return Ok(());
        };
        let rows = x.len() / self.config.d_model as usize;
        rows_or_copy(layer.attn_norm.as_ref(), on.cpu, x, &mut room.normed);
        room.input.set_pruned(layer.pruned);
        let input = Input::new(on.cpu, &room.normed[..x.len()], rows, &mut room.input);
        attention.project(on, input, heads, &mut room.rows);
        Ok(())
    }

    /// Adds the output projection of a part's attention to its residual stream, if devices multiply projections.
    fn add_attention(&mut self, layer: &LayerWeights, part: &mut PartRows<'_>) {
        let (on, c, room) = (self.on, self.config, &mut *self.room);
        let (Mixer::Attention(attention), Some(heads)) = (&layer.mixer, &part.heads) else {
            return;
        };
        let rows = part.x.len() / c.d_model as usize;
        let mixed = &heads.attended[..rows * attention.o.cols()];
        let input = Input::new(on.cpu, mixed, rows, &mut room.input);
        attention.output(on, input, &mut room.rows, &mut room.out);
        let (out, scale) = (&mut room.out[..part.x.len()], c.form.residual_scale);
        add_output(on.cpu, layer.attn_post_norm.as_ref(), scale, out, part.x);
    }

    /// Adds a part's FFN to its residual stream, after what is left of its mixer.
    fn feed(&mut self, job: &mut PartJob<'_>) -> Result<(), Error> {
        let layers = self.layers;
        let layer = &layers[job.place.layer];
        self.room.input.set_pruned(layer.pruned);
        self.add_attention(layer, &mut job.part);
        if self.config.has_ffn(job.place.layer as u32) {
            self.add_ffn(layer, job)?;
        }
        end_layer(layer, job.part.x);
        Ok(())
    }

    /// Adds a part's FFN.
    fn add_ffn(&mut self, layer: &LayerWeights, job: &mut PartJob<'_>) -> Result<(), Error> {
        let (on, c, room) = (self.on, self.config, &mut *self.room);
        let width = job.part.x.len();
        let x = &mut *job.part.x;
        let rows = width / c.d_model as usize;
        rows_or_copy(layer.before_ffn(), on.cpu, x, &mut room.normed);
        let input = Input::new(on.cpu, &room.normed[..width], rows, &mut room.input);
        let place = c.ffn_place(job.place.layer as u32);
        let dense = [BankWork {
            bank: self.ffn.store.layout.banks_of(place).start,
            rows: Rows::All(rows),
            weights: None,
            group: None,
            scales: None,
            bias: Bias::of(layer.ffn_bias.as_ref(), 0),
        }];
        let at = LayerInput {
            part: Some(job.first),
            ..LayerInput::alone(place, &dense, input, x)
        };
        self.ffn.layer(on, &at, &mut room.out)?;
        let (out, scale) = (&mut room.out[..width], c.form.residual_scale);
        add_output(on.cpu, layer.ffn_post_norm.as_ref(), scale, out, x);
        Ok(())
    }
}

/// The step after a layer's last term: a factor.
fn end_layer(layer: &LayerWeights, x: &mut [f32]) {
    if layer.scale != 1.0 {
        x.iter_mut().for_each(|x| *x *= layer.scale);
    }
}

/// Buffers of the calling thread.
enum MixRoom<'a> {
    /// For whole mixers.
    Whole(&'a mut Scratch),
    /// [`Scratch::partials`]: the parts have the others.
    Partials(&'a mut [f32]),
}

/// The parts of a residual stream `x` of width `d`, by `rows` rows: with `projects` each has its buffers of attention, and the
/// calling thread what is left of them.
fn parts_of<'x>(
    x: ChunksMut<'x, f32>,
    s: &'x mut Scratch,
    [rows, d]: [usize; 2],
    projects: bool,
) -> (Vec<Option<PartRows<'x>>>, MixRoom<'x>) {
    if !projects {
        let parts = x.map(|x| Some(PartRows { x, heads: None }));
        return (parts.collect(), MixRoom::Whole(s));
    }
    let all = s.normed.len() / d;
    let buffers = [&mut s.q, &mut s.k, &mut s.v, &mut s.gate, &mut s.attended];
    let mut chunks = buffers.map(|buffer| {
        let len = buffer.len() / all * rows;
        buffer.chunks_mut(len.max(1))
    });
    let part = |x| {
        let next = chunks.each_mut().map(Iterator::next);
        let [q, k, v, gate, attended] = next.map(Option::unwrap_or_default);
        let heads = HeadRows {
            q,
            k,
            v,
            gate,
            attended,
        };
        Some(PartRows {
            x,
            heads: Some(heads),
        })
    };
    (x.map(part).collect(), MixRoom::Partials(&mut s.partials))
}

/// What the calling thread mixes parts with.
struct PartMixers<'a, 's, 't> {
    on: &'a Compute,
    config: &'a ModelConfig,
    layers: &'a [LayerWeights],
    rope: &'a mut Ropes,
    room: MixRoom<'a>,
    span: &'a mut Span<'t>,
    tracer: &'s Tracer,
    /// Rows of a part.
    rows: usize,
}

impl PartMixers<'_, '_, '_> {
    /// Adds a layer's mixer to a part's residual stream; or mixes its values, if devices multiply projections.
    fn mix(&mut self, place: PartPlace, part: &mut PartRows<'_>) {
        let (on, c) = (self.on, self.config);
        let (number, first) = (place.layer, place.part * self.rows);
        let (layer, x) = (&self.layers[number], &mut *part.x);
        let rows = first..first + x.len() / c.d_model as usize;
        self.tracer.section(&trace::ATTENTION, [number as u64, 0]);
        self.rope.begin_part(first);
        self.span.sequence.set_part(rows.clone());
        let at = LayerPass {
            config: c,
            number,
            rope: self.rope.of(number),
            given: None,
        };
        let span = Span {
            sequence: &mut *self.span.sequence,
            tokens: &self.span.tokens[rows],
        };
        let s = match (&mut self.room, &mut part.heads, &layer.mixer) {
            (MixRoom::Whole(scratch), ..) => &mut **scratch,
            (MixRoom::Partials(partials), Some(heads), Mixer::Attention(attention)) => {
                attention.attend(on, at, &mut [span], heads, partials);
                return;
            }
            _ => return,
        };
        rows_or_copy(layer.attn_norm.as_ref(), on.cpu, x, &mut s.normed);
        s.input.set_pruned(layer.pruned);
        layer.mixer.run(on, at, &mut [span], s);
        s.input.set_pruned(false);
        let (out, scale) = (&mut s.out[..x.len()], c.form.residual_scale);
        add_output(on.cpu, layer.attn_post_norm.as_ref(), scale, out, x);
        if !c.has_ffn(number as u32) {
            end_layer(layer, x);
        }
    }
}

/// How far a pass in parts has come.
struct Reached {
    /// It is to yield.
    yielding: bool,
    /// The layer that comes next.
    layer: usize,
    /// Times of mixers, and of waits for FFNs.
    times: [Duration; 2],
}

/// A pass in parts that is under way: what has begun, and where its parts are.
struct PartsUnderway<'a, 'x> {
    execution: Execution<'a>,
    graph: &'a PartGraph,
    /// Each part of which nothing is being computed.
    parts: Vec<Option<PartRows<'x>>>,
    /// Rows of a part.
    rows: usize,
    /// What the FFN thread is to take.
    job: Option<PartJob<'x>>,
    /// It has a part, or is to take one.
    busy: bool,
    /// The first failure.
    outcome: Result<(), Error>,
    /// Nothing more begins.
    over: bool,
    /// The layer at which it ends; no operation of that layer has begun.
    until: usize,
    layers: usize,
}

impl<'x> PartsUnderway<'_, 'x> {
    /// Whether there is a layer of which nothing has begun, and that may begin.
    fn has_more(&self) -> bool {
        let (layer, _) = self.graph.layer_after(self.execution.begun());
        self.until == self.layers && layer < self.layers
    }

    /// Begins no operation of a layer of which none has begun. Returns whether any is left.
    fn stop(&mut self) -> bool {
        let (layer, first) = self.graph.layer_after(self.execution.begun());
        self.execution.stop_at(first);
        self.until = self.until.min(layer);
        self.until < self.layers
    }

    /// Begins an operation of a part on a processor, if one is ready.
    fn begin(&mut self, processor: usize) -> Option<PartJob<'x>> {
        let operation = self.execution.begin(processor)?;
        let place = self.graph.places[operation];
        Some(PartJob {
            operation,
            place,
            first: place.part * self.rows,
            part: self.parts[place.part].take()?,
        })
    }

    /// Gives the FFN thread a part, if it has none and one is ready.
    fn begin_ffn(&mut self) {
        if !self.busy && !self.over {
            self.job = self.begin(DEVICE);
            self.busy = self.job.is_some();
        }
    }

    /// An operation has ended; others may begin.
    fn end(&mut self, job: PartJob<'x>) {
        self.parts[job.place.part] = Some(job.part);
        self.execution.end(job.operation);
        self.begin_ffn();
    }
}

/// A pass in parts, shared by the calling thread and its FFN thread. The one that ends an operation begins the next one of
/// the devices, so that they do not wait for a mixer that is under way.
struct PassInParts<'a, 'x> {
    underway: Mutex<PartsUnderway<'a, 'x>>,
    /// An operation has begun or ended.
    changed: Condvar,
}

impl<'a, 'x> PassInParts<'a, 'x> {
    fn lock(&self) -> MutexGuard<'_, PartsUnderway<'a, 'x>> {
        self.underway.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'l>(
        &self,
        pass: MutexGuard<'l, PartsUnderway<'a, 'x>>,
    ) -> MutexGuard<'l, PartsUnderway<'a, 'x>> {
        (self.changed.wait(pass)).unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until all parts have come to the same layer.
    fn run(
        &self,
        mixers: &mut PartMixers<'_, '_, '_>,
        yields: &dyn Fn() -> bool,
    ) -> Result<Reached, Error> {
        let _over = Over(self);
        let (mut yielding, mut last) = (false, Instant::now());
        // Of mixers, and of waits for FFNs.
        let mut times = [Duration::ZERO; 2];
        let mut pass = self.lock();
        while !pass.over {
            pass.begin_ffn();
            let mixer = pass.begin(CPU);
            // What begins may let the other processor begin too.
            pass.begin_ffn();
            if let Some(mut job) = mixer {
                drop(pass);
                self.changed.notify_all();
                mixers.mix(job.place, &mut job.part);
                pass = self.lock();
                pass.end(job);
                self.changed.notify_all();
                lap(&mut times[0], &mut last);
            } else if pass.busy {
                self.changed.notify_all();
                pass = self.wait(pass);
                lap(&mut times[1], &mut last);
            } else {
                break;
            }
            if !yielding && pass.has_more() && yields() {
                yielding = pass.stop();
            }
        }
        std::mem::replace(&mut pass.outcome, Ok(()))?;
        Ok(Reached {
            yielding,
            layer: pass.until,
            times,
        })
    }

    /// What the FFN thread is to compute next, once there is something; `None` if there is no more.
    fn next_job(&self) -> Option<PartJob<'x>> {
        let mut pass = self.lock();
        loop {
            match pass.job.take() {
                _ if pass.over => return None,
                Some(job) => return Some(job),
                None => pass = self.wait(pass),
            }
        }
    }

    /// The FFN thread is done with a part; a device may be `lost`.
    fn done(&self, job: PartJob<'x>, outcome: Result<(), Error>, lost: bool) {
        let mut pass = self.lock();
        pass.busy = false;
        if lost {
            pass.stop();
        }
        match outcome {
            Ok(()) => pass.end(job),
            Err(e) => (pass.outcome, pass.over) = (Err(e), true),
        }
        drop(pass);
        self.changed.notify_all();
    }
}

/// Ends a pass for both threads when one of them leaves it, also by a panic.
struct Over<'p, 'a, 'x>(&'p PassInParts<'a, 'x>);

impl Drop for Over<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.changed.notify_all();
    }
}

impl Decoder {
    /// Runs the first layers of a pass, from number `first` on, in parts if that is faster. Returns the layer that comes
    /// next; `None` if the pass yields.
    pub(super) fn run_first(
        &mut self,
        first: usize,
        pass: &mut Pass,
        spans: &mut [Span<'_>],
        hooks: &Hooks<'_, '_>,
    ) -> Result<Option<usize>, Error> {
        let how = self.ffn.parts(pass.rows).cloned();
        let Some(how) = how.filter(|_| self.runs_in_parts(pass, spans, hooks)) else {
            return Ok(Some(first));
        };
        let yields = || hooks.yields.is_some_and(|yields| yields());
        if self.run_in_parts(&how, pass, &mut spans[0], &yields)? {
            return Ok(None);
        }
        spans[0].sequence.set_whole();
        Ok(pass.layers)
    }

    /// Whether a pass runs in parts: a prompt of one text, if that is expected to be faster.
    fn runs_in_parts(&self, pass: &Pass, spans: &[Span<'_>], hooks: &Hooks<'_, '_>) -> bool {
        let observed =
            hooks.observer.is_some() || hooks.attention.is_some() || hooks.between.is_some();
        spans.len() == 1 && !observed && self.in_parts(pass.rows).is_some()
    }

    /// How prompts' passes of `rows` rows run in parts; `None` layer by layer.
    pub fn in_parts(&self, rows: usize) -> Option<&InParts> {
        let pays = |how: &&InParts| how.pays(self.part_room.products);
        let can = can_run_in_parts(&self.config) && !self.part_room.out.is_empty();
        self.ffn.parts(rows).filter(|_| can).filter(pays)
    }

    /// Runs a pass of one text in parts, from the layer to which it has come, and counts it. Returns whether it yields.
    /// Layers may be left, of a pass that yields, has lost its device, or found no thread.
    fn run_in_parts(
        &mut self,
        how: &InParts,
        pass: &mut Pass,
        span: &mut Span<'_>,
        yields: &dyn Fn() -> bool,
    ) -> Result<bool, Error> {
        let (c, ffn, layers) = (&self.config, &mut self.ffn, &self.weights.layers[..]);
        let (d, from) = (c.d_model as usize, pass.layers.unwrap_or(0));
        let rows = how.rows_of(pass.rows);
        let x = pass.x[..pass.rows * d].chunks_mut(rows * d);
        let (parts, room) = parts_of(x, &mut self.scratch, [rows, d], how.projects);
        let seconds = how.times(pass.rows);
        let steps = |layer: usize| steps_of(c, layer, how.projects);
        let graph = PartGraph::new(from, (from..layers.len()).map(steps), &seconds);
        let order = self.part_room.orders.of(&graph, &seconds);
        let mut scheduler = order.scheduler(&graph);
        let tracer = ffn.store.tracer.clone();
        let mut mixers = PartMixers {
            on: &self.on,
            config: c,
            layers,
            rope: &mut self.rope,
            room,
            span,
            tracer: &tracer,
            rows,
        };
        let multiplies = match how.projects {
            true => Multiplies::Devices,
            false => Multiplies::Cpu,
        };
        set_multiplies(ffn, multiplies);
        let on_thread = FfnThread {
            on: &self.on,
            config: c,
            layers,
            ffn: &mut *ffn,
            room: &mut self.part_room,
        };
        let underway = PartsUnderway {
            execution: Execution::new(&graph.operations, &mut *scheduler),
            graph: &graph,
            parts,
            rows,
            job: None,
            busy: false,
            outcome: Ok(()),
            over: false,
            until: layers.len(),
            layers: layers.len(),
        };
        let outcome = run_both(on_thread, underway, &mut mixers, yields);
        set_multiplies(ffn, Multiplies::Both);
        self.rope.begin_part(0);
        let Some(reached) = outcome? else {
            tracing::warn!("no thread for the FFN of parts: the pass runs layer by layer");
            return Ok(false);
        };
        let [mixing, waiting] = reached.times;
        self.times.attention += mixing;
        self.times.ffn += waiting;
        self.times.passes_in_parts += u64::from(from == 0);
        pass.layers = Some(reached.layer);
        Ok(reached.yielding)
    }
}

/// Runs a pass beside its FFN thread; `None` if there is no thread.
fn run_both(
    on_thread: FfnThread<'_>,
    underway: PartsUnderway<'_, '_>,
    mixers: &mut PartMixers<'_, '_, '_>,
    yields: &dyn Fn() -> bool,
) -> Result<Option<Reached>, Error> {
    let pass = &PassInParts {
        underway: Mutex::new(underway),
        changed: Condvar::new(),
    };
    thread::scope(|scope| {
        let thread = Builder::new().name("ember-ffn".into()).stack_size(STACK);
        match thread.spawn_scoped(scope, || on_thread.run(pass)) {
            Ok(_) => pass.run(mixers, yields).map(Some),
            Err(_) => Ok(None),
        }
    })
}

/// The steps of a layer. Where devices multiply the projections, the output projection is fed like an FFN.
fn steps_of(c: &ModelConfig, layer: usize, projects: bool) -> [bool; 3] {
    let [mixes, feeds] = [c.has_mixer(layer as u32), c.has_ffn(layer as u32)];
    let projects = projects && mixes;
    [projects, mixes, feeds || projects]
}

/// Leaves products to the CPU or to devices, or to both.
fn set_multiplies(ffn: &Ffn, what: Multiplies) {
    let devices = ffn.lanes.iter().flat_map(DeviceLane::devices);
    devices.for_each(|device| device.set_multiplies(what));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ByStalls;

    /// The devices go on while a mixer is under way: nothing waits for the calling thread.
    #[test]
    fn who_ends_an_operation_begins_the_next_one_of_the_devices() {
        let graph = PartGraph::new(0, std::iter::once([false, true, true]), &[[1.0; 3]; 3]);
        let mut scheduler = ByStalls { npu: DEVICE };
        let part = |_| {
            let (x, heads) = (&mut [][..], None);
            Some(PartRows { x, heads })
        };
        let mut pass = PartsUnderway {
            execution: Execution::new(&graph.operations, &mut scheduler),
            graph: &graph,
            parts: (0..3).map(part).collect(),
            rows: 1,
            job: None,
            busy: false,
            outcome: Ok(()),
            over: false,
            until: 1,
            layers: 1,
        };
        let mut mixed = (0..2).map(|_| {
            let mixer = pass.begin(CPU).unwrap();
            pass.end(mixer);
            pass.job.take()
        });
        let first = mixed.next().flatten().unwrap();
        assert!(mixed.next().unwrap().is_none());
        let mixer = pass.begin(CPU).unwrap();
        assert_eq!([first.place.part, mixer.place.part], [0, 2]);
        // As `PassInParts::done` does, while that mixer is under way.
        pass.busy = false;
        pass.end(first);
        assert_eq!(pass.job.map(|job| job.place.part), Some(1));
    }
}
