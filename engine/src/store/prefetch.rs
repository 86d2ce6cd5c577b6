//! Reads to make when no needed neuron is missing: whole clusters of later layers that are certain
//! to be read, experts that a router has chosen or is likely to choose, and single neurons selected
//! by a predictor. These reads overlap with the rest of the layer, with attention and, after the
//! last layer, with the head.
//!
//! This module only proposes. The caller knows which neurons are resident, and evicts nothing for a
//! proposal.

pub(crate) mod foresight;
mod precision;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use emberflow_storage::io::Priority;

use super::layout::Layout;
use super::rules::Rules;
use foresight::{Foreseen, Foresight};
pub(super) use precision::Guesses;

/// A position in the order in which scans need clusters: layer by layer, and after the last layer
/// the first one of the next pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Ahead {
    /// Layers after the current one; 0 is the current layer.
    layers: usize,
    /// Cluster of that layer.
    cluster: usize,
}

/// Iterator over the clusters of several banks.
#[derive(Debug, Default)]
struct Series {
    banks: Vec<u32>,
    /// Index of the next cluster's bank in `banks`; the cluster.
    at: usize,
    cluster: usize,
}

impl Series {
    fn set(&mut self, banks: impl Iterator<Item = u32>) {
        self.banks.clear();
        self.banks.extend(banks);
        (self.at, self.cluster) = (0, 0);
    }

    /// The next cluster, skipping banks for which `reads` is false.
    fn next(&mut self, layout: &Layout, reads: impl Fn(u32) -> bool) -> Option<(u32, u32)> {
        loop {
            let bank = *self.banks.get(self.at)?;
            if !reads(bank) {
                return None;
            }
            if self.cluster < layout.clusters(bank) {
                self.cluster += 1;
                return Some((bank, self.cluster as u32 - 1));
            }
            (self.at, self.cluster) = (self.at + 1, 0);
        }
    }
}

/// A whole cluster to read, if it is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Want {
    pub bank: u32,
    pub cluster: u32,
    pub priority: Priority,
    /// The cluster may not be needed.
    pub guessed: bool,
}

impl Want {
    /// A cluster that is certain to be needed.
    pub fn now(bank: u32, cluster: u32) -> Self {
        Self {
            bank,
            cluster,
            priority: Priority::Now,
            guessed: false,
        }
    }
}

/// Proposals after the current layer.
pub(super) struct Prefetch {
    layout: Arc<Layout>,
    /// Whether chosen and guessed neurons are read.
    on: bool,
    /// The current layer.
    layer: usize,
    /// Next cluster of later layers to consider.
    ahead: Ahead,
    /// Banks of the current layer that are certain to be visited next.
    after: Series,
    /// Guessed banks of the next layer, most likely first.
    guessed: Series,
    /// Whether the layer's router has chosen `guessed`, so that they are certain.
    certain: bool,
    /// Whether experts are guessed.
    experts: Foresight,
    /// Guessed single neurons.
    pub(super) neurons: Guesses,
}

impl Prefetch {
    /// `on`: neurons that may not be needed are read. `guesses`: experts may be guessed then.
    pub(super) fn new(layout: Arc<Layout>, on: bool, guesses: bool) -> Self {
        Self {
            on,
            layer: 0,
            ahead: Ahead::default(),
            after: Series::default(),
            guessed: Series::default(),
            certain: false,
            experts: Foresight::new(on && guesses),
            neurons: Guesses::new(&layout),
            layout,
        }
    }

    /// Begins a pass over all layers. `single`: it has one token.
    pub(super) fn begin_pass(&mut self, single: bool) {
        self.neurons.begin_pass(single);
        self.experts.begin_pass(single);
    }

    /// Advances to a layer, or to a part of it that is followed by the banks `after`.
    pub(super) fn begin_layer(&mut self, layer: usize, after: impl Iterator<Item = u32>) {
        let layers = self.layout.layers();
        let moved = (layer + layers - self.layer) % layers;
        self.ahead = match moved {
            0 => Ahead::default(),
            _ if moved > self.ahead.layers => Ahead::default(),
            _ => Ahead {
                layers: self.ahead.layers - moved,
                ..self.ahead
            },
        };
        self.layer = layer;
        self.after.set(after);
        self.neurons.begin_layer(&self.layout, layer);
    }

    /// The next whole cluster to read, once all of the current layer is requested. Scans need every
    /// cluster of every layer, so the next one is always known, even beyond the end of the pass.
    /// With many tokens this holds for the next layer only. `partly`: some banks have resident Gate
    /// rows and others scan.
    pub(super) fn next(&mut self, rules: impl Fn(u32) -> Rules, partly: bool) -> Option<Want> {
        if self.after.banks.is_empty() {
            return self.next_of_layers(rules, partly);
        }
        let reads = |bank| {
            let rules = rules(bank);
            rules.scans || rules.many
        };
        let (bank, cluster) = self.after.next(&self.layout, reads)?;
        Some(Want::now(bank, cluster))
    }

