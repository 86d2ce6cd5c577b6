//! Tracing: spans of every thread and of the device.
//!
//! A [`Tracer`] is an optional handle; without a trace it costs one branch. Each compute thread,
//! the I/O thread and the device has a lane, a preallocated ring of its latest spans.

use std::time::Instant;

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A kind of work.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// Meaning of a span's two numbers; empty if unused.
    pub keys: [&'static str; 2],
}

/// A device command, from submission to completion.
pub static READ: Kind = Kind {
    name: "read",
    keys: ["offset", "bytes"],
};

/// The I/O thread queues new reads.
pub static QUEUE: Kind = Kind {
    name: "queue",
    keys: ["reads", ""],
};

/// The I/O thread turns reads into commands.
pub static START: Kind = Kind {
    name: "start",
    keys: ["commands", ""],
};

/// The I/O thread processes completions and delivers them.
pub static DELIVER: Kind = Kind {
    name: "deliver",
    keys: ["reads", ""],
};

/// A time interval of a lane.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// What was done.
    pub kind: &'static Kind,
    /// Its two numbers.
    pub values: [u64; 2],
    /// Start, in nanoseconds since the trace began.
    pub start: u64,
    /// End, likewise.
    pub end: u64,
}

/// Snapshot of a lane.
#[derive(Debug, Clone)]
pub struct Lane {
    /// Its owner.
    pub name: String,
    /// Oldest first, by end time.
    pub spans: Vec<Span>,
    /// Spans overwritten by later ones.
    pub lost: u64,
}

#[derive(Debug, Default)]
struct Ring {
    spans: Vec<Span>,
    /// Index of the oldest, once the ring is full.
    oldest: usize,
    lost: u64,
}

/// Lanes in addition to those of the compute threads and of accelerators.
pub const OTHERS: usize = 2;

/// The recorder.
pub struct Trace {
    epoch: Instant,
    /// Compute threads. The lanes of the I/O thread, the device and accelerators follow theirs.
    threads: usize,
    /// Spans per lane.
    room: usize,
    lanes: Vec<Mutex<Ring>>,
    /// Current section of the compute threads, see [`Trace::around`].
    section: Mutex<(&'static Kind, [u64; 2])>,
}

/// Kind before the first section is named.
static UNNAMED: Kind = Kind {
    name: "work",
    keys: ["", ""],
};

thread_local! {
    /// Lane of this thread, while it is in a section.
    static LANE: Cell<usize> = const { Cell::new(0) };
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("threads", &self.threads)
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

impl Trace {
    /// A trace of `threads` compute threads, the I/O thread, the device and so many accelerators, with
    /// `room` spans each.
    #[must_use]
    pub fn new(threads: usize, accelerators: usize, room: usize) -> Self {
        let ring = || Ring {
            spans: Vec::with_capacity(room),
            ..Ring::default()
        };
        Self {
            epoch: Instant::now(),
            threads,
            room,
            lanes: (0..threads + OTHERS + accelerators)
                .map(|_| Mutex::new(ring()))
                .collect(),
            section: Mutex::new((&UNNAMED, [0; 2])),
        }
    }

    /// Bytes it may hold.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.lanes.len() * self.room * size_of::<Span>()) as u64
    }

    /// Lane of the I/O thread.
    #[must_use]
    pub fn io_lane(&self) -> usize {
        self.threads
    }

    /// Lane of the device, the only one whose spans overlap.
    #[must_use]
    pub fn device_lane(&self) -> usize {
        self.threads + 1
    }

    /// Lane of the first accelerator that computes in parallel with the threads; others follow.
    #[must_use]
    pub fn accelerator_lane(&self) -> usize {
        self.threads + OTHERS
    }

    /// Nanoseconds since the trace began.
    #[must_use]
    pub fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn ring(&self, lane: usize) -> Option<MutexGuard<'_, Ring>> {
        let lane = self.lanes.get(lane)?;
        Some(lane.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records a span of a lane from `start` until now.
    pub fn record(&self, lane: usize, kind: &'static Kind, values: [u64; 2], start: u64) {
        let end = self.now();
        self.keep(
            lane,
            Span {
                kind,
                values,
                start,
                end,
            },
        );
    }

    fn keep(&self, lane: usize, span: Span) {
        let Some(mut ring) = self.ring(lane) else {
            return;
        };
        if ring.spans.len() < self.room {
            ring.spans.push(span);
        } else {
            let oldest = ring.oldest;
            ring.lost += 1;
            if let Some(place) = ring.spans.get_mut(oldest) {
                *place = span;
                ring.oldest = (oldest + 1) % self.room;
            }
        }
    }

    /// Runs a compute thread's part of a section, and records it under the kind last set by
    /// [`Tracer::section`].
    pub fn around(&self, thread: usize, part: &dyn Fn()) {
        LANE.set(thread);
        let start = self.now();
        part();
        let (kind, values) = *self.section.lock().unwrap_or_else(PoisonError::into_inner);
        self.record(thread, kind, values, start);
    }

    /// Discards all spans.
    pub fn clear(&self) {
        for lane in 0..self.lanes.len() {
            if let Some(mut ring) = self.ring(lane) {
                ring.spans.clear();
                (ring.oldest, ring.lost) = (0, 0);
            }
        }
    }

    /// A copy of all lanes: compute threads, I/O thread, device, and accelerators that did anything.
    #[must_use]
    pub fn lanes(&self) -> Vec<Lane> {
        let name = |lane| match lane {
            _ if lane == self.io_lane() => "i/o thread".into(),
            _ if lane == self.device_lane() => "device".into(),
            _ if lane == self.accelerator_lane() => "accelerator".into(),
            _ if lane > self.accelerator_lane() => {
                format!("accelerator {}", lane - self.accelerator_lane() + 1)
            }
            thread => format!("compute {thread}"),
        };
        let copy = |lane| {
            let ring = self.ring(lane)?;
            if lane >= self.accelerator_lane() && ring.spans.is_empty() {
                return None;
            }
            let (late, early) = ring.spans.split_at(ring.oldest);
            Some(Lane {
                name: name(lane),
                spans: [early, late].concat(),
                lost: ring.lost,
            })
        };
        (0..self.lanes.len()).filter_map(copy).collect()
    }
}

/// An optional trace.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<Arc<Trace>>);

impl From<Arc<Trace>> for Tracer {
    fn from(trace: Arc<Trace>) -> Self {
        Self(Some(trace))
    }
}

/// Records a span when it is dropped.
#[must_use]
pub struct Open<'a> {
    trace: &'a Trace,
    kind: &'static Kind,
    values: [u64; 2],
    start: u64,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let lane = LANE.get();
        self.trace.record(lane, self.kind, self.values, self.start);
    }
}

