//! The I/O thread. It owns the engine, sleeps when idle, and never blocks on the threads that wait
//! for it.

use std::time::Instant;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Waker;
use super::{Completion, DioAlign, FileSource, IoChoice, IoEngine, IoError, Read, sys};
use crate::limits::Limits;
use crate::sync::{
    AtomicBool, AtomicUsize, Builder, Condvar, JoinHandle, Mutex, MutexGuard, Parker, Unparker,
    fence,
};
use crate::sync::{Receiver, Sender, TryRecvError, bounded};
use crate::trace::{QUEUE, Tracer};

/// Scheduler time slice of the thread, the shortest the kernel grants: its work comes in short
/// pieces, and a compute thread waits for each.
const TIME_SLICE_NS: u64 = 100_000;

/// Options of the I/O thread.
#[derive(Debug, Clone, Default)]
pub struct IoOptions {
    /// Core to pin the thread to.
    pub core: Option<usize>,
    /// Bounds; a device profile tunes `limits.depth` and `limits.lanes`.
    pub limits: Limits,
    /// Records what the thread and the device do.
    pub trace: Tracer,
}

/// Counters of an I/O thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStats {
    /// Reads that delivered all their bytes.
    pub reads: u64,
    /// Bytes in those reads.
    pub bytes: u64,
    /// Commands submitted to the device: fewer than reads after merging, more after splitting or
    /// resuming.
    pub commands: u64,
    /// Commands through the page cache.
    pub buffered: u64,
    /// Unwanted bytes read between two merged reads.
    pub gap_bytes: u64,
    /// Commands retried: interrupted ones, and reads of a failed merged command.
    pub retries: u64,
    /// Batches submitted.
    pub batches: u64,
    /// Time with work queued or in flight, in nanoseconds.
    pub busy_ns: u64,
    /// CPU time of the I/O thread, in nanoseconds, without the lanes of the `pread` device.
    pub cpu_ns: u64,
    /// Time callers spent blocked in [`IoThread::wait`], in nanoseconds.
    pub wait_ns: u64,
}

#[derive(Default)]
struct SharedStats {
    reads: AtomicU64,
    bytes: AtomicU64,
    commands: AtomicU64,
    buffered: AtomicU64,
    gap_bytes: AtomicU64,
    retries: AtomicU64,
    batches: AtomicU64,
    busy_ns: AtomicU64,
    cpu_ns: AtomicU64,
    wait_ns: AtomicU64,
}

enum Message {
    Batch(Vec<Read>),
    CancelPrefetches,
}

/// Completions for the callers.
#[derive(Default)]
struct Mailbox {
    done: Vec<Completion>,
    /// Completions a waiter needs before it is woken; `None` if no one waits. One wake-up per read
    /// would cost more than some of the reads.
    wanted: Option<usize>,
    first_error: Option<Arc<IoError>>,
    /// The thread has ended; nothing more will arrive.
    ended: bool,
}

#[derive(Default)]
struct Shared {
    mailbox: Mutex<Mailbox>,
    news: Condvar,
    stats: SharedStats,
    /// The thread may be blocked inside the device, where the channel cannot wake it.
    in_device: AtomicBool,
}

impl Shared {
    /// The mailbox has no invariant that a panic could break, so ignore poison.
    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Handle of the I/O thread. Several threads may use it. Completions go to whichever thread waits,
/// so share one consumer or tell reads apart by tag.
///
/// Dropping it discards reads not yet started, waits for those in flight, and joins.
pub struct IoThread {
    requests: Option<Sender<Message>>,
    /// Emptied request batches, returned for reuse.
    spare: Receiver<Vec<Read>>,
    shared: Arc<Shared>,
    waker: Waker,
    unparker: Unparker,
    outstanding: AtomicUsize,
    thread: Option<JoinHandle<()>>,
    engine: &'static str,
    dio: Option<DioAlign>,
    label: Arc<str>,
}

impl IoThread {
    /// Starts the thread on `source`.
    ///
    /// # Errors
    /// [`IoError::Engine`] if the thread cannot start or the requested device does not work.
    pub fn spawn(
        source: FileSource,
        choice: IoChoice,
        options: IoOptions,
    ) -> Result<Self, IoError> {
        let label = Arc::clone(source.label());
        let dio = source.dio_align();
        let (limits, trace) = (options.limits, options.trace.clone());
        Self::start(label, dio, options, move || {
            Ok(IoEngine::open(source, choice, limits)?.traced(trace))
        })
    }

