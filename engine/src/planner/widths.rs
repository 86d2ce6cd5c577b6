//! How much a device computes of a layer, by the number of rows of a pass: as much as makes it and the CPU end
//! at the same time, by the device's measured times and the forecast of the CPU's.

use super::budget::Division;
use super::cost::InMemory;
use super::facts::{Planner, Tier};
use super::pass::{Beside, Pass};
use crate::cluster::CLUSTER;
use crate::device::{LEAST_STREAMED, Width, Widths};
use crate::ffn::RECENT;
use crate::split::{Curve, Product, pieces_of_second};

/// Bytes a nanosecond that one thread copies to a device's buffer.
const COPIED_PER_NS: f64 = 4.0;

/// The longest pass of the list.
const MOST: usize = 512;

impl Planner {
    /// How many clusters of each layer the device computes with `threads` compute threads beside it. Nothing
    /// but its times decides where the CPU has what it leaves; otherwise, and where the times would decide on
    /// a text, it is all that it holds. The same for the rows that it computes with all clusters.
    pub(crate) fn widths(&self, division: &Division, threads: usize) -> Widths {
        let tier = self.tier.as_ref().filter(|tier| tier.same_bits);
        let (Some(tier), Some(pass)) = (tier, self.pass(division, threads)) else {
            return Widths::default();
        };
        let all = self.shape.neurons.div_ceil(CLUSTER) as u32;
        let rows = std::iter::successors(Some(1usize), |&n| Some(2 * n));
        let of = |rows: usize| {
            let layers = 0..self.shape.layers;
            let clusters: Vec<u32> = layers
                .map(|layer| match tier.follows() {
                    true => self.best_for(&pass, division, layer, rows),
                    false => all,
                })
                .collect();
            let streamed = self.streamed_of(&pass, division, &clusters, rows);
            Width {
                rows,
                clusters,
                streamed,
            }
        };
        Widths(rows.take_while(|&n| n <= MOST).map(of).collect())
    }

    /// How many of `rows` rows the device computes with all clusters, so that it and the CPU end first; 0 if it
    /// is faster with the first `clusters` of each layer, of which it holds some.
    fn streamed_of(
        &self,
        pass: &Pass<'_>,
        division: &Division,
        clusters: &[u32],
        rows: usize,
    ) -> usize {
        let Some(tier) = self.tier.as_ref().filter(|tier| tier.at_once > 0) else {
            return 0;
        };
        if rows < LEAST_STREAMED {
            return 0;
        }
        let all = |beside: Beside| {
            let pass = Pass { beside, ..*pass };
            let time = |layer| pass.in_memory(&division.memory, InMemory { layer, rows })[1];
            (0..self.shape.layers).map(time).sum::<f64>()
        };
        let held = division.needs.device_clusters as usize / self.shape.layers.max(1);
        // Such passes are computed in groups of clusters, so that the device's and the CPU's come one after the other.
        let apart: f64 = (clusters.iter().enumerate())
            .map(|(layer, &best)| {
                let neurons = (held.min(best as usize) * CLUSTER).min(self.shape.neurons);
                let beside = Beside {
                    neurons,
                    ..Beside::default()
                };
                let pass = Pass { beside, ..*pass };
                let own = pass.in_memory(&division.memory, InMemory { layer, rows })[1];
                own + 1e9 * tier.seconds(neurons, rows)
            })
            .sum();
        let streamed = |its: usize| self.streaming(tier, held, [its, rows]);
        let own = |its: usize| {
            all(Beside {
                ns: 0.0,
                ..streamed(its)
            })
        };
        let device = |its: usize| streamed(its).ns * self.shape.layers as f64;
        // The last rows say what stays in memory.
        let its = pieces_of_second(rows - RECENT, own, device);
        match its > 0 && all(streamed(its)) < apart {
            true => its,
            false => 0,
        }
    }

    /// A layer of which a device that holds so many clusters computes `its` of `all` rows. Where the CPU cannot
    /// read what it holds, the CPU waits until that is computed.
    fn streaming(&self, tier: &Tier, held: usize, [its, all]: [usize; 2]) -> Beside {
        let clusters = self.shape.neurons.div_ceil(CLUSTER);
        let (held, at_once) = (held.min(clusters), tier.at_once.max(1));
        let rest = clusters - held;
        let neurons = |clusters: usize| (clusters * CLUSTER).min(self.shape.neurons);
        let of = |clusters: usize, least: f64| {
            let pieces = clusters.div_ceil(at_once).max(1) as f64;
            let piece = neurons(clusters) as f64 / pieces;
            pieces * tier.seconds(piece as usize, its).max(least / pieces)
        };
        let seconds = |clusters: usize, least: f64| match clusters {
            0 => 0.0,
            _ => of(clusters, least),
        };
        let bytes = rest as f64 * tier.cluster_len as f64;
        let of_held = seconds(held, 0.0);
        let (waits, of_others) = match tier.unified || held == 0 {
            true => (0.0, 0.0),
            false => (of_held, tier.seconds(neurons(held), all - its)),
        };
        // Copies to a memory of its own go on beside its work, of which the later one counts.
        let ns = 1e9 * (of_held + seconds(rest, bytes * tier.copy) + of_others);
        Beside {
            neurons: match tier.unified {
                true => 0,
                false => neurons(held),
            },
            ns,
            rows: its,
            copying: bytes / COPIED_PER_NS + 1e9 * (waits + of_others),
        }
    }

