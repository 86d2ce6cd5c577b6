//! Simulated devices change no bit, only times: those of a model of the device, on a clock that stands
//! still while the CPU computes for it.

use std::time::Instant;

use emberflow_engine::device::{Device, SimDevice, Simulated};
use emberflow_engine::{Budget, Engine, Error, Logits, Model, Options};
use emberflow_storage::clock::Moment;
use emberflow_storage::io::IoChoice;
use emberflow_storage::trace::Span;
use emberflow_tests::{all_logits, bits};

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|i| 40 + (i * 31) % 900).collect()
}

fn demo(options: Options) -> Result<Engine, Error> {
    Engine::open(Model::demo().unwrap(), options)
}

fn on(device: Simulated, share: f64, held: u64) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        chunk: 32,
        context: 128,
        io: "sim:ufs4".parse().unwrap(),
        device: Some(Device::new(Box::new(SimDevice::new(device)))),
        device_memory: Some(held),
        ..Options::default()
    }
}

#[test]
fn budgets_chunks_and_shares_of_a_simulated_device_change_no_bit() {
    let tokens = text(40);
    let plain = Options {
        device: None,
        ..on(Simulated::Npu8Gen3, 1.0, 0)
    };
    let expected = bits(&all_logits(&mut demo(plain).unwrap(), &tokens, 1));
    for device in Simulated::ALL {
        for (share, mib, chunk) in [(0.4, 1, 1), (0.6, 2, 16), (1.0, 64, 30)] {
            let mut engine = demo(on(device, share, mib << 20)).unwrap();
            let held = engine.device().unwrap();
            assert!(held.simulated && held.clusters > 0 && held.numerics == "cpu");
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{held:?}");
        }
    }
}

#[test]
fn it_asks_for_a_simulated_disk() {
    let options = Options {
        io: IoChoice::Pread,
        ..on(Simulated::Npu8Gen3, 1.0, 1 << 20)
    };
    assert!(matches!(demo(options), Err(Error::SimulatedDevice)));
}

/// The three kinds of processors of a phone are at work at the same time, by the simulation's clock; the
/// time in which this machine stands in for one of them is no part of it.
#[test]
fn a_trace_shows_all_lanes_at_once_and_computing_for_the_device_takes_no_time() {
    let options = Options {
        trace: 4096,
        ..on(Simulated::Npu8Gen3, 0.4, 2 << 20)
    };
    let mut engine = demo(options).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let (real, start) = (Instant::now(), Moment::now());
    // By its times it is of no use to single tokens of so small a model.
    for tokens in text(96).chunks(32) {
        engine.forward(&mut sequence, tokens, Logits::Last).unwrap();
    }
    let (real, simulated) = (real.elapsed(), start.elapsed());
    assert!(simulated < real, "{simulated:?} of {real:?}");
    let lanes = engine.trace().unwrap().lanes();
    let lane = |name: &str| {
        let found = lanes.iter().find(|lane| lane.name.starts_with(name));
        &found.unwrap().spans
    };
    let beside = |a: &Span, b: &Span| a.start < b.end && b.start < a.end;
    let busy = |a: &&Span| {
        let with = |name| lane(name).iter().any(|b| beside(a, b));
        with("compute") && with("device")
    };
    let its = lane("accelerator")
        .iter()
        .filter(|s| s.kind.name == "dense");
    let its: Vec<&Span> = its.collect();
    let both = its.iter().filter(|s| busy(s)).count();
    assert!(
        both > 0,
        "{both} of {}; {} reads; {:?}",
        its.len(),
        lane("device").len(),
        engine.device()
    );
}
