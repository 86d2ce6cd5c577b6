//! Proposals against a plain model: the order of all later clusters, and the set of proposed ones.

use std::collections::BTreeSet;

use emberflow_kernels::DType;
use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::cluster::CLUSTER;
use crate::store::costs::ReadCosts;
use crate::store::rules::{BankState, Settings};
use crate::testing::{World, chance};

fn rules(scans: bool, many: bool) -> Rules {
    let settings = Settings {
        mapped: false,
        bundles: true,
        costs: ReadCosts {
            cluster: 1.0,
            gate: 1.0,
            rest: 1.0,
            bundle: 1.0,
            fire_share: 1.0,
        },
        gates_first: false,
    };
    let bank = BankState {
        scans,
        cold: !scans,
        gates_resident: !scans,
    };
    settings.rules(bank, many, false)
}

/// Layers with the given numbers of clusters per bank. Layers with several banks have experts.
fn prefetch(layers: &[&[usize]]) -> Prefetch {
    let bank = |layer: usize, expert: usize, clusters: usize| {
        (layer as u32, expert as u32, (clusters * CLUSTER - 5) as u32)
    };
    let banks = layers.iter().enumerate().flat_map(|(layer, experts)| {
        let experts = experts.iter().enumerate();
        experts.map(move |(expert, &clusters)| bank(layer, expert, clusters))
    });
    let world = World::new(&Vec::from_iter(banks), 8, DType::F32, 1);
    Prefetch::new(Arc::new(world.layout().unwrap().0), true, true)
}

/// Which layers scan, and the clusters of each.
struct Model {
    clusters: Vec<usize>,
    scans: Vec<bool>,
    many: bool,
    layer: usize,
    /// Proposed: layers ahead, cluster.
    proposed: BTreeSet<(usize, usize)>,
}

impl Model {
    fn begin_layer(&mut self, layer: usize, many: bool) {
        let layers = self.clusters.len();
        let moved = (layer + layers - self.layer) % layers;
        (self.layer, self.many) = (layer, many);
        let kept = std::mem::take(&mut self.proposed).into_iter();
        let kept = kept.filter(|proposal| moved > 0 && proposal.0 > moved);
        self.proposed = kept
            .map(|proposal| (proposal.0 - moved, proposal.1))
            .collect();
    }

    fn certain(&self, ahead: usize) -> bool {
        let target = (self.layer + ahead) % self.clusters.len();
        self.scans[target] || self.many && ahead == 1
    }

