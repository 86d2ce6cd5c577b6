//! The cold region: single neurons, evicted by frequency and recency of use (LRFU).

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{Eviction, Key, SlotCache, SlotId};

use super::hot::vectors;
use crate::error::Error;
use crate::store::bits::Bits;
use crate::store::content::SlotContent;
use crate::store::layout::Layout;

/// The cold region's cache.
pub(crate) struct Cold {
    pub cache: SlotCache,
    /// Resident neurons whose checksums are not yet verified.
    unchecked: Bits,
}

/// An arena with capacity for every neuron, at least one, and a limit of no slots.
fn arena(layout: &Layout, content: &SlotContent, memory: ArenaOptions) -> Result<Arena, Error> {
    let slots = u32::try_from(layout.total()).map_err(|_| layout.too_many())?;
    Arena::with_limit(
        0,
        slots.max(1),
        content.slot_len,
        layout.memory_align(),
        memory,
    )
    .map_err(|e| emberflow_storage::Error::from(e).into())
}

/// Effect on the eviction order when the use of a neuron ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Leave {
    /// The next token is likely to need it.
    Used,
    /// Counts as unused.
    Unused,
    /// Is evicted first.
    First,
}

impl Cold {
    /// An empty cache with capacity for every neuron; the plan limits the slots in use.
    pub fn new(
        layout: &Layout,
        content: &SlotContent,
        memory: ArenaOptions,
        eviction: Eviction,
    ) -> Result<Self, Error> {
        Ok(Self {
            cache: SlotCache::with_eviction(
                arena(layout, content, memory)?,
                layout.sizes(),
                eviction,
            )
            .ok_or_else(|| layout.too_many())?,
            unchecked: Bits::new(layout.sizes()),
        })
    }

    /// Evicts everything and continues with slots for other content. How often and how recently neurons were used
    /// remains known.
    ///
    /// # Errors
    /// No memory.
    pub fn replace_slots(
        &mut self,
        layout: &Layout,
        content: &SlotContent,
        memory: ArenaOptions,
    ) -> Result<(), Error> {
        self.cache.resize(0);
        self.unchecked = Bits::new(layout.sizes());
        self.cache.replace_arena(arena(layout, content, memory)?);
        Ok(())
    }

    /// Bytes of the bits for unverified neurons.
    pub fn bytes_for(layout: &Layout) -> u64 {
        Bits::bytes_for(layout.sizes())
    }

    /// Pins a resident neuron. Returns (slot, whether its checksums must still be verified).
    #[inline]
    pub fn pin(&mut self, key: Key) -> Option<(SlotId, bool)> {
        let slot = self.cache.get_pin(key)?;
        Some((slot, self.unchecked.take(key)))
    }

    /// Ends the use of a pinned neuron.
    #[inline]
    pub fn unpin(&mut self, key: Key, leave: Leave) {
        match leave {
            Leave::Used => self.cache.unpin(key),
            Leave::Unused => self.cache.unpin_unused(key),
            Leave::First => self.cache.unpin_first_victim(key),
        }
    }

    /// Unpins a neuron that was not computed. `unchecked`: its checksums were not verified.
    pub fn give_back(&mut self, key: Key, unchecked: bool) {
        if unchecked {
            self.unchecked.set(key);
        }
        self.cache.unpin(key);
    }

    /// Makes a prefetched neuron resident, unpinned and not verified.
    pub fn admit_ahead(&mut self, key: Key, slot: Slot) {
        self.cache.admit_ahead(key, slot);
        self.unchecked.set(key);
    }

    /// Copies a neuron's `bundle`, in flash layout, to a slot, evicting another neuron if
    /// necessary. Returns false if no slot is available.
    pub fn keep(
        &mut self,
        layout: &Layout,
        content: &SlotContent,
        key: Key,
        bundle: &[u8],
    ) -> bool {
        if self.cache.get_pin(key).is_some() {
            self.cache.unpin(key);
            return true;
        }
        if self.cache.is_loading(key) {
            return true;
        }
        let Some(slot) = self.cache.reserve(key) else {
            return false;
        };
        self.write(layout, content, key, slot, bundle);
        true
    }

    /// Copies it only if a slot is free. Returns false also if the neuron is resident or in flight.
    pub fn keep_if_free(
        &mut self,
        layout: &Layout,
        content: &SlotContent,
        key: Key,
        bundle: &[u8],
    ) -> bool {
        let Some(slot) = self.cache.reserve_if_free(key) else {
            return false;
        };
        self.write(layout, content, key, slot, bundle);
        true
    }

    fn write(
        &mut self,
        layout: &Layout,
        content: &SlotContent,
        key: Key,
        mut slot: Slot,
        bundle: &[u8],
    ) {
        let offset = layout.shift(key.bank, key.neuron, content.start);
        slot.as_mut_slice()[offset..offset + content.len]
            .copy_from_slice(&bundle[content.start..content.stride]);
        self.settle(key, slot);
    }

    fn settle(&mut self, key: Key, slot: Slot) {
        self.cache.admit(key, slot);
        self.cache.unpin(key);
    }

    /// Copies the neurons of a hot cluster to free slots; evicts nothing. `unit`: the cluster's
    /// bytes in the hot region.
    pub fn keep_from_hot(
        &mut self,
        layout: &Layout,
        content: &SlotContent,
        [bank, cluster]: [u32; 2],
        unit: &[u8],
    ) {
        for (i, neuron) in layout.cluster_neurons(bank, cluster).enumerate() {
            let key = Key { bank, neuron };
            let Some(mut slot) = self.cache.reserve_if_free(key) else {
                continue;
            };
            let shift = layout.shift(bank, neuron, content.start);
            let target = &mut slot.as_mut_slice()[shift..];
            let [gate, up, down] = vectors(content, unit, i);
            target[..gate.len()].copy_from_slice(gate);
            let rest = &mut target[content.gate_span - content.start..];
            rest[..up.len()].copy_from_slice(up);
            rest[up.len()..][..down.len()].copy_from_slice(down);
            self.settle(key, slot);
        }
    }

    /// Number of neurons of a cluster that are not resident.
    pub fn missing(&self, layout: &Layout, bank: u32, cluster: u32) -> usize {
        let missing = |&neuron: &u32| !self.cache.contains(Key { bank, neuron });
        layout
            .cluster_neurons(bank, cluster)
            .filter(missing)
            .count()
    }
}
