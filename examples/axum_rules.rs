//! A web service whose rules are Lisp, changed while it serves: `cargo run --example axum_rules`. It asks itself some
//! questions over HTTP and ends; with an address, as in `cargo run --example axum_rules -- 127.0.0.1:3000`, it serves.
//!
//! `GET /price/CUSTOMER/TOTAL` has the rules decide; `PUT /rules` changes them.

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

/// A rule that does not end is a 504, one that fails a 500 that says why. Both leave the service as it was.
fn refusal(error: Error) -> (StatusCode, String) {
    match error {
        Error::Timeout { .. } => (StatusCode::GATEWAY_TIMEOUT, error.to_string()),
        other => (StatusCode::INTERNAL_SERVER_ERROR, other.to_string()),
    }
}

/// The call runs on a Lisp thread. When the client goes away, the future is dropped, and the call interrupted.
async fn price(State(lisp): State<Lisp>, Path((customer, total)): Path<(String, i64)>) -> Answer {
    let cents = lisp.call_async::<i64>("rules:price", (customer, total)).await.map_err(refusal)?;
    Ok(cents.to_string())
}

/// Calls that run now go on with the definitions that they began with; the next ones have the new ones.
async fn change(State(lisp): State<Lisp>, rules: String) -> Answer {
    let loaded = tokio::task::spawn_blocking(move || lisp.load_str(&rules)).await;
    loaded.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?.map_err(refusal)?;
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
                let asked = tokio::task::spawn_blocking(move || ask_questions(at));
                let ended = async move {
                    asked.await.map_err(std::io::Error::other).flatten().expect("the service answers as it should");
                };
                serve(listener, service).with_graceful_shutdown(ended).await?;
            }
        }
        Ok(())
    })
}

/// What a client does, while others ask all the time.
fn ask_questions(at: SocketAddr) -> std::io::Result<()> {
    let over = Arc::new(AtomicBool::new(false));
    let others: Vec<_> = (0..4)
        .map(|_| {
            let over = over.clone();
            std::thread::spawn(move || -> std::io::Result<u32> {
                let mut asked = 0;
                while !over.load(Ordering::SeqCst) {
                    // No request is lost when the rules change: it gets the old price or the new one.
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

/// Makes one request and returns the status and the body.
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
