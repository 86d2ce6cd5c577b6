//! Devices that are known by numbers only, such as those of phones in the laboratory's simulations.

use std::sync::Arc;

use emberflow_engine::lane::LaneFacts;

use crate::plan::MeasuredTimes;
use crate::split::{Curve, Product};
use crate::times::{Sample, Samples};

/// Times of a device for passes of some number of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowTimes {
    /// Rows.
    pub rows: usize,
    /// Seconds of any piece of work.
    pub launch: f64,
    /// Seconds of a neuron for all these rows.
    pub neuron: f64,
}

/// A device that shares the machine's memory and has the CPU's bits.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceNumbers {
    /// Its name.
    pub name: String,
    /// Times by ascending number of rows, interpolated between them.
    pub times: Vec<RowTimes>,
    /// Clusters in each of its two stream buffers; 0 for none.
    pub at_once: usize,
}

impl DeviceNumbers {
    /// Seconds of a piece of work of `neurons` neurons for `rows` rows.
    pub fn seconds(&self, neurons: usize, rows: usize) -> f64 {
        self.samples().seconds(Product {
            rows: neurons,
            cols: 1,
            n: rows,
        })
    }

    /// The device as a planner sees it. The planner adds the bytes of a cluster and the CPU's time for it.
    pub fn facts(&self) -> LaneFacts {
        let names = vec![self.name.clone()];
        LaneFacts {
            names: names.clone(),
            unified: true,
            memory: u64::MAX,
            asked: false,
            fixed: 0,
            cluster_len: 0,
            same_bits: true,
            at_once: self.at_once,
            cpu_cluster: 0.0,
            times: Arc::new(MeasuredTimes {
                names,
                times: vec![self.samples()],
                unified: true,
                same_bits: true,
                at_once: self.at_once,
                copy: 0.0,
                experts: None,
            }),
        }
    }

    fn samples(&self) -> Samples {
        let sample = |of: &RowTimes| Sample {
            n: of.rows,
            launch: of.launch,
            weight: of.neuron,
        };
        Samples(self.times.iter().map(sample).collect())
    }
}
