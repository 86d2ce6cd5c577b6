//! The devices' part of a layer, by the number of rows of a pass: devices and CPU should finish at the same time, by the
//! devices' measured times and the CPU's forecast.

use arrayvec::ArrayVec;
use emberflow_engine::lane::{
    CLUSTER, CpuTimes, LaneOutlook, LanePart, LanePlan, LaneTimes, Width, Widths,
};
use serde::Serialize;
use serde_json::json;

use crate::in_use::MOST_DEVICES;
use crate::loads::{ExpertModel, ExpertSetup};
use crate::split::{self, Curve, Linear, Product, pieces_of_second, shares};
use crate::tiers::CapacityGroup;
use crate::times::Samples;

/// Fewest rows of a pass of which devices may compute some with all clusters.
pub(crate) const LEAST_STREAMED: usize = 32;

/// Bytes per nanosecond that one thread copies to a device buffer: half of a typical bandwidth, since
/// a copy reads and writes.
const COPY_BYTES_PER_NS: f64 = 4.0;

/// Longest pass in the table.
const LONGEST_PASS: usize = 512;

/// Devices with measured times.
#[derive(Debug, Clone)]
pub(crate) struct MeasuredTimes {
    /// Name of each device.
    pub names: Vec<String>,
    /// Of each device: seconds by neurons (rows of products with one column) and rows of a pass.
    pub times: Vec<Samples>,
    /// Their memory is the machine's.
    pub unified: bool,
    /// They have the CPU's bits.
    pub same_bits: bool,
    /// Clusters per stream buffer; 0 without.
    pub at_once: usize,
    /// Seconds per byte copied to separate memory while a device computes.
    pub copy: f64,
    /// Experts, if a device computes them in groups.
    pub experts: Option<ExpertModel>,
}

/// Devices beside the CPU's forecast.
#[derive(Clone, Copy)]
struct Beside<'a> {
    devices: &'a MeasuredTimes,
    cpu: &'a dyn CpuTimes,
    /// Clusters that devices hold of each layer.
    held: usize,
}

impl MeasuredTimes {
    fn curves(&self) -> ArrayVec<&dyn Curve, MOST_DEVICES> {
        self.times.iter().map(|times| times as &dyn Curve).collect()
    }

    /// Seconds of the devices together for `neurons` neurons and `rows` rows.
    fn seconds(&self, neurons: usize, rows: usize) -> f64 {
        let work = Product {
            rows: neurons,
            cols: 1,
            n: rows,
        };
        split::seconds(work, &self.curves())
    }

    fn beside<'a>(&'a self, cpu: &'a dyn CpuTimes, held: u64) -> Beside<'a> {
        Beside {
            devices: self,
            cpu,
            held: held as usize / cpu.layers().max(1),
        }
    }
}

