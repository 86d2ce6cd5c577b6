//! Plans for machines that are known by numbers only, such as phones in the laboratory's simulations.

use emberflow_storage::profile::ReadCost;

use super::facts::Planner;
use super::firing::Firing;
use super::rates::Rates;
use crate::cluster::{CLUSTER, hot_prefix};
use crate::lane::LaneFacts;

/// A machine.
#[derive(Debug, Clone)]
pub struct MachineNumbers {
    /// Rates of the CPU.
    pub rates: Rates,
    /// Compute threads.
    pub threads: usize,
    /// Storage with a deep queue.
    pub storage: ReadCost,
    /// Storage at the depth of the stream buffers.
    pub stream: ReadCost,
    /// Who computes beside the CPU, if anyone does.
    pub lane: Option<LaneFacts>,
}

/// A planner's model on another machine.
pub fn on_machine(planner: Planner, machine: &MachineNumbers) -> Planner {
    let neuron_len = planner.needs.gate_len + planner.needs.rest_len;
    let cluster_len = CLUSTER as u64 * neuron_len;
    let all = (planner.needs.neurons * neuron_len) as f64;
    // What a cluster takes all threads if its neurons all fire.
    let rates = machine.rates.with_threads(machine.threads);
    let cluster_ns = rates.map(|rates| {
        let kernel = rates.kernel(planner.shape.ffn);
        let speed = kernel.map_or(&rates.read, |kernel| &kernel.neuron);
        speed.ns(3.0 * CLUSTER as f64, cluster_len as f64, all)
    });
    let lane = machine.lane.as_ref().map(|lane| LaneFacts {
        cluster_len,
        cpu_cluster: cluster_ns.unwrap_or_default() / 1e9,
        ..lane.clone()
    });
    Planner {
        rates: machine.rates.clone(),
        storage: machine.storage.clone(),
        stream: machine.stream.clone(),
        threads: machine.threads,
        threads_fixed: true,
        io_core: None,
        lane,
        ..planner
    }
}

/// Tokens that frequencies are converted to counts of.
const COUNTED: u64 = 1 << 20;

/// A planner's model without statistics, with neurons that fire so often, 0 to 1: `often` of each bank in packed order.
/// `persistence`: probability that one that fires does so again for the next token.
pub fn with_frequencies(planner: Planner, often: &[Vec<f32>], persistence: f64) -> Planner {
    let hot = |often: &Vec<f32>, batch: usize| {
        let count = |&often: &f32| (f64::from(often) * COUNTED as f64) as u64;
        let counts: Vec<u64> = often.iter().map(count).collect();
        hot_prefix(&counts, COUNTED, batch as f64)
    };
    let of_batch = |batch: usize| often.iter().map(|often| hot(often, batch)).collect();
    let batches = 1..=planner.hot_clusters.len();
    let hot_clusters: Vec<Vec<u32>> = batches.map(of_batch).collect();
    let mut planner = Planner {
        firing: Firing::measured(often.iter().map(Vec::as_slice), Some(persistence), None),
        hot_clusters,
        ..planner
    };
    let hot = planner.hot(planner.batch);
    planner.needs.hot_clusters = hot.iter().map(|&n| u64::from(n)).sum();
    planner
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::{Profile, SimOptions};

    use super::super::tests::{LAYERS, NEURONS, even_lane, planner, sparse};
    use super::*;

    /// It plans as a planner that was made for the machine.
    #[test]
    fn a_plan_for_another_machine_is_that_machines() {
        let of = |profile: Profile| planner(profile, sparse());
        let p = of(Profile::Nvme);
        let machine = MachineNumbers {
            rates: p.rates.clone(),
            threads: p.threads,
            storage: ReadCost::simulated(&SimOptions::new(Profile::Ufs4, 0), 32, 4 << 30),
            stream: ReadCost::simulated(&SimOptions::new(Profile::Ufs4, 0), 4, 4 << 30),
            lane: None,
        };
        let budget = p.needs.budget_for_share(0.5);
        let moved = on_machine(p.clone(), &machine).plan(budget).unwrap();
        let own = of(Profile::Ufs4).plan(budget).unwrap();
        assert_eq!(moved.decode.ms, own.decode.ms);
        let machine = MachineNumbers {
            lane: Some(even_lane()),
            ..machine
        };
        let with = on_machine(p, &machine);
        let with = with.divide(with.full_budget()).unwrap();
        assert!(with.needs.lane_clusters > 0);
    }

    #[test]
    fn frequencies_are_those_of_the_forecast() {
        let p = planner(Profile::Ufs4, Firing::unknown(LAYERS, NEURONS));
        let often = [vec![0.9; NEURONS / 2], vec![0.1; NEURONS / 2]].concat();
        let p = with_frequencies(p, &vec![often; LAYERS], 0.95);
        assert!((p.firing.share() - 0.5).abs() < 1e-6);
        assert!((p.firing.persistence() - 0.95).abs() < 1e-6);
        let half = (NEURONS / 2 / CLUSTER) as u64;
        assert_eq!(p.needs.hot_clusters, LAYERS as u64 * half);
    }
}
