//! `sbcl-mcp replay`: a recorded session, played against a new server, and where the answers differ.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use once_cell::sync::Lazy;
use regex::Regex;
use serde_json::{Value, json};

use super::client::{Client, Event};
use super::exit_status::{FAILED, FINE};
use crate::rpc::framing::MAX_LINE;
use crate::rpc::recorder::{Header, Record, Side, read_header};

/// How much longer than in the recording an answer may take, and how long at least.
const SLOWER: f64 = 10.0;
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest that a request is held back because it was made while another one was not answered yet.
const LONGEST_GAP: Duration = Duration::from_secs(10);
/// Lines that are shown of each side of a difference.
const SHOWN_LINES: usize = 20;
/// Messages that are kept until their turn comes.
const MAX_WAITING: usize = 100_000;

/// Options that are about the server that was recorded, and not about what it answers; each has a value.
const ITS_OWN: [&str; 3] = ["--record", "--session", "--socket"];

/// What is different each time, in texts, and what stands for it.
static VOLATILE: Lazy<Vec<(Regex, &str)>> = Lazy::new(|| {
    let patterns = [
        ("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?Z", "<time>"),
        // #<FOO {1001A2B3C4}>
        ("[{][0-9A-F]{6,16}[}]", "{<address>}"),
        ("(0x|#[xX])[0-9a-fA-F]{6,16}", "<address>"),
        // What crate::scratch and crate::recovery::checkpoint name.
        ("(sbcl-mcp|checkpoints)-[0-9a-f]{16}", "<scratch>"),
        ("[0-9][0-9,]* bytes consed", "<number> bytes consed"),
        ("[0-9][0-9,.]* ?(ns|µs|ms|s|seconds?|minutes?|hours?)(?-u:\\b)", "<duration>"),
        ("(?P<what>[Pp]rocess|[Pp][Ii][Dd]) [0-9]+", "$what <process>"),
    ];
    patterns.map(|(pattern, name)| (Regex::new(pattern).expect("a pattern"), name)).into()
});

/// Names of properties of structured content that are times, or go with them.
const MEASURED: [&str; 8] =
    ["seconds", "realMs", "runMs", "gcMs", "bytesConsed", "milliseconds", "nanoseconds", "stoppedMs"];

