//! The scenarios. Each creates its objects, runs them to their end, and panics when its property does not hold.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rmcp::model::RequestId;
use serde_json::{Value, json};
use shuttle::thread;

use crate::rpc::event_loop::{EventLoop, Service};
use crate::rpc::framing::Line;
use crate::rpc::inflight::{Inflight, Responder};
use crate::rpc::output::{Output, Recipient};
use crate::rpc::waker::Waker;
use crate::{Condvar, Mutex};

/// Returns both ends of a client's connection, the output to the client, and its waker.
fn connection() -> (UnixStream, UnixStream, Arc<Output>, Arc<Waker>) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let waker = Arc::new(Waker::new().expect("a pipe"));
    let output = Output::new(theirs.try_clone().expect("a descriptor").into(), Recipient::Client, waker.clone());
    (ours, theirs, Arc::new(output.expect("it does not block")), waker)
}

fn admit(inflight: &Arc<Inflight>, id: i64) -> Responder {
    inflight.admit(RequestId::Number(id), 1, None, 10).expect("the id is free")
}

/// Reads all messages that were sent to the client.
fn sent(ours: UnixStream) -> Vec<Value> {
    BufReader::new(ours).lines().map(|line| serde_json::from_str(&line.expect("text")).expect("JSON")).collect()
}

/// A call is answered, dropped or left unanswered while its client cancels it and reuses its ID. The call gets at most one
/// answer, and none after the cancellation took effect. The second call with that ID gets its own answer.
pub fn at_most_one_answer_under_cancellation_and_id_reuse() {
    for end in [(|call| _ = call.leave_unanswered()) as fn(Responder), |call| call.answer(json!("first")), drop] {
        let (ours, theirs, output, _) = connection();
        drop(theirs);
        let inflight = Inflight::new(output);
        let first = admit(&inflight, 7);
        let cancelled = Arc::new(Mutex::new(0));
        let noted = cancelled.clone();
        inflight.on_cancel(first.request_number(), move || *noted.lock() += 1);
        let answering = thread::spawn(move || end(first));
        let canceller = inflight.clone();
        let cancelling = thread::spawn(move || {
            canceller.cancel(&RequestId::Number(7));
            // The ID is free after the cancellation.
            let again = canceller.admit(RequestId::Number(7), 2, None, 10).expect("the id is free");
            again.answer(json!("second"));
        });
        answering.join().expect("no panic");
        cancelling.join().expect("no panic");
        assert!(inflight.is_idle());
        drop(inflight);
        let sent = sent(ours);
        let seconds = sent.iter().filter(|answer| answer["result"] == "second").count();
        assert_eq!(seconds, 1, "{sent:?}");
        assert!(sent.len() + *cancelled.lock() <= 2, "{sent:?}");
        assert_eq!(sent.last().expect("an answer")["result"], "second", "{sent:?}");
    }
}

type ConcurrentAction = dyn FnOnce(&Inflight) + Send;

/// A client answers a question while its call is cancelled and its timeout expires. The reply is called at most once.
pub fn at_most_one_reply_to_a_question() {
    let (ours, theirs, output, _) = connection();
    drop(theirs);
    let inflight = Inflight::new(output);
    let asking = admit(&inflight, 7);
    let replies = Arc::new(Mutex::new(0));
    let noted = replies.clone();
    let reply = Box::new(move |_| *noted.lock() += 1);
    inflight.ask(asking.request_number(), "ask", &json!({}), std::time::Duration::ZERO, reply);
    let others: [Box<ConcurrentAction>; 3] = [
        Box::new(|inflight| inflight.deliver_reply(1, Ok(json!("yes")))),
        Box::new(|inflight| _ = inflight.cancel(&RequestId::Number(7))),
        Box::new(|inflight| _ = inflight.run_timers(Instant::now())),
    ];
    let threads = others.map(|act| {
        let inflight = inflight.clone();
        thread::spawn(move || act(&inflight))
    });
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert!(*replies.lock() <= 1);
    asking.answer(json!("too late"));
    drop(inflight);
    assert!(sent(ours).iter().all(|message| message.get("result").is_none()));
}

