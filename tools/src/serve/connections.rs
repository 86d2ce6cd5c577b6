//! Accepts connections, within limits: a client that sends nothing, or takes nothing, is let go.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use super::peer::Peer;

/// Time for the head of a request to arrive, and for the next one of a connection to come.
const HEAD_TIME: Duration = Duration::from_secs(20);
/// Time in which a client takes some of what it asked for.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// Time for a request and its answer when all places are taken.
const CROWDED_TIME: Duration = Duration::from_secs(2);
/// The same where few files are left to open.
const HURRIED_TIME: Duration = Duration::from_millis(300);
/// Connections beside the places, for those who are told that all are taken.
pub const SPARE: usize = 16;
/// Time to wait after the system had no connection to give.
const PAUSE: Duration = Duration::from_millis(50);
/// Files that must be left to open when a connection gets a place beside others: for connections that are
/// answered once, and for the process that renders a chat template.
const FILES: u64 = 10;
/// Bytes that a connection keeps of its requests.
const BUFFER: usize = 16 << 10;
/// Bytes that a connection takes in all.
pub const MEMORY: u64 = 2 * BUFFER as u64;

/// Routers and numbers of the connections.
pub struct Doors {
    /// Answers those who have a place.
    pub router: Router,
    /// Most of these at once.
    pub most: usize,
    /// Answers the others: that there is no place, and what must be told even then.
    pub crowded: Router,
}

/// Serves until `stop`; connections that are then running end by themselves. Who comes when all places
/// are taken, or no files are left to open, is answered once, within [`CROWDED_TIME`].
pub async fn serve(listener: TcpListener, doors: Doors, stop: impl Future<Output = ()>) {
    let mut stop = pin!(stop);
    let places = Arc::new(Semaphore::new(doors.most));
    let spare = Arc::new(Semaphore::new(SPARE));
    let running = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .half_close(true)
        .max_buf_size(BUFFER);
    let mut once = http.clone();
    once.header_read_timeout(CROWDED_TIME).keep_alive(false);
    loop {
        let next = async {
            // Closed by nobody.
            let spare = spare.clone().acquire_owned().await.ok()?;
            Some((listener.accept().await, spare))
        };
        let (accepted, spare) = tokio::select! {
            Some(next) = next => next,
            () = &mut stop => break,
            else => break,
        };
        let Ok((stream, _)) = accepted else {
            // No more file descriptors, or a client that has gone.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // Without it small pieces of a stream would wait for each other.
        let _ = stream.set_nodelay(true);
        let peer = Peer::new(stream);
        let stream = TokioIo::new(Box::pin(limited(peer.clone())));
        // A client that breaks off is no fault of ours.
        let alone = places.available_permits() == doors.most;
        let files = has_files(if alone { 0 } else { FILES });
        let place = places.clone().try_acquire_owned().ok();
        let place = place.filter(|_| files);
        if let Some(place) = place {
            drop(spare);
            let service = TowerToHyperService::new(doors.router.clone());
            let connection = running.watch(http.serve_connection(stream, service));
            tokio::spawn(async move {
                peer.run(connection).await;
                drop(place);
            });
        } else {
            let service = TowerToHyperService::new(doors.crowded.clone());
            let connection = once.serve_connection(stream, service);
            tokio::spawn(async move {
                let time = if files { CROWDED_TIME } else { HURRIED_TIME };
                let _ = tokio::time::timeout(time, connection).await;
                drop(spare);
            });
        }
    }
    drop(listener);
    running.shutdown().await;
}

/// Whether this process may open so many more files. Where that cannot be found out, it may.
fn has_files(more: u64) -> bool {
    let limit = getrlimit(Resource::Nofile).current;
    let open = std::fs::read_dir("/proc/self/fd").map(Iterator::count);
    match (limit, open) {
        (Some(limit), Ok(open)) => open as u64 + more <= limit,
        (Some(_), Err(e)) if Errno::from_io_error(&e) == Some(Errno::MFILE) => more == 0,
        _ => true,
    }
}

fn limited(stream: Peer) -> TimeoutStream<Peer> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIME));
    stream
}
