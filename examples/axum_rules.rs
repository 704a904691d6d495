//! A web service whose rules, written in Lisp, can be changed while the service runs: `cargo run --example axum_rules`.
//!
//! By default the program sends itself some requests over HTTP and exits. With an address it serves clients until it is
//! stopped: `cargo run --example axum_rules -- 127.0.0.1:3000`.
//!
//! `GET /price/CUSTOMER/TOTAL` applies the rules; `PUT /rules` changes them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, put};
use axum::{Router, serve};
use sbcl::{Error, Lisp};
use tokio::net::TcpListener;

const RULES: &str = r#"
(defpackage :rules (:use :cl) (:export #:price))
(in-package :rules)
(defun price (customer total)
  "What CUSTOMER pays for goods of TOTAL cents."
  (declare (ignore customer))
  total)
"#;

const REDUCED: &str = r#"
(in-package :rules)
(defun price (customer total)
  (if (string= customer "ada") (floor (* total 9) 10) total))
"#;

const WRONG: &str =
    "(in-package :rules) (defun price (customer total) (/ total (length (string-trim \"bob\" customer))))";
const ENDLESS: &str = "(in-package :rules) (defun price (customer total) (loop while (and customer total)))";

type Answer = Result<String, (StatusCode, String)>;

/// Returns 504 for a rule that does not end, and 500 with the reason for a rule that fails. Neither harms the service.
fn error_response(error: Error) -> (StatusCode, String) {
    match error {
        Error::Timeout { .. } => (StatusCode::GATEWAY_TIMEOUT, error.to_string()),
        other => (StatusCode::INTERNAL_SERVER_ERROR, other.to_string()),
    }
}

/// Calls the pricing rule on a Lisp thread. If the client disconnects, the future is dropped, which interrupts the call.
async fn price(State(lisp): State<Lisp>, Path((customer, total)): Path<(String, i64)>) -> Answer {
    let cents = lisp.call_async::<i64>("rules:price", (customer, total)).await.map_err(error_response)?;
    Ok(cents.to_string())
}

/// Loads new rules. A rule that is running completes with its old definition, and later calls use the new definition.
async fn change(State(lisp): State<Lisp>, rules: String) -> Answer {
    let loaded = tokio::task::spawn_blocking(move || lisp.load_str(&rules)).await;
    loaded.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?.map_err(error_response)?;
    Ok("changed".to_owned())
}

fn main() -> Result<(), Error> {
    let lisp = Lisp::builder().threads(2).boot()?;
    lisp.load_str(RULES)?;
    let limited = lisp.with_timeout(Duration::from_secs(1));
    let service =
        Router::new().route("/price/{customer}/{total}", get(price)).route("/rules", put(change)).with_state(limited);
    let address = std::env::args().nth(1);
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(address.as_deref().unwrap_or("127.0.0.1:0")).await?;
        let at = listener.local_addr()?;
        println!("http://{at}");
        match address {
            Some(_) => serve(listener, service).await?,
            None => {
                let asked = tokio::task::spawn_blocking(move || run_clients(at));
                let ended = async move {
                    asked.await.map_err(std::io::Error::other).flatten().expect("the service answers as it should");
                };
                serve(listener, service).with_graceful_shutdown(ended).await?;
            }
        }
        Ok(())
    })
}

/// Changes the rules and checks prices, while four other clients keep sending requests.
fn run_clients(at: SocketAddr) -> std::io::Result<()> {
    let over = Arc::new(AtomicBool::new(false));
    let others: Vec<_> = (0..4)
        .map(|_| {
            let over = over.clone();
            std::thread::spawn(move || -> std::io::Result<u32> {
                let mut asked = 0;
                while !over.load(Ordering::SeqCst) {
                    // No request is lost when the rules change: each gets the old price or the new one.
                    let (status, text) = request(at, "GET", "/price/ada/1000", "")?;
                    assert!(status == 200 && ["1000", "900"].contains(&&*text), "{status}: {text}");
                    asked += 1;
                }
                Ok(asked)
            })
        })
        .collect();
    let price = |customer: &str| request(at, "GET", &format!("/price/{customer}/1000"), "");
    println!("ada pays {}", price("ada")?.1);
    for _ in 0..10 {
        assert_eq!(request(at, "PUT", "/rules", REDUCED)?.0, 200);
        assert_eq!(price("ada")?.1, "900");
        assert_eq!(request(at, "PUT", "/rules", RULES)?.0, 200);
        assert_eq!(price("ada")?.1, "1000");
    }
    over.store(true, Ordering::SeqCst);
    for other in others {
        println!("asked {} times meanwhile", other.join().expect("it does not panic")?);
    }
    for rules in [WRONG, ENDLESS, "(in-package :no-such-rules)"] {
        let changed = request(at, "PUT", "/rules", rules)?;
        println!("{changed:?}: {:?}", price("bob")?);
    }
    assert_eq!(request(at, "PUT", "/rules", REDUCED)?.0, 200);
    println!("ada pays {}, bob {}", price("ada")?.1, price("bob")?.1);
    Ok(())
}

/// Sends one request and returns the status and the body.
fn request(at: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(at)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, text) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Ok((status, text.to_owned()))
}