impl Beside<'_> {
    fn neurons(&self, clusters: usize) -> usize {
        (clusters * CLUSTER).min(self.cpu.neurons())
    }

    fn clusters(&self) -> usize {
        self.cpu.neurons().div_ceil(CLUSTER)
    }

    /// Nanoseconds of all layers beside a part.
    fn all_layers(&self, rows: usize, part: LanePart) -> f64 {
        let layers = 0..self.cpu.layers();
        layers
            .map(|layer| self.cpu.layer_ns(layer, rows, part)[1])
            .sum()
    }

    /// Number of `rows` rows for which devices compute all clusters. 0 if devices that compute the first `clusters` of each
    /// layer, which they hold, are faster.
    fn streamed(&self, clusters: &[u32], rows: usize) -> usize {
        if self.devices.at_once == 0 || rows < LEAST_STREAMED {
            return 0;
        }
        // Such passes are computed in groups of clusters, so devices and CPU alternate.
        let apart: f64 = (clusters.iter().enumerate())
            .map(|(layer, &best)| {
                let neurons = self.neurons(self.held.min(best as usize));
                let part = LanePart {
                    neurons,
                    ..LanePart::default()
                };
                let cpu = self.cpu.layer_ns(layer, rows, part)[1];
                cpu + 1e9 * self.devices.seconds(neurons, rows)
            })
            .sum();
        let streaming = |streamed: usize| self.streaming([streamed, rows]);
        let cpu = |streamed: usize| {
            let part = LanePart {
                ns: 0.0,
                ..streaming(streamed)
            };
            self.all_layers(rows, part)
        };
        let device = |streamed: usize| streaming(streamed).ns * self.cpu.layers() as f64;
        // The CPU computes the last rows: they determine what stays in the cache.
        let streamed = pieces_of_second(rows - self.cpu.last_rows(), cpu, device);
        match streamed > 0 && self.all_layers(rows, streaming(streamed)) < apart {
            true => streamed,
            false => 0,
        }
    }

    /// The devices' part of a layer if they compute `streamed` of `all` rows. The CPU waits for clusters that it cannot read.
    fn streaming(&self, [streamed, all]: [usize; 2]) -> LanePart {
        let devices = self.devices;
        let clusters = self.clusters();
        let (held, at_once) = (self.held.min(clusters), devices.at_once.max(1));
        let rest = clusters - held;
        let pieces_of = |clusters: usize, least: f64| {
            let pieces = clusters.div_ceil(at_once).max(1) as f64;
            let piece = self.neurons(clusters) as f64 / pieces;
            pieces
                * devices
                    .seconds(piece as usize, streamed)
                    .max(least / pieces)
        };
        let seconds = |clusters: usize, least: f64| match clusters {
            0 => 0.0,
            _ => pieces_of(clusters, least),
        };
        let bytes = rest as f64 * self.cpu.cluster_len() as f64;
        let of_held = seconds(held, 0.0);
        let (waits, for_others) = if devices.unified || held == 0 {
            (0.0, 0.0)
        } else {
            (of_held, devices.seconds(self.neurons(held), all - streamed))
        };
        // Copies to separate memory overlap the devices' work; the longer of the two counts.
        let ns = 1e9 * (of_held + seconds(rest, bytes * devices.copy) + for_others);
        LanePart {
            neurons: if devices.unified {
                0
            } else {
                self.neurons(held)
            },
            ns,
            rows: streamed,
            copying: bytes / COPY_BYTES_PER_NS + 1e9 * (waits + for_others),
        }
    }

    /// Number of a layer's clusters for which devices and CPU finish first.
    fn best_for(&self, layer: usize, rows: usize) -> usize {
        let all = self.clusters();
        let with = |clusters: usize, ns: f64| {
            let part = LanePart {
                neurons: self.neurons(clusters),
                ns,
                ..LanePart::default()
            };
            self.cpu.layer_ns(layer, rows, part)
        };
        let device = |clusters: usize| 1e9 * self.devices.seconds(self.neurons(clusters), rows);
        // Devices start after the active set is known. From some number of clusters on they finish later than the CPU.
        let later = |clusters: usize| with(clusters, 0.0)[0] + device(clusters);
        let met = pieces_of_second(all, |clusters| with(clusters, 0.0)[1], later);
        let time = |clusters: usize| with(clusters, device(clusters))[1];
        if time(all) < time(met) { all } else { met }
    }

    /// What each device computes of a layer in the middle of the model.
    fn layer(&self, of: &LaneOutlook<'_>, device: usize, rows: usize) -> LayerTime {
        let layer = self.cpu.layers() / 2;
        let streamed = of.widths.streamed(rows);
        let clusters = match (self.devices.expert_plan(of, rows), streamed) {
            (Some(plan), _) => plan.in_groups(),
            (None, 0) => {
                let wanted = of.widths.clusters(layer, rows);
                wanted.map_or(self.held, |wanted| self.held.min(wanted as usize))
            }
            (None, _) => self.clusters(),
        };
        let work = Product {
            rows: clusters,
            cols: CLUSTER,
            n: if streamed > 0 { streamed } else { rows },
        };
        let whole = Product {
            rows: self.cpu.neurons(),
            cols: 1,
            n: rows,
        };
        let alone = self.cpu.layer_ns(layer, rows, LanePart::default());
        LayerTime {
            rows,
            device_ms: 1e3 * self.devices.times[device].seconds(whole),
            cpu_ms: alone[1] / 1e6,
            clusters: shares(work, &self.devices.curves())[device],
            streamed,
        }
    }
}

