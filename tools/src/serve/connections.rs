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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

/// Time for the head of a request to arrive, and for the next one of a connection to come.
const HEAD_TIME: Duration = Duration::from_secs(20);
/// Time in which a client takes some of what it asked for.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// Time to wait after the system had no connection to give.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes that a connection keeps of its requests.
const BUFFER: usize = 16 << 10;
/// Bytes that a connection takes in all.
pub const MEMORY: u64 = 2 * BUFFER as u64;

/// Serves at most `most` connections at once until `stop`; those that are then running end by
/// themselves.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    most: usize,
    stop: impl Future<Output = ()>,
) {
    let mut stop = pin!(stop);
    let places = Arc::new(Semaphore::new(most));
    let running = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(BUFFER);
    loop {
        let next = async {
            // Closed by nobody.
            let place = places.clone().acquire_owned().await.ok()?;
            Some((listener.accept().await, place))
        };
        let (accepted, place) = tokio::select! {
            Some(next) = next => next,
            () = &mut stop => break,
            else => break,
        };
        let Ok((stream, _)) = accepted else {
            // No more file descriptors, or a client that has gone.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let stream = TokioIo::new(Box::pin(limited(stream)));
        let connection = running.watch(http.serve_connection(stream, service));
        tokio::spawn(async move {
            // A client that breaks off is no fault of ours.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    running.shutdown().await;
}

fn limited(stream: TcpStream) -> TimeoutStream<TcpStream> {
    // Without it small pieces of a stream would wait for each other.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIME));
    stream
}