    /// Starts the thread on the engine that `open` creates there.
    pub(crate) fn start(
        label: Arc<str>,
        dio: Option<DioAlign>,
        options: IoOptions,
        open: impl FnOnce() -> Result<IoEngine, IoError> + Send + 'static,
    ) -> Result<Self, IoError> {
        let limits = options.limits;
        let (requests, inbox) = bounded(limits.batches.max(1));
        // Enough for a full channel, one in use by the thread and one by the caller. Allocated in
        // advance and reused, so that steady state does not allocate.
        let carriers = limits.batches.max(1) + 2;
        let (give_back, spare) = bounded(carriers);
        for _ in 0..carriers {
            let room = limits.queued / limits.batches.max(1);
            drop(give_back.try_send(Vec::with_capacity(room)));
        }
        let (ready, started) = bounded(1);
        let shared = Arc::new(Shared::default());
        shared.lock().done.reserve(limits.queued);
        let theirs = Arc::clone(&shared);
        let parker = Parker::new();
        let unparker = parker.unparker().clone();
        let thread = Builder::new()
            .name("ember-io".into())
            .spawn(move || {
                // The device first: its helper threads must not inherit the pinning.
                let engine = match open() {
                    Ok(engine) => engine,
                    Err(e) => return drop(ready.send(Err(e))),
                };
                pin(options.core);
                sys::request_time_slice(TIME_SLICE_NS);
                let hello = Ok((engine.name(), engine.waker()));
                if ready.send(hello).is_ok() {
                    let ender = Ender(&theirs);
                    Worker::new(engine, &inbox, parker, &give_back, &theirs).run();
                    drop(ender);
                }
            })
            .map_err(|e| IoError::Engine {
                engine: "thread",
                reason: e.to_string(),
            })?;
        let (engine, waker) = started.recv().unwrap_or_else(|_| {
            Err(IoError::Engine {
                engine: "thread",
                reason: "ended while starting".into(),
            })
        })?;
        Ok(Self {
            requests: Some(requests),
            spare,
            shared,
            waker,
            unparker,
            outstanding: AtomicUsize::new(0),
            thread: Some(thread),
            engine,
            dio,
            label,
        })
    }

    /// Bytes a thread with these limits holds, not counting the slots in its reads, for the budget.
    #[must_use]
    pub fn overhead(limits: Limits) -> u64 {
        // A reading thread touches a few pages of its stack, and the kernel uses some for it.
        const PER_THREAD: u64 = 32 << 10;
        let carriers = limits.queued * size_of::<Read>() * 2;
        let completions = limits.queued * size_of::<Completion>() * 2;
        IoEngine::overhead(limits)
            + (carriers + completions) as u64
            + (u64::from(limits.lanes) + 1) * PER_THREAD
    }

    /// Name of the device in use.
    #[must_use]
    pub fn engine(&self) -> &'static str {
        self.engine
    }

    /// Alignments for direct I/O on the source, or `None` if reads are buffered.
    #[must_use]
    pub fn dio_align(&self) -> Option<DioAlign> {
        self.dio
    }