impl LaneTimes for MeasuredTimes {
    /// The weighted partition of [`split`]. 0 if it is less than one cluster per layer: the launches would take as long as
    /// they save.
    fn balanced(&self, hot: u64, cpu: f64, layers: usize) -> u64 {
        let cpu = Linear {
            launch: 0.0,
            row: cpu,
        };
        let of_one = self.times.iter().filter_map(|samples| samples.0.first());
        let devices: Vec<Linear> = of_one
            .map(|one| Linear {
                launch: layers as f64 * one.launch,
                row: CLUSTER as f64 * one.weight,
            })
            .collect();
        let cpu: &dyn Curve = &cpu;
        let devices = devices.iter().map(|device| device as &dyn Curve);
        let all: Vec<&dyn Curve> = std::iter::once(cpu).chain(devices).collect();
        let rows = usize::try_from(hot).unwrap_or(usize::MAX);
        let work = Product {
            rows,
            cols: 1,
            n: 1,
        };
        let clusters = rows - shares(work, &all)[0];
        if clusters < layers {
            0
        } else {
            clusters as u64
        }
    }

    /// They follow the times if the CPU can compute the rest with the same bits. Otherwise devices compute all that they hold,
    /// since times must not change a text.
    fn widths(&self, cpu: &dyn CpuTimes, held: u64) -> Widths {
        if !self.same_bits {
            return Widths::default();
        }
        let beside = self.beside(cpu, held);
        let rows = std::iter::successors(Some(1usize), |&n| Some(2 * n));
        let width = |rows: usize| {
            let best = |layer| match self.unified {
                true => beside.best_for(layer, rows) as u32,
                false => beside.clusters() as u32,
            };
            let clusters: Vec<u32> = (0..cpu.layers()).map(best).collect();
            Width {
                rows,
                streamed: beside.streamed(&clusters, rows),
                clusters,
            }
        };
        Widths(rows.take_while(|&n| n <= LONGEST_PASS).map(width).collect())
    }

    fn part(&self, cpu: &dyn CpuTimes, widths: &Widths, held: u64, rows: usize) -> LanePart {
        let streamed = widths.streamed(rows);
        if streamed > 0 {
            return self.beside(cpu, held).streaming([streamed, rows]);
        }
        let layers = cpu.layers().max(1);
        let held = held as f64 / layers as f64;
        let of_layer = |layer: usize| match widths.clusters(layer, rows) {
            Some(best) => held.min(best.into()),
            None => held,
        };
        let clusters = (0..layers).map(of_layer).sum::<f64>() / layers as f64;
        let neurons = (clusters * CLUSTER as f64) as usize;
        LanePart {
            neurons,
            ns: 1e9 * self.seconds(neurons, rows),
            ..LanePart::default()
        }
    }

    fn explain(&self, of: &LaneOutlook<'_>) -> Vec<LanePlan> {
        let beside = self.beside(of.cpu, of.held);
        let plan = |(device, name): (usize, &String)| {
            let layers = of.rows.iter().map(|&rows| beside.layer(of, device, rows));
            let plan = DevicePlan {
                name: name.clone(),
                layers: layers.collect(),
                experts: self.expert_plan(of, of.chunk),
            };
            LanePlan {
                values: json!(plan),
                text: plan.words(),
            }
        };
        self.names.iter().enumerate().map(plan).collect()
    }
}

