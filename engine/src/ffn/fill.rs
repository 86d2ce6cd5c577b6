//! Filling memory when a plan takes effect: large sequential reads.

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::Key;
use emberflow_storage::io::Read;

use super::banks::Banks;
use super::store::NeuronStore;
use crate::Error;

/// This many reads at once, of this size.
const STAGING_SLOTS: u32 = 4;
const STAGING_BYTES: usize = 256 << 10;

/// Bytes that a fill holds besides its result.
pub(super) fn staging_bytes(banks: &Banks) -> u64 {
    u64::from(STAGING_SLOTS) * staging_len(banks) as u64
}

fn staging_len(banks: &Banks) -> usize {
    let stride = banks.container.geometry().stride as usize;
    (STAGING_BYTES.max(stride) + banks.slack()).next_multiple_of(banks.slack())
}

impl NeuronStore {
    /// Reads the banks in large sequential pieces: all Gate rows where they stay
    /// resident, and the first neurons of every bank until the cache is full.
    pub(super) fn fill(&mut self, slots: u64) -> Result<(), Error> {
        let (banks, neurons) = (self.banks.count, self.banks.neurons);
        let prefix = match self.kept {
            Some(kept) => kept as usize,
            None => (slots as usize).div_ceil(banks).min(neurons),
        };
        let wanted = if self.gates.is_empty() {
            prefix
        } else {
            neurons
        };
        let stride = self.part.stride;
        let len = staging_len(&self.banks);
        let per_piece = ((len - self.banks.slack()) / stride).max(1);
        let options = ArenaOptions::default();
        let mut staging = Arena::new(STAGING_SLOTS, len, self.banks.memory_align(), options)
            .map_err(emberflow_storage::Error::from)?;
        let mut pieces = (0..banks)
            .flat_map(|b| (0..wanted).step_by(per_piece).map(move |n| (b, n)))
            .peekable();
        while pieces.peek().is_some() || self.io.outstanding() > 0 {
            while let Some(&(bank, first)) = pieces.peek() {
                let Some(slot) = staging.take() else { break };
                pieces.next();
                let count = per_piece.min(wanted - first);
                let (offset, len, _) = self.banks.cover(bank, first as u32, 0, count * stride);
                let tag = (bank as u64) << 32 | first as u64;
                self.reads.push(Read::new(tag, offset, len, slot));
            }
            self.io
                .submit(&mut self.reads)
                .map_err(emberflow_storage::Error::from)?;
            let mut arrived = std::mem::take(&mut self.completions);
            self.io
                .wait(&mut arrived, 1)
                .map_err(emberflow_storage::Error::from)?;
            for done in arrived.drain(..) {
                done.result.map_err(emberflow_storage::Error::from)?;
                let (bank, first) = ((done.tag >> 32) as usize, done.tag as u32 as usize);
                let count = per_piece.min(wanted - first);
                self.take_piece(bank, first, count, prefix, done.slot.as_slice())?;
                staging.put(done.slot);
            }
            self.completions = arrived;
        }
        Ok(())
    }

    /// Distributes a piece of `count` neurons from `first` on.
    fn take_piece(
        &mut self,
        bank: usize,
        first: usize,
        count: usize,
        prefix: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let stride = self.part.stride;
        let (_, _, shift) = self.banks.cover(bank, first as u32, 0, count * stride);
        let gate_len = self.banks.format.gate_len();
        for (n, bundle) in (first..first + count).zip(bytes[shift..].chunks_exact(stride)) {
            let (gate, rest) = bundle.split_at(self.part.gate_span);
            if let Some(gates) = self.gates.get_mut(bank) {
                self.banks.container.check_gate(bank, n as u32, gate)?;
                gates[n * gate_len..(n + 1) * gate_len].copy_from_slice(&gate[..gate_len]);
            }
            let key = Key {
                bank: bank as u32,
                neuron: n as u32,
            };
            if n >= prefix {
                continue;
            }
            let Some(mut slot) = self.cache.reserve_if_free(key) else {
                continue;
            };
            if self.gates.is_empty() {
                self.banks.container.check_gate(bank, n as u32, gate)?;
            }
            self.banks.container.check_rest(bank, n as u32, rest)?;
            let (_, _, shift) = self
                .banks
                .cover(bank, n as u32, self.part.start, self.part.len);
            slot.as_mut_slice()[shift..shift + self.part.len]
                .copy_from_slice(&bundle[self.part.start..]);
            let id = self.cache.admit(key, slot);
            self.cache.unpin(id);
        }
        Ok(())
    }
}
