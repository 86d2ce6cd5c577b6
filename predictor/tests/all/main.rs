//! Sections of a container and training. One binary, because linking many takes longer than running them.

mod section;
mod train;
