//! Devices behind the engine's trait `Lane`: whatever they take of a layer, and whenever they fail, no bit changes.

mod second_cpu;

use std::time::Duration;

use emberflow_devices::{
    Backend, CpuDevice, Device, DeviceError, DeviceReport, Facts, Grouping, HostBytes, Lease,
    NeuronRows, OnDevices, Part, PartKind, Program, Taken, Ticket, Work, device_report,
};
use emberflow_engine::{Budget, Engine, Lab, Logits, Model, Options, demo_container};
use emberflow_models::demo::Demo;

/// Pieces of work of the check at the start.
const CHECKS: usize = 41;

/// The CPU as a device that reports a nanosecond for its work, so that it gets all that it can hold.
struct Fast {
    inner: Lease,
    facts: Facts,
    /// Pieces of work on neurons so far, and the one that fails.
    done: usize,
    fails: usize,
}

impl Fast {
    fn device(unified: bool, fails: usize) -> Device {
        let inner = Device::new(Box::new(CpuDevice::new()));
        let facts = Facts {
            unified,
            ..inner.facts().clone()
        };
        Device::new(Box::new(Self {
            inner: inner.lease().unwrap(),
            facts,
            done: 0,
            fails,
        }))
    }
}

impl Backend for Fast {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError> {
        self.inner.backend().prepare(program)
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        self.inner.backend().memory(of)
    }

    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        match self.facts.unified {
            true => self.inner.backend().host(part),
            false => Ok(None),
        }
    }

    fn release(&mut self, part: Part) {
        self.inner.backend().release(part);
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Ticket, DeviceError> {
        self.inner.backend().upload(part, first, neurons)
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        self.done += usize::from(!matches!(work, Work::Products(..)));
        match self.done > self.fails {
            true => Err(DeviceError {
                device: "fast".into(),
                what: "was reset".into(),
            }),
            false => self.inner.backend().submit(work),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        self.inner.backend().poll(ticket)
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        let taken = self.inner.backend().take(ticket, out)?;
        let took = Duration::from_nanos(1);
        Ok(Taken { took, ..taken })
    }

    fn clear(&mut self) {
        self.inner.backend().clear();
    }
}

/// A model, and how it is run.
#[derive(Clone, Copy)]
struct Case {
    demo: Demo,
    share: f64,
    chunk: usize,
}

impl Case {
    fn open(self, devices: OnDevices) -> Engine {
        let options = Options {
            budget: Budget::FfnShare(self.share),
            threads: 2,
            context: 256,
            lane: devices.lane(),
            lab: Lab {
                chunk: self.chunk,
                profiles: false,
                ..Lab::default()
            },
            ..Options::default()
        };
        let model = Model::open(demo_container(self.demo).unwrap()).unwrap();
        Engine::open(model, options).unwrap()
    }

    /// The bits of all logits of a prompt in chunks, then of single tokens.
    fn run(self, devices: OnDevices) -> (Vec<u32>, Option<DeviceReport>) {
        let mut engine = self.open(devices);
        let tokens: Vec<u32> = (0..140u32).map(|i| 3 + (i * 31) % 300).collect();
        let (prompt, single) = tokens.split_at(132);
        let mut sequence = engine.new_sequence().unwrap();
        let mut bits = Vec::new();
        let pieces = prompt.chunks(self.chunk).chain(single.chunks(1));
        for piece in pieces {
            let mut sink =
                |_: usize, logits: &[f32]| bits.extend(logits.iter().map(|v| v.to_bits()));
            let wanted = Logits::Each(&mut sink);
            engine.forward(&mut sequence, piece, wanted).unwrap();
        }
        (bits, device_report(&engine))
    }

    /// Runs with devices, and compares the bits with the CPU's.
    fn same(self, devices: OnDevices) -> DeviceReport {
        let (expected, none) = self.run(OnDevices::default());
        assert!(none.is_none());
        let (found, report) = self.run(devices);
        let report = report.unwrap();
        assert!(found == expected, "{report:?}");
        report
    }
}

fn dense(share: f64, chunk: usize) -> Case {
    Case {
        demo: Demo::Dense,
        share,
        chunk,
    }
}

fn fast(unified: bool) -> OnDevices {
    OnDevices::new(vec![Fast::device(unified, usize::MAX)])
}

#[test]
fn clusters_and_rows_of_matrices_of_one_device() {
    for (share, chunk) in [(0.5, 5), (1.0, 16)] {
        let report = dense(share, chunk).same(fast(true).holding(1 << 20));
        assert!(report.clusters > 0 && report.lost.is_none(), "{report:?}");
        let work = &report.devices[0];
        assert!(work.clusters > 0 && work.rows > 0, "{report:?}");
        assert!(report.products_share > 0.5, "{report:?}");
    }
}

#[test]
fn rows_of_a_prompt_with_all_clusters() {
    for unified in [true, false] {
        for share in [0.5, 1.0] {
            let report = dense(share, 64).same(fast(unified).holding(1 << 20));
            assert!(report.streamed.rows > 0, "{report:?}");
            assert!(report.lost.is_none(), "{report:?}");
        }
    }
}

#[test]
fn clusters_and_rows_of_matrices_of_several_devices() {
    let devices = [(); 2].map(|()| Fast::device(true, usize::MAX));
    let report = dense(0.5, 16).same(OnDevices::new(devices.into()).holding(1 << 20));
    // The budget leaves a layer's few clusters to the first; both multiply.
    assert!(report.devices[0].clusters > 0, "{report:?}");
    assert!(report.devices.iter().all(|of| of.rows > 0), "{report:?}");
}

#[test]
fn experts_in_groups() {
    let case = Case {
        demo: Demo::Experts,
        share: 1.0,
        chunk: 64,
    };
    for capacity in [0, 2] {
        let experts = 4;
        let groups = Grouping::All { experts, capacity };
        let report = case.same(fast(true).holding(64 << 20).grouping(groups));
        let work = report.experts.unwrap();
        assert!(work.groups > 0 && work.routes.npu > 0, "{report:?}");
        assert!(capacity == 0 || work.routes.overflow > 0, "{report:?}");
    }
}

/// The user is told what takes long before a plan is made.
#[test]
fn drivers_that_compile_say_so() {
    let device = |name: &str, compiles| {
        let inner = Device::new(Box::new(CpuDevice::new()));
        let facts = Facts {
            name: name.into(),
            compiles,
            ..inner.facts().clone()
        };
        Device::new(Box::new(Fast {
            inner: inner.lease().unwrap(),
            facts,
            done: 0,
            fails: usize::MAX,
        }))
    };
    let said = |devices| OnDevices::new(devices).lane().unwrap().slow_start();
    let gpu = || device("a GPU", Some("kernels"));
    let words = |what: &str| {
        format!("compiling and timing {what}, which takes seconds to minutes the first time")
    };
    assert_eq!(said(vec![device("cpu", None)]), None);
    assert_eq!(said(vec![gpu()]), Some(words("kernels for a GPU")));
    let both = vec![gpu(), device("npu:qnn", Some("graphs"))];
    assert_eq!(
        said(both),
        Some(words("kernels for a GPU and graphs for npu:qnn"))
    );
}

#[test]
fn a_device_that_fails_is_not_missed() {
    let experts = Case {
        demo: Demo::Experts,
        share: 1.0,
        chunk: 64,
    };
    for after in [0, 1, 2, 9] {
        let failing =
            |held: u64| OnDevices::new(vec![Fast::device(true, CHECKS + after)]).holding(held);
        for case in [dense(0.5, 5), dense(0.5, 64), dense(1.0, 64)] {
            let report = case.same(failing(1 << 20));
            assert!(report.lost.is_some(), "{after}: {report:?}");
        }
        let report = experts.same(failing(64 << 20).grouping(Grouping::All {
            experts: 4,
            capacity: 0,
        }));
        assert!(report.lost.is_some(), "{after}: {report:?}");
    }
    // Of two the other goes on.
    let devices = vec![
        Fast::device(true, CHECKS + 3),
        Fast::device(true, usize::MAX),
    ];
    let report = dense(0.5, 16).same(OnDevices::new(devices).holding(1 << 20));
    assert!(report.lost.is_none() && report.devices[0].lost.is_some());
}
