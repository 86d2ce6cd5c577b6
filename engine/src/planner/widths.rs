//! The device's part of a layer, by the number of rows of a pass: the device and the CPU should
//! finish at the same time, by the device's measured times and the CPU's forecast.

use arrayvec::ArrayVec;

use super::budget::Division;
use super::cost::ResidentLayer;
use super::facts::{DeviceTier, Planner};
use super::pass::{CostModel, DevicePart};
use crate::cluster::CLUSTER;
use crate::device::{LEAST_STREAMED, MOST_DEVICES, Width, Widths};
use crate::ffn::RECENT;
use crate::split::{self, Curve, Product, pieces_of_second};

/// Bytes per nanosecond that one thread copies to a device buffer: half of a typical bandwidth, since
/// a copy reads and writes.
const COPY_BYTES_PER_NS: f64 = 4.0;

/// Longest pass in the table.
const LONGEST_PASS: usize = 512;

impl Planner {
    /// Clusters per layer and streamed rows that the device computes in parallel with `threads`
    /// compute threads. They follow the times if the CPU can compute the rest with the same bits.
    /// Otherwise the device computes all that it holds, since times must not change a text.
    pub(crate) fn widths(&self, division: &Division, threads: usize) -> Widths {
        // The experts of a pass are not known.
        let follows = |tier: &&DeviceTier| tier.same_bits && self.shape.visited == 1.0;
        let tier = self.tier.as_ref().filter(follows);
        let (Some(tier), Some(pass)) = (tier, self.pass(division, threads)) else {
            return Widths::default();
        };
        let all = self.shape.neurons.div_ceil(CLUSTER) as u32;
        let rows = std::iter::successors(Some(1usize), |&n| Some(2 * n));
        let of = |rows: usize| {
            let layers = 0..self.shape.layers;
            let clusters: Vec<u32> = layers
                .map(|layer| {
                    if tier.follows() {
                        self.best_for(&pass, division, layer, rows)
                    } else {
                        all
                    }
                })
                .collect();
            let streamed = self.streamed_of(&pass, division, &clusters, rows);
            Width {
                rows,
                clusters,
                streamed,
            }
        };
        Widths(rows.take_while(|&n| n <= LONGEST_PASS).map(of).collect())
    }

    /// Number of `rows` rows for which the device computes all clusters. 0 if a device that
    /// computes the first `clusters` of each layer, which it holds, is faster.
    fn streamed_of(
        &self,
        pass: &CostModel<'_>,
        division: &Division,
        clusters: &[u32],
        rows: usize,
    ) -> usize {
        let tier = self.tier.as_ref().filter(|tier| tier.at_once > 0);
        let Some(tier) = tier.filter(|_| rows >= LEAST_STREAMED) else {
            return 0;
        };
        let all = |device_part: DevicePart| {
            let pass = CostModel {
                device_part,
                ..*pass
            };
            let time = |layer| pass.in_memory(&division.memory, ResidentLayer { layer, rows })[1];
            (0..self.shape.layers).map(time).sum::<f64>()
        };
        let held = division.needs.device_clusters as usize / self.shape.layers.max(1);
        // Such passes are computed in groups of clusters, so the device and the CPU alternate.
        let apart: f64 = (clusters.iter().enumerate())
            .map(|(layer, &best)| {
                let neurons = (held.min(best as usize) * CLUSTER).min(self.shape.neurons);
                let device_part = DevicePart {
                    neurons,
                    ..DevicePart::default()
                };
                let pass = CostModel {
                    device_part,
                    ..*pass
                };
                let own = pass.in_memory(&division.memory, ResidentLayer { layer, rows })[1];
                own + 1e9 * tier.seconds(neurons, rows)
            })
            .sum();
        let streamed = |its: usize| self.streaming(tier, held, [its, rows]);
        let own = |its: usize| {
            all(DevicePart {
                ns: 0.0,
                ..streamed(its)
            })
        };
        let device = |its: usize| streamed(its).ns * self.shape.layers as f64;
        // The CPU computes the last rows: they determine what stays in the cache.
        let its = pieces_of_second(rows - RECENT, own, device);
        if its > 0 && all(streamed(its)) < apart {
            its
        } else {
            0
        }
    }

