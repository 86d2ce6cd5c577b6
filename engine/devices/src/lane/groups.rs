//! Experts on a device in groups of one capacity (NPUMoE, §4): their Gate and Up come from the device, group after group,
//! while the CPU computes the units before them, and Down of all of them in the order of units.
//!
//! ```text
//! expected load ─ place ─▶ groups of experts that the device holds whole; the others are the CPU's
//! a layer       ─ begin ─▶ the first tokens of each, as many as its capacity holds; the CPU's units have the rest
//! hidden values ◀─ take ── group after group, in the order of their first units
//! ```

use std::time::Instant;

use arrayvec::ArrayVec;
use emberflow_engine::Error;
use emberflow_engine::lane::{CLUSTER, Experts, HiddenRows, Room};

use super::DeviceLane;
use crate::experts::{ExpertGroup, ExpertRows, GraphRuns, MOST_EXPERTS};
use crate::loads::Grouping;
use crate::split::{Curve, Product};
use crate::tiers::{CapacityGroup, ExpertTimes, GroupLimits, Placement, RouteCounts, expected};
use crate::times::Samples;

/// Experts of a model, as a device may compute them.
#[derive(Debug, Clone)]
pub(crate) struct ExpertSetup {
    /// By layer: how often each expert is visited, all alike without statistics; empty without experts.
    pub visits: Vec<Vec<f64>>,
    /// The model's banks.
    pub banks: HeldBanks,
    /// Experts that a token visits.
    pub chosen: usize,
    /// What they take.
    pub times: GroupTimes,
    /// Whether times decide.
    pub grouping: Grouping,
}

/// Banks of a model, whole ones of which a device holds.
#[derive(Debug, Clone)]
pub(crate) struct HeldBanks {
    /// Clusters of each.
    pub clusters: Vec<u32>,
    /// Whether each is an expert of the size that groups have.
    pub in_groups: Vec<bool>,
    /// In the order in which a device holds them: the most visited first, and shared experts last.
    pub order: Vec<u32>,
    /// By layer: its first bank.
    pub first: Vec<u32>,
}

impl HeldBanks {
    /// By bank: how many clusters a device holds that has room for so many, whole banks and one in part.
    pub fn held(&self, clusters: u64) -> Vec<u32> {
        let (mut held, mut left) = (vec![0; self.clusters.len()], clusters);
        for &bank in &self.order {
            let bank = bank as usize;
            held[bank] = self.clusters[bank].min(u32::try_from(left).unwrap_or(u32::MAX));
            left -= u64::from(held[bank]);
        }
        held
    }

    /// Whether an expert of a layer is computed in groups, of banks of which a device holds so many clusters.
    pub fn is_in_groups(&self, layer: usize, expert: usize, held: &[u32]) -> bool {
        let bank = self
            .first
            .get(layer)
            .map_or(usize::MAX, |&first| first as usize + expert);
        self.in_groups.get(bank) == Some(&true) && held.get(bank) == self.clusters.get(bank)
    }
}

/// Seconds of Gate and Up of experts.
#[derive(Debug, Clone)]
pub(crate) struct GroupTimes {
    /// The device's, by neurons and tokens, with Down.
    pub device: Samples,
    /// All compute threads' for a token of an expert, with Down.
    pub cpu_token: f64,
    /// Neurons of an expert.
    pub neurons: usize,
    /// Share of Gate and Up in an expert's matrices.
    pub share: f64,
}

impl ExpertTimes for GroupTimes {
    fn on_npu(&self, experts: usize, capacity: usize) -> f64 {
        let of = |rows| {
            let (cols, n) = (1, capacity);
            self.device.seconds(Product { rows, cols, n })
        };
        // The line through two numbers of neurons: launches, and what each neuron takes.
        let launch = (2.0 * of(self.neurons) - of(2 * self.neurons)).max(0.0);
        launch + experts as f64 * self.share * (of(self.neurons) - launch)
    }

    fn on_cpu(&self, tokens: f64) -> f64 {
        self.share * self.cpu_token * tokens
    }
}

impl ExpertSetup {
    /// How many experts of a layer are chosen from; 0 in layers without a router.
    pub fn experts(&self, layer: usize) -> usize {
        self.visits.get(layer).map_or(0, Vec::len)
    }