    /// The first later cluster that was not proposed.
    fn next(&mut self) -> Option<Want> {
        let partly = self.scans.contains(&false) && self.scans.contains(&true);
        for ahead in 1..self.clusters.len() {
            let target = (self.layer + ahead) % self.clusters.len();
            if !self.certain(ahead) {
                if partly { continue } else { return None }
            }
            // Clusters before a proposal have been considered.
            let after = self.proposed.last().copied().filter(|last| last.0 >= ahead);
            let first = match after {
                Some(last) if last.0 > ahead => continue,
                Some(last) => last.1 + 1,
                None => 0,
            };
            if first < self.clusters[target] {
                self.proposed.insert((ahead, first));
                return Some(Want {
                    bank: target as u32,
                    cluster: first as u32,
                    priority: if ahead > 1 && partly {
                        Priority::Prefetch
                    } else {
                        Priority::Now
                    },
                    guessed: false,
                });
            }
        }
        None
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_comes_next_is_proposed_in_order_once(seed: u64) {
        let mut random = Rng::with_seed(seed);
        let layers = 1 + random.usize(..6);
        let clusters: Vec<usize> = (0..layers).map(|_| 1 + random.usize(..4)).collect();
        let banks: Vec<Vec<usize>> = clusters.iter().map(|&n| vec![n]).collect();
        let mut prefetch = prefetch(&banks.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let scans_all = chance(&mut random, 0.5);
        let mut model = Model {
            scans: (0..layers).map(|_| scans_all || chance(&mut random, 0.6)).collect(),
            clusters,
            many: false,
            layer: 0,
            proposed: BTreeSet::new(),
        };
        let partly = model.scans.contains(&false) && model.scans.contains(&true);
        let many = !partly && chance(&mut random, 0.3);
        for _ in 0..60 {
            let layer = match random.usize(..8) {
                0 => random.usize(..layers),
                _ => (model.layer + 1) % layers,
            };
            model.begin_layer(layer, many);
            prefetch.begin_layer(layer, [].into_iter());
            for _ in 0..random.usize(..8) {
                let rules = |bank: u32| rules(model.scans[bank as usize], many);
                let want = prefetch.next(rules, partly);
                prop_assert_eq!(want, model.next());
            }
            for proposal in &model.proposed {
                let bank = (layer + proposal.0) % layers;
                prop_assert!(prefetch.follows(bank as u32, proposal.1 as u32, false));
            }
            if layers > 1 && model.certain(layers - 1) && !model.proposed.iter().any(|proposal| proposal.0 == layers - 1) {
                let last = (layer + layers - 1) % layers;
                prop_assert!(!prefetch.follows(last as u32, 0, false));
            }
            prop_assert!(prefetch.follows(layer as u32, 0, true));
            prop_assert!(!prefetch.follows(layer as u32, 0, false));
        }
        prefetch.forget();
        prop_assert!(layers < 2 || !prefetch.follows(((model.layer + 1) % layers) as u32, 0, false));
    }
}

#[test]
fn with_many_tokens_the_next_layer_is_certain() {
    let mut prefetch = prefetch(&[&[1], &[2], &[1]]);
    prefetch.begin_layer(0, [].into_iter());
    assert_eq!(prefetch.next(|_| rules(false, false), false), None);
    let mut next = || prefetch.next(|_| rules(false, true), false);
    assert_eq!(next(), Some(Want::now(1, 0)));
    assert_eq!(next(), Some(Want::now(1, 1)));
    assert_eq!(next(), None);
}

#[test]
fn the_rest_of_a_layer_goes_before_the_next_one() {
    let mut prefetch = prefetch(&[&[1, 2, 1], &[1, 1, 1]]);
    prefetch.begin_layer(0, [1, 2].into_iter());
    let mut next = || prefetch.next(|_| rules(true, false), false);
    let proposed: Vec<_> = std::iter::from_fn(&mut next).collect();
    assert_eq!(
        proposed,
        [(1, 0), (1, 1), (2, 0)].map(|(b, c)| Want::now(b, c))
    );
    assert!(prefetch.follows(2, 0, false) && !prefetch.follows(0, 0, false));
    // Neurons of few tokens are read individually.
    prefetch.begin_layer(0, [1, 2].into_iter());
    assert_eq!(prefetch.next(|_| rules(false, false), false), None);
}

#[test]
fn experts_are_guessed_and_judged() {
    let mut prefetch = prefetch(&[&[1, 1, 1], &[1, 2, 1]]);
    prefetch.begin_pass(true);
    assert!(prefetch.guesses_experts());
    prefetch.begin_layer(0, [].into_iter());
    prefetch.guess([4, 5].into_iter());
    let guess = |bank, cluster| Want {
        priority: Priority::Prefetch,
        guessed: true,
        ..Want::now(bank, cluster)
    };
    for want in [guess(4, 0), guess(4, 1), guess(5, 0)] {
        assert_eq!(prefetch.next(|_| rules(true, false), false), Some(want));
        assert!(prefetch.follows(want.bank, want.cluster, false));
        prefetch.accepted(want);
    }
    assert_eq!(prefetch.next(|_| rules(true, false), false), None);
    // One of two guesses is right; both of its clusters were read.
    assert!(prefetch.judge(1, [3, 4].into_iter(), |bank| if bank == 4 { 2 } else { 0 }));
    let seen = prefetch.foreseen().unwrap();
    assert_eq!([seen.guessed, seen.right], [2, 1]);
    assert_eq!([seen.clusters, seen.used], [3, 2]);
    assert!(!prefetch.follows(4, 0, false));
    // A chosen expert is no guess: it is neither counted nor cancelled.
    prefetch.choose([3].into_iter());
    assert_eq!(prefetch.next_guessed(), Some(Want::now(3, 0)));
    assert!(!prefetch.judge(1, [3].into_iter(), |_| 1));
    assert_eq!(prefetch.foreseen().unwrap(), seen);
}