    /// Device part of a layer that computes `its` of `all` rows and holds `held` clusters. If the
    /// CPU cannot read these, it waits for them.
    fn streaming(&self, tier: &DeviceTier, held: usize, [its, all]: [usize; 2]) -> DevicePart {
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
        let (waits, of_others) = if tier.unified || held == 0 {
            (0.0, 0.0)
        } else {
            (of_held, tier.seconds(neurons(held), all - its))
        };
        // Copies to separate memory overlap the device's work; the longer of the two counts.
        let ns = 1e9 * (of_held + seconds(rest, bytes * tier.copy) + of_others);
        DevicePart {
            neurons: if tier.unified { 0 } else { neurons(held) },
            ns,
            rows: its,
            copying: bytes / COPY_BYTES_PER_NS + 1e9 * (waits + of_others),
        }
    }

    /// Number of a layer's clusters for which the device and the CPU finish first.
    fn best_for(
        &self,
        pass: &CostModel<'_>,
        division: &Division,
        layer: usize,
        rows: usize,
    ) -> u32 {
        let Some(tier) = &self.tier else { return 0 };
        let all = self.shape.neurons.div_ceil(CLUSTER);
        let neurons = |clusters: usize| (clusters * CLUSTER).min(self.shape.neurons);
        let with = |clusters: usize, ns: f64| {
            let device_part = DevicePart {
                neurons: neurons(clusters),
                ns,
                ..DevicePart::default()
            };
            let pass = CostModel {
                device_part,
                ..*pass
            };
            pass.in_memory(&division.memory, ResidentLayer { layer, rows })
        };
        let its = |clusters: usize| 1e9 * tier.seconds(neurons(clusters), rows);
        // The device starts after the active set is known. From some number of clusters on it
        // finishes later than the CPU.
        let later = |clusters: usize| with(clusters, 0.0)[0] + its(clusters);
        let met = pieces_of_second(all, |clusters| with(clusters, 0.0)[1], later);
        let time = |clusters: usize| with(clusters, its(clusters))[1];
        if time(all) < time(met) {
            all as u32
        } else {
            met as u32
        }
    }

    /// Mean device part of a layer in a pass of `rows` rows.
    pub(super) fn device_part(&self, division: &Division, rows: usize) -> DevicePart {
        let Some(tier) = self.tier.as_ref().filter(|_| self.shape.visited == 1.0) else {
            return DevicePart::default();
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
        DevicePart {
            neurons,
            ns: 1e9 * tier.seconds(neurons, rows),
            ..DevicePart::default()
        }
    }
}

impl DeviceTier {
    /// Seconds of the devices together for `neurons` neurons and `rows` rows.
    pub(super) fn seconds(&self, neurons: usize, rows: usize) -> f64 {
        let of = Product {
            rows: neurons,
            cols: 1,
            n: rows,
        };
        let curves = self.times.iter().map(|times| times as &dyn Curve);
        let curves: ArrayVec<&dyn Curve, MOST_DEVICES> = curves.collect();
        split::seconds(of, &curves)
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use super::super::tests::{planner, sparse};
    use super::*;
    use crate::device::shared::{Sample, Samples};

    /// A 7B model on a phone with a device that takes `neuron[i]` seconds per neuron for 1, 8 and
    /// 64 rows.
    fn device_planner(neuron: [f64; 3]) -> Planner {
        let mut p = planner(Profile::Ufs4, sparse());
        let sample = |(n, weight)| Sample {
            n,
            launch: 100e-6,
            weight,
        };
        p.tier = Some(DeviceTier {
            unified: true,
            memory: u64::MAX,
            cluster_len: CLUSTER as u64 * (p.needs.gate_len + p.needs.rest_len),
            cpu_cluster: 100e-6,
            times: vec![Samples(
                [1, 8, 64].into_iter().zip(neuron).map(sample).collect(),
            )],
            same_bits: true,
            ..DeviceTier::default()
        });
        p
    }

    #[test]
    fn both_end_as_early_as_they_can_and_the_part_grows_with_the_rows() {
        let p = device_planner([400e-9, 420e-9, 600e-9]);
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
                let device_part = DevicePart {
                    neurons,
                    ns,
                    ..DevicePart::default()
                };
                let pass = CostModel {
                    device_part,
                    ..pass
                };
                pass.in_memory(&division.memory, ResidentLayer { layer: 3, rows })[1]
            };
            let all = 0..=p.shape.neurons / CLUSTER;
            let fastest = all.map(time).fold(f64::INFINITY, f64::min);
            assert!(time(best) <= fastest * 1.000_001, "{rows} rows, {best}");
            assert!(best >= before, "{rows} rows: {best} after {before}");
            before = best;
        }
        assert!(before > p.shape.neurons / CLUSTER / 2, "{before}");
    }

