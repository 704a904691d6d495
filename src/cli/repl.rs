//! `sbcl-mcp repl`: a person's REPL on a server's image, with the reports and the debugger of the tools.
//!
//! It is an MCP client like any other. What is typed at a terminal goes through [`Editor`]; from a pipe or a file it is
//! read form by form, without prompts.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reedline::ExternalPrinter;
use serde_json::{Value, json};

use super::client::{Answer, Client, Event, Failure, START, answered, client_of};
use super::editor::{Editor, Typed};
use super::exit_status::{FAILED, FINE, IMPOSSIBLE};
use super::tools::{load_arguments, test_arguments, test_failures, with_timeout};
use crate::attach::TAKE_OVER;
use crate::check::is_unfinished;
use crate::environment;
use crate::mcp::stdio::Stdio;
use crate::mcp::{ONE_FORM, parted};
use crate::report;
use crate::rpc::inflight::OUTPUT_FROM;

/// How soon after the last Ctrl-C another one asks for more than that did.
const TWICE: Duration = Duration::from_secs(1);
/// How long an evaluation may take to end before the user is told what else there is.
const SOON: Duration = Duration::from_millis(200);
/// How long what is interrupted may take to unwind before the prompt comes back without it.
const UNWINDING: Duration = Duration::from_secs(15);
/// The name of a checkpoint that got none.
const CHECKPOINT: &str = "repl";
/// How similar the name of a command must be to be what was meant.
const NEAR: f64 = 0.75;
/// Frames that `:bt` shows.
const FRAMES: u64 = 50;
/// Notices of what others do that wait to be shown at most; more are not.
const MAX_NOTICES: usize = 1_000;

/// A command of the REPL.
pub(super) struct Command {
    /// Its name, with the colon.
    pub(super) name: &'static str,
    arguments: &'static str,
    pub(super) summary: &'static str,
}

const fn command(name: &'static str, arguments: &'static str, summary: &'static str) -> Command {
    Command { name, arguments, summary }
}

/// The commands, as `:help` lists them.
pub(super) const COMMANDS: [Command; 16] = [
    command(":help", "", "this list"),
    command(":quit", "", "leave; so do Ctrl-D, (quit) and (exit)"),
    command(":load", "SYSTEM or FILE", "load a system through ASDF, or a file"),
    command(":test", "SYSTEM ...", "run the tests of systems, of a package (P:) or of a name (P::TEST)"),
    command(":describe", "NAME", "what a symbol means, with its source"),
    command(":checkpoint", "[NAME]", "save the whole image"),
    command(":restore", "[NAME]", "go back to a checkpoint"),
    command(":checkpoints", "", "list checkpoints"),
    command(":reset", "", "begin with a new image"),
    command(":bt", "[FRAMES]", "backtrace of the last error"),
    command(":frame", "[N]", "choose the frame that code is evaluated in"),
    command(":locals", "[N]", "local variables of a frame"),
    command(":restart", "N [VALUES]", "go on by a restart; in the debugger its number will do"),
    command(":return", "VALUES", "go on as if the frame had returned them"),
    command(":abort", "", "give up what is held"),
    command(":take", "[EVALUATION]", "take over what another client holds for debugging"),
];

/// How a REPL begins.
pub(super) struct Options {
    /// Whose image it is; `None`: its own.
    pub(super) joined: Option<String>,
    /// Others may join.
    pub(super) shared: bool,
    /// The time limit, in seconds, of what is evaluated, if one was given.
    pub(super) timeout: Option<f64>,
}

