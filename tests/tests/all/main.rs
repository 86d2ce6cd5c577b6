//! Engine, goldens and code rules. One binary, because linking many takes longer than running them.

mod batch;
mod calibrated;
mod dense_device;
mod device_streams;
mod documents;
mod edits;
mod embedding;
mod expert_groups;
mod expert_reads;
mod experts;
mod first_tokens;
mod further_tokens;
mod gemma3n;
mod golden_logits;
mod in_parts;
mod long_prompts;
mod npu_floats;
mod observe;
mod powerinfer;
mod predicted;
mod same_bits;
mod several_devices;
mod stepper;
mod text_golden;
mod tidy;
mod ungated;