    /// Where the experts of a layer are computed in passes of `rows` rows, if the device holds so many clusters of each bank.
    pub fn place(&self, layer: usize, rows: usize, held: &[u32]) -> Placement {
        let held = |expert: usize| self.banks.is_in_groups(layer, expert, held);
        let visits = self.visits.get(layer).map_or(&[][..], Vec::as_slice);
        let loads = expected(visits, rows, self.chosen);
        let limits = GroupLimits {
            rows,
            expert_bytes: 1,
            graph_bytes: self.grouping.most() as u64,
            short: true,
        };
        let Grouping::All { capacity, .. } = self.grouping else {
            return limits.place(&loads, held, &self.times);
        };
        let mut groups = limits.groups(&loads, held);
        if capacity > 0 {
            (groups.iter_mut()).for_each(|group| group.capacity = capacity);
        }
        Placement {
            groups,
            on_cpu: (0..loads.len()).filter(|&expert| !held(expert)).collect(),
        }
    }
}

/// A group that is to be computed: experts by number, and their hidden values.
#[derive(Debug, Clone)]
pub(crate) struct Queued {
    /// Most tokens of each.
    pub capacity: usize,
    /// The experts.
    pub experts: ArrayVec<usize, MOST_EXPERTS>,
    /// One past the last of its hidden values.
    pub end: usize,
}

/// Pieces of work of groups, and what came out of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GroupCounts {
    /// Pieces of work.
    pub groups: u64,
    /// What the device ran for them.
    pub graphs: GraphRuns,
    /// Tokens of experts, by who computed them.
    pub routes: RouteCounts,
}

/// The groups of a device.
#[derive(Debug)]
pub(crate) struct GroupLane {
    setup: ExpertSetup,
    /// By bank: clusters that the device holds.
    held: Vec<u32>,
    /// By layer, for passes of so many rows.
    placed: Vec<Vec<CapacityGroup>>,
    rows: usize,
    /// By expert of the layer under way: its tokens, and which of them are computed in a group.
    tokens: Vec<usize>,
    parts: Vec<Option<HiddenRows>>,
    /// Hidden values of the layer's groups, of which those before `known` are there.
    hidden: Vec<f32>,
    known: usize,
    counts: GroupCounts,
}

impl GroupLane {
    /// Of banks of which the device holds the first `held` clusters, for passes within a room.
    pub fn new(setup: ExpertSetup, held: &[u32], room: &Room) -> Self {
        let mut groups = Self {
            held: held.to_vec(),
            placed: Vec::new(),
            rows: 0,
            tokens: Vec::new(),
            parts: Vec::new(),
            hidden: Vec::new(),
            known: 0,
            counts: GroupCounts::default(),
            setup,
        };
        groups.set_room(room);
        groups
    }

    /// Room for the hidden values of a pass.
    pub fn set_room(&mut self, room: &Room) {
        self.hidden = Vec::new();
        self.hidden = vec![0.0; hidden_values(room)];
    }

    /// Whether it computes experts of a layer.
    pub fn has(&self, layer: usize) -> bool {
        self.setup.experts(layer) > 0
    }

    /// Where experts are computed in passes of `rows` rows, layer by layer.
    fn placed(&self, rows: usize) -> Vec<Placement> {
        let layers = 0..self.setup.visits.len();
        let of = |layer| self.setup.place(layer, rows, &self.held);
        layers.map(of).collect()
    }

    /// Clusters of all experts that it computes in passes of `rows` rows.
    pub fn clusters_for(&self, rows: usize) -> u64 {
        let groups = self.placed(rows);
        let groups = groups.iter().flat_map(|layer| &layer.groups);
        let experts: usize = groups.map(|group| group.experts.len()).sum();
        (experts * self.setup.times.neurons.div_ceil(CLUSTER)) as u64
    }

    /// Begins a layer of a pass of `rows` rows in which experts, ascending, have tokens: `(expert, tokens)`. Returns the groups
    /// to be computed.
    pub fn begin(
        &mut self,
        [layer, rows]: [usize; 2],
        visited: impl Iterator<Item = (usize, usize)>,
    ) -> Vec<Queued> {
        if rows != self.rows {
            let placed = self.placed(rows).into_iter();
            self.placed = placed.map(|of| of.groups).collect();
            self.rows = rows;
        }
        let experts = self.setup.experts(layer);
        self.tokens.resize(experts, 0);
        for (expert, count) in visited {
            if let Some(tokens) = self.tokens.get_mut(expert) {
                *tokens = count;
            }
        }
        let mut queue = Vec::new();
        for group in self.placed.get(layer).into_iter().flatten() {
            let visited = |expert: &usize| self.tokens[*expert] > 0;
            let some = group.experts.iter().copied().filter(visited);
            let mut experts: ArrayVec<usize, MOST_EXPERTS> = some.take(MOST_EXPERTS).collect();
            experts.sort_unstable();
            if !experts.is_empty() {
                queue.push(Queued {
                    capacity: group.capacity,
                    experts,
                    end: 0,
                });
            }
        }
        self.assign(experts, &mut queue);
        queue
    }

