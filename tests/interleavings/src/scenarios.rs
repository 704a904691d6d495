//! What is tried. Each is a whole life of its parts, and panics when what it claims does not hold.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rmcp::model::RequestId;
use serde_json::{Value, json};
use shuttle::thread;

use crate::rpc::driver::{Driver, Service};
use crate::rpc::framing::Line;
use crate::rpc::inflight::{Inflight, Responder};
use crate::rpc::output::{Output, Reader};
use crate::rpc::waker::Waker;
use crate::{Condvar, Mutex};

/// A client's end, and what answers go through.
fn connection() -> (UnixStream, UnixStream, Arc<Output>, Arc<Waker>) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let waker = Arc::new(Waker::new().expect("a pipe"));
    let output = Output::new(theirs.try_clone().expect("a descriptor").into(), Reader::Client, waker.clone());
    (ours, theirs, Arc::new(output.expect("it does not block")), waker)
}

fn admit(inflight: &Arc<Inflight>, id: i64) -> Responder {
    inflight.admit(RequestId::Number(id), 1, None, 10).expect("the id is free")
}

/// All messages that were sent.
fn sent(ours: UnixStream) -> Vec<Value> {
    BufReader::new(ours).lines().map(|line| serde_json::from_str(&line.expect("text")).expect("JSON")).collect()
}

/// A call is answered, dropped or left, while its client cancels it and uses its id again. It gets one answer at most, none
/// once the cancellation was taken, and the other call of its id gets its own.
pub fn one_answer_whatever_comes_first() {
    for end in [Responder::leave as fn(Responder), |call| call.answer(json!("first")), drop] {
        let (ours, theirs, output, _) = connection();
        drop(theirs);
        let inflight = Inflight::new(output);
        let first = admit(&inflight, 7);
        let cancelled = Arc::new(Mutex::new(0));
        let noted = cancelled.clone();
        inflight.on_cancel(first.call(), move || *noted.lock() += 1);
        let answering = thread::spawn(move || end(first));
        let canceller = inflight.clone();
        let cancelling = thread::spawn(move || {
            canceller.cancel(&RequestId::Number(7));
            // From here on the id is free.
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

type Act = dyn FnOnce(&Inflight) + Send;

/// A question is answered by its client, while its call is cancelled and its time ends: its reply is called once at most.
pub fn one_reply_to_a_question() {
    let (ours, theirs, output, _) = connection();
    drop(theirs);
    let inflight = Inflight::new(output);
    let asking = admit(&inflight, 7);
    let replies = Arc::new(Mutex::new(0));
    let noted = replies.clone();
    let reply = Box::new(move |_| *noted.lock() += 1);
    inflight.ask(asking.call(), "ask", &json!({}), std::time::Duration::ZERO, reply);
    let number = asking.call() + 1;
    let others: [Box<Act>; 3] = [
        Box::new(move |inflight| inflight.answered(number, Ok(json!("yes")))),
        Box::new(|inflight| inflight.cancel(&RequestId::Number(7))),
        Box::new(|inflight| _ = inflight.due(Instant::now())),
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

/// Answers a line with itself: at once, or, with a number, when the evaluating thread comes to it.
struct Echo {
    inflight: Arc<Inflight>,
    /// `None` ends the evaluating thread.
    work: Mutex<VecDeque<Option<Responder>>>,
    changed: Condvar,
}

impl Echo {
    fn evaluate(&self, owed: Option<Responder>) {
        self.work.lock().push_back(owed);
        self.changed.notify_one();
    }
}

impl Service for Echo {
    fn line(&self, line: Line<'_>) {
        let Line::Text(text) = line else { panic!("too long") };
        let id: i64 = str::from_utf8(text).expect("text").trim().parse().expect("a number");
        let owed = admit(&self.inflight, id);
        if id % 2 == 0 {
            return owed.answer(json!(id));
        }
        self.evaluate(Some(owed));
    }

    fn due(&self, now: Instant) -> Option<Instant> {
        self.inflight.due(now)
    }

    fn is_idle(&self) -> bool {
        self.inflight.is_idle()
    }

    fn heeds_signals(&self) -> bool {
        false
    }
}

/// The next `count` answers' ids, in order of number.
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

/// The event loop reads while a client writes and another thread evaluates, then a third one brings work, and at last the
/// client closes its end: all is answered before that, and both come to their end.
pub fn all_is_answered_before_the_end() {
    const LINES: i64 = 4;
    let (mut ours, theirs, output, waker) = connection();
    let driver = Driver::new(theirs.into(), output.clone(), waker).expect("descriptors");
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
            let Some(owed) = next else { break };
            let call = owed.call();
            thread::yield_now();
            owed.answer(json!(call));
        }
    });
    let echo = service.clone();
    let serving = thread::spawn(move || driver.run(&*echo));
    for line in 1..=LINES {
        ours.write_all(format!("{line}\n").as_bytes()).expect("it is read");
        thread::yield_now();
    }
    let count = usize::try_from(LINES).expect("a few");
    assert_eq!(read_ids(&mut ours, count), (1..=LINES).collect::<Vec<_>>());
    // Nothing is written while this is brought.
    for id in LINES + 1..LINES + 3 {
        service.evaluate(Some(admit(&service.inflight, id)));
        assert_eq!(read_ids(&mut ours, 1), [id]);
    }
    ours.shutdown(std::net::Shutdown::Write).expect("it is open");
    assert_eq!(serving.join().expect("no panic"), 0);
    service.evaluate(None);
    evaluating.join().expect("no panic");
}