    /// The number of a layer's clusters with which the device and the CPU end first.
    fn best_for(&self, pass: &Pass<'_>, division: &Division, layer: usize, rows: usize) -> u32 {
        let Some(tier) = &self.tier else { return 0 };
        let all = self.shape.neurons.div_ceil(CLUSTER);
        let neurons = |clusters: usize| (clusters * CLUSTER).min(self.shape.neurons);
        let with = |clusters: usize, ns: f64| {
            let beside = Beside {
                neurons: neurons(clusters),
                ns,
                ..Beside::default()
            };
            let pass = Pass { beside, ..*pass };
            pass.in_memory(&division.memory, InMemory { layer, rows })
        };
        let its = |clusters: usize| 1e9 * tier.seconds(neurons(clusters), rows);
        // The device begins after what both wait for, and is the later one from some number on.
        let later = |clusters: usize| with(clusters, 0.0)[0] + its(clusters);
        let met = pieces_of_second(all, |clusters| with(clusters, 0.0)[1], later);
        let time = |clusters: usize| with(clusters, its(clusters))[1];
        match time(all) < time(met) {
            true => all as u32,
            false => met as u32,
        }
    }

    /// What a device computes of a layer in a pass of `rows` rows, on average.
    pub(super) fn beside(&self, division: &Division, rows: usize) -> Beside {
        let Some(tier) = &self.tier else {
            return Beside::default();
        };
        let layers = self.shape.layers.max(1);
        let held = division.needs.device_clusters as f64 / layers as f64;
        let streamed = division.widths.streamed(rows);
        if streamed > 0 {
            return self.streaming(tier, held as usize, [streamed, rows]);
        }
        let of = |layer: usize| match division.widths.clusters(layer, rows) {
            Some(best) => held.min(best.into()),
            None => held,
        };
        let clusters = (0..layers).map(of).sum::<f64>() / layers as f64;
        let neurons = (clusters * CLUSTER as f64) as usize;
        Beside {
            neurons,
            ns: 1e9 * tier.seconds(neurons, rows),
            ..Beside::default()
        }
    }
}