/// Talks to `client`'s server until the input ends. Returns the exit status.
///
/// # Errors
/// A sentence: the server did not start, or stdout cannot be written to.
pub(super) fn run(mut client: Client, options: &Options) -> Result<i32, String> {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let is_dumb = std::env::var_os(environment::TERMINAL).is_none_or(|term| term == "dumb");
    let colours =
        is_terminal && !is_dumb && std::env::var_os(environment::NO_COLOUR).is_none_or(|value| value.is_empty());
    let notices = ExternalPrinter::new(MAX_NOTICES);
    let is_shared = options.shared || options.joined.is_some();
    if is_shared && is_terminal {
        let notices = notices.sender();
        client.hear(move |params| drop(notices.try_send(told(params, colours))));
    }
    client.initialize(START).map_err(|failure| failure.to_string())?;
    if is_terminal {
        watch_interrupts(&client).map_err(|error| format!("SIGINT cannot be watched: {error}"))?;
    }
    let client = Arc::new(Mutex::new(client));
    let rich = is_terminal && !is_dumb && io::stderr().is_terminal();
    let editor = rich.then(|| Editor::new(client.clone(), colours, is_shared.then(|| notices.clone())));
    let own = options.joined.is_none();
    let mut repl = Repl {
        client,
        interactive: is_terminal,
        colours,
        own,
        timeout: options.timeout,
        notices,
        level: 0,
        frame: 0,
        package: None,
        failed: false,
    };
    let done = repl.greet(options).and_then(|()| match editor {
        Some(mut editor) => repl.converse(|prompt| editor.read(prompt)),
        None => {
            let mut input = io::stdin().lock();
            repl.converse(|prompt| read_plainly(&mut input, is_terminal.then_some(prompt)))
        }
    });
    match done {
        Ok(()) if repl.failed && !is_terminal => Ok(FAILED),
        Ok(()) => Ok(FINE),
        Err(Stop::Gone) => {
            super::say("; The server has ended.");
            Ok(IMPOSSIBLE)
        }
        Err(Stop::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(FAILED),
        Err(Stop::Output(error)) => Err(format!("it cannot write: {error}")),
    }
}

/// A notice of what somebody else did, as it is shown.
fn told(params: &Value, colours: bool) -> String {
    let mut text = params["text"].as_str().unwrap_or_default().to_owned();
    if let Some(evaluation) = params["held"].as_u64() {
        _ = write!(text, " :take {evaluation} takes it over.");
    }
    let lines = text.lines().map(|line| if colours { format!("\x1b[2m; {line}\x1b[0m") } else { format!("; {line}") });
    lines.collect::<Vec<_>>().join("\n")
}

/// Has Ctrl-C told to the client, and not end this process.
fn watch_interrupts(client: &Client) -> io::Result<()> {
    let (mut receiver, sender) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGINT, sender)?;
    let interrupts = client.interrupts();
    let pass_on = move || {
        let mut byte = [0];
        while matches!(receiver.read(&mut byte), Ok(1)) && interrupts.send(Event::Interrupted(Instant::now())).is_ok() {
        }
    };
    std::thread::Builder::new().name("interrupts".to_owned()).spawn(pass_on).map(drop)
}

/// The last Ctrl-C.
#[derive(Debug)]
struct CtrlC(Instant);

impl CtrlC {
    /// Takes note of another one; true when it comes within [`TWICE`] of the one before it.
    fn again(&mut self, at: Instant) -> bool {
        let before = std::mem::replace(&mut self.0, at);
        at.saturating_duration_since(before) <= TWICE
    }
}

/// Reads lines until they are a whole. `prompt`: shown before the first.
fn read_plainly(input: &mut impl BufRead, prompt: Option<&str>) -> io::Result<Typed> {
    if let Some(prompt) = prompt {
        print!("{prompt} ");
        io::stdout().flush()?;
    }
    let mut text = Vec::new();
    while input.read_until(b'\n', &mut text)? > 0 {
        let so_far = String::from_utf8_lossy(&text);
        if !is_unfinished(&so_far) {
            return Ok(Typed::Text(so_far.into_owned()));
        }
    }
    // What is unfinished is the reader's to complain about.
    let text = String::from_utf8_lossy(&text).into_owned();
    Ok(if text.trim().is_empty() { Typed::End } else { Typed::Text(text) })
}

