//! The operations of a pass in parts.

use super::parts::{CPU, DEVICE, PartGraph, PartPlace};
use super::simulate::Processors;
use super::*;

const BOTH: Processors = Processors {
    names: &["CPU", "device"],
    bandwidth: f64::INFINITY,
};

/// Layers with both, with a mixer alone, and with an FFN alone.
const LAYERS: [[bool; 2]; 4] = [[true, true], [true, false], [false, true], [true, true]];

#[test]
fn parts_wait_for_the_same_layer_of_the_part_before_and_for_their_own_last_layer() {
    let graph = PartGraph::new(5, LAYERS.into_iter(), &[[1.0, 2.0], [3.0, 4.0]]);
    let of = |at: usize| {
        let PartPlace { layer, part } = graph.places[at];
        (
            layer,
            part,
            graph.operations[at].on,
            graph.operations[at].seconds,
        )
    };
    let number = |layer, part, on| {
        (0..graph.places.len()).position(|at| (of(at).0, of(at).1, of(at).2) == (layer, part, on))
    };
    for at in 0..graph.places.len() {
        let (layer, part, on, seconds) = of(at);
        assert_eq!(seconds, [[1.0, 2.0], [3.0, 4.0]][part][on]);
        let mixer = (on == DEVICE).then(|| number(layer, part, CPU)).flatten();
        let before = (5..layer)
            .rev()
            .find_map(|layer| number(layer, part, DEVICE).or(number(layer, part, CPU)));
        let earlier = (on == CPU && part > 0)
            .then(|| number(layer, part - 1, CPU))
            .flatten();
        let mut expected: Vec<usize> = [mixer.or(before), earlier].into_iter().flatten().collect();
        expected.sort_unstable();
        let mut found = graph.operations[at].after.clone();
        found.sort_unstable();
        assert_eq!(found, expected, "{layer} {part} {on}");
    }
}

/// Whenever a pass stops, all parts come to the same layer, and no part is further.
#[test]
fn a_pass_that_stops_ends_after_a_layer() {
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..300 {
        let parts = random.usize(2..5);
        let times: Vec<[f64; 2]> = (0..parts)
            .map(|_| [0; 2].map(|_| 0.1 + random.f64()))
            .collect();
        let graph = PartGraph::new(0, LAYERS.into_iter(), &times);
        let rule = if random.bool() {
            Rule::Stalls
        } else {
            Rule::InOrder
        };
        let mut scheduler = scheduler(&graph.operations, 2, DEVICE, rule);
        let mut execution = Execution::new(&graph.operations, &mut *scheduler);
        let stop = random.usize(0..graph.operations.len());
        let (mut running, mut ended, mut until) = ([None; 2], Vec::new(), LAYERS.len());
        loop {
            for (on, running) in running.iter_mut().enumerate() {
                *running = running.or_else(|| execution.begin(on));
            }
            if running == [None; 2] {
                break;
            }
            let on = if random.bool() { 0 } else { 1 };
            if let Some(done) = running[on].take() {
                execution.end(done);
                ended.push(done);
            }
            if ended.len() == stop && until == LAYERS.len() {
                let (layer, first) = graph.layer_after(execution.begun());
                execution.stop_at(first);
                until = layer;
            }
        }
        ended.sort_unstable();
        let all = (0..graph.places.len()).filter(|&at| graph.places[at].layer < until);
        assert_eq!(ended, all.collect::<Vec<_>>());
    }
}

/// Of two parts whose mixer takes as long as the FFN, one is always beside the other.
#[test]
fn mixers_hide_behind_ffns() {
    let graph = PartGraph::new(0, std::iter::repeat_n([true; 2], 10), &[[1.0, 1.0]; 2]);
    for rule in [Rule::InOrder, Rule::Stalls] {
        let found = by_rule(&graph.operations, &BOTH, DEVICE, rule);
        assert_eq!(found.seconds(), 21.0, "{rule:?}");
    }
    let found = InParts::new(64, vec![[1.0, 1.0]; 2], 10, [20.0, 20.0]);
    assert!((found.gain - 40.0 / 21.0).abs() < 1e-9, "{found:?}");
    // Devices that multiply all projections layer by layer.
    let found = InParts {
        least: 1.1,
        ..found
    };
    assert_eq!(
        [0.0, 0.5, 1.0].map(|share| found.pays(share)),
        [true, true, false]
    );
}

/// Of random times of 1,000 passes: the executor's rule is never slower than in order, above the lower bounds, and about
/// as fast as the planner expects from a few layers.
#[test]
fn no_pass_in_parts_is_slower_than_in_order() {
    let mut random = fastrand::Rng::with_seed(11);
    let (mut faster, mut worst) = (0, 1.0f64);
    for _ in 0..1000 {
        let (parts, layers) = (random.usize(2..6), random.usize(4..24));
        let seconds: Vec<[f64; 2]> = (0..parts)
            .map(|_| [0; 2].map(|_| 0.1 + 9.9 * random.f64()))
            .collect();
        let graph = PartGraph::new(0, std::iter::repeat_n([true; 2], layers), &seconds);
        let of = |rule| by_rule(&graph.operations, &BOTH, DEVICE, rule).seconds();
        let (taken, in_order) = (of(graph.faster_rule()), of(Rule::InOrder));
        assert!(taken <= in_order, "{taken} {in_order}");
        assert!(taken >= Bounds::of(&graph.operations, 2).largest() * (1.0 - 1e-12));
        faster += usize::from(taken < in_order);
        let sums = [0, 1].map(|on| layers as f64 * seconds.iter().map(|of| of[on]).sum::<f64>());
        let expected = sums.iter().sum::<f64>() / InParts::new(64, seconds, layers, sums).gain;
        worst = worst.max((expected / taken).max(taken / expected));
    }
    println!("{faster} of 1000 faster than in order; forecasts off by up to {worst}");
    assert!(faster > 0 && worst < 1.1, "{faster} {worst}");
}

#[test]
fn parts_are_multiples_of_what_devices_have_graphs_for() {
    let of = |rows: usize, all: usize| {
        let parts = InParts::new(rows, vec![[1.0; 2]], 3, [1.0; 2]);
        parts.rows_of(all)
    };
    assert_eq!(
        [of(64, 128), of(64, 130), of(64, 70), of(256, 300)],
        [64, 64, 64, 160]
    );
    // One part is none.
    assert_eq!([of(64, 32), of(64, 1), of(7, 33)], [0, 0, 32]);
}
