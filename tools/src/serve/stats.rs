//! `/stats`, the engine statistics of the web UI, and `/slots`.

use emberflow_engine::LayerResidency;
use serde_json::{Value, json};

use super::app::App;
use super::metrics::{Class, Totals};
use super::snapshot::{IdleSlot, Slot};

/// Running sequences, then idle ones.
pub fn slots(app: &App) -> Value {
    let snapshot = app.shared.snapshot();
    let running = snapshot.slots.iter().map(Slot::json);
    running
        .chain(snapshot.idle.iter().map(IdleSlot::json))
        .collect()
}

/// All statistics.
pub fn stats(app: &App) -> Value {
    let (totals, snapshot) = (app.shared.totals(), app.shared.snapshot());
    let parts = snapshot.memory.iter();
    let parts: serde_json::Map<_, _> = parts
        .map(|part| (part.name.to_owned(), json!(part.bytes)))
        .collect();
    let layer = |layer: &LayerResidency| json!({"neurons": layer.neurons, "hot": layer.hot, "cold": layer.cold});
    json!({
        "model": app.model,
        "uptime_s": app.started.elapsed().as_secs_f64(),
        "totals": counters(&totals),
        "memory": {
            "budget_bytes": snapshot.budget,
            "peak_rss_bytes": emberflow_storage::mem::peak_rss(),
            "parts": parts,
        },
        "classes": {
            "reactive": class(&totals.reactive),
            "proactive": class(&totals.proactive),
        },
        "slots": snapshot.slots.iter().map(Slot::json).collect::<Value>(),
        "layers": snapshot.layers.iter().map(layer).collect::<Value>(),
    })
}

fn counters(totals: &Totals) -> Value {
    let c = &totals.counters;
    json!({
        "requests": totals.requests,
        "cancelled": totals.cancelled,
        "preemptions": totals.preemptions,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "predicted_tokens": totals.predicted_tokens,
        "pass_ns": totals.pass.as_nanos() as u64,
        "ffn_ns": c.ffn_ns,
        "attention_ns": c.attention_ns,
        "head_ns": c.head_ns,
        "predict_ns": c.predict_ns,
        "wait_ns": c.wait_ns,
        "hot_hits": c.hot_hits,
        "hits": c.hits,
        "misses": c.misses,
        "evictions": c.evictions,
        "commands": c.commands,
        "bytes_read": c.bytes_read,
    })
}

fn class(class: &Class) -> Value {
    json!({
        "running": class.running,
        "waiting": class.waiting,
        "ended": class.ended,
        "queue_s": class.queue.mean(),
        "first_token_s": class.first.mean(),
        "token_s": class.token.mean(),
    })
}