/// Why a REPL cannot go on.
#[derive(Debug)]
enum Stop {
    /// The server has ended.
    Gone,
    /// Nobody reads what it says.
    Output(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// What came of a request.
enum Came {
    Answer(Box<Answer>),
    /// The user gave it up. An evaluation that has not ended for that has cost its image.
    Interrupted {
        has_ended: bool,
    },
    /// The server refused it, for this reason.
    Refused(String),
}

/// What something is to be shown as.
#[derive(Debug, Clone, Copy)]
enum Ink {
    Plain,
    Note,
    Warning,
    Failure,
}

struct Repl {
    client: Arc<Mutex<Client>>,
    interactive: bool,
    colours: bool,
    /// The image is nobody else's.
    own: bool,
    timeout: Option<f64>,
    /// What others did, until it is shown.
    notices: ExternalPrinter<String>,
    /// How many evaluations are held: 0 or 1.
    level: usize,
    /// The frame of the held one that code is evaluated in.
    frame: u64,
    package: Option<String>,
    failed: bool,
}

impl Repl {
    /// Says who this is, and finds out where.
    fn greet(&mut self, options: &Options) -> Result<(), Stop> {
        if !self.interactive {
            return Ok(());
        }
        let whose = options.joined.as_ref().map_or(String::new(), |name| format!(", in the session {name}"));
        self.print(
            Ink::Note,
            &format!("; SBCL {}{whose}. :help lists commands, Ctrl-D leaves.\n", crate::SBCL_VERSION),
        )?;
        // Any answer says which package it is.
        self.ask("check-evaluation", &json!({})).map(drop)
    }

    /// Reads, evaluates and prints until there is no more.
    fn converse(&mut self, mut read: impl FnMut(&str) -> io::Result<Typed>) -> Result<(), Stop> {
        loop {
            while let Some(notice) = self.notices.get_line() {
                self.print(Ink::Plain, &format!("{notice}\n"))?;
            }
            match read(&self.prompt())? {
                Typed::End => return Ok(()),
                Typed::Nothing => {}
                Typed::Text(text) if text.trim().is_empty() => {}
                Typed::Text(text) => {
                    if self.take(text.trim())? {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn prompt(&self) -> String {
        let package = match self.package.as_deref() {
            None | Some("COMMON-LISP-USER") => "CL-USER",
            Some(package) => package,
        };
        if self.level > 0 { format!("[{}] {package}>", self.level) } else { format!("{package}>") }
    }

    /// Does what was typed; true when that was to leave.
    fn take(&mut self, text: &str) -> Result<bool, Stop> {
        // What one leaves other REPLs by. In a file it is code as any other: the server refuses it.
        if self.interactive && ["(exit)", "(quit)"].contains(&text.to_lowercase().as_str()) {
            return Ok(true);
        }
        if self.level > 0 && text.parse::<u64>().is_ok() {
            self.restart(text)?;
            return Ok(false);
        }
        if let Some(name) = text.split_whitespace().next()
            && name.starts_with(':')
            && !text.contains('\n')
        {
            let rest = text[name.len()..].trim();
            let lower = name.to_lowercase();
            if COMMANDS.iter().any(|command| command.name == lower) {
                return self.command(&lower, rest);
            }
            let near = near(&lower);
            if !rest.is_empty() {
                self.failed = true;
                let near = near.map_or(String::new(), |near| format!(" Did you mean {near}?"));
                let all: Vec<_> = COMMANDS.iter().map(|command| command.name).collect();
                let text = format!("; There is no command {name}.{near} There are: {}.\n", all.join(", "));
                self.print(Ink::Failure, &text)?;
                return Ok(false);
            }
            // A keyword, as any other form; but perhaps not what was meant.
            self.evaluate(text)?;
            if let (Some(near), true) = (near, self.interactive) {
                self.print(Ink::Note, &format!("; That is a keyword. The command is {near}.\n"))?;
            }
            return Ok(false);
        }
        self.evaluate(text)?;
        Ok(false)
    }

    /// Does a command; true when that was to leave.
    fn command(&mut self, name: &str, rest: &str) -> Result<bool, Stop> {
        let number = rest.parse::<u64>();
        match name {
            ":quit" => return Ok(true),
            ":help" => self.help()?,
            ":load" | ":test" | ":describe" | ":return" | ":restart" if rest.is_empty() => {
                let arguments =
                    COMMANDS.iter().find(|command| command.name == name).map_or("", |known| known.arguments);
                self.failed = true;
                self.print(Ink::Failure, &format!("; {name} needs {arguments}.\n"))?;
            }
            ":frame" | ":locals" | ":bt" | ":take" if !rest.is_empty() && number.is_err() => {
                self.failed = true;
                self.print(Ink::Failure, &format!("; {name} takes a number.\n"))?;
            }
            ":load" => {
                let arguments = self.with_options(load_arguments(rest));
                self.run("load-system", &arguments)?;
            }
            ":test" => match test_arguments(&parted(rest)) {
                Ok(arguments) => self.run("run-tests", &arguments)?,
                Err(reason) => {
                    self.failed = true;
                    self.print(Ink::Failure, &format!("; {reason}\n"))?;
                }
            },
            ":describe" => self.show("describe-symbol", &json!({"name": rest, "source": true}))?,
            ":checkpoints" => self.show("checkpoint", &json!({}))?,
            ":checkpoint" | ":restore" => {
                let action = if name == ":restore" { "restore" } else { "save" };
                let name = if rest.is_empty() { CHECKPOINT } else { rest };
                self.show("checkpoint", &json!({"action": action, "name": name}))?;
                if action == "restore" {
                    self.level = 0;
                }
            }
            ":reset" => {
                self.show("reset-session", &json!({}))?;
                self.level = 0;
            }
            ":bt" => self.show_frames(&json!({"max-frames": number.unwrap_or(FRAMES)}))?,
            ":frame" => {
                self.frame = number.unwrap_or(self.frame);
                self.show_frames(&json!({"from": self.frame, "max-frames": 1}))?;
            }
            ":locals" => self.show_locals(number.unwrap_or(self.frame))?,
            ":restart" => self.restart(rest)?,
            ":take" => {
                let params = number.map_or_else(|_| json!({}), |id| json!({"id": id}));
                let came = self.request(TAKE_OVER, params)?;
                self.settle(came)?;
            }
            ":return" => {
                let arguments = json!({"frame": self.frame, "return": rest});
                self.run("resume-from-frame", &arguments)?;
            }
            _ => {
                self.show("abort-evaluation", &json!({}))?;
                self.level = 0;
            }
        }
        Ok(false)
    }

    fn help(&mut self) -> Result<(), Stop> {
        let mut text = String::new();
        for Command { name, arguments, summary } in &COMMANDS {
            _ = writeln!(text, "{:28} {summary}", format!("{name} {arguments}"));
        }
        text.push_str(
            "Anything else is evaluated; in the debugger, in the frame that :frame chose.\n\
             Tab completes. Ctrl-C interrupts; twice within a second, it replaces the image and restores it.\n",
        );
        self.print(Ink::Plain, &text)
    }

    /// Evaluates code: form by form, or all in its frame where an evaluation is held.
    fn evaluate(&mut self, code: &str) -> Result<(), Stop> {
        if self.level == 0 {
            return self.evaluate_forms(code);
        }
        let arguments = with_timeout(json!({"frame": self.frame, "code": code}), self.timeout);
        let came = self.ask("eval-in-frame", &arguments)?;
        if let Came::Answer(answer) = &came
            && is_nothing_held(answer)
        {
            // Its time was up, or somebody else let it go.
            self.level = 0;
            self.print(Ink::Note, "; What was held has been released.\n")?;
            return self.evaluate(code);
        }
        self.report(came)
    }

    /// Evaluates forms one by one, and shows what each of them comes to. Who types does not want the rest of them once
    /// one has failed.
    fn evaluate_forms(&mut self, code: &str) -> Result<(), Stop> {
        let mut rest = code;
        loop {
            let arguments = self.with_options(json!({"code": rest}));
            let params = json!({"name": "evaluate-lisp", "arguments": arguments, "_meta": {ONE_FORM: true}});
            let came = self.request("tools/call", params)?;
            let Came::Answer(answer) = &came else { return self.settle(came) };
            let (read, is_error) = (answer.content["read"].as_u64(), answer.is_error);
            let Some(read) = read.and_then(|read| usize::try_from(read).ok()) else {
                // What cannot be read has no end, and where there is nothing more, there are no values.
                return if is_error { self.settle(came) } else { self.show_notices(&answer.content) };
            };
            self.settle(came)?;
            rest = rest.char_indices().nth(read).map_or("", |(at, _)| rest[at..].trim());
            if rest.is_empty() || self.interactive && is_error {
                break;
            }
        }
        let is_comment = rest.starts_with(';') && !rest.contains('\n');
        if rest.is_empty() || is_comment {
            return Ok(());
        }
        self.print(Ink::Note, &format!("; Not evaluated: {}\n", rest.replace('\n', "\n; ")))
    }

    /// What is typed by hand is held when it fails.
    fn with_options(&self, arguments: Value) -> Value {
        let mut arguments = with_timeout(arguments, self.timeout);
        arguments["on-error"] = if self.interactive { "debug" } else { "abort" }.into();
        arguments
    }

    /// Takes a restart: its number or name, and Lisp expressions.
    fn restart(&mut self, text: &str) -> Result<(), Stop> {
        let (restart, values) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mut arguments = json!({"restart": restart});
        if !values.trim().is_empty() {
            arguments["values"] = values.trim().into();
        }
        self.run("invoke-restart", &arguments)
    }

    /// Calls a tool that evaluates, shows what came of it, and is at the level that this left.
    fn run(&mut self, tool: &str, arguments: &Value) -> Result<(), Stop> {
        let came = self.ask(tool, arguments)?;
        self.settle(came)
    }

    /// Shows what came of what evaluates, and is at the level that this left.
    fn settle(&mut self, came: Came) -> Result<(), Stop> {
        match &came {
            // It was refused: nothing has changed.
            Came::Answer(answer) if answer.content.get("refused").is_some() => {
                if is_nothing_held(answer) {
                    self.level = 0;
                }
            }
            Came::Answer(answer) => {
                self.level = usize::from(answer.content["held"] == true);
                self.frame = 0;
            }
            Came::Interrupted { has_ended } => {
                self.level = 0;
                if self.own && !has_ended {
                    let client = Arc::clone(&self.client);
                    self.tell_of_loss(&mut client.lock().unwrap_or_else(PoisonError::into_inner))?;
                }
            }
            Came::Refused(_) => self.level = 0,
        }
        self.report(came)
    }

    /// Calls a tool that only looks, and shows what it says.
    fn show(&mut self, tool: &str, arguments: &Value) -> Result<(), Stop> {
        let came = self.ask(tool, arguments)?;
        self.report(came)
    }

    /// Shows frames of the last error. How to see more is said of this REPL's command, not of the tool's arguments.
    fn show_frames(&mut self, arguments: &Value) -> Result<(), Stop> {
        let mut came = self.ask("get-backtrace", arguments)?;
        if let Came::Answer(answer) = &mut came
            && let Some((frames, last)) = answer.text.trim_end().rsplit_once('\n')
            && let Some((count, how)) = last.split_once("; ask ")
        {
            answer.text = match how.strip_prefix("for max-frames ").and_then(|rest| rest.split(' ').next()) {
                Some(all) => format!("{frames}\n{count}; :bt {all} shows them all."),
                None => frames.to_owned(),
            };
        }
        self.report(came)
    }

    /// Shows the local variables of a frame, a line each.
    fn show_locals(&mut self, frame: u64) -> Result<(), Stop> {
        let mut came = self.ask("get-backtrace", &json!({"from": frame, "max-frames": 1, "locals": true}))?;
        if let Came::Answer(answer) = &mut came
            && let Some(locals) = answer.content["error"]["frames"][0]["locals"].as_array()
        {
            let name = |local: &Value| local["name"].as_str().unwrap_or_default().to_owned();
            let known = |local: &Value| Some(format!("{} = {}", name(local), local["value"].as_str()?));
            let mut lines: Vec<_> = locals.iter().filter_map(known).collect();
            let missing: Vec<_> = locals.iter().filter(|local| local["value"].is_null()).map(name).collect();
            if !missing.is_empty() {
                lines.push(format!("not available: {}", missing.join(", ")));
            }
            if lines.is_empty() {
                lines.push("No local variables: the frame is of SBCL's own code, or SBCL kept none of it.".to_owned());
            }
            answer.text = lines.join("\n");
        }
        self.report(came)
    }

    /// Calls a tool, shows what is printed meanwhile, and waits.
    fn ask(&mut self, tool: &str, arguments: &Value) -> Result<Came, Stop> {
        self.request("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// The same of any request that is answered as a tool's call.
    fn request(&mut self, method: &str, params: Value) -> Result<Came, Stop> {
        let client = Arc::clone(&self.client);
        let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
        // What was meant for what is over.
        while let Some(event) = client.next(Some(Duration::ZERO)) {
            if matches!(event, Event::Closed) {
                return Err(Stop::Gone);
            }
        }
        let id = client.begin(method, params).map_err(|_| Stop::Gone)?;
        let mut printed = 0;
        loop {
            match client.next(None).unwrap_or(Event::Closed) {
                Event::Message(message) if message["params"]["progressToken"] == id => {
                    printed += self.progress(&message["params"], printed)?;
                }
                Event::Message(message) => match answered(message, id) {
                    Some(Ok(result)) => {
                        let mut answer = Answer::of(&result);
                        if answer.package.is_some() {
                            self.package.clone_from(&answer.package);
                        }
                        if let Some(Value::String(stdout)) = answer.content.get_mut("stdout") {
                            // It was shown when it was printed.
                            let rest = stdout.get(printed..).unwrap_or_default().to_owned();
                            *stdout = rest;
                        }
                        return Ok(Came::Answer(Box::new(answer)));
                    }
                    Some(Err(Failure::Refused(reason))) => return Ok(Came::Refused(reason)),
                    Some(Err(_)) => return Err(Stop::Gone),
                    None => {}
                },
                Event::Interrupted(at) => {
                    return self.interrupt(&mut client, id, CtrlC(at));
                }
                Event::Closed => return Err(Stop::Gone),
            }
        }
    }

    /// Shows what a report of progress says, if it is output that goes on from byte `printed`; how many bytes that are.
    fn progress(&mut self, params: &Value, printed: usize) -> Result<usize, Stop> {
        let message = params["message"].as_str().unwrap_or_default();
        if params["_meta"][OUTPUT_FROM] != printed {
            return Ok(0);
        }
        self.print(Ink::Plain, message)?;
        Ok(message.len())
    }

    /// Ends request `id`. Another Ctrl-C before that is over replaces the image, if it comes at once.
    fn interrupt(&mut self, client: &mut Client, id: u64, mut pressed: CtrlC) -> Result<Came, Stop> {
        let params = json!({"requestId": id, "reason": "Ctrl-C"});
        client.notify("notifications/cancelled", &params).map_err(|_| Stop::Gone)?;
        let mut begin = Instant::now();
        // It is answered when what was cancelled is over, or some time later with a notice that it is not.
        let mut question = client.begin_call("get-backtrace", &json!({"max-frames": 5})).map_err(|_| Stop::Gone)?;
        let mut wait = SOON;
        loop {
            match client.next(Some(wait.saturating_sub(begin.elapsed()))) {
                Some(Event::Message(message)) => {
                    if let Some(Ok(result)) = answered(message, question) {
                        let answer = Answer::of(&result);
                        if report::is_unsettled(&answer.text) {
                            let again = client.begin_call("get-backtrace", &json!({"max-frames": 5}));
                            question = again.map_err(|_| Stop::Gone)?;
                            continue;
                        }
                        self.print(Ink::Failure, "; Interrupted.\n")?;
                        let has_ended = answer.text.starts_with("Backtrace for CANCELLED")
                            && !answer.text.starts_with("Backtrace for CANCELLED (0 of 0 frames)");
                        if has_ended {
                            self.print(Ink::Note, &format!("{}\n", answer.text))?;
                        }
                        return Ok(Came::Interrupted { has_ended });
                    }
                }
                Some(Event::Interrupted(at)) if pressed.again(at) => {
                    self.replace(client)?;
                    return Ok(Came::Interrupted { has_ended: true });
                }
                // The server interrupts it once a second until it is over: there is nothing to add.
                Some(Event::Interrupted(_)) => (begin, wait) = (Instant::now(), SOON),
                Some(Event::Closed) => return Err(Stop::Gone),
                None if wait == SOON => {
                    wait = UNWINDING;
                    let more = match self.workers(client).is_empty() {
                        true => "",
                        false => " Ctrl-C twice within a second replaces the image.",
                    };
                    self.print(Ink::Note, &format!("; It is being interrupted.{more}\n"))?;
                }
                None => {
                    self.print(Ink::Failure, "; It does not end.\n")?;
                    return Ok(Came::Interrupted { has_ended: true });
                }
            }
        }
    }

    /// Ends the process that holds the image, in whose place the server puts another one with what it can restore: a
    /// reset would forget all.
    fn replace(&mut self, client: &mut Client) -> Result<(), Stop> {
        let workers = self.workers(client);
        if workers.is_empty() {
            let why = if self.own { "there is no process for it alone" } else { "it is not this REPL's own" };
            return self.print(Ink::Failure, &format!("; The image cannot be replaced from here: {why}.\n"));
        }
        for worker in workers {
            let _ = rustix::process::kill_process(worker, rustix::process::Signal::KILL);
        }
        self.print(Ink::Failure, "; The image was replaced.\n")?;
        self.tell_of_loss(client)
    }

    /// Shows what became of the image before this one, which the first answer says: what was restored, what was lost.
    fn tell_of_loss(&mut self, client: &mut Client) -> Result<(), Stop> {
        self.level = 0;
        let id = client.begin_call("evaluate-lisp", &json!({"code": ""})).map_err(|_| Stop::Gone)?;
        loop {
            match client.next(None).unwrap_or(Event::Closed) {
                Event::Message(message) => {
                    if let Some(Ok(result)) = answered(message, id) {
                        let answer = Answer::of(&result);
                        if answer.package.is_some() {
                            self.package.clone_from(&answer.package);
                        }
                        return self.show_notices(&answer.content);
                    }
                }
                // It may wait for others.
                Event::Interrupted(_) => return Ok(()),
                Event::Closed => return Err(Stop::Gone),
            }
        }
    }

    /// The processes that hold this REPL's image, if it is its own and they hold nothing else.
    fn workers(&self, client: &Client) -> Vec<rustix::process::Pid> {
        client.server().filter(|_| self.own).map(workers_of).unwrap_or_default()
    }

    /// Shows what came of a request.
    fn report(&mut self, came: Came) -> Result<(), Stop> {
        match came {
            Came::Interrupted { .. } => {
                self.failed = true;
                Ok(())
            }
            Came::Refused(reason) => {
                self.failed = true;
                self.print(Ink::Failure, &format!("; {reason}\n"))
            }
            Came::Answer(answer) => {
                self.failed |= answer.is_error || test_failures(&answer.content) > 0;
                self.show_answer(&answer)
            }
        }
    }

    /// Shows an answer: what an evaluation did, part by part; anything else as the tool says it.
    fn show_answer(&mut self, answer: &Answer) -> Result<(), Stop> {
        let Answer { text, content, is_error, .. } = answer;
        if content.get("refused").is_some() {
            return self.print(Ink::Failure, &format!("; {text}\n"));
        }
        let Some(stdout) = content["stdout"].as_str() else {
            return self.print(if *is_error { Ink::Failure } else { Ink::Plain }, &format!("{text}\n"));
        };
        self.show_notices(content)?;
        for (ink, part) in [(Ink::Plain, content["background"].as_str().unwrap_or_default()), (Ink::Plain, stdout)] {
            self.print(ink, part)?;
        }
        if !stdout.is_empty() && !stdout.ends_with('\n') {
            self.print(Ink::Plain, "\n")?;
        }
        let stderr = content["stderr"].as_str().unwrap_or_default();
        if !stderr.is_empty() {
            let stderr = if stderr.ends_with('\n') { stderr.to_owned() } else { format!("{stderr}\n") };
            self.print_aside(&stderr)?;
        }
        // What is left of the text is as the tools have it: its markers are real ones.
        if content.get("loaded").is_some()
            && let Some(loaded) = text.split("\n\n").find(|part| !part.starts_with('['))
        {
            self.print(Ink::Plain, &format!("{loaded}\n"))?;
        }
        if content.get("tests").is_some() {
            return self.print(Ink::Plain, &format!("{text}\n"));
        }
        if let Some(warnings) = section(text, "[warnings]") {
            self.print(Ink::Warning, &format!("{warnings}\n"))?;
        }
        if let Some(at) = find_marker(text, "[ERROR] ") {
            let (error, debugger) = match text[at..].split_once("\n\n[Debugger]\nHeld. Restarts:\n") {
                Some((error, rest)) => (error, rest.lines().filter(|line| !line.starts_with("Tools: ")).collect()),
                None => (&text[at..], Vec::new()),
            };
            let (message, frames) = error.split_once("\n\n[Backtrace]\n").unwrap_or((error, ""));
            self.print(Ink::Failure, &format!("{message}\n"))?;
            let frames = frames.replace("more frames (get-backtrace shows them)", "more frames (:bt shows them)");
            self.print(Ink::Note, &format!("{frames}\n"))?;
            if !debugger.is_empty() {
                self.print(
                    Ink::Plain,
                    &format!(
                        "Restarts (a number takes one, :help says what else there is):\n{}\n",
                        debugger.join("\n")
                    ),
                )?;
            }
            return Ok(());
        }
        let values = content["values"].as_array().map_or(&[][..], Vec::as_slice);
        for value in values.iter().filter_map(Value::as_str) {
            self.print(Ink::Plain, &format!("=> {value}\n"))?;
        }
        if values.is_empty() && content.get("loaded").is_none() && content.get("inBackground").is_none() {
            self.print(Ink::Plain, "; No values\n")?;
        }
        Ok(())
    }

    /// Shows what the server itself has to say.
    fn show_notices(&mut self, content: &Value) -> Result<(), Stop> {
        for notice in content["notices"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            self.print(Ink::Note, &format!("; {}\n", notice.replace('\n', "\n; ")))?;
        }
        Ok(())
    }

    /// Writes to stderr what the code wrote there; on a terminal, it is all one.
    fn print_aside(&mut self, text: &str) -> Result<(), Stop> {
        if self.interactive {
            return self.print(Ink::Warning, text);
        }
        io::stdout().flush()?;
        let _ = io::stderr().write_all(text.as_bytes());
        Ok(())
    }

    fn print(&mut self, ink: Ink, text: &str) -> Result<(), Stop> {
        let mut stdout = io::stdout().lock();
        let code = match ink {
            Ink::Plain => "",
            Ink::Note => "2",
            Ink::Warning => "33",
            Ink::Failure => "31",
        };
        if self.colours && !code.is_empty() && !text.is_empty() {
            let (body, end) = text.strip_suffix('\n').map_or((text, ""), |body| (body, "\n"));
            write!(stdout, "\x1b[{code}m{body}\x1b[0m{end}")?;
        } else {
            stdout.write_all(text.as_bytes())?;
        }
        Ok(stdout.flush()?)
    }
}

/// True when a tool of the debugger says that there is nothing for it.
fn is_nothing_held(answer: &Answer) -> bool {
    answer.content.get("refused").is_some() && answer.text.starts_with("No evaluation is held")
}

/// The name of the command that is nearest to this, if one is near.
fn near(name: &str) -> Option<&'static str> {
    let similar = COMMANDS.iter().map(|command| (strsim::jaro_winkler(name, command.name), command.name));
    let best = similar.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(similarity, _)| *similarity > NEAR).map(|(_, name)| name)
}

/// Where a line of the text begins with this marker.
fn find_marker(text: &str, marker: &str) -> Option<usize> {
    if text.starts_with(marker) { Some(0) } else { text.find(&format!("\n\n{marker}")).map(|at| at + 2) }
}

/// The lines of a section, without its marker.
fn section<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    let lines = &text[find_marker(text, &format!("{marker}\n"))? + marker.len() + 1..];
    Some(lines.split("\n\n").next().unwrap_or(lines))
}

/// The processes that the process `parent` has started: where it is a server, those that hold Lisp.
fn workers_of(parent: u32) -> Vec<rustix::process::Pid> {
    let parent = i32::try_from(parent).ok().and_then(rustix::process::Pid::from_raw);
    parent.map(crate::supervisor::processes::children).unwrap_or_default()
}

/// A person's REPL, on an image of its own or that of a server that runs.
pub(super) fn start(
    attach: Option<Option<String>>,
    given: Vec<OsString>,
    shared: bool,
    timeout: Option<f64>,
    stdio: Stdio,
) -> i32 {
    let talk = || {
        give_back(stdio).map_err(|error| format!("stdin and stdout cannot be used: {error}"))?;
        let joined = attach.clone().map(Option::unwrap_or_default);
        run(client_of(attach, given)?, &Options { joined, shared, timeout })
    };
    talk().unwrap_or_else(|reason| {
        super::say(&format!("sbcl-mcp repl: {reason}"));
        IMPOSSIBLE
    })
}

/// Makes stdin and stdout what they were: Lisp is in another process.
fn give_back(stdio: Stdio) -> io::Result<()> {
    rustix::stdio::dup2_stdin(&stdio.input)?;
    rustix::stdio::dup2_stdout(&stdio.output)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_counts_twice_within_a_second_of_the_one_before() {
        let begin = Instant::now();
        let mut pressed = CtrlC(begin);
        let presses =
            [(1_001, false), (11_000, false), (12_000, true), (12_000, true), (13_001, false), (13_500, true)];
        for (milliseconds, expected) in presses {
            assert_eq!(pressed.again(begin + Duration::from_millis(milliseconds)), expected, "after {milliseconds} ms");
        }
    }
}
