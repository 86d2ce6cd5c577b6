//! Finished responses, kept in memory for `previous_response_id`, `GET /v1/responses/{id}` and its `/input_items`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A finished response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredResponse {
    /// Its id.
    pub id: String,
    /// The response object as JSON.
    pub object: Arc<str>,
    /// Input and output items of the whole conversation as JSON, separated by commas.
    pub items: Arc<str>,
    /// Length of the input items in `items`.
    pub inputs: usize,
}

impl StoredResponse {
    /// The items before the response as JSON, separated by commas.
    pub fn input(&self) -> &str {
        self.items.get(..self.inputs).unwrap_or_default()
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.id.len() + self.object.len() + self.items.len()
    }
}

/// The last responses whose size together stays within a limit.
#[derive(Debug)]
pub struct ResponseStore {
    /// Maximum bytes.
    limit: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: usize,
    /// Oldest first.
    all: VecDeque<StoredResponse>,
}

impl ResponseStore {
    /// An empty store for this many bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            kept: Mutex::default(),
        }
    }

    /// Maximum bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Keeps a response, and drops the oldest ones for it. One that is larger than the whole store is not kept.
    pub fn put(&self, response: StoredResponse) {
        let bytes = response.bytes();
        if bytes > self.limit {
            return;
        }
        let mut kept = self.kept();
        while kept.bytes + bytes > self.limit {
            let Some(oldest) = kept.all.pop_front() else {
                break;
            };
            kept.bytes -= oldest.bytes();
        }
        kept.bytes += bytes;
        kept.all.push_back(response);
    }

    /// The response with this id.
    pub fn get(&self, id: &str) -> Option<StoredResponse> {
        let kept = self.kept();
        kept.all.iter().find(|kept| kept.id == id).cloned()
    }

    /// Drops the response with this id; returns whether there was one.
    pub fn remove(&self, id: &str) -> bool {
        let mut kept = self.kept();
        let at = kept.all.iter().position(|kept| kept.id == id);
        let Some(removed) = at.and_then(|at| kept.all.remove(at)) else {
            return false;
        };
        kept.bytes -= removed.bytes();
        true
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(id: &str, bytes: usize) -> StoredResponse {
        StoredResponse {
            id: id.to_owned(),
            object: "o".repeat(bytes).into(),
            items: "".into(),
            inputs: 0,
        }
    }

    #[test]
    fn the_oldest_responses_make_room() {
        let one = response("a", 100).bytes();
        let store = ResponseStore::new(3 * one);
        let has = |id: &str| store.get(id).is_some();
        for id in ["a", "b", "c"] {
            store.put(response(id, 100));
        }
        assert!(has("a") && has("b") && has("c"));
        store.put(response("d", 100));
        assert!(!has("a") && has("b") && has("c") && has("d"));
        assert!(store.remove("c") && !store.remove("c"));
        store.put(response("e", 100));
        assert!(has("b") && has("d") && has("e"), "there was room for it");
        store.put(response("f", 3 * one));
        assert!(!has("f") && has("b"), "too large for the store");
        store.put(response("g", 100 + 2 * one));
        assert!(has("g") && !has("b") && !has("d") && !has("e"));
        assert_eq!(store.kept().bytes, 3 * one);
    }
}
