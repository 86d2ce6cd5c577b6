//! A device that makes decoding slower than it is without is left out, and no bit changes.

use std::ops::ControlFlow;

use emberflow_devices::{Device, OnDevices, Verdicts, device_report};
use emberflow_engine::{Budget, Engine, Lab, Model, Options, Request};
use emberflow_tests::devices::{fast_products, plain_devices};

fn options(devices: Vec<Device>, pass_seconds: Option<[f64; 2]>) -> Options {
    Options {
        budget: Budget::FfnShare(1.0),
        threads: 2,
        context: 256,
        lane: OnDevices::new(devices).pass_seconds(pass_seconds).lane(),
        lab: Lab {
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

/// The hash over the logits of so many tokens.
fn generated(engine: &mut Engine, tokens: usize) -> u64 {
    let mut sequence = engine.new_sequence().unwrap();
    let request = Request {
        max_tokens: tokens,
        ignore_eos: true,
        ..Request::default()
    };
    let go_on = &mut |_| ControlFlow::Continue(());
    let prompt: Vec<u32> = (0..9).map(|i| 40 + 31 * i).collect();
    let done = engine.generate(&mut sequence, &prompt, &request, go_on);
    done.unwrap().logits_hash
}

/// What the device has computed: clusters, and rows of matrices.
fn work(engine: &Engine) -> [u64; 2] {
    let report = device_report(engine).unwrap();
    [report.devices[0].clusters, report.devices[0].rows]
}

#[test]
fn a_device_is_left_out_if_the_run_says_that_it_slows_decoding() {
    let open =
        |devices, seconds| Engine::open(Model::demo().unwrap(), options(devices, seconds)).unwrap();
    let expected = generated(&mut open(Vec::new(), None), 48);
    let device = || vec![fast_products(&plain_devices()[0])];

    let mut slower = open(device(), Some([0.070, 0.038]));
    assert_eq!(generated(&mut slower, 48), expected);
    let report = device_report(&slower).unwrap();
    let [of] = report.left_out[..] else {
        panic!("{report:?}")
    };
    assert_eq!((of.rows, of.with_ms, of.without_ms), (1, 70.0, 38.0));
    // Prompts are computed with it all the same.
    let before = work(&slower);
    assert_eq!(
        generated(&mut slower, 1),
        generated(&mut open(Vec::new(), None), 1)
    );
    let prompt = work(&slower);
    assert!(before < prompt, "{before:?} {prompt:?}");
    generated(&mut slower, 40);
    let all = work(&slower);
    let of_prompt = [0, 1].map(|i| prompt[i] - before[i]);
    assert_eq!([0, 1].map(|i| all[i] - prompt[i]), of_prompt);

    let mut faster = open(device(), Some([0.038, 0.070]));
    assert_eq!(generated(&mut faster, 48), expected);
    assert_eq!(device_report(&faster).unwrap().left_out, []);
    let before = work(&faster);
    generated(&mut faster, 40);
    let all = work(&faster);
    assert!(all[0] - before[0] > 10 * of_prompt[0], "{before:?} {all:?}");
}

/// By the same rule as decoding.
#[test]
fn a_device_is_left_out_of_prompts_that_it_slows() {
    let prompt: Vec<u32> = (0..200).map(|i| 3 + 31 * i % 300).collect();
    let computed = |devices| {
        let mut options = options(devices, Some([0.070, 0.038]));
        options.lab.chunk = 8;
        let mut engine = Engine::open(Model::demo().unwrap(), options).unwrap();
        let mut sequence = engine.new_sequence().unwrap();
        let go_on = &mut |_| ControlFlow::Continue(());
        let request = Request {
            max_tokens: 1,
            ..Request::default()
        };
        let done = engine.generate(&mut sequence, &prompt, &request, go_on);
        (done.unwrap().logits_hash, engine)
    };
    let (expected, _) = computed(Vec::new());
    let (found, engine) = computed(vec![fast_products(&plain_devices()[0])]);
    assert_eq!(found, expected);
    let report = device_report(&engine).unwrap();
    let [of] = report.left_out[..] else {
        panic!("{report:?}")
    };
    assert_eq!((of.prompt, of.rows), (true, 8));
}

#[test]
fn the_next_run_begins_without_a_device_that_slowed_the_last_one() {
    let dir = tempfile::tempdir().unwrap();
    let left_out = |file: &str, threads: usize, tokens: usize| {
        let devices = OnDevices::new(vec![fast_products(&plain_devices()[0])]);
        let devices = devices.pass_seconds(Some([0.070, 0.038]));
        let verdicts = Verdicts::at(dir.path().join(file));
        let options = Options {
            threads,
            lane: devices.saving_to(Some(verdicts)).lane(),
            ..options(Vec::new(), None)
        };
        let mut engine = Engine::open(Model::demo().unwrap(), options).unwrap();
        generated(&mut engine, tokens);
        device_report(&engine).unwrap().left_out
    };
    let first = left_out("devices.json", 2, 48);
    assert_eq!(first.len(), 1);
    assert_eq!(left_out("devices.json", 2, 2), first);
    assert_eq!(left_out("devices.json", 1, 2), [], "another thread count");
    assert_eq!(left_out("others.json", 2, 2), [], "nothing is known");
}

/// A device that was given a size has its part whatever it costs.
#[test]
fn a_device_with_a_size_stays() {
    let devices = OnDevices::new(vec![fast_products(&plain_devices()[0])]);
    let slower = devices.pass_seconds(Some([0.070, 0.038]));
    let options = Options {
        lane: slower.holding(1 << 20).lane(),
        ..options(Vec::new(), None)
    };
    let mut engine = Engine::open(Model::demo().unwrap(), options).unwrap();
    generated(&mut engine, 32);
    assert_eq!(device_report(&engine).unwrap().left_out, []);
}