    /// Clusters that the device does not hold stream through its buffers if copying is faster than
    /// computing.
    #[test]
    fn long_chunks_stream_through_a_device_that_is_fast_for_many_rows() {
        let mut p = device_planner([400e-9, 420e-9, 600e-9]);
        p.tier.iter_mut().for_each(|tier| tier.at_once = 8);
        // The device holds no cluster.
        let budget = p.needs_with(&p.needs, p.longest_chunk()).full_budget();
        let division = p.divide(budget).unwrap();
        assert_eq!(division.needs.device_clusters, 0);
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
        // A slow device gains nothing.
        let mut slow = device_planner([1e-3, 1e-3, 1e-3]);
        slow.tier.iter_mut().for_each(|tier| tier.at_once = 8);
        let widths = slow.divide(slow.full_budget()).unwrap().widths;
        assert!(
            [32, 128, 512]
                .iter()
                .all(|&rows| widths.streamed(rows) == 0)
        );
    }

    /// The device computes clusters in separate memory for all rows, and copies take time.
    #[test]
    fn through_a_memory_of_its_own_clusters_stream_where_copies_are_fast() {
        let its = |copy: f64, rows: usize| {
            let mut p = device_planner([400e-9, 420e-9, 600e-9]);
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
        // Copies that take as long as the CPU needs for all rows.
        assert_eq!(its(1e-6, 512), 0);
        assert!(its(1e-9, 512) <= fast);
    }

    /// Stream buffers in separate memory displace neurons only if they are used.
    #[test]
    fn what_does_not_stream_leaves_its_memory_to_neurons() {
        for (neuron, used) in [(1e-9, true), (1e-2, false)] {
            let mut p = device_planner([neuron; 3]);
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
        let p = device_planner([1e-3, 1e-3, 100e-9]);
        let plain = Planner {
            tier: None,
            ..p.clone()
        };
        let budget = p.full_budget();
        assert!(budget > plain.full_budget());
        let [with, without] = [&p, &plain].map(|p| p.divide(budget).unwrap());
        assert!(with.is_resident() && with.needs.device_clusters > 0);
        assert_eq!(with.widths.clusters(0, 1), Some(0));
        assert!(with.widths.clusters(0, with.chunk) > Some(0));
        let [a, b] = [(&p, &with), (&plain, &without)].map(|(p, d)| {
            let [one, many] = [1, d.chunk].map(|tokens| p.speed(d, tokens));
            (one, many)
        });
        assert!(a.0 >= 0.99 * b.0 && a.1 > 1.2 * b.1, "{a:?} {b:?}");
        // Without equal bits, times must not decide.
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
