//! Plans of the engine's planner with devices that are known by numbers.

use emberflow_devices::{DeviceNumbers, RowTimes};
use emberflow_engine::planner::Planner;
use emberflow_engine::planner::machine::{MachineNumbers, on_machine};
use emberflow_engine::planner::rates::Rates;
use emberflow_engine::{Lab, Model, Options};
use emberflow_kernels::Isa;
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_storage::profile::ReadCost;

/// The bundled model on a phone with a device that takes `neuron[i]` seconds per neuron for 1, 8 and 64 rows, or without.
fn phone(neuron: Option<[f64; 3]>) -> Planner {
    let sim = SimOptions::new(Profile::Ufs4, 0);
    let options = Options {
        threads: 4,
        lab: Lab {
            io: IoChoice::Sim(sim),
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    };
    let planner = Planner::open(Model::demo().unwrap(), options).unwrap();
    let storage = |depth| ReadCost::simulated(&SimOptions::new(Profile::Ufs4, 0), depth, 4 << 30);
    let times = |(rows, neuron)| RowTimes {
        rows,
        launch: 1e-9,
        neuron,
    };
    let lane = neuron.map(|neuron| DeviceNumbers {
        name: "npu".into(),
        times: [1, 8, 64].into_iter().zip(neuron).map(times).collect(),
        at_once: 0,
    });
    let machine = MachineNumbers {
        rates: Rates::assumed(4, Isa::Neon),
        threads: 4,
        storage: storage(32),
        stream: storage(4),
        lane: lane.map(|lane| lane.facts()),
    };
    on_machine(planner, &machine)
}

#[test]
fn seconds_are_those_of_the_numbers() {
    let device = DeviceNumbers {
        name: "npu".into(),
        times: vec![RowTimes {
            rows: 1,
            launch: 1e-6,
            neuron: 1e-9,
        }],
        at_once: 0,
    };
    assert!((device.seconds(1000, 1) - 2e-6).abs() < 1e-12);
}

#[test]
fn a_device_that_helps_prompts_only_holds_what_these_want() {
    let (with, without) = (phone(Some([1e-3, 1e-3, 1e-12])), phone(None));
    let budget = with.full_budget();
    assert!(budget > without.full_budget());
    let division = with.divide(budget).unwrap();
    assert!(division.is_resident() && division.needs.lane_clusters > 0);
    assert_eq!(division.widths.clusters(0, 1), Some(0));
    assert!(division.widths.clusters(0, division.chunk) > Some(0));
}

#[test]
fn a_slow_device_holds_nothing_and_the_plan_says_so() {
    let slow = phone(Some([1.0; 3]));
    let budget = slow.full_budget();
    assert_eq!(slow.divide(budget).unwrap().needs.lane_clusters, 0);
    let plan = slow.plan(budget).unwrap();
    let [device] = &plan.devices[..] else {
        panic!("one device")
    };
    assert_eq!(device.values["name"], "npu");
    assert!(
        device.text.contains("computes none of it"),
        "{}",
        device.text
    );
}