    fn next_of_layers(&mut self, rules: impl Fn(u32) -> Rules, partly: bool) -> Option<Want> {
        let layers = self.layout.layers();
        // The current layer is completely requested.
        let next = Ahead {
            layers: 1,
            cluster: 0,
        };
        self.ahead = self.ahead.max(next);
        while self.ahead.layers < layers {
            let number = (self.layer + self.ahead.layers) % layers;
            let mut banks = self.layout.banks_of(number);
            let (Some(bank), None) = (banks.next(), banks.next()) else {
                // With experts, the next banks are not certain.
                return self.next_guessed();
            };
            let rules = rules(bank);
            let certain = rules.scans || rules.many && self.ahead.layers == 1;
            // Streaming layers may follow layers with resident Gate rows.
            if !(certain || partly) {
                return None;
            }
            if !certain || self.ahead.cluster == self.layout.clusters(bank) {
                self.ahead = Ahead {
                    layers: self.ahead.layers + 1,
                    cluster: 0,
                };
                continue;
            }
            let cluster = self.ahead.cluster as u32;
            self.ahead.cluster += 1;
            // Misses of the layers in between have priority.
            let priority = if self.ahead.layers > 1 && partly {
                Priority::Prefetch
            } else {
                Priority::Now
            };
            return Some(Want {
                priority,
                ..Want::now(bank, cluster)
            });
        }
        None
    }

    /// The next cluster of a guessed or chosen expert.
    pub(super) fn next_guessed(&mut self) -> Option<Want> {
        let (bank, cluster) = self.guessed.next(&self.layout, |_| true)?;
        let priority = if self.certain {
            Priority::Now
        } else {
            Priority::Prefetch
        };
        Some(Want {
            bank,
            cluster,
            priority,
            guessed: !self.certain,
        })
    }

    /// Records that a proposal is being read.
    pub(super) fn accepted(&mut self, want: Want) {
        self.experts.seen.clusters += u64::from(want.guessed);
    }

    /// Sets the guessed banks of the next layer, most likely first.
    pub(super) fn guess(&mut self, banks: impl Iterator<Item = u32>) {
        self.guessed.set(banks);
    }

    /// Sets the banks that the next layer's router has chosen.
    pub(super) fn choose(&mut self, banks: impl Iterator<Item = u32>) {
        self.guessed.set(banks);
        self.certain = true;
    }

    /// Compares the guess for a layer with the visited `banks`, and clears it. `underway`: number
    /// of a bank's clusters in flight or arrived. Returns whether there was a guess, in which case
    /// the caller cancels guessed reads that have not begun; needed clusters are then requested
    /// again with normal priority.
    pub(super) fn judge(
        &mut self,
        layer: usize,
        banks: impl Iterator<Item = u32>,
        underway: impl Fn(u32) -> usize,
    ) -> bool {
        let guessed = &mut self.guessed.banks;
        let visited = self.layout.banks_of(layer);
        let certain = std::mem::take(&mut self.certain);
        if !certain && guessed.first().is_some_and(|bank| visited.contains(bank)) {
            let mut right = 0;
            for bank in banks.filter(|bank| guessed.contains(bank)) {
                self.experts.seen.used += underway(bank) as u64;
                right += 1;
            }
            self.experts.judge(guessed.len() as u64, right);
        }
        let any = !certain && !guessed.is_empty();
        guessed.clear();
        any
    }

    /// Whether a cluster was read for a later layer, or for this one if `visited`.
    pub(super) fn follows(&self, bank: u32, cluster: u32, visited: bool) -> bool {
        let (layers, layer) = (self.layout.layers(), self.layout.layer_of(bank));
        let place = Ahead {
            layers: (layer + layers - self.layer) % layers,
            cluster: cluster as usize,
        };
        match place.layers {
            0 => visited || self.after.banks.contains(&bank),
            1 if self.guessed.banks.contains(&bank) => true,
            _ => place < self.ahead,
        }
    }

    /// Forgets the proposals for later layers; their clusters have been dropped.
    pub(super) fn forget(&mut self) {
        self.ahead = Ahead::default();
    }

    /// Whether chosen and guessed neurons are read.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether guessing experts pays off in this pass.
    pub(super) fn guesses_experts(&self) -> bool {
        self.experts.pays()
    }

    /// Counts of expert prefetches; `None` without experts.
    pub fn foreseen(&self) -> Option<Foreseen> {
        self.layout.has_experts().then_some(self.experts.seen)
    }
}
