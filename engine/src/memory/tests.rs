use proptest::prelude::*;

use super::*;
use crate::ablation::Ablation;

fn needs() -> Needs {
    Needs {
        lane_clusters: 0,
        lane: 0,
        process: 10 << 20,
        process_peak: 11 << 20,
        fixed: 3 << 20,
        tables: [1 << 20, 0, 0],
        scales: 1 << 20,
        kv: 1 << 20,
        context: 64,
        batch: 1,
        scratch: 1 << 20,
        predictor: 0,
        gates: 340 * 8000,
        gate_len: 340,
        rest_len: 680,
        whole_slot: 1024,
        rest_slot: 1024,
        neurons: 8000,
        banks: 4,
        cluster: 128,
        clusters: 63,
        hot_clusters: 7,
        always: 0,
        tiles: 0,
        tile_slot: 0,
        least_tiles: 0,
        whole_ffn: 0,
        streamed: 0,
        two_phases: false,
        min_slots: 256,
        stream_len: 128 * 1024,
        stream_most: 0,
        gates_help: true,
        gates_must: false,
        gate_banks: 4,
        gates_divide: true,
        predicts: false,
    }
}

#[test]
fn stream_buffers_follow_the_budget_and_the_device() {
    let n = Needs {
        gates_help: false,
        stream_most: 12,
        ..needs()
    };
    let at = |share: f64| n.plan(n.budget_for_share(share)).unwrap();
    assert_eq!(n.plan(n.smallest_budget()).unwrap().stream_buffers, 4);
    // A 16th of 8 MB is four buffers of 128 KiB.
    assert_eq!([0.2, 0.5, 0.9].map(|s| at(s).stream_buffers), [4, 6, 7]);
    let large = Needs {
        stream_len: 16 << 10,
        ..n
    };
    let half = large.plan(large.budget_for_share(0.5)).unwrap();
    assert_eq!(half.stream_buffers, 12);
    assert_eq!(half.ledger.held("stream"), 8 * (16 << 10));
    // Nothing streams if everything fits.
    let all = large.plan(large.full_budget()).unwrap();
    assert_eq!((all.hot_clusters, all.stream_buffers), (63, 4));
}

#[test]
fn with_predictors_bundles_stay_whole_until_everything_fits() {
    let n = Needs {
        predicts: true,
        predictor: 300 << 10,
        ..needs()
    };
    assert_eq!(n.base(), needs().base() + (300 << 10));
    let small = n.plan(n.smallest_budget()).unwrap();
    assert_eq!(
        (small.residency(), small.slots),
        (SlotContents::Bundles, 256)
    );
    for share in [0.4, 0.8, 0.95] {
        let part = n.plan(n.budget_for_share(share)).unwrap();
        assert_eq!(part.residency(), SlotContents::Bundles);
        let held = part.ffn_resident_share(&n);
        assert!((share - 0.02..=share).contains(&held), "{share}: {held}");
    }
    let all = n.plan(n.full_budget()).unwrap();
    assert_eq!(all.residency(), SlotContents::GatesResident);
    assert_eq!(all.ffn_resident_share(&n), 1.0);
}

#[test]
fn gates_are_resident_first_when_they_fit() {
    let n = needs();
    let smallest = n.smallest_budget();
    let plan = n.plan(smallest).unwrap();
    assert_eq!((plan.residency(), plan.slots), (SlotContents::Bundles, 0));
    let plan = n.plan(with_kernel(smallest + n.with_gates())).unwrap();
    assert_eq!(plan.residency(), SlotContents::GatesResident);
    let all = n.plan(n.full_budget()).unwrap();
    assert_eq!(
        (all.hot_clusters, all.slots, all.residency()),
        (63, 0, SlotContents::GatesResident)
    );
    assert_eq!(all.ffn_resident_share(&n), 1.0);
}

#[test]
fn some_banks_have_gates_and_the_others_stream() {
    let n = Needs {
        gate_banks: 2,
        ..needs()
    };
    // 8000 neurons in 4 banks: half of the Gate rows, and two clusters of slots.
    let least = with_kernel(n.base() + n.gates / 2 + 256 * 1024);
    let before = n.plan(least - 4096).unwrap();
    assert_eq!((before.gate_banks, before.slots), (0, 0));
    let plan = n.plan(least).unwrap();
    assert!(plan.gates_partly() && !plan.gates_resident());
    assert_eq!(
        (plan.gate_banks, plan.hot_clusters, plan.slots),
        (2, 0, 256)
    );
    assert_eq!(plan.ledger.held("gates"), n.gates / 2);
    let share = 0.5 / 3.0 + 256.0 / 8000.0 * 2.0 / 3.0;
    assert!((plan.ffn_resident_share(&n) - share).abs() < 1e-9);
    // More slots than these banks have neurons are useless.
    assert_eq!(n.plan(n.full_budget()).unwrap().slots, 4000);
    let mapped = plan.limited_to(Ablation::Mmap.policy(), &n);
    assert_eq!((mapped.gate_banks, mapped.ledger.held("gates")), (0, 0));
}

