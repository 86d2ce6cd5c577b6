//! Finished responses for `previous_response_id`, `GET /v1/responses/{id}` and its `/input_items`: the last ones in memory,
//! with `--state-dir` more of them on disk.

use std::collections::{HashSet, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::SystemTime;

use emberflow_storage::container::checksum;
use serde::{Deserialize, Serialize};

use crate::atomic::{Partial, remove_stale};
use crate::states::DayCount;
use crate::{Failure, atomic};

/// Bytes of the names of files in a folder of responses, at most.
const NAME: usize = 64;
/// Responses that wait to be written, at most.
const WAITING: usize = 64;
/// Files of a folder, at most, so that the oldest one is soon found.
const FILES: usize = 4096;

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
    folder: Option<ResponseFolder>,
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
            folder: None,
        }
    }

    /// The same, with responses also in a folder.
    pub fn saving(self, folder: Option<ResponseFolder>) -> Self {
        Self { folder, ..self }
    }

    /// Maximum bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Keeps a response, and drops the oldest ones for it. One that is larger than the whole store is not kept.
    pub fn put(&self, response: StoredResponse) {
        if let Some(folder) = &self.folder
            && response.bytes() <= self.limit
        {
            folder.save(response.clone());
        }
        self.keep(response);
    }

    fn keep(&self, response: StoredResponse) {
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
        let found = kept.all.iter().find(|kept| kept.id == id).cloned();
        drop(kept);
        found.or_else(|| {
            let saved = self.folder.as_ref()?.files.read(id, self.limit)?;
            self.keep(saved.clone());
            Some(saved)
        })
    }

    /// Drops the response with this id; returns whether there was one.
    pub fn remove(&self, id: &str) -> bool {
        let saved = self
            .folder
            .as_ref()
            .is_some_and(|folder| folder.files.remove(id));
        let mut kept = self.kept();
        let at = kept.all.iter().position(|kept| kept.id == id);
        let Some(removed) = at.and_then(|at| kept.all.remove(at)) else {
            return saved;
        };
        kept.bytes -= removed.bytes();
        true
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A response in a file: its checksum in hexadecimal, a line ending, this as JSON.
#[derive(Serialize, Deserialize)]
struct SavedResponse {
    id: String,
    object: String,
    items: String,
    inputs: usize,
}

/// Responses on disk, one in a file of its own. A thread writes them, since a server's may not wait; dropping the folder
/// waits for it.
#[derive(Debug)]
pub struct ResponseFolder {
    files: Arc<ResponseFiles>,
    queue: Option<SyncSender<StoredResponse>>,
    writer: Option<JoinHandle<()>>,
}

/// The files of a folder.
#[derive(Debug)]
struct ResponseFiles {
    path: PathBuf,
    /// Maximum bytes.
    limit: u64,
    day: DayCount,
    /// Ids of responses that are to be written. One that is deleted meanwhile is not in it.
    pending: Mutex<HashSet<String>>,
}

impl ResponseFolder {
    /// Opens or creates the folder `path` for this many bytes, and as many a day.
    ///
    /// # Errors
    /// A folder that cannot be created or written.
    pub fn open(path: &Path, limit: u64) -> Result<Self, Failure> {
        std::fs::create_dir_all(path).map_err(Failure::file(path))?;
        let day = DayCount::new(path, limit);
        atomic::may_write(day.path(), true, &[])?;
        let files = Arc::new(ResponseFiles {
            path: path.to_owned(),
            limit,
            day,
            pending: Mutex::default(),
        });
        let (queue, waiting) = sync_channel::<StoredResponse>(WAITING);
        let of_writer = Arc::clone(&files);
        let writer = Builder::new().name("ember-responses".into());
        let writer = writer.spawn(move || {
            for response in waiting {
                of_writer.save(&response);
            }
        })?;
        Ok(Self {
            files,
            queue: Some(queue),
            writer: Some(writer),
        })
    }

    /// Has a response written.
    fn save(&self, response: StoredResponse) {
        self.files.pending().insert(response.id.clone());
        let queue = self.queue.as_ref();
        if let Some(Err(refused)) = queue.map(|queue| queue.try_send(response)) {
            let (TrySendError::Full(of) | TrySendError::Disconnected(of)) = refused;
            self.files.pending().remove(&of.id);
            tracing::warn!("a response is not saved: the disk is too slow");
        }
    }
}

impl Drop for ResponseFolder {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            // It has nothing that could panic.
            let _ = writer.join();
        }
    }
}

impl ResponseFiles {
    fn pending(&self) -> MutexGuard<'_, HashSet<String>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a response, unless it is deleted before or meanwhile.
    fn save(&self, response: &StoredResponse) {
        if !self.pending().contains(&response.id) {
            return;
        }
        if let Err(why) = self.write(response) {
            tracing::warn!(%why, "a response is not saved");
        }
        if !self.pending().remove(&response.id) {
            self.remove(&response.id);
        }
    }

