//! Devices in a plan: measured times for a layer, of each device and of the CPU, and the share of each.

use arrayvec::ArrayVec;

use super::budget::Division;
use super::cost::ResidentLayer;
use super::facts::{DeviceTier, Planner};
use super::groups::expert_plan;
use super::pass::CostModel;
use super::plan::{DevicePlan, ExpertPlan, LayerTime};
use crate::cluster::CLUSTER;
use crate::device::MOST_DEVICES;
use crate::split::{Curve, Product, shares};

/// What of a layer is compared.
#[derive(Clone, Copy)]
struct DeviceLayer<'a> {
    planner: &'a Planner,
    tier: &'a DeviceTier,
    pass: &'a CostModel<'a>,
    division: &'a Division,
}

/// Each device's times for a layer in the middle of the model, in passes of one row, of all texts and of a prompt.
pub(super) fn device_plans(
    planner: &Planner,
    pass: &CostModel<'_>,
    division: &Division,
) -> Vec<DevicePlan> {
    let Some(tier) = &planner.tier else {
        return Vec::new();
    };
    let of = DeviceLayer {
        planner,
        tier,
        pass,
        division,
    };
    let mut rows = vec![1, division.batch.max(1), division.chunk.max(1)];
    rows.sort_unstable();
    rows.dedup();
    let plan = |(n, name): (usize, &String)| DevicePlan {
        name: name.clone(),
        layers: rows.iter().map(|&rows| of.layer(n, rows)).collect(),
        experts: expert_plan(planner, division, division.chunk.max(1)),
    };
    tier.names.iter().enumerate().map(plan).collect()
}

impl DeviceLayer<'_> {
    /// A layer on a device, for so many rows.
    fn layer(self, device: usize, rows: usize) -> LayerTime {
        let DeviceLayer {
            planner,
            tier,
            pass,
            division,
        } = self;
        let shape = &planner.shape;
        let layers = shape.layers.max(1);
        let layer = layers / 2;
        let streamed = division.widths.streamed(rows);
        let held = division.needs.device_clusters as usize / layers;
        let grouped = expert_plan(planner, division, rows);
        let clusters = match streamed {
            _ if grouped.is_some() => grouped.map_or(0, |plan| plan.in_groups()),
            0 => {
                let wanted = division.widths.clusters(layer, rows);
                wanted.map_or(held, |wanted| held.min(wanted as usize))
            }
            _ => shape.neurons.div_ceil(CLUSTER),
        };
        let curves = tier.times.iter().map(|times| times as &dyn Curve);
        let curves: ArrayVec<&dyn Curve, MOST_DEVICES> = curves.collect();
        let of = Product {
            rows: clusters,
            cols: CLUSTER,
            n: if streamed > 0 { streamed } else { rows },
        };
        let whole = Product {
            rows: shape.neurons,
            cols: 1,
            n: rows,
        };
        let alone = pass.in_memory(&division.memory, ResidentLayer { layer, rows });
        LayerTime {
            rows,
            device_ms: 1e3 * tier.times[device].seconds(whole),
            cpu_ms: alone[1] / 1e6,
            clusters: shares(of, &curves)[device],
            streamed,
        }
    }
}