#[test]
fn tables_stay_where_everything_else_does() {
    const M: u64 = 1 << 20;
    let n = Needs {
        tables: [M, 64 * M, 3 * M],
        ..needs()
    };
    let full = n.full_budget();
    let held = |less| {
        let plan = n.plan(full - less).unwrap();
        assert_eq!(plan.hot_clusters, n.clusters);
        let held = TABLES.map(|table| plan.ledger.held(table));
        assert_eq!(plan.tables, held.map(|bytes| bytes > 0));
        held
    };
    assert_eq!(held(0), n.tables);
    // each where it fits: a large one keeps no other out
    assert_eq!(held(2 * M), [M, 64 * M, 0]);
    assert_eq!(held(64 * M), [M, 0, 3 * M]);
    assert_eq!(held(66 * M), [M, 0, 0]);
    assert_eq!(held(68 * M - M / 4), [0; 3]);
    let without = needs().plan(needs().full_budget()).unwrap();
    let entries = without.ledger.entries().iter().map(|entry| entry.0);
    let named: Vec<&str> = entries.filter(|name| TABLES.contains(name)).collect();
    assert_eq!(named, ["embedding"]);
    let less = n.plan(full - 70 * M).unwrap();
    assert!(less.hot_clusters < n.clusters && less.tables == [false; 3]);
}

#[test]
fn two_phases_need_a_cold_region() {
    let n = Needs {
        two_phases: true,
        gates_help: false,
        ..needs()
    };
    let plan = n.plan(n.smallest_budget()).unwrap();
    assert_eq!((plan.hot_clusters, plan.slots), (0, 256));
    let plan = n.plan(n.smallest_budget() + (4 << 20)).unwrap();
    assert_eq!(plan.hot_clusters, 7);
    assert!(plan.slots > 256 + 2048, "{}", plan.slots);
}

#[test]
fn a_window_may_use_both_regions() {
    let n = needs();
    for share in [0.5, 0.8, 1.0] {
        let plan = n.plan(n.budget_for_share(share)).unwrap();
        let regions = plan.ledger.held("hot") + plan.ledger.held("cold");
        let window = plan.clone().limited_to(Ablation::LlmFlash.policy(), &n);
        assert_eq!(window.hot_clusters, 0);
        let room = regions / n.rest_slot;
        assert_eq!(window.slots, room.min(n.neurons), "{share}");
        assert!(window.ledger.used() <= plan.ledger.used());
        let nothing = plan.limited_to(Ablation::NoCache.policy(), &n);
        assert_eq!(nothing.slots, room.min(n.neurons / n.banks), "{share}");
    }
}

#[test]
fn too_small_names_the_smallest_that_works() {
    let n = needs();
    let smallest = n.smallest_budget();
    match n.plan(smallest - 1) {
        Err(Error::BudgetTooSmall { smallest: s, .. }) => assert_eq!(s, smallest),
        other => panic!("{other:?}"),
    }
    assert!(n.plan(smallest).is_ok());
}

#[test]
fn a_peak_already_reached_counts() {
    let n = Needs {
        process_peak: 100 << 20,
        ..needs()
    };
    assert!(n.smallest_budget() > 100 << 20);
}

/// Held bytes equal used bytes without reserves.
#[test]
fn reserves_are_not_held() {
    let n = needs();
    let plan = n.plan(2 * n.smallest_budget()).unwrap();
    let [kernel, margin] = ["kernel", "margin"].map(|part| plan.ledger.held(part));
    assert!(margin > 0 && kernel > 0);
    assert_eq!(plan.held() + kernel + margin, plan.ledger.used());
}

#[test]
fn a_share_counts_every_weight_once() {
    let n = needs();
    for share in [0.2, 0.34, 0.45, 0.5, 0.75, 1.0] {
        let plan = n.plan(n.budget_for_share(share)).unwrap();
        // 62 clusters of 128 and one of 64, all counted as whole clusters.
        let hot = plan.hot_clusters as f64 * 8000.0 / 63.0;
        let units = (plan.slots as f64 + hot).min(8000.0);
        let resident = match plan.residency() {
            SlotContents::GatesResident => units * 680.0 + 8000.0 * 340.0,
            SlotContents::Bundles => units * 1020.0,
        };
        let distinct = resident / (8000.0 * 1020.0);
        assert!((distinct - plan.ffn_resident_share(&n)).abs() < 1e-9);
        assert!(
            distinct <= share + 1e-9 && distinct > share - 0.02,
            "{share}: {distinct}"
        );
    }
}

proptest! {
    #[test]
    fn a_plan_never_exceeds_its_budget(extra in 0u64..20 << 20, gates_help: bool, predicts: bool) {
        let predicts = predicts && gates_help;
        let n = Needs { gates_help, predicts, ..needs() };
        let plan = n.plan(n.smallest_budget() + extra).unwrap();
        let held = n.base() + plan.ledger.held("kernel") + plan.ledger.held("gates") + plan.ledger.held("cold")
            + plan.ledger.held("embedding")
            + plan.ledger.held("stream")
            + plan.ledger.held("hot");
        prop_assert_eq!(held, plan.ledger.used());
        prop_assert!(held <= plan.budget());
        prop_assert!(plan.slots >= n.min_slots
            || plan.hot_clusters == n.clusters
            || plan.residency() == SlotContents::Bundles);
        let more = n.plan(n.smallest_budget() + extra + (1 << 20)).unwrap();
        prop_assert!(more.ffn_resident_share(&n) >= plan.ffn_resident_share(&n)
            || more.residency() != plan.residency());
    }
}