/// Plays the recording in `path` against a server with `arguments`, or those that it was recorded with. Returns the exit
/// status, or a sentence that says why it cannot be played.
pub(super) fn run(path: &Path, arguments: Vec<OsString>, output: OwnedFd) -> Result<i32, String> {
    let file = File::open(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    let mut file = BufReader::new(file);
    let header = read_header(&mut file).ok_or_else(|| format!("{} is no recording of sbcl-mcp's", path.display()))?;
    let arguments = if arguments.is_empty() { arguments_of(&header) } else { arguments };
    let client = Client::start(arguments).map_err(|error| format!("no server can be started: {error}"))?;
    let mut replay = Replay::new(client, File::from(output));
    let Header { sbcl_mcp, sbcl, recorded, .. } = &header;
    let (now, now_sbcl) = (crate::VERSION, crate::SBCL_VERSION);
    replay.say(&format!(
        "Recorded {recorded} with sbcl-mcp {sbcl_mcp} (SBCL {sbcl}); played with sbcl-mcp {now} (SBCL {now_sbcl}).\n"
    ))?;
    let mut number = 1;
    loop {
        let mut line = Vec::new();
        // A record has a line, with what stands for some of its characters.
        let read = (&mut file).take(6 * MAX_LINE as u64 + 1_000).read_until(b'\n', &mut line);
        if read.map_err(|error| format!("{} cannot be read: {error}", path.display()))? == 0 {
            break;
        }
        number += 1;
        // The last line may be cut where the server was ended.
        let Ok(record) = serde_json::from_slice::<Record>(&line) else {
            replay.say(&format!("line {number} is no record: the recording ends before it\n"))?;
            break;
        };
        if !replay.play(number, &record)? {
            break;
        }
    }
    replay.finish()
}

/// The arguments of the server that was recorded, as far as they are about its answers.
fn arguments_of(header: &Header) -> Vec<OsString> {
    let mut arguments = Vec::new();
    let mut given = header.arguments.iter();
    while let Some(argument) = given.next() {
        if ITS_OWN.contains(&argument.as_str()) {
            given.next();
        } else if !ITS_OWN.iter().any(|own| argument.strip_prefix(own).is_some_and(|rest| rest.starts_with('='))) {
            arguments.push(argument.into());
        }
    }
    arguments
}

/// A recording while it is played.
struct Replay {
    client: Client,
    output: File,
    /// What the server said, and nobody has asked for yet.
    waiting: VecDeque<Value>,
    /// Requests of the client's that the recording has no answer to yet: their ids, what they ask, when they were made.
    open: Vec<(Value, String, f64)>,
    /// Ids of the server's questions: in the recording, and now.
    questions: Vec<(Value, Value)>,
    /// When the last record was made.
    at: f64,
    answers: usize,
    different: usize,
}

impl Replay {
    fn new(client: Client, output: File) -> Self {
        let (waiting, open, questions) = Default::default();
        Self { client, output, waiting, open, questions, at: 0.0, answers: 0, different: 0 }
    }

    fn say(&mut self, text: &str) -> Result<(), String> {
        self.output.write_all(text.as_bytes()).map_err(|error| format!("sbcl-mcp cannot write: {error}"))
    }

    /// Plays a record. False when nothing can be played any more.
    fn play(&mut self, number: usize, record: &Record) -> Result<bool, String> {
        let gap = record.at - std::mem::replace(&mut self.at, record.at);
        if let Some(note) = &record.note {
            self.say(&format!("line {number}: {note}\n"))?;
        }
        let (Some(from), Some(line)) = (record.from, &record.line) else { return Ok(true) };
        let message: Value = serde_json::from_str(line).unwrap_or(Value::Null);
        match from {
            Side::Client => {
                if !self.open.is_empty()
                    && let Ok(gap) = Duration::try_from_secs_f64(gap)
                {
                    // What was asked of something that ran is asked when it has run as long.
                    std::thread::sleep(gap.min(LONGEST_GAP));
                }
                if self.send(record.bytes.as_deref().unwrap_or(line.as_bytes()), &message, record.at) {
                    return Ok(true);
                }
                self.ended(number)
            }
            Side::Server => match kind_of(&message) {
                Kind::Answer(id) => self.compare(number, id, &message, record.at),
                Kind::Question(method, id) => {
                    let patience = self.patience(None, record.at);
                    let asked = |other: &Value| matches!(kind_of(other), Kind::Question(asked, _) if asked == method);
                    match self.next(patience, asked) {
                        Some(question) => self.questions.push((id.clone(), question["id"].clone())),
                        None => {
                            self.different += 1;
                            self.say(&format!("line {number}: the server no longer asks {method}\n"))?;
                        }
                    }
                    Ok(true)
                }
                Kind::Other => Ok(true),
            },
        }
    }

    /// Sends a line of the client's; false when the server is gone.
    fn send(&mut self, line: &[u8], message: &Value, at: f64) -> bool {
        let members = message.as_array().map_or(std::slice::from_ref(message), Vec::as_slice);
        for member in members {
            let known = self.questions.iter().position(|(recorded, _)| member.get("id") == Some(recorded));
            if member.get("method").is_some() {
                if let Some(id) = member.get("id") {
                    self.open.push((id.clone(), title(member), at));
                }
            } else if let Some(known) = known {
                let (_, now) = self.questions.swap_remove(known);
                let mut answer = member.clone();
                answer["id"] = now;
                return self.client.send_line(answer.to_string().as_bytes()).is_ok();
            }
        }
        self.client.send_line(line).is_ok()
    }

    /// How long to wait for what came at this time, in answer to what was asked then.
    fn patience(&self, asked: Option<f64>, at: f64) -> Duration {
        let took = at - asked.unwrap_or_else(|| self.open.first().map_or(at, |(.., asked)| *asked));
        Duration::try_from_secs_f64(took * SLOWER).unwrap_or_default().max(PATIENCE)
    }

    /// Waits for the answer that the recording has here.
    fn compare(&mut self, number: usize, id: &Value, recorded: &Value, at: f64) -> Result<bool, String> {
        let known = self.open.iter().position(|(open, ..)| open == id);
        let (_, title, asked) = known.map(|index| self.open.remove(index)).unwrap_or_default();
        let title = if title.is_empty() { "what is no request".to_owned() } else { title };
        self.answers += 1;
        let patience = self.patience(Some(asked).filter(|_| known.is_some()), at);
        let Some(answer) = self.next(patience, |other| matches!(kind_of(other), Kind::Answer(other) if other == id))
        else {
            self.different += 1;
            if self.client.is_closed() {
                return self.ended(number);
            }
            self.say(&format!("line {number}, {title}: no answer within {} seconds\n", patience.as_secs()))?;
            return Ok(true);
        };
        if settled(recorded) != settled(&answer) {
            self.different += 1;
            let difference = difference(&settled(recorded), &settled(&answer));
            self.say(&format!("line {number}, {title}: the answer differs\n{difference}"))?;
        }
        Ok(true)
    }

    /// The first message of the server's that `is` this, of what it said and says within `time`.
    fn next(&mut self, time: Duration, is: impl Fn(&Value) -> bool) -> Option<Value> {
        if let Some(index) = self.waiting.iter().position(&is) {
            return self.waiting.remove(index);
        }
        let end = Instant::now() + time;
        loop {
            match self.client.next(Some(end.saturating_duration_since(Instant::now())))? {
                Event::Message(message) if is(&message) => return Some(message),
                Event::Message(message) if matches!(kind_of(&message), Kind::Other) => {}
                Event::Message(message) => {
                    if self.waiting.len() == MAX_WAITING {
                        self.waiting.pop_front();
                    }
                    self.waiting.push_back(message);
                }
                Event::Interrupted(_) => {}
                Event::Closed => return None,
            }
        }
    }

    fn ended(&mut self, number: usize) -> Result<bool, String> {
        self.different = self.different.max(1);
        self.say(&format!("line {number}: the server has ended\n"))?;
        Ok(false)
    }

    fn finish(mut self) -> Result<i32, String> {
        let (answers, different) = (self.answers, self.different);
        let end = match different {
            0 => format!("{answers} answers, all the same.\n"),
            1 => format!("{answers} answers, 1 difference.\n"),
            _ => format!("{answers} answers, {different} differences.\n"),
        };
        self.say(&end)?;
        let said = self.client.end();
        if different > 0 && !said.trim().is_empty() {
            super::say(said.trim_end());
        }
        Ok(if different == 0 { FINE } else { FAILED })
    }
}

/// What a message of the server's is.
enum Kind<'a> {
    /// An answer to this id; to the ids of a batch, as an array.
    Answer(&'a Value),
    /// A question: its method and id.
    Question(&'a str, &'a Value),
    Other,
}

fn kind_of(message: &Value) -> Kind<'_> {
    // The answers to a batch come together, and the first one's id will do.
    let message = message.get(0).unwrap_or(message);
    match (message.get("method").and_then(Value::as_str), message.get("id")) {
        (None, Some(id)) => Kind::Answer(id),
        (None, None) if message.get("error").is_some() => Kind::Answer(&Value::Null),
        (Some(method), Some(id)) => Kind::Question(method, id),
        _ => Kind::Other,
    }
}

