//! Whether a prompt's pass runs in parts, the mixer of one beside the FFN of another, and in which.

use super::budget::Division;
use super::facts::{DeviceTier, Planner};
use super::pass::CostModel;
use super::search::FORECAST_MARGIN;
use crate::device::LEAST_STREAMED;
use crate::options::PassOrder;
use crate::schedule::{InParts, part_rows};

/// Numbers of parts that are compared.
const PARTS: std::ops::RangeInclusive<usize> = 2..=4;

/// A pass of some number of rows.
#[derive(Clone, Copy)]
pub(super) struct PassOfParts<'a> {
    pub planner: &'a Planner,
    pub pass: &'a CostModel<'a>,
    pub division: &'a Division,
    pub rows: usize,
    /// Nanoseconds of its FFNs layer by layer, whose rows or clusters the CPU and devices divide.
    pub ffn_ns: f64,
}

impl PassOfParts<'_> {
    /// The fastest way to run it in parts, if that is [`FORECAST_MARGIN`] times as fast as layer by layer, or was asked
    /// for. Each part needs all neurons of a layer, so nothing may have to be read. What devices multiply of projections
    /// layer by layer is known later: [`InParts::pays`].
    pub fn best(self) -> Option<InParts> {
        let tier = self.planner.tier.as_ref()?;
        if tier.at_once == 0 || self.rows < 2 * LEAST_STREAMED {
            return None;
        }
        match tier.order {
            PassOrder::Layers => None,
            PassOrder::Parts(rows) => Some(InParts {
                asked: true,
                ..self.in_parts_of(tier, rows.max(1), false)
            }),
            PassOrder::Subgraphs(rows) => Some(InParts {
                asked: true,
                ..self.in_parts_of(tier, rows.max(1), tier.projects)
            }),
            PassOrder::Planned if !self.division.is_resident() => None,
            PassOrder::Planned => {
                let ways = [false, true]
                    .into_iter()
                    .filter(|&way| tier.projects || !way);
                let all = ways.flat_map(|projects| {
                    PARTS.map(move |parts| {
                        self.in_parts_of(tier, self.rows.div_ceil(parts), projects)
                    })
                });
                let best = all.max_by(|a, b| a.gain.total_cmp(&b.gain));
                let best = best.map(|best| InParts {
                    least: FORECAST_MARGIN,
                    ..best.searched(self.planner.shape.layers)
                });
                best.filter(|best| best.gain >= best.least)
            }
        }
    }

    /// In parts of up to `rows` rows, by the times of the parts that run. With `projects`, the devices multiply the
    /// projections, whose weights take as long there as those of neurons.
    fn in_parts_of(self, tier: &DeviceTier, rows: usize, projects: bool) -> InParts {
        let layers = self.planner.shape.layers.max(1);
        let longest = self.planner.longest_chunk();
        let before = longest.saturating_sub(self.rows) / 2;
        let each = part_rows(rows, self.rows).max(1);
        let part = |first: usize| {
            let rows = each.min(self.rows - first);
            let [ffn, copying] = self.ffn_ns(tier, rows);
            // The thread that copies for devices takes its time from the compute threads.
            let taken = copying / f64::from(self.pass.rates.threads.max(1));
            let mixer = self.pass.mixer_ns(rows, before + first) + taken;
            let shape = self.pass.shape;
            let its = |bytes: f64| {
                let neurons = bytes / (shape.gate_len + shape.rest_len);
                1e9 * tier.seconds(neurons.ceil() as usize, rows)
            };
            let steps = match projects {
                false => [0.0, mixer, ffn],
                true => [
                    its(shape.attention_bytes - shape.output_bytes),
                    mixer - self.pass.projections_ns(rows),
                    ffn + its(shape.output_bytes),
                ],
            };
            steps.map(|ns| ns / 1e9)
        };
        let seconds: Vec<[f64; 3]> = (0..self.rows).step_by(each).map(part).collect();
        let mixers = layers as f64 * self.pass.mixer_ns(self.rows, before);
        let in_order = [mixers, self.ffn_ns].map(|ns| ns / 1e9);
        InParts::new([rows, self.rows], seconds, layers, in_order)
    }

    /// Nanoseconds of a layer's FFN for `rows` rows on devices, and of the part in which a thread copies for them.
    fn ffn_ns(self, tier: &DeviceTier, rows: usize) -> [f64; 2] {
        let layers = self.planner.shape.layers.max(1);
        let held = self.division.needs.device_clusters as usize / layers;
        let part = self.planner.streaming(tier, held, [rows, rows]);
        let ns = part.ns.max(part.copying) + self.pass.rates.layer_ns;
        [ns, part.copying]
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use super::super::tests::{planner, sparse};
    use super::*;
    use crate::cluster::CLUSTER;
    use crate::device::shared::{Sample, Samples};

    /// A 7B model on a phone with a device that takes `neuron` seconds per neuron for a prompt's rows.
    fn beside(neuron: f64, order: PassOrder) -> Planner {
        let mut p = planner(Profile::Ufs4, sparse());
        let sample = |n: usize| Sample {
            n,
            launch: 100e-6,
            weight: neuron * n as f64 / 512.0,
        };
        p.tier = Some(DeviceTier {
            unified: true,
            memory: u64::MAX,
            cluster_len: CLUSTER as u64 * (p.needs.gate_len + p.needs.rest_len),
            cpu_cluster: 100e-6,
            times: vec![Samples([1, 32, 512].map(sample).to_vec())],
            same_bits: true,
            at_once: 8,
            order,
            ..DeviceTier::default()
        });
        p
    }

    /// Seconds of the mixers of a layer for 512 rows, and of the CPU alone for its FFN.
    fn of_cpu(p: &Planner) -> [f64; 2] {
        let division = p.divide(p.full_budget()).unwrap();
        let pass = p.pass(&division, p.threads).unwrap();
        let of = super::super::cost::ResidentLayer {
            layer: 3,
            rows: 512,
        };
        [
            pass.mixer_ns(512, 0),
            pass.in_memory(&division.memory, of)[1],
        ]
        .map(|ns| ns / 1e9)
    }

    /// A device about as fast as the CPU's mixers hides behind them; one that is much slower or faster does not.
    #[test]
    fn prompts_run_in_parts_where_that_is_faster() {
        let parts = |neuron: f64, order, share: f64| {
            let p = beside(neuron, order);
            let budget = if share < 1.0 {
                p.budget_for_share(share)
            } else {
                p.full_budget()
            };
            let division = p.divide(budget).unwrap();
            division.widths.parts(512).cloned()
        };
        let p = beside(1.0, PassOrder::Layers);
        let ([mixer, ffn], neurons) = (of_cpu(&p), p.shape.neurons as f64);
        assert!(mixer < ffn);
        let equal = mixer / neurons;
        let found = parts(equal, PassOrder::Planned, 1.0).expect("in parts");
        assert!(
            found.gain > FORECAST_MARGIN && found.gain < 2.0,
            "{found:?}"
        );
        assert!(found.rows <= 256 && found.seconds.len() == 512usize.div_ceil(found.rows));
        // Layer by layer, nearly all of it is on the CPU, or on the device.
        assert_eq!(parts(100.0 * ffn / neurons, PassOrder::Planned, 1.0), None);
        assert_eq!(parts(equal / 100.0, PassOrder::Planned, 1.0), None);
        // Each part would read it again.
        assert_eq!(parts(equal, PassOrder::Planned, 0.5), None);
        // By request.
        assert_eq!(parts(equal, PassOrder::Layers, 1.0), None);
        let asked = parts(equal / 100.0, PassOrder::Parts(64), 0.5).expect("in parts");
        assert_eq!((asked.rows, asked.asked), (64, true));
    }

    /// A device that is faster than the CPU gains where it multiplies the projections too.
    #[test]
    fn fast_devices_multiply_the_projections_of_parts() {
        let equal = of_cpu(&beside(1.0, PassOrder::Layers))[0];
        let of = |faster: f64, projects: bool, order| {
            let neurons = beside(1.0, order).shape.neurons;
            let mut p = beside(equal / neurons as f64 / faster, order);
            p.tier.iter_mut().for_each(|tier| tier.projects = projects);
            let division = p.divide(p.full_budget()).unwrap();
            division.widths.parts(512).cloned()
        };
        for faster in [0.25, 0.5, 1.0, 2.0, 4.0, 16.0] {
            let gain =
                |projects| of(faster, projects, PassOrder::Planned).map(|of| [of.gain, of.mixing]);
            println!(
                "{faster} times as fast as mixers: {:?}",
                [false, true].map(gain)
            );
        }
        let mixers = of(4.0, true, PassOrder::Parts(128)).expect("in parts");
        let found = of(4.0, true, PassOrder::Planned).expect("in parts");
        assert!(!mixers.projects && found.projects);
        assert!(
            found.gain > FORECAST_MARGIN * mixers.gain,
            "{found:?} {mixers:?}"
        );
        // What the CPU has of a mixer is less than all, and the device has the output projection beside the FFN.
        let asked = of(4.0, true, PassOrder::Subgraphs(128)).expect("in parts");
        let [a, b] = [&asked, &mixers].map(|parts| parts.seconds[1]);
        assert!(a[0] > 0.0 && a[1] < b[1] && a[2] > b[2], "{a:?} {b:?}");
        // Not all mixers are plain attention.
        let other = of(4.0, false, PassOrder::Planned);
        assert!(other.is_none_or(|found| !found.projects));
        assert!(!of(4.0, false, PassOrder::Subgraphs(128)).unwrap().projects);
        // It must have the matrices, and not gain more layer by layer.
        assert!(!found.pays(0.0) && found.pays(0.1));
    }

    /// The forecast counts the gain.
    #[test]
    fn a_prompt_in_parts_is_expected_to_be_faster() {
        let p = beside(1.0, PassOrder::Layers);
        let equal = of_cpu(&p)[0] / p.shape.neurons as f64;
        let speed = |order| {
            let p = beside(equal, order);
            p.speed(&p.divide(p.full_budget()).unwrap(), 512)
        };
        let (layers, planned) = (speed(PassOrder::Layers), speed(PassOrder::Planned));
        assert!(
            planned > FORECAST_MARGIN * layers * 0.99,
            "{planned} {layers}"
        );
    }

    /// The times of 192, 192 and 128 rows where three parts of 512 rows were asked for, as they run.
    #[test]
    fn the_forecast_is_of_the_parts_that_run() {
        let p = beside(2e-5, PassOrder::Parts(171));
        let division = p.divide(p.full_budget()).unwrap();
        let parts = division.widths.parts(512).expect("in parts");
        assert_eq!(parts.rows_of(512), 192);
        assert_eq!(parts.times(512), parts.seconds);
        let ffn = |rows: usize| {
            let tier = p.tier.as_ref().unwrap();
            let part = p.streaming(tier, 0, [rows, rows]);
            let pass = p.pass(&division, p.threads).unwrap();
            (part.ns.max(part.copying) + pass.rates.layer_ns) / 1e9
        };
        let found: Vec<f64> = parts.seconds.iter().map(|of| of[2]).collect();
        assert_eq!(found, [192, 192, 128].map(ffn));
        assert!(ffn(192) > ffn(171) && ffn(171) > ffn(128));
    }
}
