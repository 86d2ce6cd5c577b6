//! A memory-mapped container within the budget: which pages may stay resident.

use std::collections::VecDeque;

use emberflow_storage::cache::Key;
use emberflow_storage::container::{MappedBundles, TensorRows};

use super::layout::Layout;
use crate::error::Error;
use crate::memory::MemoryPlan;

/// Bytes of pages around the used ones: a fault also maps the pages around it, including those of the
/// program if the model is inside it. Without this margin, peaks were up to 0.13 MiB above the plan with
/// three processes running at the same time.
const AROUND: u64 = 1 << 20;

/// A mapped container, and the banks whose pages may be resident.
pub(super) struct Mapping {
    bundles: MappedBundles,
    /// (bank, use number), oldest first. Only the last use of a bank counts.
    uses: VecDeque<(u32, u64)>,
    /// By bank: number of its last use; 0 if its pages were released.
    last: Vec<u64>,
    /// Number of the next use.
    next: u64,
    /// Bytes that may be resident; upper bound of those that are (`held`).
    limit: u64,
    held: u64,
}

impl Mapping {
    pub fn new(layout: &Layout, plan: &MemoryPlan) -> Result<Self, Error> {
        let mut mapping = Self {
            bundles: layout.map()?,
            uses: VecDeque::with_capacity(Self::uses_for(layout)),
            last: vec![0; layout.banks()],
            next: 1,
            limit: 0,
            held: 0,
        };
        mapping.set_plan(layout, plan)?;
        Ok(mapping)
    }

    fn uses_for(layout: &Layout) -> usize {
        4 * layout.banks()
    }

    /// Bytes of the pages that one part of a layer needs, of those around them, and bookkeeping: the
    /// minimum for a mapped container.
    pub fn least_bytes(layout: &Layout) -> u64 {
        let layer_bytes = |layer| {
            let (mut clusters, mut bytes) = (0, Vec::new());
            for bank in layout.banks_of(layer) {
                bytes.push(resident(layout, bank));
                clusters = clusters.max(layout.clusters(bank));
            }
            // Largest first: a part has as many banks as one row visits.
            bytes.sort_unstable_by(|a, b| b.cmp(a));
            let banks = layout.clusters_at_once().div_ceil(clusters.max(1)).max(1);
            bytes.into_iter().take(banks).sum::<u64>()
        };
        let pages = (0..layout.layers()).map(layer_bytes).max().unwrap_or(0);
        AROUND
            + pages
            + (Self::uses_for(layout) * size_of::<(u32, u64)>() + 8 * layout.banks()) as u64
    }

    /// Adds the memory left over by the plan to the minimum.
    pub fn set_plan(&mut self, layout: &Layout, plan: &MemoryPlan) -> Result<(), Error> {
        self.limit = plan.ledger.left() + Self::least_bytes(layout) - AROUND;
        self.shrink(layout, self.next)
    }

    /// Begins a part of a layer that uses `banks`. Releases the least recently used banks until
    /// these fit.
    pub fn begin(
        &mut self,
        layout: &Layout,
        banks: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        self.bundles.still_whole()?;
        let first = self.next;
        for bank in banks {
            if self.last[bank as usize] == 0 {
                self.held += resident(layout, bank);
            }
            self.last[bank as usize] = self.next;
            if self.uses.len() == self.uses.capacity() {
                let last = &self.last;
                self.uses
                    .retain(|(bank, use_)| last[*bank as usize] == *use_);
            }
            self.uses.push_back((bank, self.next));
            self.next += 1;
        }
        self.shrink(layout, first)
    }

    /// The bundle of a neuron, verified on first use.
    pub fn bundle(&self, layout: &Layout, key: Key) -> Result<&[u8], Error> {
        let bank = key.bank as usize;
        Ok((self.bundles).bundle(&layout.container, bank, key.neuron)?)
    }

    /// Passes the `wanted` rows of a table to `then`, and releases their pages.
    pub fn fetch(
        &self,
        layout: &Layout,
        rows: &TensorRows,
        wanted: impl Iterator<Item = u32>,
        then: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Error> {
        self.bundles.still_whole()?;
        for (number, row) in wanted.enumerate() {
            let row = row as usize;
            then(number, self.bundles.row(&layout.container, rows, row)?);
            self.bundles.release_row(rows, row)?;
        }
        Ok(())
    }

    /// Releases banks last used before `until`, oldest first, down to the limit.
    fn shrink(&mut self, layout: &Layout, until: u64) -> Result<(), Error> {
        while self.held > self.limit {
            let Some(&(bank, use_)) = self.uses.front().filter(|(_, use_)| *use_ < until) else {
                break;
            };
            self.uses.pop_front();
            if self.last[bank as usize] == use_ {
                self.last[bank as usize] = 0;
                self.held -= resident(layout, bank);
                let neurons = layout.neurons(bank) as u32;
                (self.bundles).release(&layout.container, bank as usize, neurons)?;
            }
        }
        Ok(())
    }
}

fn resident(layout: &Layout, bank: u32) -> u64 {
    MappedBundles::resident(&layout.container, layout.neurons(bank) as u32)
}
