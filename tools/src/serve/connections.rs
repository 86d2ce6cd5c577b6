//! Accepts connections, with limits on their number, memory and idle time.

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

/// Time to receive a request's head, also for further requests on a connection.
const HEAD_TIME: Duration = Duration::from_secs(20);
/// Time in which a client must read some of its response.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// Time for a request and its response if all slots are taken.
const CROWDED_TIME: Duration = Duration::from_secs(2);
/// The same if file descriptors are scarce.
const HURRIED_TIME: Duration = Duration::from_millis(300);
/// Additional connections, which receive a rejection.
pub const SPARE: usize = 16;
/// Wait after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);
/// File descriptors that must be free to accept a connection normally: for rejected connections, and for the process
/// that renders chat templates.
const FILES: u64 = 10;
/// Read buffer of a connection.
const BUFFER: usize = 16 << 10;
/// Memory of a connection.
pub const MEMORY: u64 = 2 * BUFFER as u64;

/// Routers and limits of the connections.
pub struct Routers {
    /// Serves accepted connections.
    pub router: Router,
    /// Maximum number of these.
    pub most: usize,
    /// Serves connections beyond the limit: rejections, health and metrics.
    pub crowded: Router,
}

/// Serves until `stop`, then lets running connections finish. Connections beyond the limit, or when file descriptors
/// are scarce, get one response within [`CROWDED_TIME`].
pub async fn serve(listener: TcpListener, doors: Routers, stop: impl Future<Output = ()>) {
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
            // The semaphore is never closed.
            let spare = spare.clone().acquire_owned().await.ok()?;
            Some((listener.accept().await, spare))
        };
        let (accepted, spare) = tokio::select! {
            Some(next) = next => next,
            () = &mut stop => break,
            else => break,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file descriptors, or the client has disconnected.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // TCP_NODELAY, so that small pieces of a stream are sent at once.
        let _ = stream.set_nodelay(true);
        let peer = Peer::new(stream);
        let stream = TokioIo::new(Box::pin(limited(peer.clone())));
        // Disconnecting clients are not an error.
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

/// Whether this process may open `more` files. True if unknown.
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