    /// The file of a response; `None` for an id that no response has.
    fn file(&self, id: &str) -> Option<PathBuf> {
        let known = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let valid = id.starts_with("resp_") && id.len() <= NAME && id.bytes().all(known);
        valid.then(|| self.path.join(format!("{id}.json")))
    }

    fn write(&self, response: &StoredResponse) -> Result<(), Failure> {
        let Some(file) = self.file(&response.id) else {
            return Ok(());
        };
        let saved = SavedResponse {
            id: response.id.clone(),
            object: response.object.to_string(),
            items: response.items.to_string(),
            inputs: response.inputs,
        };
        let json = serde_json::to_string(&saved).map_err(std::io::Error::from)?;
        let text = format!("{:08x}\n{json}", checksum(json.as_bytes()));
        let bytes = text.len() as u64;
        if !self.day.has(bytes) || !self.make_room(bytes)? || !self.day.take(bytes)? {
            return Ok(());
        }
        let partial = Partial::of_server(&file)?;
        partial
            .get()
            .write_all(text.as_bytes())
            .map_err(Failure::file(&file))?;
        partial.publish()
    }

    /// The response with this id, if it is whole and of at most `limit` bytes.
    fn read(&self, id: &str, limit: usize) -> Option<StoredResponse> {
        let file = self.file(id)?;
        // JSON in JSON: no byte takes more than two.
        let long = file.metadata().ok()?.len() > 2 * limit as u64;
        let text = (!long).then(|| std::fs::read_to_string(&file).ok())??;
        let (sum, json) = text.split_once('\n')?;
        let whole = u32::from_str_radix(sum, 16) == Ok(checksum(json.as_bytes()));
        let saved: SavedResponse = whole.then(|| serde_json::from_str(json).ok())??;
        let response = StoredResponse {
            id: saved.id,
            object: saved.object.into(),
            items: saved.items.into(),
            inputs: saved.inputs,
        };
        (response.id == id && response.bytes() <= limit).then_some(response)
    }

    fn remove(&self, id: &str) -> bool {
        self.pending().remove(id);
        let file = self.file(id);
        file.is_some_and(|file| std::fs::remove_file(file).is_ok())
    }

    /// Removes the oldest responses until there is room for `bytes`. False, and nothing is removed, if there is never enough.
    fn make_room(&self, bytes: u64) -> Result<bool, Failure> {
        if bytes > self.limit {
            return Ok(false);
        }
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(Failure::file(&self.path))? {
            let Ok((path, Ok(facts))) = entry.map(|it| (it.path(), it.metadata())) else {
                continue;
            };
            remove_stale(&path, |whole| whole.starts_with("resp_"));
            let id = path.file_stem().and_then(|stem| stem.to_str());
            if id.and_then(|id| self.file(id)).as_ref() == Some(&path) {
                let written = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((written, facts.len(), path));
            }
        }
        files.sort();
        let mut taken: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        let mut count = files.len();
        for (_, freed, path) in files {
            if taken + bytes <= self.limit && count < FILES {
                break;
            }
            // Another process may have removed it.
            let _ = std::fs::remove_file(path);
            (taken, count) = (taken - freed, count - 1);
        }
        Ok(true)
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

    #[test]
    fn responses_on_disk_outlive_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let store = || {
            let folder = ResponseFolder::open(dir.path(), 2900).unwrap();
            ResponseStore::new(100_000).saving(Some(folder))
        };
        let path = |id: &str| dir.path().join(format!("{id}.json"));
        std::fs::write(path("mine"), "mine").unwrap();
        let first = store();
        let written = |store: &ResponseStore| {
            let files = &store.folder.as_ref().unwrap().files;
            while !files.pending().is_empty() {
                std::thread::yield_now();
            }
        };
        for id in ["resp_1", "resp_2", "resp_3"] {
            // A day later.
            let _ = std::fs::remove_file(dir.path().join("written-today"));
            first.put(response(id, 1000));
            written(&first);
        }
        first.put(response("resp_large", 5000));
        written(&first);
        let second = store();
        assert_eq!(second.get("resp_3"), first.get("resp_3"));
        assert!(second.get("resp_1").is_none(), "the oldest one made room");
        assert!(second.get("../x").is_none() && second.get("mine").is_none());
        assert!(first.get("resp_large").is_some() && second.get("resp_large").is_none());
        assert!(second.remove("resp_3") && store().get("resp_3").is_none());
        let bytes = std::fs::read(path("resp_2")).unwrap();
        for at in (0..bytes.len()).step_by(41) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            std::fs::write(path("resp_2"), &damaged).unwrap();
            assert!(store().get("resp_2").is_none(), "{at}");
        }
        std::fs::write(path("resp_2"), &bytes).unwrap();
        assert!(store().get("resp_2").is_some());
        for _ in 0..3 {
            first.put(response("resp_4", 1000));
            written(&first);
        }
        first.put(response("resp_5", 1000));
        written(&first);
        assert!(store().get("resp_5").is_none(), "enough for a day");
        assert_eq!(std::fs::read(path("mine")).unwrap(), b"mine");
    }
}