impl MeasuredTimes {
    /// Where the experts of a layer in the middle are computed in passes of `rows` rows.
    fn expert_plan(&self, of: &LaneOutlook<'_>, rows: usize) -> Option<ExpertPlan> {
        let (model, times) = (self.experts.as_ref()?, self.times.first()?);
        let middle = of.cpu.layers() / 2;
        let cpu = of.cpu.layer_ns(middle, of.chunk, LanePart::default())[1];
        let setup: ExpertSetup = model.setup(of.visits, times, cpu / 1e9, of.chunk);
        let layers = 0..setup.visits.len();
        let layers: Vec<usize> = layers.filter(|&layer| setup.experts(layer) > 0).collect();
        let &layer = layers.get(layers.len() / 2)?;
        let held = setup.banks.held(of.held);
        let placed = setup.place(layer, rows, &held);
        let group = |group: &CapacityGroup| GroupPlan {
            experts: group.experts.len(),
            capacity: group.capacity,
        };
        Some(ExpertPlan {
            rows,
            groups: placed.groups.iter().map(group).collect(),
            on_cpu: placed.on_cpu.len(),
            clusters: setup.times.neurons.div_ceil(CLUSTER),
        })
    }
}

/// A device's measured times, and what it computes of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DevicePlan {
    /// Name of the device.
    pub name: String,
    /// By rows of a pass: one, all texts, a prompt chunk.
    pub layers: Vec<LayerTime>,
    /// Experts that it computes in groups in a prompt chunk; `null` if it does not.
    pub experts: Option<ExpertPlan>,
}

/// Where the experts of a layer in the middle are computed in a prompt chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExpertPlan {
    /// Rows of the chunk.
    pub rows: usize,
    /// Groups on the device, those of the most tokens first.
    pub groups: Vec<GroupPlan>,
    /// Experts that the CPU computes.
    pub on_cpu: usize,
    /// Clusters of an expert.
    #[serde(skip)]
    clusters: usize,
}

/// A group of experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GroupPlan {
    /// Number of experts.
    pub experts: usize,
    /// Most tokens of each that are computed there.
    pub capacity: usize,
}

/// A layer's FFN on a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LayerTime {
    /// Rows of the pass.
    pub rows: usize,
    /// Milliseconds of the device for all clusters, by its measured times, launch included.
    pub device_ms: f64,
    /// Milliseconds of the CPU's threads without devices, if nothing is read.
    pub cpu_ms: f64,
    /// Clusters that the device computes.
    pub clusters: usize,
    /// Rows for which the devices compute all clusters; 0 if they compute those that they hold for all rows.
    pub streamed: usize,
}

impl ExpertPlan {
    /// Clusters of the experts in groups.
    fn in_groups(&self) -> usize {
        let experts: usize = self.groups.iter().map(|group| group.experts).sum();
        experts * self.clusters
    }

    /// The groups as text.
    fn words(&self) -> String {
        let text = |group: &GroupPlan| format!("{} of {} tokens", group.experts, group.capacity);
        let groups: Vec<String> = self.groups.iter().map(text).collect();
        let groups = match groups.is_empty() {
            true => "none in groups".into(),
            false => format!("groups of {}", groups.join(", ")),
        };
        format!(
            "; experts of a layer for {} rows: {groups}; {} on the CPU",
            self.rows, self.on_cpu
        )
    }
}