/// A service that answers each line, a number: even ones at once, odd ones from the evaluating thread.
struct Echo {
    inflight: Arc<Inflight>,
    /// The calls that wait for the evaluating thread; `None` ends the thread.
    work: Mutex<VecDeque<Option<Responder>>>,
    changed: Condvar,
}

impl Echo {
    fn evaluate(&self, responder: Option<Responder>) {
        self.work.lock().push_back(responder);
        self.changed.notify_one();
    }
}

impl Service for Echo {
    fn handle_line(&self, line: Line<'_>) {
        let Line::Text(text) = line else { panic!("too long") };
        let id: i64 = str::from_utf8(&text).expect("text").trim().parse().expect("a number");
        let responder = admit(&self.inflight, id);
        if id % 2 == 0 {
            return responder.answer(json!(id));
        }
        self.evaluate(Some(responder));
    }

    fn run_timers(&self, now: Instant) -> Option<Instant> {
        self.inflight.run_timers(now)
    }

    fn is_idle(&self) -> bool {
        self.inflight.is_idle()
    }

    fn exits_on_signal(&self) -> bool {
        false
    }
}

/// Reads the next `count` answers and returns their IDs in ascending order.
fn read_ids(ours: &mut UnixStream, count: usize) -> Vec<i64> {
    ours.set_nonblocking(true).expect("it can");
    let mut bytes = Vec::new();
    while bytes.iter().filter(|byte| **byte == b'\n').count() < count {
        let mut chunk = [0; 4096];
        match ours.read(&mut chunk) {
            Ok(read) => bytes.extend_from_slice(&chunk[..read]),
            Err(_) => thread::yield_now(),
        }
    }
    let lines = str::from_utf8(&bytes).expect("text").lines().map(serde_json::from_str::<Value>);
    let mut ids: Vec<_> = lines.map(|line| line.expect("JSON")["id"].as_i64().expect("ours")).collect();
    ids.sort_unstable();
    ids
}

/// The event loop reads while a client writes and a second thread evaluates. Then the main thread queues more work, and
/// the client closes its end. Every call is answered before that, and both threads end.
pub fn all_calls_are_answered_before_the_end() {
    const LINES: i64 = 4;
    let (mut ours, theirs, output, waker) = connection();
    let event_loop = EventLoop::new(theirs.into(), output.clone(), waker).expect("descriptors");
    let service = Arc::new(Echo { inflight: Inflight::new(output), work: Mutex::default(), changed: Condvar::new() });
    let echo = service.clone();
    let evaluating = thread::spawn(move || {
        loop {
            let mut work = echo.work.lock();
            let next = loop {
                match work.pop_front() {
                    Some(next) => break next,
                    None => echo.changed.wait(&mut work),
                }
            };
            drop(work);
            let Some(responder) = next else { break };
            let number = responder.request_number();
            thread::yield_now();
            responder.answer(json!(number));
        }
    });
    let echo = service.clone();
    let serving = thread::spawn(move || event_loop.run(&*echo));
    for line in 1..=LINES {
        ours.write_all(format!("{line}\n").as_bytes()).expect("it is read");
        thread::yield_now();
    }
    let count = usize::try_from(LINES).expect("a few");
    assert_eq!(read_ids(&mut ours, count), (1..=LINES).collect::<Vec<_>>());
    // This work arrives while the client writes nothing.
    for id in LINES + 1..LINES + 3 {
        service.evaluate(Some(admit(&service.inflight, id)));
        assert_eq!(read_ids(&mut ours, 1), [id]);
    }
    ours.shutdown(std::net::Shutdown::Write).expect("it is open");
    assert_eq!(serving.join().expect("no panic"), 0);
    service.evaluate(None);
    evaluating.join().expect("no panic");
}