impl Tier {
    /// Seconds that the device takes for so many neurons and rows.
    fn seconds(&self, neurons: usize, rows: usize) -> f64 {
        self.times.seconds(Product {
            rows: neurons,
            cols: 1,
            n: rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use super::super::tests::{planner, sparse};
    use super::*;
    use crate::device::products::{Sample, Samples};

    /// A 7B model on a phone beside a device that takes so many seconds for a neuron and 1, 8 or 64 rows.
    fn beside(neuron: [f64; 3]) -> Planner {
        let mut p = planner(Profile::Ufs4, sparse());
        let sample = |(n, weight)| Sample {
            n,
            launch: 100e-6,
            weight,
        };
        p.tier = Some(Tier {
            unified: true,
            memory: u64::MAX,
            cluster_len: CLUSTER as u64 * (p.needs.gate_len + p.needs.rest_len),
            launch: 100e-6,
            cluster: CLUSTER as f64 * neuron[0],
            cpu_cluster: 100e-6,
            times: Samples([1, 8, 64].into_iter().zip(neuron).map(sample).collect()),
            same_bits: true,
            ..Tier::default()
        });
        p
    }

    #[test]
    fn both_end_as_early_as_they_can_and_the_part_grows_with_the_rows() {
        let p = beside([400e-9, 420e-9, 600e-9]);
        let division = p.divide(p.full_budget()).unwrap();
        let pass = p.pass(&division, p.threads).unwrap();
        let mut before = 0;
        for rows in [1, 2, 8, 64, 512] {
            let best = p.best_for(&pass, &division, 3, rows) as usize;
            let time = |clusters: usize| {
                let neurons = clusters * CLUSTER;
                let ns = match clusters {
                    0 => 0.0,
                    _ => 1e9 * p.tier.as_ref().unwrap().seconds(neurons, rows),
                };
                let beside = Beside {
                    neurons,
                    ns,
                    ..Beside::default()
                };
                let pass = Pass { beside, ..pass };
                pass.in_memory(&division.memory, InMemory { layer: 3, rows })[1]
            };
            let all = 0..=p.shape.neurons / CLUSTER;
            let fastest = all.map(time).fold(f64::INFINITY, f64::min);
            assert!(time(best) <= fastest * 1.000_001, "{rows} rows, {best}");
            assert!(best >= before, "{rows} rows: {best} after {before}");
            before = best;
        }
        assert!(before > p.shape.neurons / CLUSTER / 2, "{before}");
    }

    /// What the device does not hold passes through its buffers where copying it takes less than computing.
    #[test]
    fn long_chunks_stream_through_a_device_that_is_fast_for_many_rows() {
        let mut p = beside([400e-9, 420e-9, 600e-9]);
        p.tier.iter_mut().for_each(|tier| tier.at_once = 8);
        let division = p.divide(p.full_budget()).unwrap();
        let pass = p.pass(&division, p.threads).unwrap();
        let of = |rows| p.streamed_of(&pass, &division, &[0; 32], rows);
        assert_eq!(of(16), 0);
        let mut before = 0;
        for rows in [64, 128, 256, 512] {
            let its = of(rows);
            assert!(
                its > rows / 2 && its <= rows - RECENT && its > before,
                "{its} of {rows}"
            );
            before = its;
        }
        assert_eq!(division.widths.streamed(512), before);
        // With a slow one it is no gain.
        let mut slow = beside([1e-3, 1e-3, 1e-3]);
        slow.tier.iter_mut().for_each(|tier| tier.at_once = 8);
        let widths = slow.divide(slow.full_budget()).unwrap().widths;
        assert!(
            [32, 128, 512]
                .iter()
                .all(|&rows| widths.streamed(rows) == 0)
        );
    }

    /// What the CPU cannot read of the device's memory the device computes for all rows, and copies take their time.
    #[test]
    fn through_a_memory_of_its_own_clusters_stream_where_copies_are_fast() {
        let its = |copy: f64, rows: usize| {
            let mut p = beside([400e-9, 420e-9, 600e-9]);
            p.tier.iter_mut().for_each(|tier| {
                (tier.unified, tier.at_once, tier.copy) = (false, 8, copy);
            });
            let division = p.divide(p.full_budget()).unwrap();
            let widths = p.widths(&division, p.threads);
            let all = p.shape.neurons.div_ceil(CLUSTER) as u32;
            assert_eq!(widths.clusters(3, 1), Some(all));
            widths.streamed(rows)
        };
        let fast = its(0.05e-9, 512);
        assert!(fast > 256 && fast <= 512 - RECENT, "{fast}");
        assert_eq!(its(0.0, 16), 0);
        // Copies that take as long as the CPU for all rows.
        assert_eq!(its(1e-6, 512), 0);
        assert!(its(1e-9, 512) <= fast);
    }

    /// Buffers take room from neurons in a memory of its own, where they are used.
    #[test]
    fn what_does_not_stream_leaves_its_memory_to_neurons() {
        for (neuron, used) in [(1e-9, true), (1e-2, false)] {
            let mut p = beside([neuron; 3]);
            p.tier.iter_mut().for_each(|tier| {
                (tier.unified, tier.at_once, tier.asked) = (false, 4, true);
                tier.memory = 40 * tier.cluster_len;
            });
            let division = p.divide(p.full_budget()).unwrap();
            let (held, buffers) = (division.needs.device_clusters, p.stream_buffers(&division));
            let expected = if used { (32, 4) } else { (40, 0) };
            assert_eq!((held, buffers), expected);
            assert_eq!(p.device_spare(&division), 0);
        }
    }

    #[test]
    fn a_device_that_helps_prompts_only_holds_what_these_want() {
        let p = beside([1e-3, 1e-3, 100e-9]);
        let plain = Planner {
            tier: None,
            ..p.clone()
        };
        // With room for Gate rows on both sides.
        let budget = 2 * p.full_budget();
        let [with, without] = [&p, &plain].map(|p| p.divide(budget).unwrap());
        assert!(with.needs.device_clusters > 0);
        assert_eq!(with.widths.clusters(0, 1), Some(0));
        assert!(with.widths.clusters(0, with.chunk) > Some(0));
        let [a, b] = [(&p, &with), (&plain, &without)].map(|(p, d)| {
            let [one, many] = [1, d.chunk].map(|tokens| p.speed(d, tokens));
            (one, many)
        });
        assert!(a.0 >= 0.99 * b.0 && a.1 > 1.2 * b.1, "{a:?} {b:?}");
        // Where times must not decide, nothing of that.
        let mut apart = p.clone();
        apart
            .tier
            .iter_mut()
            .for_each(|tier| tier.same_bits = false);
        let fixed = apart.divide(budget).unwrap();
        assert_eq!(fixed.widths, Widths::default());
        assert_eq!(fixed.needs.device_clusters, 0);
    }
}