    /// Name of the file in messages.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Reads submitted whose completions are not yet taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Submits all reads in `batch`, which keeps its capacity. Blocks while too many batches are
    /// queued.
    ///
    /// # Errors
    /// [`IoError::Engine`] if the thread has ended; the reads and their slots are then lost. A
    /// failed read is no error here: later reads complete as [`IoError::Stopped`].
    pub fn submit(&self, batch: &mut Vec<Read>) -> Result<(), IoError> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut carrier = self.spare.try_recv().unwrap_or_default();
        // Sized for the caller's largest batch, so later ones do not allocate.
        carrier.reserve(batch.capacity());
        carrier.append(batch);
        let n = carrier.len();
        self.outstanding.fetch_add(n, Ordering::Relaxed);
        let sent = self.send(Message::Batch(carrier));
        if sent.is_err() {
            self.outstanding.fetch_sub(n, Ordering::Relaxed);
        }
        self.shared.stats.batches.fetch_add(1, Ordering::Relaxed);
        sent
    }

    /// Cancels prefetches not yet started; they complete as [`IoError::Cancelled`].
    ///
    /// # Errors
    /// [`IoError::Engine`] if the thread has ended.
    pub fn cancel_prefetches(&self) -> Result<(), IoError> {
        self.send(Message::CancelPrefetches)
    }

    fn send(&self, message: Message) -> Result<(), IoError> {
        let sent = self.requests.as_ref().map(|r| r.send(message));
        if !matches!(sent, Some(Ok(()))) {
            return Err(self.ended());
        }
        // Pairs with the fence in `Worker::run`: either the thread sees the message before it
        // blocks in the device, or we see that it is about to block.
        fence(Ordering::SeqCst);
        if self.shared.in_device.load(Ordering::Relaxed) {
            (self.waker)();
        }
        // Always: it may have left the device since, after finding the channel empty.
        self.unparker.unpark();
        Ok(())
    }

    /// Appends completions to `out`. Blocks until it has appended at least `min` or nothing is
    /// outstanding. Returns how many it appended.
    ///
    /// # Errors
    /// [`IoError::Engine`] if the thread has ended with reads outstanding.
    pub fn wait(&self, out: &mut Vec<Completion>, min: usize) -> Result<usize, IoError> {
        let mut taken = 0;
        let mut blocked: Option<Instant> = None;
        let mut mailbox = self.shared.lock();
        let result = loop {
            let n = mailbox.done.len();
            if n > 0 {
                out.append(&mut mailbox.done);
                taken += n;
                if self.outstanding.fetch_sub(n, Ordering::Relaxed) == n {
                    // Other waiters have nothing left to wait for.
                    mailbox.wanted = None;
                    self.shared.news.notify_all();
                }
            }
            if taken >= min || self.outstanding() == 0 {
                break Ok(taken);
            }
            if mailbox.ended {
                break Err(());
            }
            blocked.get_or_insert_with(Instant::now);
            let want = min - taken;
            mailbox.wanted = Some(mailbox.wanted.map_or(want, |other| other.min(want)));
            mailbox = self
                .shared
                .news
                .wait(mailbox)
                .unwrap_or_else(|e| e.into_inner());
        };
        drop(mailbox);
        if let Some(since) = blocked {
            let ns = since.elapsed().as_nanos() as u64;
            self.shared.stats.wait_ns.fetch_add(ns, Ordering::Relaxed);
        }
        // After unlocking, because it locks the mailbox.
        result.map_err(|()| self.ended())
    }

    /// Appends available completions without blocking. Returns how many.
    ///
    /// # Errors
    /// As [`IoThread::wait`].
    pub fn try_drain(&self, out: &mut Vec<Completion>) -> Result<usize, IoError> {
        self.wait(out, 0)
    }

    /// The first failure, which stopped the thread.
    #[must_use]
    pub fn first_error(&self) -> Option<IoError> {
        let first = self.shared.lock().first_error.clone();
        first.map(|e| (*e).clone())
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> IoStats {
        let s = &self.shared.stats;
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        IoStats {
            reads: get(&s.reads),
            bytes: get(&s.bytes),
            commands: get(&s.commands),
            buffered: get(&s.buffered),
            gap_bytes: get(&s.gap_bytes),
            retries: get(&s.retries),
            batches: get(&s.batches),
            busy_ns: get(&s.busy_ns),
            cpu_ns: get(&s.cpu_ns),
            wait_ns: get(&s.wait_ns),
        }
    }

    fn ended(&self) -> IoError {
        self.first_error().unwrap_or(IoError::Engine {
            engine: self.engine,
            reason: "the i/o thread has ended".into(),
        })
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.requests = None;
        fence(Ordering::SeqCst);
        (self.waker)();
        self.unparker.unpark();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(file = %self.label, "the i/o thread panicked");
        }
    }
}

/// Tells waiters that the thread has ended, however it ends.
struct Ender<'a>(&'a Shared);

impl Drop for Ender<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.news.notify_all();
    }
}

fn pin(core: Option<usize>) {
    let Some(id) = core else { return };
    if !core_affinity::set_for_current(core_affinity::CoreId { id }) {
        tracing::warn!(core = id, "the i/o thread could not be pinned to its core");
    }
}

/// State of the I/O thread.
struct Worker<'a> {
    engine: IoEngine,
    inbox: &'a Receiver<Message>,
    /// Where the thread sleeps when idle.
    parker: Parker,
    give_back: &'a Sender<Vec<Read>>,
    shared: &'a Shared,
    queue_limit: usize,
    out: Vec<Completion>,
    first_error: Option<Arc<IoError>>,
    busy_since: Option<Instant>,
}

