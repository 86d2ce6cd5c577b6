//! Fills memory when a plan takes effect, with large sequential reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Builder;

use emberflow_storage::arena::ArenaPages;
use emberflow_storage::io::Priority;

use super::{NeuronStore, Upload};
use crate::bundle::NeuronRows;
use crate::error::Error;
use crate::store::bytes::check_cluster;
use crate::store::content::SlotContent;
use crate::store::layout::Layout;
use crate::store::reads::Tag;
use crate::store::residency::Resident;

/// Bytes of memory per page-clearing thread: less is cleared faster than a thread starts.
const BYTES_PER_THREAD: usize = 64 << 20;

/// Stack size of such a thread in bytes.
const STACK: usize = 64 << 10;

/// Runs `work` while up to `threads` threads make `memory` resident, in order.
fn populating<T>(memory: &[ArenaPages], threads: usize, work: impl FnOnce() -> T) -> T {
    let bytes: usize = memory.iter().map(ArenaPages::len).sum();
    let (next, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let clear = || {
        let part = || memory.get(next.fetch_add(1, Ordering::Relaxed));
        let goes_on = |_: &&ArenaPages| !done.load(Ordering::Relaxed);
        let mut parts = std::iter::from_fn(part).take_while(goes_on);
        let _ = parts.all(ArenaPages::populate);
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(bytes / BYTES_PER_THREAD) {
            // Without threads, pages are cleared on first use.
            let thread = Builder::new().name("ember-pages".into()).stack_size(STACK);
            let _ = thread.spawn_scoped(scope, clear);
        }
        let outcome = work();
        done.store(true, Ordering::Relaxed);
        outcome
    })
}

/// [Gate, Up, Down] rows of each neuron in a whole cluster.
fn rows<'a>(
    layout: &'a Layout,
    content: SlotContent,
    gates: &'a Resident,
    [bank, cluster]: [u32; 2],
    buffer: &'a [u8],
) -> impl Iterator<Item = NeuronRows<'a>> {
    let (neurons, format) = (layout.cluster_neurons(bank, cluster), layout.format);
    let bundles = &buffer[layout.shift(bank, neurons.start, 0)..];
    let bundles = neurons.zip(bundles.chunks_exact(content.stride));
    bundles.map(move |(neuron, bundle)| {
        let scales = gates.scales(bank, neuron);
        let (up, down) = format.split_rest(&bundle[content.gate_span..]);
        NeuronRows {
            gate: format.gate(bundle, scales),
            up: (!format.ungated).then(|| format.up(up, scales)),
            down: format.down(down, scales),
        }
    })
}

impl NeuronStore {
    /// Reads the banks from `first` on, cluster by cluster: all resident Gate rows, the hot
    /// clusters, then the next neurons by temperature until the cold region is full.
    ///
    /// Other threads make the memory resident at the same time, in the order in which it is filled:
    /// clearing its pages takes longer than reading their contents.
    pub(super) fn fill(&mut self, first: usize, upload: &mut Upload<'_>) -> Result<(), Error> {
        let memory = self.residency.memory_to_fill(first);
        let (threads, layout) = (self.threads, Arc::clone(&self.layout));
        let cold_per_bank = self.residency.cold_per_bank();
        let clusters = self.residency.clusters_to_fill(first);
        let mut next = clusters.into_iter().peekable();
        populating(&memory, threads, || {
            while next.peek().is_some() || self.reads.outstanding() > 0 {
                while let Some(&(bank, cluster)) = next.peek() {
                    if !self.reads.cluster(bank, cluster, Priority::Now)? {
                        break;
                    }
                    next.next();
                }
                self.reads.submit()?;
                self.reads.wait(0)?;
                while let Some(arrival) = self.reads.next() {
                    arrival.result?;
                    let buffer = arrival.slot.as_slice();
                    if let Tag::Cluster { bank, cluster } = arrival.tag {
                        let content = *self.residency.banks.content(bank);
                        check_cluster(&layout, &content, [bank, cluster], buffer)?;
                        self.residency.fill_gates(bank, cluster, buffer);
                        if (cluster as usize) < self.outside.holds(bank) {
                            let gates = self.residency.gates();
                            let key = [bank, cluster];
                            upload(key, &mut rows(&layout, content, gates, key, buffer))?;
                        } else {
                            self.residency.fill(bank, cluster, cold_per_bank, buffer);
                        }
                    }
                    self.reads.put(arrival.slot);
                }
            }
            Ok(())
        })
    }
}
