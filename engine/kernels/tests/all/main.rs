//! The kernels against their scalar references. One binary, because linking many takes longer than running them.

mod accuracy;
mod attend;
mod axpy;
mod bit_equal;
mod blocks;
mod delta;
mod golden;
mod int;
mod narrow;
mod quantize;
mod reference;
mod scan;
mod select;
mod signs;
mod workers;