/// What a request asks: its method, or the tool that it calls.
fn title(request: &Value) -> String {
    let method = request["method"].as_str().unwrap_or_default();
    match (method, request["params"]["name"].as_str()) {
        ("tools/call", Some(tool)) => tool.to_owned(),
        _ => method.to_owned(),
    }
}

/// The message without what is different each time.
fn settled(message: &Value) -> Value {
    match message {
        Value::String(text) => {
            let text = VOLATILE
                .iter()
                .fold(text.clone(), |text, (pattern, name)| pattern.replace_all(&text, *name).into_owned());
            text.into()
        }
        Value::Array(items) => items.iter().map(settled).collect(),
        Value::Object(map) => {
            let settle = |(name, value): (&String, &Value)| {
                let measured = value.is_number() && MEASURED.contains(&name.as_str());
                (name.clone(), if measured { json!("<number>") } else { settled(value) })
            };
            Value::Object(map.iter().map(settle).collect())
        }
        other => other.clone(),
    }
}

/// Where two messages differ: the lines between what they have in common at the beginning and at the end.
fn difference(recorded: &Value, now: &Value) -> String {
    let text = |message: &Value| match (&message["result"]["content"], message["result"]["content"][0]["text"].as_str())
    {
        (Value::Array(items), Some(text)) if items.len() == 1 => Some(text.to_owned()),
        _ => None,
    };
    let (before, after) = match (text(recorded), text(now)) {
        (Some(before), Some(after)) if before != after => (before, after),
        _ => {
            let pretty = |message: &Value| serde_json::to_string_pretty(message).unwrap_or_default();
            (pretty(recorded), pretty(now))
        }
    };
    let (before, after): (Vec<_>, Vec<_>) = (before.lines().collect(), after.lines().collect());
    let same = before.iter().zip(&after).take_while(|(one, other)| one == other).count();
    let (before, after) = (&before[same..], &after[same..]);
    let end = before.iter().rev().zip(after.iter().rev()).take_while(|(one, other)| one == other).count();
    let mut difference = String::new();
    for (mark, lines) in [('-', &before[..before.len() - end]), ('+', &after[..after.len() - end])] {
        for line in lines.iter().take(SHOWN_LINES) {
            _ = writeln!(difference, "  {mark} {line}");
        }
        if lines.len() > SHOWN_LINES {
            _ = writeln!(difference, "  {mark} ... {} more lines", lines.len() - SHOWN_LINES);
        }
    }
    difference
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_each_time_is_no_difference() {
        for (one, other) in [
            ("at 2026-11-21T20:55:03Z", "at 2026-11-22T01:02:03.123Z"),
            ("=> #<FOO {1001A2B3C4}>", "=> #<FOO {1009FFFFF3}>"),
            ("#<SB-SYS:INT-SAP #X7F00AABBCC>", "#<SB-SYS:INT-SAP #X7E00112233>"),
            ("/tmp/sbcl-mcp-0123456789abcdef/x.fasl", "/tmp/sbcl-mcp-fedcba9876543210/x.fasl"),
            (
                "; Timing: 3ms real, 2ms run, 0ms GC, 1,024 bytes consed",
                "; Timing: 12ms real, 9ms run, 1ms GC, 9 bytes consed",
            ),
            ("Evaluation 12: running for 34 s", "Evaluation 12: running for 3.1 s"),
            ("in process 12", "in process 13"),
        ] {
            assert_eq!(settled(&json!({"text": one})), settled(&json!({"text": other})), "{one}");
        }
        assert_eq!(settled(&json!({"seconds": 0.1, "id": 1})), settled(&json!({"seconds": 2, "id": 1})));
        for (one, other) in [("=> 3", "=> 4"), ("{ABC}", "{ABD}"), ("10 seconds", "10 second thoughts")] {
            assert_ne!(settled(&json!(one)), settled(&json!(other)), "{one}");
        }
    }

    #[test]
    fn a_difference_is_shown_by_its_lines() {
        let answer = |text: &str| json!({"result": {"content": [{"type": "text", "text": text}], "isError": false}});
        assert_eq!(difference(&answer("a\nb\nc"), &answer("a\nx\ny\nc")), "  - b\n  + x\n  + y\n");
    }
}