impl DevicePlan {
    /// The times and the decision, in words.
    pub fn words(&self) -> String {
        let of = |time: &LayerTime| {
            let LayerTime {
                rows,
                device_ms,
                cpu_ms,
                clusters,
                streamed,
            } = time;
            let what = match (clusters, streamed) {
                (0, _) => "computes none of it".to_owned(),
                (_, 0) => format!("computes {clusters} clusters of it"),
                _ => format!("computes {clusters} clusters of it for {streamed} rows"),
            };
            format!(
                "a layer for {rows} rows takes {device_ms:.3} ms, {cpu_ms:.3} ms on the CPU alone: {what}"
            )
        };
        let layers: Vec<String> = self.layers.iter().map(of).collect();
        let experts = self.experts.as_ref().map(ExpertPlan::words);
        let experts = experts.unwrap_or_default();
        format!("{}: {}{experts}", self.name, layers.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use super::super::tests::{planner, sparse};
    use super::*;
    use crate::device::shared::{Sample, Samples};

    /// Times of a device for one row, by cluster.
    fn one_row(launch: f64, cluster: f64) -> Samples {
        let weight = cluster / CLUSTER as f64;
        Samples(vec![Sample {
            n: 1,
            launch,
            weight,
        }])
    }

    #[test]
    fn devices_get_what_makes_all_end_at_once() {
        let times = [[50e-6, 10e-6], [20e-6, 15e-6]];
        let tier = |count: usize| DeviceTier {
            unified: true,
            memory: 1 << 30,
            cluster_len: 1 << 20,
            times: times[..count].iter().map(|&[l, c]| one_row(l, c)).collect(),
            cpu_cluster: 30e-6,
            ..DeviceTier::default()
        };
        let seconds = |n: usize, clusters: u64| match clusters {
            0 => 0.0,
            _ => 10.0 * times[n][0] + clusters as f64 * times[n][1],
        };
        for (hot, computed) in [(1000, 1.0), (1000, 0.6), (333, 1.0)] {
            for count in [1, 2] {
                let tier = tier(count);
                let clusters = tier.balanced(hot, computed, 10);
                // Of the devices' clusters the second takes as many as are best, if it is there.
                let time = |d: u64| {
                    let second = if count > 1 { 0..=d } else { 0..=0 };
                    let devices = second.map(|its| seconds(0, d - its).max(seconds(1, its)));
                    let devices = devices.fold(f64::INFINITY, f64::min);
                    devices.max((hot - d) as f64 * computed * tier.cpu_cluster)
                };
                // No other number is faster.
                let best = (0..=hot).map(time).fold(f64::INFINITY, f64::min);
                assert!(time(clusters) <= best * 1.000_001, "{clusters}");
            }
            let [one, two] = [1, 2].map(|count| tier(count).balanced(hot, computed, 10));
            assert!(two > one, "{two} {one}");
        }
        // A launch costs more than the CPU needs for everything.
        assert_eq!(tier(1).balanced(16, 1.0, 10), 0);
        let slow = DeviceTier {
            times: vec![one_row(50e-6, 1.0)],
            ..tier(1)
        };
        assert_eq!(slow.balanced(1000, 1.0, 10), 0);
    }

    /// A device for a 7B model on a phone that takes this many seconds per cluster, for any number of rows.
    fn device_planner(cluster: f64) -> Planner {
        let mut p = planner(Profile::Ufs4, sparse());
        p.tier = Some(DeviceTier {
            unified: true,
            memory: u64::MAX,
            asked: true,
            cluster_len: CLUSTER as u64 * (p.needs.gate_len + p.needs.rest_len),
            cpu_cluster: 100e-6,
            times: vec![one_row(100e-6, cluster)],
            same_bits: true,
            ..DeviceTier::default()
        });
        p
    }

    /// A second device takes a share of what the first had alone; a slow one takes nothing, and the plan says so.
    #[test]
    fn a_plan_names_each_devices_times_and_share() {
        let [fast, slow] = [1e-6, 128e-3].map(device_planner);
        let of = |second: &Planner| {
            let mut p = fast.clone();
            let times = second.tier.as_ref().map(|tier| tier.times[0].clone());
            if let Some(tier) = &mut p.tier {
                tier.names = vec!["one".into(), "two".into()];
                tier.times.extend(times);
            }
            let division = p.divide(p.full_budget()).unwrap();
            let pass = p.pass(&division, p.threads).unwrap();
            device_plans(&p, &pass, &division)
        };
        let [one, two] = &of(&fast)[..] else {
            panic!("two devices")
        };
        for (one, two) in one.layers.iter().zip(&two.layers) {
            assert_eq!(one.device_ms, two.device_ms);
            assert!(one.clusters > 0 && one.clusters.abs_diff(two.clusters) <= 1);
        }
        let [one, two] = &of(&slow)[..] else {
            panic!("two devices")
        };
        assert!(one.layers.iter().all(|time| time.clusters > 0));
        let idle = |time: &LayerTime| time.clusters == 0 && time.device_ms > time.cpu_ms;
        assert!(two.layers.iter().all(idle));
        let words = two.words();
        assert!(
            words.starts_with("two: a layer for 1 rows takes 14336"),
            "{words}"
        );
        assert!(
            words.contains("on the CPU alone: computes none of it"),
            "{words}"
        );
    }
}
