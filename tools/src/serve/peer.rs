//! Detects disconnected clients, even those that have only shut down their sending side.
//!
//! A half-closed connection and a closed one are indistinguishable until something is sent. While a half-closed
//! client waits, bytes without meaning (white space or comments) are sent before its response; when the connection
//! breaks, its request is cancelled.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// A comment in a stream of server-sent events.
pub const COMMENT: &[u8] = b":\n\n";
/// Interval between probes.
const PROBE: Duration = Duration::from_secs(1);
/// Polling interval for a client that has already sent its next request.
const EARLY: Duration = Duration::from_millis(100);

tokio::task_local! {
    /// The client whose request this task answers.
    static PEER: Peer;
}

/// A connection to a client.
#[derive(Debug, Clone)]
pub struct Peer(Arc<TcpStream>);

impl Peer {
    /// Wraps a connection.
    pub fn new(stream: TcpStream) -> Self {
        Self(Arc::new(stream))
    }

    /// Runs the connection until it ends or breaks.
    pub async fn run(self, connection: impl Future) {
        let gone = self.clone();
        let connection = PEER.scope(self, connection);
        tokio::select! {
            _ = connection => {}
            _ = gone.0.ready(Interest::ERROR) => {}
        }
    }

    /// Waits until the client shuts down its sending side.
    async fn closes(&self) {
        loop {
            let mut byte = [0];
            let mut byte = ReadBuf::new(&mut byte);
            match poll_fn(|cx| self.0.poll_peek(cx, &mut byte)).await {
                Ok(1..) => tokio::time::sleep(EARLY).await,
                Ok(0) | Err(_) => return,
            }
        }
    }
}

/// Waits for a JSON response. If the client half-closes before it is complete, the response begins with white space,
/// and errors have status 200 as well; `wrong` formats errors.
pub async fn json_with_probes<E: Send + 'static>(
    answer: impl Future<Output = Result<Response, E>> + Send + 'static,
    wrong: fn(E) -> Response,
) -> Result<Response, E> {
    let Ok(peer) = PEER.try_with(Peer::clone) else {
        return answer.await;
    };
    let mut answer: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(answer);
    tokio::select! {
        biased;
        done = &mut answer => return done,
        () = peer.closes() => {}
    }
    let whole = async move {
        let response = answer.await.unwrap_or_else(wrong);
        to_bytes(response.into_body(), usize::MAX)
            .await
            .unwrap_or_default()
    };
    let probed = Probed {
        peer,
        closed: true,
        due: true,
        probe: b" ",
        pieces: Box::pin(stream::once(whole).map(Ok)),
    };
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Ok((kind, probed.body()).into_response())
}

/// A streamed response that sends `probe` while its client has half-closed.
pub fn stream_with_probes(response: Response, probe: &'static [u8]) -> Response {
    let Ok(peer) = PEER.try_with(Peer::clone) else {
        return response;
    };
    let (head, body) = response.into_parts();
    let probed = Probed {
        peer,
        closed: false,
        due: false,
        probe,
        pieces: Box::pin(body.into_data_stream()),
    };
    Response::from_parts(head, probed.body())
}

/// A body with probes between its pieces.
struct Probed<S> {
    peer: Peer,
    /// Whether the client has shut down its sending side.
    closed: bool,
    /// Whether to send a probe now.
    due: bool,
    probe: &'static [u8],
    pieces: Pin<Box<S>>,
}

impl<S: Stream<Item = Result<Bytes, axum::Error>> + Send + 'static> Probed<S> {
    fn body(self) -> Body {
        let pieces = stream::unfold(self, |mut probed| async move {
            let piece = probed.next().await?;
            Some((piece, probed))
        });
        Body::from_stream(pieces)
    }

    async fn next(&mut self) -> Option<S::Item> {
        let probe = Bytes::from_static(self.probe);
        if std::mem::take(&mut self.due) {
            return Some(Ok(probe));
        }
        let Self {
            peer,
            closed,
            pieces,
            ..
        } = self;
        let wait = async {
            if *closed {
                tokio::time::sleep(PROBE).await
            } else {
                peer.closes().await
            }
        };
        tokio::select! {
            biased;
            piece = pieces.next() => piece,
            () = wait => {
                self.closed = true;
                Some(Ok(probe))
            }
        }
    }
}

impl AsyncRead for Peer {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    buffer.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Peer {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write_vectored(parts) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// The connection ends when it is dropped.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
