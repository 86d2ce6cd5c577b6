//! Chrome trace (about:tracing, Perfetto) of what every thread and the device did.

use std::io::{BufWriter, Write};
use std::path::Path;

use emberflow_storage::trace::{Lane, READ, Span, Trace};
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::atomic::Partial;

/// Spans recorded per lane: a few hundred tokens of a small model, a few tens of a 7B model.
pub const ROOM: usize = 1 << 15;

/// Writes a trace in Chrome's JSON array format, one event per line.
pub fn write(trace: &Trace, path: &Path) -> Result<(), Failure> {
    let file = Partial::create(path)?;
    let mut out = BufWriter::new(file.get());
    let lanes = trace.lanes();
    let lost: u64 = lanes.iter().map(|lane| lane.lost).sum();
    if lost > 0 {
        tracing::warn!(lost, "the trace holds only the last part of the run");
    }
    chrome(&lanes, &mut out)
        .and_then(|()| out.flush())
        .map_err(Failure::file(path))?;
    drop(out);
    file.publish()
}

fn chrome(lanes: &[Lane], out: &mut impl Write) -> std::io::Result<()> {
    let name = json!({"name": "emberflow"});
    let process = json!({"ph": "M", "pid": 1, "name": "process_name", "args": name});
    write!(out, "[\n{process}")?;
    for (tid, lane) in lanes.iter().enumerate() {
        let name = json!({"name": lane.name});
        let meta = json!({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": name});
        let order = json!({"sort_index": tid});
        let sort =
            json!({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": order});
        write!(out, ",\n{meta},\n{sort}")?;
        for (id, span) in lane.spans.iter().enumerate() {
            let us = |ns: u64| ns as f64 / 1e3;
            let mut event =
                json!({"pid": 1, "tid": tid, "name": label(span), "cat": span.kind.name});
            event["ts"] = us(span.start).into();
            event["args"] = args(span);
            // Device spans overlap, which only asynchronous events may do.
            if *span.kind == READ {
                event["ph"] = "b".into();
                event["id"] = id.into();
                let mut end = event.clone();
                end["ph"] = "e".into();
                end["ts"] = us(span.end).into();
                write!(out, ",\n{event},\n{end}")?;
            } else {
                event["ph"] = "X".into();
                event["dur"] = us(span.end - span.start).into();
                write!(out, ",\n{event}")?;
            }
        }
    }
    writeln!(out, "\n]")
}

/// Name of a span; for a cluster with its layer and number.
pub fn label(span: &Span) -> String {
    let [a, b] = span.values;
    match span.kind.keys {
        ["layer", "cluster"] => format!("{} L{a} C{b}", span.kind.name),
        ["layer", _] => format!("{} L{a}", span.kind.name),
        _ => span.kind.name.to_owned(),
    }
}

fn args(span: &Span) -> Value {
    let pairs = span.kind.keys.iter().zip(span.values);
    let named = pairs.filter(|(key, _)| !key.is_empty());
    let map: Map<_, _> = named
        .map(|(key, value)| ((*key).to_owned(), value.into()))
        .collect();
    map.into()
}