impl Tracer {
    /// The trace, if any.
    #[must_use]
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.0.as_ref()
    }

    /// Nanoseconds since the trace began; 0 without a trace.
    #[inline]
    #[must_use]
    pub fn now(&self) -> u64 {
        self.0.as_ref().map_or(0, |trace| trace.now())
    }

    /// Begins a span of the calling compute thread; dropping the result ends it.
    #[inline]
    pub fn open(&self, kind: &'static Kind, values: [u64; 2]) -> Option<Open<'_>> {
        let trace = self.0.as_deref()?;
        Some(Open {
            trace,
            kind,
            values,
            start: trace.now(),
        })
    }

    /// Sets the section that the compute threads run from now on.
    #[inline]
    pub fn section(&self, kind: &'static Kind, values: [u64; 2]) {
        if let Some(trace) = &self.0 {
            *(trace.section.lock()).unwrap_or_else(PoisonError::into_inner) = (kind, values);
        }
    }

    /// Records a span of the I/O thread from `start` until now.
    #[inline]
    pub(crate) fn io(&self, kind: &'static Kind, value: usize, start: u64) {
        if let Some(trace) = &self.0 {
            trace.record(trace.io_lane(), kind, [value as u64, 0], start);
        }
    }

    /// Records an accelerator's work of `nanoseconds` from `start` on, or until now if it has no clock.
    #[inline]
    pub fn accelerator(
        &self,
        number: usize,
        kind: &'static Kind,
        values: [u64; 2],
        start: u64,
        nanoseconds: u64,
    ) {
        if let Some(trace) = &self.0 {
            let end = match nanoseconds {
                0 => trace.now(),
                _ => start + nanoseconds,
            };
            let span = Span {
                kind,
                values,
                start,
                end,
            };
            trace.keep(trace.accelerator_lane() + number, span);
        }
    }

    /// Records a device command from `start` until now.
    #[inline]
    pub(crate) fn device(&self, offset: u64, bytes: u64, start: u64) {
        if let Some(trace) = &self.0 {
            trace.record(trace.device_lane(), &READ, [offset, bytes], start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static A: Kind = Kind {
        name: "a",
        keys: ["n", ""],
    };

    fn numbers(lane: &Lane) -> Vec<u64> {
        lane.spans.iter().map(|span| span.values[0]).collect()
    }

    #[test]
    fn a_lane_keeps_its_last_spans() {
        let trace = Trace::new(1, 0, 3);
        for n in 0..5 {
            trace.record(0, &A, [n, 0], trace.now());
        }
        trace.record(trace.device_lane(), &A, [7, 0], 0);
        trace.record(99, &A, [8, 0], 0);
        let lanes = trace.lanes();
        let names: Vec<_> = lanes.iter().map(|lane| lane.name.as_str()).collect();
        assert_eq!(names, ["compute 0", "i/o thread", "device"]);
        assert_eq!((numbers(&lanes[0]), lanes[0].lost), (vec![2, 3, 4], 2));
        assert_eq!((numbers(&lanes[2]), lanes[2].lost), (vec![7], 0));
        assert!(lanes[0].spans.iter().all(|span| span.start <= span.end));
        trace.clear();
        assert!(
            trace
                .lanes()
                .iter()
                .all(|l| l.spans.is_empty() && l.lost == 0)
        );
    }

    #[test]
    fn spans_go_to_the_lane_of_their_thread_inside_its_section() {
        let trace = Arc::new(Trace::new(2, 2, 8));
        let tracer = Tracer::from(Arc::clone(&trace));
        tracer.section(&READ, [5, 6]);
        trace.around(1, &|| drop(tracer.open(&A, [1, 0])));
        let lanes = trace.lanes();
        let [inner, outer] = &lanes[1].spans[..] else {
            panic!("{lanes:?}");
        };
        assert_eq!((inner.kind, outer.kind, outer.values), (&A, &READ, [5, 6]));
        assert!(outer.start <= inner.start && inner.end <= outer.end);
        assert!(lanes[0].spans.is_empty());
        // Only accelerators that did anything have lanes.
        assert_eq!(lanes.len(), 4);
        tracer.accelerator(1, &A, [0; 2], 0, 1);
        let lanes = trace.lanes();
        assert_eq!((lanes.len(), &*lanes[4].name), (5, "accelerator 2"));
    }

    #[test]
    fn nothing_is_recorded_without_a_trace() {
        let tracer = Tracer::default();
        assert!(tracer.open(&A, [0; 2]).is_none() && tracer.now() == 0);
        tracer.section(&A, [0; 2]);
        tracer.io(&QUEUE, 0, 0);
        tracer.device(0, 0, 0);
    }
}
