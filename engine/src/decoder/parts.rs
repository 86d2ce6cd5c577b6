//! A prompt's pass in parts: the compute threads mix one part while devices compute the FFN of another (llm.npu, §3.4).
//!
//! ```text
//! calling thread   mixer(0, 0)  mixer(1, 0)  mixer(0, 1)  mixer(1, 1) …
//! its FFN thread                ffn(0, 0)    ffn(1, 0)    ffn(0, 1)   …      all rows on devices
//! ```
//!
//! A row's bits do not depend on the other rows of its pass, and keys, values and recurrent states are extended in the
//! order of parts, so no bit changes. Which part comes next, a [`Scheduler`](crate::schedule::Scheduler) decides. Devices multiply no projections
//! meanwhile, as one piece of their work is under way at a time. A pass that is to yield, or has lost its device, goes on
//! to the end of the layers that have begun; then it is as one that ran layer by layer.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;

use super::{Decoder, Hooks, lap};
use crate::error::Error;
use crate::ffn::{BankWork, Bias, Ffn, LayerInput, Rows};
use crate::input::Input;
use crate::lanes::DeviceLane;
use crate::mixer::LayerPass;
use crate::norm::{add_output, rows_or_copy};
use crate::part_room::{PartRoom, STACK, can_run_in_parts};
use crate::pass::Pass;
use crate::rope::Ropes;
use crate::schedule::{CPU, DEVICE, Execution, InParts, PartGraph, PartPlace};
use crate::scratch::Scratch;
use crate::state::Span;
use crate::trace;
use crate::weights::LayerWeights;

/// A part whose FFN is to be computed.
struct PartJob<'x> {
    operation: usize,
    place: PartPlace,
    /// Its first row in the pass, and its residual stream.
    first: usize,
    x: &'x mut [f32],
}

/// A part with its FFN's output in its residual stream.
struct PartDone<'x> {
    job: PartJob<'x>,
    outcome: Result<(), Error>,
    /// A device is lost.
    lost: bool,
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
    fn run<'x>(mut self, jobs: &Receiver<PartJob<'x>>, done: &SyncSender<PartDone<'x>>) {
        Tracer::leave_lane();
        for mut job in jobs {
            let outcome = self.feed(&mut job);
            let lost = self.ffn.lanes.iter().any(DeviceLane::has_failed);
            if done.send(PartDone { job, outcome, lost }).is_err() {
                return;
            }
        }
    }

    /// Adds a part's FFN to its residual stream.
    fn feed(&mut self, job: &mut PartJob<'_>) -> Result<(), Error> {
        let (on, c, room) = (self.on, self.config, &mut *self.room);
        let (layer, width) = (&self.layers[job.place.layer], job.x.len());
        let rows = width / c.d_model as usize;
        rows_or_copy(layer.before_ffn(), on.cpu, job.x, &mut room.normed);
        room.input.set_pruned(layer.pruned);
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
            ..LayerInput::alone(place, &dense, input, job.x)
        };
        self.ffn.layer(on, &at, &mut room.out)?;
        let (out, scale) = (&mut room.out[..width], c.form.residual_scale);
        add_output(on.cpu, layer.ffn_post_norm.as_ref(), scale, out, job.x);
        end_layer(layer, job.x);
        Ok(())
    }
}

/// The step after a layer's last term: a factor.
fn end_layer(layer: &LayerWeights, x: &mut [f32]) {
    if layer.scale != 1.0 {
        x.iter_mut().for_each(|x| *x *= layer.scale);
    }
}

/// What the calling thread mixes parts with.
struct PartMixers<'a, 's, 't> {
    on: &'a Compute,
    config: &'a ModelConfig,
    layers: &'a [LayerWeights],
    rope: &'a mut Ropes,
    scratch: &'a mut Scratch,
    span: &'a mut Span<'t>,
    tracer: &'s Tracer,
    /// Rows of a part.
    rows: usize,
}

