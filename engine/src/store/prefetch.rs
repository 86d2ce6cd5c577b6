//! What to read when nothing that is needed is missing: whole clusters of the layers to come where
//! they are certain to be read, experts that a router has chosen or is likely to choose, and single
//! neurons that a predictor names. The reads overlap with the rest of this layer, with attention
//! and, beyond the last layer, with the head.
//!
//! Proposes only: whoever asks knows what is resident, and nothing is evicted for a proposal.

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

/// A place in the order in which a scan needs clusters: layer after layer, and from the last layer
/// on to the first one of the next pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Ahead {
    /// Layers after the current one.
    layers: usize,
    /// Cluster of that layer.
    cluster: usize,
}

/// The clusters of some banks, one after the other.
#[derive(Debug, Default)]
struct Series {
    banks: Vec<u32>,
    /// The next one: number of its bank, and its cluster.
    at: usize,
    cluster: usize,
}

impl Series {
    fn set(&mut self, banks: impl Iterator<Item = u32>) {
        self.banks.clear();
        self.banks.extend(banks);
        (self.at, self.cluster) = (0, 0);
    }

    /// The next cluster, unless its bank is not to be read.
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

/// A whole cluster that is worth reading, if it is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Want {
    pub bank: u32,
    pub cluster: u32,
    pub priority: Priority,
    /// It may turn out not to be needed.
    pub guessed: bool,
}

impl Want {
    /// One that is certain to be needed.
    pub fn now(bank: u32, cluster: u32) -> Self {
        Self {
            bank,
            cluster,
            priority: Priority::Now,
            guessed: false,
        }
    }
}

/// What follows the current layer.
pub(crate) struct Prefetch {
    layout: Arc<Layout>,
    /// The current layer.
    layer: usize,
    /// The next cluster to consider of the layers to come.
    ahead: Ahead,
    /// Banks of the same layer that are certain to be visited next.
    after: Series,
    /// Banks of the next layer that a guess names, the likeliest first.
    guessed: Series,
    /// Whether these are no guess: the layer's router has chosen them.
    certain: bool,
    /// Whether experts are guessed.
    experts: Foresight,
    /// Single neurons that are guessed.
    pub(super) neurons: Guesses,
}

impl Prefetch {
    /// `guesses`: whether experts may be guessed.
    pub(super) fn new(layout: Arc<Layout>, guesses: bool) -> Self {
        Self {
            layer: 0,
            ahead: Ahead::default(),
            after: Series::default(),
            guessed: Series::default(),
            certain: false,
            experts: Foresight::new(guesses),
            neurons: Guesses::new(&layout),
            layout,
        }
    }

    /// Begins a pass over all layers, of one token or several.
    pub(super) fn begin_pass(&mut self, single: bool) {
        self.neurons.begin_pass(single);
        self.experts.begin_pass(single);
    }

    /// Moves on to a layer, or a part of it that `after` follows.
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

    /// The next whole cluster to read, once all of the current layer is requested. In a scan every
    /// cluster of every layer is needed, so what is next is always known, beyond the end of the pass
    /// too. With many tokens that holds for the next layer only. `partly`: some banks have resident
    /// Gate rows and others scan.
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
        // All of the current layer is requested.
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
            // Behind layers whose Gate rows are resident others may stream.
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
            // What layers before it miss goes first.
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

    /// The next cluster of the experts that were guessed or chosen.
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

    /// A proposal is read.
    pub(super) fn accepted(&mut self, want: Want) {
        self.experts.seen.clusters += u64::from(want.guessed);
    }

    /// Takes a guess at the banks of the next layer, the likeliest first.
    pub(super) fn guess(&mut self, banks: impl Iterator<Item = u32>) {
        self.guessed.set(banks);
    }

    /// The next layer's router has chosen its banks.
    pub(super) fn choose(&mut self, banks: impl Iterator<Item = u32>) {
        self.guessed.set(banks);
        self.certain = true;
    }

    /// Compares the guess for a layer with the `banks` that it visits, and forgets it. `underway`
    /// counts the clusters of a bank that are in flight or have arrived. Whether there was a guess,
    /// so that what was not begun to be read for it need not be: what is needed is asked for again,
    /// without waiting behind the rest.
    pub(super) fn judge(
        &mut self,
        layer: usize,
        banks: impl Iterator<Item = u32>,
        underway: impl Fn(u32) -> usize,
    ) -> bool {
        let guessed = &mut self.guessed.banks;
        let own = self.layout.banks_of(layer);
        let certain = std::mem::take(&mut self.certain);
        if !certain && guessed.first().is_some_and(|bank| own.contains(bank)) {
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

    /// Whether a cluster was read for what comes next. `visited`: the current layer visits its bank.
    pub(super) fn follows(&self, bank: u32, cluster: u32, visited: bool) -> bool {
        let (layers, of) = (self.layout.layers(), self.layout.layer_of(bank));
        let place = Ahead {
            layers: (of + layers - self.layer) % layers,
            cluster: cluster as usize,
        };
        match place.layers {
            0 => visited || self.after.banks.contains(&bank),
            1 if self.guessed.banks.contains(&bank) => true,
            _ => place < self.ahead,
        }
    }

    /// Forgets what was proposed of the layers to come: nothing of it is kept.
    pub(super) fn forget(&mut self) {
        self.ahead = Ahead::default();
    }

    /// Whether guesses at experts are worth reading in this pass.
    pub(super) fn guesses_experts(&self) -> bool {
        self.experts.pays()
    }

    /// What reading experts ahead has done; `None` without experts.
    pub fn foreseen(&self) -> Option<Foreseen> {
        self.layout.has_experts().then_some(self.experts.seen)
    }
}