    /// Assigns the hidden values of the queued groups, in the order of their first experts, as far as there is room.
    fn assign(&mut self, experts: usize, queue: &mut Vec<Queued>) {
        queue.sort_unstable_by_key(|group| group.experts[0]);
        self.parts.resize(experts, None);
        let (tokens, part, routes) = (&self.tokens, &mut self.parts, &mut self.counts.routes);
        let (neurons, room, mut end) = (self.setup.times.neurons, self.hidden.len(), 0);
        queue.retain_mut(|group| {
            let taken = |expert: usize| tokens[expert].min(group.capacity);
            let all: usize = group.experts.iter().map(|&expert| taken(expert)).sum();
            if end + all * neurons > room {
                return false;
            }
            for &expert in &group.experts {
                let count = taken(expert);
                part[expert] = Some(HiddenRows {
                    tokens: count,
                    first: end,
                });
                end += count * neurons;
                routes.npu += count as u64;
                routes.overflow += (tokens[expert] - count) as u64;
            }
            group.end = end;
            true
        });
        let cold = tokens.iter().zip(part).filter(|(_, part)| part.is_none());
        routes.cold += cold.map(|(&tokens, _)| tokens as u64).sum::<u64>();
    }

    /// By expert: its rows of the layer under way that are computed in a group.
    pub fn parts(&self) -> &[Option<HiddenRows>] {
        &self.parts
    }

    /// Hidden values of the layer's groups.
    pub fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    /// Whether the first `end` hidden values are there.
    pub fn knows(&self, end: usize) -> bool {
        self.known >= end
    }

    /// Where the values of the group under way lie.
    fn values(&mut self, group: &Queued) -> &mut [f32] {
        &mut self.hidden[self.known..group.end]
    }

    /// The values of a group have come.
    fn taken(&mut self, group: &Queued, graphs: GraphRuns) {
        self.known = group.end;
        let parts = group
            .experts
            .iter()
            .filter_map(|&expert| self.parts[expert]);
        let tokens: u64 = parts.map(|part| part.tokens as u64).sum();
        let counts = &mut self.counts;
        counts.groups += 1;
        counts.graphs.runs += graphs.runs;
        counts.graphs.places += graphs.places;
        counts.routes.padding += graphs.places.saturating_sub(tokens);
    }

    /// What was computed since the device was opened.
    pub fn counts(&self) -> GroupCounts {
        self.counts
    }

    /// Forgets the layer under way.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.parts.clear();
        self.known = 0;
    }
}

impl DeviceLane {
    /// Begins a group with its experts' places and tokens.
    pub(super) fn submit_group(
        &mut self,
        group: &Queued,
        experts: Experts<'_>,
    ) -> Result<(), Error> {
        let rows = |expert: &usize| {
            let units = experts.units;
            let place = units.binary_search_by_key(expert, |unit| unit.0).ok()?;
            let (_, bank, tokens, bias) = units[place];
            Some(ExpertRows {
                part: self.parts[bank as usize]?,
                neurons: self.layout.neurons(bank),
                tokens,
                bias,
            })
        };
        let rows: Option<ArrayVec<_, MOST_EXPERTS>> = group.experts.iter().map(rows).collect();
        let Some(rows) = rows.filter(|_| self.set.lost().is_none()) else {
            self.lost = true;
            return Ok(());
        };
        let work = ExpertGroup {
            capacity: group.capacity,
            experts: &rows,
        };
        let submitted = self.set.submit_group(work, experts.input, self.layer)?;
        self.lost |= submitted.is_none();
        Ok(())
    }

    /// Waits for a group.
    pub(super) fn take_group(&mut self, group: &Queued) -> Result<(), Error> {
        let Some(groups) = &mut self.groups else {
            return Ok(());
        };
        let start = Instant::now();
        let taken = self.set.take_group(groups.values(group))?;
        self.waited += start.elapsed();
        match taken {
            Some(taken) => {
                groups.taken(group, taken.graphs);
                self.fired += taken.fired;
                let neurons = group.experts.len() * groups.setup.times.neurons;
                self.bytes += (neurons * self.layout.format.gate_len()) as u64;
            }
            None => self.lost = true,
        }
        Ok(())
    }
}

/// Hidden values of all experts that the rows of a pass visit.
pub(crate) fn hidden_values(room: &Room) -> usize {
    room.clusters * CLUSTER * room.rows
}
