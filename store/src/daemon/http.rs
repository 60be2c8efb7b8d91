//! HTTP server for monitoring: `/metrics`, `/healthz` and `/readyz`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::metrics;
use crate::daemon::state::DaemonState;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::boxed;

/// Maximum duration of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Size in bytes of the buffer of a connection. This is the minimum that hyper accepts.
const MAX_REQUEST: usize = 8 << 10;

/// Maximum number of concurrent connections. Further connections are closed.
const MAX_CONNECTIONS: usize = 16;

/// Listens on a loopback address.
///
/// # Errors
///
/// `Invalid` if it is not a loopback address; `Io` if the system does not bind it.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    if !address.ip().is_loopback() {
        return Err(Error::new(
            ErrorKind::Invalid,
            format_args!(
                "metrics at {address}: they name keys and processes and have no password, so only \
                 this host may ask; take a loopback address such as 127.0.0.1:{}, with a proxy before \
                 it that asks who it is",
                address.port(),
            ),
        ));
    }
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| Error::io(format_args!("metrics at {address}"), error))
}

/// Serves requests until the future is dropped.
pub(crate) async fn serve(listener: TcpListener, state: Arc<DaemonState>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(permit) = permits.clone().try_acquire_owned() else { continue };
                let state = state.clone();
                tokio::spawn(boxed(async move {
                    // A slower client gets no response.
                    let _ = timeout(CONNECTION_TIMEOUT, serve_connection(stream, state)).await;
                    drop(permit);
                }));
            }
            // Usually no descriptors are left: retry later.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn serve_connection(stream: TcpStream, state: Arc<DaemonState>) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let state = state.clone();
        async move { Ok::<_, std::convert::Infallible>(respond(&request, &state).await) }
    });
    hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(MAX_REQUEST)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// Returns the response to a request.
async fn respond(request: &Request<Incoming>, state: &DaemonState) -> Response<String> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, path) => match path {
            "/metrics" => match metrics::render(state).await {
                Ok(page) => (StatusCode::OK, page),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            },
            "/healthz" => (StatusCode::OK, "alive\n".to_owned()),
            "/readyz" => match state.check_ready().await {
                Ok(()) => (StatusCode::OK, "it serves\n".to_owned()),
                Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            },
            _ => {
                let text = "there are /metrics, /healthz and /readyz\n";
                (StatusCode::NOT_FOUND, text.to_owned())
            }
        },
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned()),
    };
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    if status == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}