impl DevicePlan {
    /// The times and the decision as text.
    fn words(&self) -> String {
        let text = |time: &LayerTime| {
            let LayerTime {
                rows,
                device_ms,
                cpu_ms,
                clusters,
                streamed,
            } = time;
            let part = match (clusters, streamed) {
                (0, _) => "computes none of it".to_owned(),
                (_, 0) => format!("computes {clusters} clusters of it"),
                _ => format!("computes {clusters} clusters of it for {streamed} rows"),
            };
            format!(
                "a layer for {rows} rows takes {device_ms:.3} ms, {cpu_ms:.3} ms on the CPU alone: {part}"
            )
        };
        let layers: Vec<String> = self.layers.iter().map(text).collect();
        let experts = self.experts.as_ref().map(ExpertPlan::words);
        let experts = experts.unwrap_or_default();
        format!("{}: {}{experts}", self.name, layers.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::times::Sample;

    /// A 7B model's layers on a CPU on which half of the neurons fire for one row, and nearly all for many.
    struct Cpu;

    impl CpuTimes for Cpu {
        fn layers(&self) -> usize {
            32
        }

        fn neurons(&self) -> usize {
            14336
        }

        fn last_rows(&self) -> usize {
            2
        }

        fn cluster_len(&self) -> u64 {
            CLUSTER as u64 * 6912
        }

        fn layer_ns(&self, _: usize, rows: usize, part: LanePart) -> [f64; 2] {
            let rows = rows - part.rows;
            let fires = 1.0 - 0.5f64.powi(rows as i32);
            let neurons = (self.neurons() - part.neurons) as f64;
            let before = 20_000.0 + 200.0 * neurons;
            let own = neurons * fires * (1500.0 + 300.0 * rows as f64) + part.copying;
            [before, before + own.max(part.ns)]
        }
    }

    /// Times of a device for one row, by cluster.
    fn one_row(launch: f64, cluster: f64) -> Samples {
        let weight = cluster / CLUSTER as f64;
        Samples(vec![Sample {
            n: 1,
            launch,
            weight,
        }])
    }

    /// A device that takes `neuron[i]` seconds per neuron for 1, 8 and 64 rows.
    fn device(neuron: [f64; 3]) -> MeasuredTimes {
        let sample = |(n, weight)| Sample {
            n,
            launch: 100e-6,
            weight,
        };
        MeasuredTimes {
            names: vec!["one".into()],
            times: vec![Samples(
                [1, 8, 64].into_iter().zip(neuron).map(sample).collect(),
            )],
            unified: true,
            same_bits: true,
            at_once: 0,
            copy: 0.0,
            experts: None,
        }
    }

    #[test]
    fn devices_get_what_makes_all_end_at_once() {
        let times = [[50e-6, 10e-6], [20e-6, 15e-6]];
        let devices = |count: usize| MeasuredTimes {
            times: times[..count].iter().map(|&[l, c]| one_row(l, c)).collect(),
            ..device([0.0; 3])
        };
        let seconds = |n: usize, clusters: u64| match clusters {
            0 => 0.0,
            _ => 10.0 * times[n][0] + clusters as f64 * times[n][1],
        };
        for (hot, cpu) in [(1000, 30e-6), (1000, 18e-6), (333, 30e-6)] {
            for count in [1, 2] {
                let clusters = devices(count).balanced(hot, cpu, 10);
                // Of the devices' clusters the second takes as many as are best, if it is there.
                let time = |d: u64| {
                    let second = if count > 1 { 0..=d } else { 0..=0 };
                    let both = second.map(|other| seconds(0, d - other).max(seconds(1, other)));
                    let both = both.fold(f64::INFINITY, f64::min);
                    both.max((hot - d) as f64 * cpu)
                };
                // No other number is faster.
                let best = (0..=hot).map(time).fold(f64::INFINITY, f64::min);
                assert!(time(clusters) <= best * 1.000_001, "{clusters}");
            }
            let [one, two] = [1, 2].map(|count| devices(count).balanced(hot, cpu, 10));
            assert!(two > one, "{two} {one}");
        }
        // A launch costs more than the CPU needs for everything.
        assert_eq!(devices(1).balanced(16, 30e-6, 10), 0);
        let slow = MeasuredTimes {
            times: vec![one_row(50e-6, 1.0)],
            ..devices(1)
        };
        assert_eq!(slow.balanced(1000, 30e-6, 10), 0);
    }

    #[test]
    fn both_end_as_early_as_they_can_and_the_part_grows_with_the_rows() {
        let devices = device([400e-9, 420e-9, 600e-9]);
        let beside = devices.beside(&Cpu, 0);
        let mut before = 0;
        for rows in [1, 2, 8, 64, 512] {
            let best = beside.best_for(3, rows);
            let time = |clusters: usize| {
                let neurons = clusters * CLUSTER;
                let ns = match clusters {
                    0 => 0.0,
                    _ => 1e9 * devices.seconds(neurons, rows),
                };
                let part = LanePart {
                    neurons,
                    ns,
                    ..LanePart::default()
                };
                Cpu.layer_ns(3, rows, part)[1]
            };
            let all = 0..=Cpu.neurons() / CLUSTER;
            let fastest = all.map(time).fold(f64::INFINITY, f64::min);
            assert!(time(best) <= fastest * 1.000_001, "{rows} rows, {best}");
            assert!(best >= before, "{rows} rows: {best} after {before}");
            before = best;
        }
        assert!(before > Cpu.neurons() / CLUSTER / 2, "{before}");
    }

    /// Clusters that devices do not hold stream through their buffers if copying is faster than computing.
    #[test]
    fn long_chunks_stream_through_a_device_that_is_fast_for_many_rows() {
        let streams = |neuron: [f64; 3]| MeasuredTimes {
            at_once: 8,
            ..device(neuron)
        };
        let widths = streams([400e-9, 420e-9, 600e-9]).widths(&Cpu, 0);
        assert_eq!(widths.streamed(16), 0);
        let mut before = 0;
        for rows in [64, 128, 256, 512] {
            let streamed = widths.streamed(rows);
            assert!(
                streamed > rows / 2 && streamed <= rows - 2 && streamed > before,
                "{streamed} of {rows}"
            );
            before = streamed;
        }
        // A slow device gains nothing.
        let slow = streams([1e-3; 3]).widths(&Cpu, 0);
        assert!([32, 128, 512].iter().all(|&rows| slow.streamed(rows) == 0));
    }

    /// In separate memory devices compute all that they hold, and copies take time.
    #[test]
    fn through_a_memory_of_its_own_clusters_stream_where_copies_are_fast() {
        let widths = |copy: f64| {
            let devices = MeasuredTimes {
                unified: false,
                at_once: 8,
                copy,
                ..device([400e-9, 420e-9, 600e-9])
            };
            devices.widths(&Cpu, 0)
        };
        let fast = widths(0.05e-9);
        let all = Cpu.neurons().div_ceil(CLUSTER) as u32;
        assert_eq!(fast.clusters(3, 1), Some(all));
        assert!(fast.streamed(512) > 256 && fast.streamed(512) <= 512 - 2);
        assert_eq!(widths(0.0).streamed(16), 0);
        // Copies that take as long as the CPU needs for all rows.
        assert_eq!(widths(1e-6).streamed(512), 0);
        assert!(widths(1e-9).streamed(512) <= fast.streamed(512));
    }

    /// Without the CPU's bits times do not decide.
    #[test]
    fn devices_with_other_bits_compute_all_that_they_hold() {
        let other = MeasuredTimes {
            same_bits: false,
            at_once: 8,
            ..device([1e-9; 3])
        };
        assert_eq!(other.widths(&Cpu, 320), Widths::default());
        let part = other.part(&Cpu, &Widths::default(), 320, 1);
        assert_eq!(part.neurons, 10 * CLUSTER);
    }

    /// A second device takes a share of what the first had alone; a slow one takes nothing, and the plan says so.
    #[test]
    fn a_plan_names_each_devices_times_and_share() {
        let plan = |second: f64| {
            let of = |cluster| one_row(100e-6, cluster);
            let devices = MeasuredTimes {
                names: vec!["one".into(), "two".into()],
                times: vec![of(1e-6), of(second)],
                ..device([0.0; 3])
            };
            let (held, widths) = (32 * 100, Widths::default());
            let outlook = LaneOutlook {
                cpu: &Cpu,
                widths: &widths,
                held,
                visits: &[],
                rows: &[1, 64],
                chunk: 64,
            };
            devices.explain(&outlook)
        };
        let clusters = |of: &LanePlan, i: usize| of.values["layers"][i]["clusters"].as_u64();
        let [one, two] = &plan(1e-6)[..] else {
            panic!("two devices")
        };
        for i in 0..2 {
            let [a, b] = [one, two].map(|of| clusters(of, i).unwrap());
            assert!(a > 0 && a.abs_diff(b) <= 1, "{a} {b}");
        }
        let [one, two] = &plan(128e-3)[..] else {
            panic!("two devices")
        };
        assert!((0..2).all(|i| clusters(one, i) > Some(0) && clusters(two, i) == Some(0)));
        assert!(
            two.text.starts_with("two: a layer for 1 rows takes 14336"),
            "{}",
            two.text
        );
        assert!(
            two.text.contains("on the CPU alone: computes none of it"),
            "{}",
            two.text
        );
    }
}