impl PartMixers<'_, '_, '_> {
    /// Adds a layer's mixer to a part's residual stream.
    fn mix(&mut self, PartPlace { layer, part }: PartPlace, x: &mut [f32]) {
        let (on, c, s) = (self.on, self.config, &mut *self.scratch);
        let (number, layer, first) = (layer, &self.layers[layer], part * self.rows);
        let rows = first..first + x.len() / c.d_model as usize;
        self.tracer.section(&trace::ATTENTION, [number as u64, 0]);
        rows_or_copy(layer.attn_norm.as_ref(), on.cpu, x, &mut s.normed);
        s.input.set_pruned(layer.pruned);
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

/// A pass in parts that is under way.
struct PassInParts<'a, 'x> {
    execution: Execution<'a>,
    graph: &'a PartGraph,
    jobs: SyncSender<PartJob<'x>>,
    done: Receiver<PartDone<'x>>,
    /// Residual stream of each part that the FFN thread does not have.
    x: Vec<Option<&'x mut [f32]>>,
    /// Rows of a part.
    rows: usize,
    /// The FFN thread is at work.
    busy: bool,
    /// The layer at which it ends; no operation of that layer has begun.
    until: usize,
    layers: usize,
    /// Times of mixers, and of waits for FFNs.
    times: [Duration; 2],
}

impl PassInParts<'_, '_> {
    /// Runs until all parts have come to the same layer.
    fn run(
        mut self,
        mixers: &mut PartMixers<'_, '_, '_>,
        yields: &dyn Fn() -> bool,
    ) -> Result<Reached, Error> {
        let (mut yielding, mut last) = (false, Instant::now());
        loop {
            self.take(false)?;
            self.begin_ffn();
            if let Some(operation) = self.execution.begin(CPU) {
                let place = self.graph.places[operation];
                if let Some(x) = &mut self.x[place.part] {
                    mixers.mix(place, x);
                }
                self.execution.end(operation);
                lap(&mut self.times[0], &mut last);
            } else if self.busy {
                self.take(true)?;
                lap(&mut self.times[1], &mut last);
            } else {
                return Ok(Reached {
                    yielding,
                    layer: self.until,
                    times: self.times,
                });
            }
            if !yielding && self.has_more() && yields() {
                yielding = self.stop();
            }
        }
    }

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

    /// Gives the FFN thread a part, if it has none and one is ready.
    fn begin_ffn(&mut self) {
        if self.busy {
            return;
        }
        let Some(operation) = self.execution.begin(DEVICE) else {
            return;
        };
        let place = self.graph.places[operation];
        if let Some(x) = self.x[place.part].take() {
            let first = place.part * self.rows;
            let job = PartJob {
                operation,
                place,
                first,
                x,
            };
            // A thread that is gone has panicked, as this one will when they join.
            self.busy = self.jobs.send(job).is_ok();
        }
    }

    /// Takes the part back whose FFN is complete; with `waits`, once it is.
    fn take(&mut self, waits: bool) -> Result<(), Error> {
        let done = match waits {
            true => self.done.recv().ok(),
            false => self.done.try_recv().ok(),
        };
        let Some(PartDone { job, outcome, lost }) = done else {
            self.busy &= !waits;
            return Ok(());
        };
        self.busy = false;
        outcome?;
        self.x[job.place.part] = Some(job.x);
        self.execution.end(job.operation);
        if lost {
            self.stop();
        }
        Ok(())
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
        spans.len() == 1 && !observed && self.takes_parts(pass.rows)
    }

    /// Whether prompts' passes of `rows` rows run in parts.
    pub fn takes_parts(&self, rows: usize) -> bool {
        let pays = |how: &InParts| how.pays(self.part_room.products);
        can_run_in_parts(&self.config)
            && !self.part_room.out.is_empty()
            && self.ffn.parts(rows).is_some_and(pays)
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
        let x: Vec<Option<&mut [f32]>> = x.map(Some).collect();
        let has = |layer: usize| [c.has_mixer(layer as u32), c.has_ffn(layer as u32)];
        let seconds = how.times(pass.rows);
        let graph = PartGraph::new(from, (from..layers.len()).map(has), &seconds);
        let mut scheduler = graph.scheduler(self.part_room.orders.of(&graph, &seconds));
        let tracer = ffn.store.tracer.clone();
        let mut mixers = PartMixers {
            on: &self.on,
            config: c,
            layers,
            rope: &mut self.rope,
            scratch: &mut self.scratch,
            span,
            tracer: &tracer,
            rows,
        };
        set_clusters_only(ffn, true);
        let on_thread = FfnThread {
            on: &self.on,
            config: c,
            layers,
            ffn: &mut *ffn,
            room: &mut self.part_room,
        };
        let outcome = thread::scope(|scope| {
            let (jobs, taken) = sync_channel(1);
            let (send, done) = sync_channel(1);
            let thread = Builder::new().name("ember-ffn".into()).stack_size(STACK);
            let work = move || on_thread.run(&taken, &send);
            let Ok(_) = thread.spawn_scoped(scope, work) else {
                return Ok(None);
            };
            let parts = PassInParts {
                execution: Execution::new(&graph.operations, &mut *scheduler),
                graph: &graph,
                jobs,
                done,
                x,
                rows,
                busy: false,
                until: layers.len(),
                layers: layers.len(),
                times: [Duration::ZERO; 2],
            };
            // The thread ends with it, as no more parts can come.
            parts.run(&mut mixers, yields).map(Some)
        });
        set_clusters_only(ffn, false);
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

/// Leaves products to the CPU, or not.
fn set_clusters_only(ffn: &Ffn, only: bool) {
    let lanes = ffn.lanes.iter();
    lanes.for_each(|lane| lane.set_clusters_only(only));
}
