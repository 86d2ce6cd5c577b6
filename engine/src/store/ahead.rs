//! Prefetch of certain needs: whole clusters of the layers to come. The reads overlap with the rest
//! of this layer, with attention and, beyond the last layer, with the head.

use emberflow_storage::cache::Key;
use emberflow_storage::io::Priority;

use super::neurons::NeuronStore;
use super::plan::Rules;
use super::work::Ahead;
use crate::error::Error;

impl NeuronStore {
    /// Reads the first missing clusters of what comes next while stream buffers are free. In a scan
    /// every cluster of every layer is needed, so what is next is always known, beyond the end of
    /// the pass too. With many tokens that holds for the next layer only.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        match self.layer.after.is_empty() {
            true => self.read_layers_ahead(),
            false => self.read_parts_ahead(),
        }
    }

    /// The same for the rest of a layer that is visited in parts.
    fn read_parts_ahead(&mut self) -> Result<(), Error> {
        let mut before = 0;
        for i in 0..self.layer.after.len() {
            let bank = self.layer.after[i];
            let (rules, clusters) = (self.rules(bank), self.layout.clusters(bank));
            if !(rules.scans || rules.many) {
                break;
            }
            while self.layer.after_taken < before + clusters && self.reader.stream.free() > 0 {
                let cluster = (self.layer.after_taken - before) as u32;
                self.layer.after_taken += 1;
                self.read_cluster_ahead(bank, cluster, Priority::Now)?;
            }
            before += clusters;
        }
        Ok(())
    }

    fn read_layers_ahead(&mut self) -> Result<(), Error> {
        let layers = self.layout.layers();
        // All of the current layer is requested.
        let next = Ahead {
            layers: 1,
            cluster: 0,
        };
        let mut ahead = self.layer.ahead.max(next);
        while ahead.layers < layers && self.reader.stream.free() > 0 {
            let number = (self.layer.number + ahead.layers) % layers;
            let mut banks = self.layout.banks_of(number);
            let (Some(bank), None) = (banks.next(), banks.next()) else {
                // With experts, the next banks are not certain.
                self.read_guessed_ahead()?;
                break;
            };
            let rules = self.rules(bank);
            let certain = rules.scans || rules.many && ahead.layers == 1;
            // Behind layers whose Gate rows are resident others may stream.
            if !(certain || self.gates_partly_resident()) {
                break;
            }
            if !certain || ahead.cluster == self.layout.clusters(bank) {
                ahead = Ahead {
                    layers: ahead.layers + 1,
                    cluster: 0,
                };
                continue;
            }
            let cluster = ahead.cluster as u32;
            ahead.cluster += 1;
            // What layers before it miss goes first.
            let priority = match ahead.layers > 1 && self.gates_partly_resident() {
                true => Priority::Prefetch,
                false => Priority::Now,
            };
            self.read_cluster_ahead(bank, cluster, priority)?;
        }
        self.layer.ahead = ahead;
        Ok(())
    }

    /// Takes a guess at the banks of the next layer, the likeliest first, and reads what is missing
    /// of them behind what this layer needs, while stream buffers are free.
    pub fn read_guessed(&mut self, banks: &[u32]) -> Result<(), Error> {
        self.layer.guessed.clear();
        self.layer.guessed.extend_from_slice(banks);
        self.layer.guessed_taken = 0;
        if self.layer.next == self.layer.total {
            self.read_ahead()?;
        }
        self.submit()
    }

    /// Reads what is missing of the `banks` that layer `number`, the next one, is going to visit: its
    /// router has chosen before attention, which these reads overlap with. For passes of one token.
    pub fn read_chosen(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32> + Clone,
    ) -> Result<(), Error> {
        let read = self.layout.has_experts()
            && self.ablation.looks_ahead()
            && self.mapped.is_none()
            && self.hot.units() < self.layout.total_clusters();
        if !read {
            return Ok(());
        }
        self.usable()?;
        self.judge_guess(number, banks.clone())?;
        self.layer.guessed.extend(banks);
        self.layer.guessed_taken = 0;
        self.layer.certain = true;
        self.drop_strays();
        self.read_guessed_ahead()?;
        self.submit()
    }

    fn read_guessed_ahead(&mut self) -> Result<(), Error> {
        let mut before = 0;
        for i in 0..self.layer.guessed.len() {
            let bank = self.layer.guessed[i];
            let clusters = self.layout.clusters(bank);
            while self.layer.guessed_taken < before + clusters && self.reader.stream.free() > 0 {
                let cluster = (self.layer.guessed_taken - before) as u32;
                self.layer.guessed_taken += 1;
                let priority = match self.layer.certain {
                    true => Priority::Now,
                    false => Priority::Prefetch,
                };
                let read = self.read_cluster_ahead(bank, cluster, priority)?;
                if read && !self.layer.certain {
                    self.foresight.seen.clusters += 1;
                }
            }
            before += clusters;
        }
        Ok(())
    }

    /// Begins to read what is missing of the layer's `banks`, before its neurons are named: where all
    /// of them are needed and pass through stream buffers, nothing else can come of it.
    pub(super) fn read_certain(&mut self, banks: impl Iterator<Item = u32>) -> Result<(), Error> {
        for bank in banks {
            if !self.rules(bank).streams() {
                continue;
            }
            for cluster in 0..self.layout.clusters(bank) as u32 {
                if self.reader.stream.free() == 0 {
                    return self.submit();
                }
                self.read_cluster_ahead(bank, cluster, Priority::Now)?;
            }
        }
        self.submit()
    }

    /// Compares the guess for layer `number` with the `banks` that it visits, and forgets it. Of what
    /// has not begun to be read for it, nothing is: what is needed is asked for again, without
    /// waiting behind the rest.
    pub(super) fn judge_guess(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        let guessed = std::mem::take(&mut self.layer.guessed);
        let own = self.layout.banks_of(number);
        let certain = std::mem::take(&mut self.layer.certain);
        if !certain && guessed.first().is_some_and(|bank| own.contains(bank)) {
            let mut right = 0;
            for bank in banks.filter(|bank| guessed.contains(bank)) {
                let coming = self.layer.coming.iter().filter(|key| key.0 == bank);
                let arrived = self.layer.arrived.iter().filter(|key| key.0 == bank);
                self.foresight.seen.used += (coming.count() + arrived.count()) as u64;
                right += 1;
            }
            self.foresight.judge(guessed.len() as u64, right);
        }
        let any = !certain && !guessed.is_empty() && !self.layer.coming.is_empty();
        self.layer.guessed = guessed;
        self.layer.guessed.clear();
        match any {
            true => {
                let cancelled = self.reader.cancel_prefetches();
                self.latch(cancelled)
            }
            false => Ok(()),
        }
    }

    /// Reads a cluster of a bank that comes next, if it is missing and will be read whole. Whether
    /// it is read.
    fn read_cluster_ahead(
        &mut self,
        bank: u32,
        cluster: u32,
        priority: Priority,
    ) -> Result<bool, Error> {
        let belongs_hot = self.belongs_hot(bank, cluster);
        let known = (cluster as usize) < self.held_on_device(bank)
            || self.hot.contains(bank, cluster)
            || self.layer.is_underway(bank, cluster);
        let certain = |rules: Rules| rules.read_ahead(belongs_hot, || self.absent(bank, cluster));
        match !known && certain(self.rules(bank)) {
            true => self.request_cluster(bank, cluster, priority),
            false => Ok(false),
        }
    }

    /// Moves on to layer `number`, which visits the banks of the layer's units. Buffers of clusters
    /// that do not follow from here on are returned.
    pub(super) fn go_on_to(&mut self, number: usize) {
        let layers = self.layout.layers();
        let moved = (number + layers - self.layer.number) % layers;
        let ahead = self.layer.ahead;
        self.layer.ahead = match moved {
            0 => Ahead::default(),
            _ if moved > ahead.layers => Ahead::default(),
            _ => Ahead {
                layers: ahead.layers - moved,
                ..ahead
            },
        };
        self.layer.number = number;
        self.layer.after_taken = 0;
    }

    /// Returns the buffers of clusters that are not visited from here on.
    pub(super) fn drop_strays(&mut self) {
        let mut i = 0;
        while i < self.layer.arrived.len() {
            let (bank, cluster, _) = self.layer.arrived[i];
            if self.follows(bank, cluster) {
                i += 1;
            } else {
                self.reader.put(self.layer.arrived.swap_remove(i).2);
            }
        }
    }

    /// Whether a cluster is of a visited bank, or was read ahead for what comes next.
    pub(super) fn follows(&self, bank: u32, cluster: u32) -> bool {
        let (layers, of) = (self.layout.layers(), self.layout.layer_of(bank));
        let place = Ahead {
            layers: (of + layers - self.layer.number) % layers,
            cluster: cluster as usize,
        };
        match place.layers {
            0 => self.layer.unit_of[bank as usize].is_some() || self.layer.after.contains(&bank),
            1 if self.layer.guessed.contains(&bank) => true,
            _ => place < self.layer.ahead,
        }
    }

    /// Number of a cluster's neurons that are not in the cold region.
    fn absent(&self, bank: u32, cluster: u32) -> usize {
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let missing = |&neuron: &u32| !self.cold.contains(Key { bank, neuron });
        neurons.filter(missing).count()
    }
}