impl<'a> Worker<'a> {
    fn new(
        engine: IoEngine,
        inbox: &'a Receiver<Message>,
        parker: Parker,
        give_back: &'a Sender<Vec<Read>>,
        shared: &'a Shared,
    ) -> Self {
        Self {
            queue_limit: engine.queue_limit(),
            out: Vec::with_capacity(engine.queue_limit()),
            engine,
            inbox,
            parker,
            give_back,
            shared,
            first_error: None,
            busy_since: None,
        }
    }

    fn run(mut self) {
        loop {
            if self.engine.is_idle() {
                self.publish();
                // Not a blocking `recv`: it yields the core several times before it sleeps, and a
                // thread that yielded is scheduled last when a message arrives.
                loop {
                    match self.inbox.try_recv() {
                        Ok(message) => break self.accept(message),
                        Err(TryRecvError::Empty) => self.parker.park(),
                        Err(TryRecvError::Disconnected) => return,
                    }
                }
            }
            // From here on senders wake us through the device. Check the inbox after setting the
            // flag: a message sent just before would otherwise wait for the next completion.
            self.shared.in_device.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let mut news = false;
            while self.engine.queued() < self.queue_limit {
                match self.inbox.try_recv() {
                    Ok(message) => {
                        self.accept(message);
                        news = true;
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            let result = self.engine.wait(&mut self.out, !news);
            self.shared.in_device.store(false, Ordering::Relaxed);
            if let Err(error) = result {
                self.latch(error);
                self.deliver();
                return;
            }
            self.deliver();
        }
    }

    fn accept(&mut self, message: Message) {
        self.busy_since.get_or_insert_with(Instant::now);
        match message {
            Message::Batch(mut batch) => {
                let (trace, reads) = (self.engine.trace().clone(), batch.len());
                let start = trace.now();
                self.engine.submit(&mut batch);
                trace.io(&QUEUE, reads, start);
                // If the channel is full, enough batches are in circulation.
                drop(self.give_back.try_send(batch));
                if let Some(first) = &self.first_error {
                    self.engine.purge(|| IoError::Stopped {
                        first: Arc::clone(first),
                    });
                }
            }
            Message::CancelPrefetches => self.engine.cancel_prefetches(),
        }
    }

    /// Puts completions into the mailbox. The first failure stops everything not yet started.
    fn deliver(&mut self) {
        let fatal = |c: &Completion| c.result.as_ref().err().filter(|e| e.is_fatal()).cloned();
        if let Some(error) = self.out.iter().find_map(fatal) {
            self.latch(error);
        }
        if self.out.is_empty() {
            return;
        }
        self.publish();
        let mut mailbox = self.shared.lock();
        mailbox.done.append(&mut self.out);
        let enough = |want| mailbox.done.len() >= want || self.engine.is_idle();
        if mailbox.wanted.is_some_and(enough) {
            // Waiters that need more set it again.
            mailbox.wanted = None;
            drop(mailbox);
            self.shared.news.notify_all();
        }
    }

    fn latch(&mut self, error: IoError) {
        if self.first_error.is_some() {
            return;
        }
        tracing::error!(%error, "reading stops");
        let first = Arc::new(error);
        self.shared.lock().first_error = Some(Arc::clone(&first));
        self.engine.purge(|| IoError::Stopped {
            first: Arc::clone(&first),
        });
        self.first_error = Some(first);
    }

    /// Publishes the engine's counters.
    fn publish(&mut self) {
        let (s, c) = (&self.shared.stats, self.engine.stats());
        let put = |to: &AtomicU64, n| to.store(n, Ordering::Relaxed);
        put(&s.reads, c.reads);
        put(&s.bytes, c.bytes);
        put(&s.commands, c.commands);
        put(&s.buffered, c.buffered);
        put(&s.gap_bytes, c.gap_bytes);
        put(&s.retries, c.retries);
        if self.engine.is_idle()
            && let Some(since) = self.busy_since.take()
        {
            let ns = since.elapsed().as_nanos() as u64;
            s.busy_ns.fetch_add(ns, Ordering::Relaxed);
            put(&s.cpu_ns, sys::thread_cpu_ns());
        }
    }
}
