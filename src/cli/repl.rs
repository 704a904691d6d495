//! The command `repl`: a REPL for a person, with the reports and the debugger of the tools.
//!
//! The REPL is an MCP client like any other. Input from a terminal is read with [`Editor`]; input from a pipe or a file
//! is read form by form, without prompts.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reedline::ExternalPrinter;
use serde_json::{Value, json};

use super::client::{CallError, Client, ClientEvent, START_TIMEOUT, ToolAnswer, connect_or_start, response_to};
use super::editor::{Editor, Input};
use super::exit_status::{CANNOT_RUN, FAILED, SUCCEEDED};
use super::tools::{load_arguments, test_arguments, test_failures, with_timeout};
use crate::audience::Audience;
use crate::environment;
use crate::mcp::stdio::Stdio;
use crate::mcp::{ONE_FORM_KEY, split_names};
use crate::report;
use crate::result_kind::CANCELLED;
use crate::rpc::attach::ADOPT_HELD_METHOD;
use crate::rpc::inflight::OUTPUT_OFFSET_KEY;
use lisp_syntax::UnfinishedLines;

/// Maximum time between two presses of Ctrl-C that count as a double press.
const DOUBLE_PRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Time to wait for an interrupted evaluation to end before a message mentions the double press.
const INTERRUPT_NOTICE_DELAY: Duration = Duration::from_millis(200);
/// Time to wait for an interrupted evaluation to unwind. Afterwards the prompt returns even if the evaluation still
/// runs.
const UNWIND_TIMEOUT: Duration = Duration::from_secs(15);
/// The name of a checkpoint for which the user gave no name.
const DEFAULT_CHECKPOINT: &str = "repl";
/// Similarity, from 0 to 1, above which a command is suggested for an unknown name.
const MIN_SIMILARITY: f64 = 0.75;
/// Number of frames that `:bt` shows by default.
const DEFAULT_FRAMES: u64 = 50;
/// Maximum number of queued notices about other clients. Further notices are dropped.
const MAX_NOTICES: usize = 1_000;

/// The text that takes the place of output that the server has shortened after its beginning was shown.
const OUTPUT_NOT_SHOWN: &str = "\n[... more output, which is too long to be shown]";
/// The text between the error and the restarts in the answer about an evaluation that has failed and is held.
const HELD_MARKER: &str = "\n\n[Debugger]\nHeld. Restarts:\n";

/// A command of the REPL.
pub(super) struct ReplCommand {
    /// The name of the command, with its colon.
    pub(super) name: &'static str,
    arguments: &'static str,
    pub(super) summary: &'static str,
}

const fn command(name: &'static str, arguments: &'static str, summary: &'static str) -> ReplCommand {
    ReplCommand { name, arguments, summary }
}

/// The commands, in the order of `:help`.
pub(super) const COMMANDS: [ReplCommand; 16] = [
    command(":help", "", "this list"),
    command(":quit", "", "leave the REPL, like Ctrl-D, (quit) and (exit)"),
    command(":load", "SYSTEM or FILE", "load a system through ASDF, or a file"),
    command(":test", "SYSTEM ...", "run the tests of systems or of a package (P:), or one test or suite (P::TEST)"),
    command(":describe", "NAME", "describe a symbol and show its source"),
    command(":checkpoint", "[NAME]", "save a checkpoint of the image"),
    command(":restore", "[NAME]", "restore a checkpoint"),
    command(":checkpoints", "", "list checkpoints"),
    command(":reset", "", "start over without the definitions, values and threads"),
    command(":bt", "[FRAMES]", "backtrace of the last error"),
    command(":frame", "[N]", "choose the frame in which code is evaluated"),
    command(":locals", "[N]", "local variables of a frame"),
    command(":restart", "N [VALUES]", "invoke a restart; in the debugger its number is enough"),
    command(":return", "VALUES", "continue as if the chosen frame had returned these values"),
    command(":abort", "", "abort the held evaluation"),
    command(":take", "[EVALUATION]", "take over an evaluation that another client holds for debugging"),
];

/// The settings of a REPL.
pub(super) struct ReplOptions {
    /// The name of the running server that the REPL attaches to; empty if the user gave no name. `None` if the REPL starts a
    /// server of its own.
    pub(super) attached_to: Option<String>,
    /// True if other clients may attach to the REPL's own server.
    pub(super) shared: bool,
    /// True unless the REPL's own server is started with `--no-supervisor`.
    pub(super) is_supervised: bool,
    /// The time limit for evaluations in seconds, if one was given.
    pub(super) timeout: Option<f64>,
}

/// Runs the REPL on `client` until its input ends. Returns the exit status.
///
/// # Errors
/// Returns a sentence if the server does not start, Ctrl-C cannot be handled, or stdout cannot be written.
pub(super) fn run(mut client: Client, options: &ReplOptions) -> Result<i32, String> {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let is_dumb = std::env::var_os(environment::TERMINAL).is_none_or(|term| term == "dumb");
    let colours =
        is_terminal && !is_dumb && std::env::var_os(environment::NO_COLOUR).is_none_or(|value| value.is_empty());
    let notices = ExternalPrinter::new(MAX_NOTICES);
    let is_shared = options.shared || options.attached_to.is_some();
    if is_shared && is_terminal {
        let notices = notices.sender();
        client.on_notice(move |params| drop(notices.try_send(notice_text(params, colours))));
    }
    client.initialize(Audience::Repl, START_TIMEOUT).map_err(|failure| failure.to_string())?;
    let tools = offered_tools(&mut client).map_err(|failure| failure.to_string())?;
    let is_offered = |name: &str| tools.iter().any(|tool| tool == name);
    if !is_offered("evaluate-lisp") {
        let reason =
            "the server does not offer the tool evaluate-lisp, which the REPL needs: add it to the server's --tools";
        return Err(reason.to_owned());
    }
    // A server without these tools refuses to hold an evaluation.
    let holds_errors = is_terminal && is_offered("eval-in-frame") && is_offered("invoke-restart");
    if is_terminal {
        watch_interrupts(&client).map_err(|error| format!("cannot install a handler for SIGINT: {error}"))?;
    }
    let client = Arc::new(Mutex::new(client));
    let has_editor = is_terminal && !is_dumb && io::stderr().is_terminal();
    let editor = has_editor.then(|| Editor::new(client.clone(), colours, is_shared.then(|| notices.clone())));
    let owns_image = options.attached_to.is_none();
    let mut repl = Repl {
        client,
        interactive: is_terminal,
        holds_errors,
        colours,
        owns_image,
        is_supervised: options.is_supervised,
        timeout: options.timeout,
        notices,
        level: 0,
        frame: 0,
        package: None,
        failed: false,
        last_interruption: Value::Null,
    };
    let done = repl.greet(options).and_then(|()| match editor {
        Some(mut editor) => repl.run_loop(|prompt| editor.read(prompt)),
        None => {
            let mut input = io::stdin().lock();
            repl.run_loop(|prompt| read_plain(&mut input, is_terminal.then_some(prompt)))
        }
    });
    match done {
        Ok(()) if repl.failed && !is_terminal => Ok(FAILED),
        Ok(()) => Ok(SUCCEEDED),
        Err(ReplError::ServerGone) => {
            let advice = match owns_image {
                true => "`sbcl-mcp repl` starts another server.",
                false => "`sbcl-mcp sessions` lists the running servers.",
            };
            super::print_to_stderr(&format!("; The server has ended. {advice}"));
            Ok(CANNOT_RUN)
        }
        Err(ReplError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(FAILED),
        Err(ReplError::Output(error)) => Err(format!("cannot read stdin or write to stdout: {error}")),
    }
}

/// Returns the names of the tools that the server offers (`--tools`).
fn offered_tools(client: &mut Client) -> Result<Vec<String>, CallError> {
    let result = client.request("tools/list", &json!({}), START_TIMEOUT)?;
    let tools = result["tools"].as_array().into_iter().flatten();
    Ok(tools.filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect())
}

/// Formats a notice about another client.
fn notice_text(params: &Value, colours: bool) -> String {
    let mut text = params["text"].as_str().unwrap_or_default().to_owned();
    if let Some(evaluation) = params["held"].as_u64() {
        _ = write!(text, " To take over: :take {evaluation}.");
    }
    let lines = text.lines().map(|line| if colours { format!("\x1b[2m; {line}\x1b[0m") } else { format!("; {line}") });
    lines.collect::<Vec<_>>().join("\n")
}

/// Forwards Ctrl-C to the client as an event. Without a handler, Ctrl-C would end this process.
fn watch_interrupts(client: &Client) -> io::Result<()> {
    let (mut receiver, sender) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGINT, sender)?;
    let interrupts = client.interrupt_sender();
    let forward = move || {
        let mut byte = [0];
        while matches!(receiver.read(&mut byte), Ok(1))
            && interrupts.send(ClientEvent::Interrupted(Instant::now())).is_ok()
        {}
    };
    std::thread::Builder::new().name("interrupts".to_owned()).spawn(forward).map(drop)
}

/// The time of the last press of Ctrl-C.
#[derive(Debug)]
struct CtrlC(Instant);

impl CtrlC {
    /// Records another press. Returns true if the press came within [`DOUBLE_PRESS_INTERVAL`] of the previous one.
    fn record_press(&mut self, at: Instant) -> bool {
        let before = std::mem::replace(&mut self.0, at);
        at.saturating_duration_since(before) <= DOUBLE_PRESS_INTERVAL
    }
}

/// Shows the prompt, if any, and reads lines until they form complete input.
fn read_plain(input: &mut impl BufRead, prompt: Option<&str>) -> io::Result<Input> {
    if let Some(prompt) = prompt {
        print!("{prompt} ");
        io::stdout().flush()?;
    }
    let (mut text, mut line) = (String::new(), Vec::new());
    let mut lines = UnfinishedLines::default();
    while input.read_until(b'\n', &mut line)? > 0 {
        let added = String::from_utf8_lossy(&line);
        text.push_str(&added);
        if !lines.add(added.strip_suffix('\n').unwrap_or(&added)) {
            return Ok(Input::Text(text));
        }
        line.clear();
    }
    // Unfinished input at the end is evaluated too, so that Lisp's reader reports the error.
    Ok(if text.trim().is_empty() { Input::End } else { Input::Text(text) })
}

/// The reason why a REPL ends early.
#[derive(Debug)]
enum ReplError {
    /// The server has ended.
    ServerGone,
    /// Stdout cannot be written.
    Output(io::Error),
}

impl From<io::Error> for ReplError {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// A call whose answer has not arrived.
struct UnansweredCall {
    /// The id of the request.
    id: u64,
    /// The name of the tool; empty if the request calls no tool.
    tool: String,
    /// The text of the call's progress reports, which has been shown.
    shown: String,
}

impl UnansweredCall {
    /// Removes from `content` the beginning of stdout, which has been shown as it arrived.
    fn remove_shown_output(&self, content: &mut Value) {
        // The reports of load-system name the files that it loads. Other tools report stdout.
        if self.tool != "load-system"
            && let Some(Value::String(stdout)) = content.get_mut("stdout")
        {
            // Without its middle, very long output does not begin with the shown text.
            let rest = stdout.strip_prefix(&*self.shown).unwrap_or(OUTPUT_NOT_SHOWN).to_owned();
            *stdout = rest;
        }
    }
}

/// The reply to a request.
enum RequestReply {
    Answer(Box<ToolAnswer>),
    /// The user interrupted the request. If `image_may_be_lost` is true, the REPL then shows what the new image has
    /// restored.
    Interrupted {
        image_may_be_lost: bool,
    },
    /// The server refused the request, for this reason.
    Refused(String),
}

/// The style in which text is shown.
#[derive(Debug, Clone, Copy)]
enum TextStyle {
    Plain,
    Note,
    Warning,
    Failure,
}

/// A running REPL.
struct Repl {
    client: Arc<Mutex<Client>>,
    interactive: bool,
    /// True if failed evaluations are held for debugging.
    holds_errors: bool,
    colours: bool,
    /// True if the REPL has started the server whose image it uses.
    owns_image: bool,
    /// True unless the REPL's own server holds the image in the server's own process.
    is_supervised: bool,
    timeout: Option<f64>,
    /// Notices about other clients that are not shown yet.
    notices: ExternalPrinter<String>,
    /// The debugger level: 1 while an evaluation is held, otherwise 0.
    level: usize,
    /// The number of the held evaluation's frame in which code is evaluated.
    frame: u64,
    package: Option<String>,
    failed: bool,
    /// The identifier of the error with which an interrupted evaluation last ended.
    last_interruption: Value,
}

impl Repl {
    /// Prints the greeting, and asks the server for the current package.
    fn greet(&mut self, options: &ReplOptions) -> Result<(), ReplError> {
        if !self.interactive {
            return Ok(());
        }
        let whose = match options.attached_to.as_deref() {
            None => String::new(),
            Some("") => ", in a running server".to_owned(),
            Some(name) => format!(", in the running server {name}"),
        };
        self.print(
            TextStyle::Note,
            &format!("; SBCL {}{whose}. :help lists commands, Ctrl-D leaves.\n", crate::SBCL_VERSION),
        )?;
        // The answer of any tool names the current package.
        self.call_tool("check-evaluation", &json!({})).map(drop)
    }

    /// Reads, evaluates and prints until the input ends.
    fn run_loop(&mut self, mut read: impl FnMut(&str) -> io::Result<Input>) -> Result<(), ReplError> {
        loop {
            while let Some(notice) = self.notices.get_line() {
                self.print(TextStyle::Plain, &format!("{notice}\n"))?;
            }
            match read(&self.prompt())? {
                Input::End => return Ok(()),
                Input::Cancelled => {}
                Input::Text(text) if text.trim().is_empty() => {}
                Input::Text(text) => {
                    if self.handle_input(text.trim())? {
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

    /// Handles one input: a restart number, a command or code. Returns true if the user wants to leave.
    fn handle_input(&mut self, text: &str) -> Result<bool, ReplError> {
        // Other REPLs accept these forms, so a person may type them. In a file, they are ordinary code, which the
        // server refuses.
        if self.interactive && ["(exit)", "(quit)"].contains(&text.to_lowercase().as_str()) {
            return Ok(true);
        }
        if self.level > 0 && text.parse::<u64>().is_ok() {
            self.invoke_restart(text)?;
            return Ok(false);
        }
        if let Some(name) = text.split_whitespace().next()
            && name.starts_with(':')
            && !text.contains('\n')
        {
            let rest = text[name.len()..].trim();
            let lower = name.to_lowercase();
            if COMMANDS.iter().any(|command| command.name == lower) {
                return self.run_command(&lower, rest);
            }
            let similar = similar_command(&lower);
            if !rest.is_empty() {
                self.failed = true;
                let similar = similar.map_or(String::new(), |similar| format!(" Did you mean {similar}?"));
                let all: Vec<_> = COMMANDS.iter().map(|command| command.name).collect();
                let text = format!("; There is no command {name}.{similar} Commands: {}.\n", all.join(", "));
                self.print(TextStyle::Failure, &text)?;
                return Ok(false);
            }
            // A keyword is a form like any other, but may be a mistyped command.
            self.evaluate(text)?;
            if let (Some(similar), true) = (similar, self.interactive) {
                self.print(
                    TextStyle::Note,
                    &format!("; {name} is a keyword, not a command. Did you mean {similar}?\n"),
                )?;
            }
            return Ok(false);
        }
        self.evaluate(text)?;
        Ok(false)
    }

    /// Runs a command. Returns true if the user wants to leave.
    fn run_command(&mut self, name: &str, rest: &str) -> Result<bool, ReplError> {
        let number = rest.parse::<u64>();
        match name {
            ":quit" => return Ok(true),
            ":help" => self.show_help()?,
            ":load" | ":test" | ":describe" | ":return" | ":restart" if rest.is_empty() => {
                let arguments =
                    COMMANDS.iter().find(|command| command.name == name).map_or("", |known| known.arguments);
                self.failed = true;
                self.print(TextStyle::Failure, &format!("; Usage: {name} {arguments}\n"))?;
            }
            ":frame" | ":locals" | ":bt" | ":take" if !rest.is_empty() && number.is_err() => {
                self.failed = true;
                self.print(TextStyle::Failure, &format!("; {name} takes a number.\n"))?;
            }
            ":load" => match load_arguments(rest) {
                Ok(arguments) => self.run_tool("load-system", &self.with_evaluation_options(arguments))?,
                Err(reason) => {
                    self.failed = true;
                    self.print(TextStyle::Failure, &format!("; {reason}\n"))?;
                }
            },
            ":test" => match test_arguments(&split_names(rest)) {
                Ok(arguments) => self.run_tool("run-tests", &arguments)?,
                Err(reason) => {
                    self.failed = true;
                    self.print(TextStyle::Failure, &format!("; {reason}\n"))?;
                }
            },
            ":describe" => self.call_and_show("describe-symbol", &json!({"name": rest, "source": true}))?,
            ":checkpoints" => self.call_and_show("checkpoint", &json!({}))?,
            ":checkpoint" | ":restore" => {
                let action = if name == ":restore" { "restore" } else { "save" };
                let name = if rest.is_empty() { DEFAULT_CHECKPOINT } else { rest };
                self.call_and_show("checkpoint", &json!({"action": action, "name": name}))?;
                if action == "restore" {
                    self.level = 0;
                }
            }
            ":reset" => {
                self.call_and_show("reset-session", &json!({}))?;
                self.level = 0;
            }
            ":bt" => {
                self.call_and_show("get-backtrace", &json!({"max-frames": number.unwrap_or(DEFAULT_FRAMES)}))?;
            }
            ":frame" => {
                self.frame = number.unwrap_or(self.frame);
                self.call_and_show("get-backtrace", &json!({"from": self.frame, "max-frames": 1}))?;
            }
            ":locals" => self.show_locals(number.unwrap_or(self.frame))?,
            ":restart" => self.invoke_restart(rest)?,
            ":take" => {
                let params = number.map_or_else(|_| json!({}), |id| json!({"id": id}));
                let reply = self.request(ADOPT_HELD_METHOD, params)?;
                self.finish_evaluation(reply)?;
            }
            ":return" => {
                let arguments = json!({"frame": self.frame, "return": rest});
                self.run_tool("resume-from-frame", &arguments)?;
            }
            _ => {
                self.call_and_show("abort-evaluation", &json!({}))?;
                self.level = 0;
            }
        }
        Ok(false)
    }

    fn show_help(&mut self) -> Result<(), ReplError> {
        let mut text = String::new();
        for ReplCommand { name, arguments, summary } in &COMMANDS {
            _ = writeln!(text, "{:28} {summary}", format!("{name} {arguments}"));
        }
        text.push_str(
            "Anything else is evaluated; in the debugger, in frame 0 or the frame that :frame chose.\n\
             Tab completes. Ctrl-C interrupts the evaluation. Ctrl-C twice within a second replaces the image and restores \
             the session as --restore says (not with --attach or --no-supervisor).\n",
        );
        self.print(TextStyle::Plain, &text)
    }

    /// Evaluates code: form by form, or in the selected frame while an evaluation is held.
    fn evaluate(&mut self, code: &str) -> Result<(), ReplError> {
        if self.level == 0 {
            return self.evaluate_forms(code);
        }
        let arguments = with_timeout(json!({"frame": self.frame, "code": code}), self.timeout);
        let reply = self.call_tool("eval-in-frame", &arguments)?;
        if let RequestReply::Answer(answer) = &reply
            && reports_no_held_evaluation(answer)
        {
            // The hold has timed out, or another client has taken over or ended the evaluation.
            self.level = 0;
            self.print(
                TextStyle::Note,
                "; The REPL no longer holds the evaluation: the code is evaluated outside the evaluation's frames.\n",
            )?;
            return self.evaluate(code);
        }
        self.show_reply(reply)
    }

    /// Evaluates forms one by one and shows the result of each. In interactive use, stops at the first failure.
    fn evaluate_forms(&mut self, code: &str) -> Result<(), ReplError> {
        let mut rest = code;
        loop {
            let arguments = self.with_evaluation_options(json!({"code": rest}));
            let params = json!({"name": "evaluate-lisp", "arguments": arguments, "_meta": {ONE_FORM_KEY: true}});
            let reply = self.request("tools/call", params)?;
            let RequestReply::Answer(answer) = &reply else { return self.finish_evaluation(reply) };
            let (read, is_error) = (answer.content["read"].as_u64(), answer.is_error);
            let Some(read) = read.and_then(|read| usize::try_from(read).ok()) else {
                // `read` is the number of characters up to the end of the form. The number is missing if the code could not be
                // read or contained no further form.
                return if is_error { self.finish_evaluation(reply) } else { self.show_notices(&answer.content) };
            };
            self.finish_evaluation(reply)?;
            rest = rest.char_indices().nth(read).map_or("", |(at, _)| rest[at..].trim());
            if rest.is_empty() || self.interactive && is_error {
                break;
            }
        }
        let is_comment = rest.starts_with(';') && !rest.contains('\n');
        if rest.is_empty() || is_comment {
            return Ok(());
        }
        self.print(TextStyle::Note, &format!("; Not evaluated: {}\n", rest.replace('\n', "\n; ")))
    }

    /// Adds the time limit and the reaction to errors: a failed evaluation is held for debugging or aborted.
    fn with_evaluation_options(&self, arguments: Value) -> Value {
        let mut arguments = with_timeout(arguments, self.timeout);
        arguments["on-error"] = if self.holds_errors { "debug" } else { "abort" }.into();
        arguments
    }

    /// Invokes a restart. `text` has the restart's number or name, then Lisp expressions for its arguments.
    fn invoke_restart(&mut self, text: &str) -> Result<(), ReplError> {
        let (restart, values) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mut arguments = json!({"restart": restart});
        if !values.trim().is_empty() {
            arguments["values"] = values.trim().into();
        }
        self.run_tool("invoke-restart", &arguments)
    }

    /// Calls a tool that evaluates, and shows the result.
    fn run_tool(&mut self, tool: &str, arguments: &Value) -> Result<(), ReplError> {
        let reply = self.call_tool(tool, arguments)?;
        self.finish_evaluation(reply)
    }

    /// Updates the debugger level after a request that evaluates, and shows the reply.
    fn finish_evaluation(&mut self, reply: RequestReply) -> Result<(), ReplError> {
        match &reply {
            // The server refused the call, so a held evaluation stays held. The level changes only if the server says that
            // no evaluation is held.
            RequestReply::Answer(answer) if answer.content.get("refused").is_some() => {
                if reports_no_held_evaluation(answer) {
                    self.level = 0;
                }
            }
            RequestReply::Answer(answer) => {
                let is_held = answer.content["held"] == true;
                self.level = usize::from(is_held);
                // An answer without restarts reports a failed attempt to resume the evaluation, which is held as before.
                if !is_held || answer.text.contains(HELD_MARKER) {
                    self.frame = 0;
                }
            }
            // The interrupted code was the arguments of a restart, or the values for a frame to return.
            RequestReply::Interrupted { .. } if self.level > 0 && self.holds_evaluation()? => {}
            RequestReply::Interrupted { image_may_be_lost } => {
                self.level = 0;
                if self.owns_image && *image_may_be_lost {
                    let client = Arc::clone(&self.client);
                    self.show_recovery(&mut client.lock().unwrap_or_else(PoisonError::into_inner))?;
                }
            }
            RequestReply::Refused(_) => self.level = 0,
        }
        self.show_reply(reply)
    }

    /// Asks the server whether an evaluation is held for this REPL.
    fn holds_evaluation(&self) -> Result<bool, ReplError> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let arguments = json!({"max-frames": 1, "locals": true});
        let id = client.begin_call("get-backtrace", &arguments).map_err(|_| ReplError::ServerGone)?;
        // Only the variables of a held evaluation are live.
        Ok(await_answer(&mut client, id)?.is_some_and(|answer| answer.content["live"] == true))
    }

    /// Calls a tool that does not evaluate, and shows its answer.
    fn call_and_show(&mut self, tool: &str, arguments: &Value) -> Result<(), ReplError> {
        let reply = self.call_tool(tool, arguments)?;
        self.show_reply(reply)
    }

    /// Shows the local variables of a frame, one per line.
    fn show_locals(&mut self, frame: u64) -> Result<(), ReplError> {
        let mut reply = self.call_tool("get-backtrace", &json!({"from": frame, "max-frames": 1, "locals": true}))?;
        if let RequestReply::Answer(answer) = &mut reply
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
                lines.push(
                    "No local variables: the frame has none, or its code lacks debug information, as SBCL's own code does."
                        .to_owned(),
                );
            }
            answer.text = lines.join("\n");
        }
        self.show_reply(reply)
    }

    /// Calls a tool, shows its output as it arrives, and waits for the reply.
    fn call_tool(&mut self, tool: &str, arguments: &Value) -> Result<RequestReply, ReplError> {
        self.request("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// Sends a request that is answered like a tool call, shows output as it arrives, and waits for the reply.
    fn request(&mut self, method: &str, params: Value) -> Result<RequestReply, ReplError> {
        let client = Arc::clone(&self.client);
        let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
        // Events left over from the previous request, such as a late Ctrl-C, are dropped.
        while let Some(event) = client.next_event(Some(Duration::ZERO)) {
            if matches!(event, ClientEvent::Closed) {
                return Err(ReplError::ServerGone);
            }
        }
        let tool = params["name"].as_str().unwrap_or_default().to_owned();
        let id = client.send_for_person(method, params).map_err(|_| ReplError::ServerGone)?;
        let mut call = UnansweredCall { id, tool, shown: String::new() };
        loop {
            match client.next_event(None).unwrap_or(ClientEvent::Closed) {
                ClientEvent::Message(message) if message["params"]["progressToken"] == id => {
                    self.show_progress(&message["params"], &mut call)?;
                }
                ClientEvent::Message(message) => match response_to(message, id) {
                    Some(Ok(result)) => {
                        let mut answer = ToolAnswer::from_result(&result);
                        if answer.package.is_some() {
                            self.package.clone_from(&answer.package);
                        }
                        call.remove_shown_output(&mut answer.content);
                        return Ok(RequestReply::Answer(Box::new(answer)));
                    }
                    Some(Err(CallError::Refused(reason))) => return Ok(RequestReply::Refused(reason)),
                    Some(Err(_)) => return Err(ReplError::ServerGone),
                    None => {}
                },
                ClientEvent::Interrupted(at) => {
                    return self.interrupt(&mut client, call, CtrlC(at));
                }
                ClientEvent::Closed => return Err(ReplError::ServerGone),
            }
        }
    }

    /// Shows the text of a progress report of `call`, if the text continues the text that has been shown.
    fn show_progress(&mut self, params: &Value, call: &mut UnansweredCall) -> Result<(), ReplError> {
        if params["_meta"][OUTPUT_OFFSET_KEY] != call.shown.len() {
            return Ok(());
        }
        let message = params["message"].as_str().unwrap_or_default();
        call.shown.push_str(message);
        self.print(TextStyle::Plain, message)
    }

    /// Cancels a call and waits for it to end. A double press of Ctrl-C meanwhile replaces the image.
    fn interrupt(
        &mut self,
        client: &mut Client,
        mut call: UnansweredCall,
        mut ctrl_c: CtrlC,
    ) -> Result<RequestReply, ReplError> {
        let params = json!({"requestId": call.id, "reason": "Ctrl-C"});
        client.notify("notifications/cancelled", &params).map_err(|_| ReplError::ServerGone)?;
        let mut started = Instant::now();
        // The server answers `get-backtrace` once the cancelled evaluation has ended, or after some time with a notice
        // that the evaluation still runs.
        let mut question =
            client.begin_call("get-backtrace", &json!({"max-frames": 5})).map_err(|_| ReplError::ServerGone)?;
        let mut wait = INTERRUPT_NOTICE_DELAY;
        loop {
            match client.next_event(Some(wait.saturating_sub(started.elapsed()))) {
                Some(ClientEvent::Message(message)) if message["params"]["progressToken"] == call.id => {
                    self.show_progress(&message["params"], &mut call)?;
                }
                Some(ClientEvent::Message(message)) => match response_to(message, question) {
                    Some(Ok(result)) => {
                        let answer = ToolAnswer::from_result(&result);
                        if report::reports_pending_cancellation(&answer.text) {
                            let repeated = client.begin_call("get-backtrace", &json!({"max-frames": 5}));
                            question = repeated.map_err(|_| ReplError::ServerGone)?;
                            continue;
                        }
                        self.show_interrupted_output(client, &call)?;
                        self.print(TextStyle::Failure, "; Interrupted.\n")?;
                        let has_ended = answer.text.starts_with("Backtrace for CANCELLED")
                            && !answer.text.starts_with("Backtrace for CANCELLED (0 of 0 frames)");
                        if has_ended {
                            self.print(TextStyle::Note, &format!("{}\n", answer.text.trim_end()))?;
                        }
                        return Ok(RequestReply::Interrupted { image_may_be_lost: !has_ended });
                    }
                    // The server may not offer get-backtrace.
                    Some(Err(failure)) => {
                        self.show_interrupted_output(client, &call)?;
                        self.print(
                            TextStyle::Failure,
                            &format!("; Interrupting the evaluation. No backtrace: {failure}\n"),
                        )?;
                        return Ok(RequestReply::Interrupted { image_may_be_lost: true });
                    }
                    None => {}
                },
                Some(ClientEvent::Interrupted(at)) if ctrl_c.record_press(at) => {
                    self.replace_image(client)?;
                    return Ok(RequestReply::Interrupted { image_may_be_lost: false });
                }
                // Another single press only restarts the wait. The server already interrupts the evaluation once a second
                // until the evaluation has ended.
                Some(ClientEvent::Interrupted(_)) => (started, wait) = (Instant::now(), INTERRUPT_NOTICE_DELAY),
                Some(ClientEvent::Closed) => return Err(ReplError::ServerGone),
                None if wait == INTERRUPT_NOTICE_DELAY => {
                    wait = UNWIND_TIMEOUT;
                    let more = match self.workers(client).is_empty() {
                        true => "",
                        false => " Ctrl-C twice within a second replaces the image.",
                    };
                    self.print(TextStyle::Note, &format!("; Interrupting the evaluation.{more}\n"))?;
                }
                None => {
                    let whose = if self.owns_image { "" } else { ", for all clients" };
                    self.print(
                        TextStyle::Failure,
                        &format!("; The interrupted evaluation may still be running; :reset starts over{whose}.\n"),
                    )?;
                    return Ok(RequestReply::Interrupted { image_may_be_lost: false });
                }
            }
        }
    }

    /// Shows the notices and the output of an interrupted call, except the output that has been shown as it arrived.
    fn show_interrupted_output(&mut self, client: &mut Client, call: &UnansweredCall) -> Result<(), ReplError> {
        // The outcome of a resumed evaluation also has the output from before the hold, which was shown then.
        if ["invoke-restart", "resume-from-frame"].contains(&call.tool.as_str()) {
            return Ok(());
        }
        let id = client.begin_call("check-evaluation", &json!({"wait": 1})).map_err(|_| ReplError::ServerGone)?;
        let Some(mut answer) = await_answer(client, id)? else { return Ok(()) };
        let error = &answer.content["error"];
        // If the call began no evaluation, the answer is about an earlier evaluation, whose output has been shown.
        if error["type"] != CANCELLED || error["id"] == self.last_interruption {
            return Ok(());
        }
        self.last_interruption = error["id"].clone();
        call.remove_shown_output(&mut answer.content);
        self.show_output(&answer.content)
    }

    /// Kills the process that holds the image. The server starts another process and restores what it can; a reset would
    /// discard everything.
    fn replace_image(&mut self, client: &mut Client) -> Result<(), ReplError> {
        let workers = self.workers(client);
        if workers.is_empty() {
            let why = match (self.owns_image, self.is_supervised) {
                (false, _) => {
                    "the REPL is attached to a server that it did not start; :reset starts over, for all clients"
                }
                (true, false) => "Lisp runs in the server's own process (--no-supervisor), which :quit ends",
                (true, true) => "the server is already starting another image",
            };
            return self.print(TextStyle::Failure, &format!("; The image cannot be replaced from here: {why}.\n"));
        }
        for worker in workers {
            let _ = rustix::process::kill_process(worker, rustix::process::Signal::KILL);
        }
        self.print(TextStyle::Failure, "; The image was terminated.\n")?;
        self.show_recovery(client)
    }

    /// Shows the notices in the new image's first answer. The notices report the state that was restored or lost.
    fn show_recovery(&mut self, client: &mut Client) -> Result<(), ReplError> {
        self.level = 0;
        let id = client.begin_call("evaluate-lisp", &json!({"code": ""})).map_err(|_| ReplError::ServerGone)?;
        let Some(answer) = await_answer(client, id)? else { return Ok(()) };
        if answer.package.is_some() {
            self.package.clone_from(&answer.package);
        }
        self.show_notices(&answer.content)
    }

    /// Returns the child processes of the server that the REPL has started: the workers, which hold the image. Returns an
    /// empty list if the REPL is attached to a running server, or the server itself holds the image.
    fn workers(&self, client: &Client) -> Vec<rustix::process::Pid> {
        let is_replaceable = self.owns_image && self.is_supervised;
        client.server_pid().filter(|_| is_replaceable).map(workers_of).unwrap_or_default()
    }

    /// Shows the reply to a request.
    fn show_reply(&mut self, reply: RequestReply) -> Result<(), ReplError> {
        match reply {
            RequestReply::Interrupted { .. } => {
                self.failed = true;
                Ok(())
            }
            RequestReply::Refused(reason) => {
                self.failed = true;
                self.print(TextStyle::Failure, &format!("; {reason}\n"))
            }
            RequestReply::Answer(answer) => {
                self.failed |= answer.is_error || test_failures(&answer.content) > 0;
                self.show_answer(&answer)
            }
        }
    }

    /// Shows an answer: the result of an evaluation part by part, anything else as the tool's text.
    fn show_answer(&mut self, answer: &ToolAnswer) -> Result<(), ReplError> {
        let ToolAnswer { text, content, is_error, .. } = answer;
        if content.get("refused").is_some() {
            return self.print(TextStyle::Failure, &format!("; {text}\n"));
        }
        if !content["stdout"].is_string() {
            return self.print(if *is_error { TextStyle::Failure } else { TextStyle::Plain }, &format!("{text}\n"));
        }
        self.show_output(content)?;
        // The following parts are found by their markers in the text. Program output cannot contain these markers, since
        // the server escapes them there.
        if content.get("loaded").is_some()
            && let Some(loaded) = text.split("\n\n").find(|part| !part.starts_with('['))
        {
            self.print(TextStyle::Plain, &format!("{loaded}\n"))?;
        }
        if content.get("tests").is_some() {
            return self.print(TextStyle::Plain, &format!("{text}\n"));
        }
        if let Some(warnings) = section(text, "[warnings]") {
            self.print(TextStyle::Warning, &format!("{warnings}\n"))?;
        }
        if let Some(at) = find_marker(text, "[ERROR] ") {
            let (error, debugger) = match text[at..].split_once(HELD_MARKER) {
                Some((error, restarts)) => (error, restarts.trim_end()),
                None => (&text[at..], ""),
            };
            let (message, frames) = error.split_once("\n\n[Backtrace]\n").unwrap_or((error, ""));
            self.print(TextStyle::Failure, &format!("{message}\n"))?;
            self.print(TextStyle::Note, &format!("{frames}\n"))?;
            if !debugger.is_empty() {
                self.print(
                    TextStyle::Plain,
                    &format!("Restarts (enter a number to invoke one; :help lists other commands):\n{debugger}\n"),
                )?;
            }
            return Ok(());
        }
        let values = content["values"].as_array().map_or(&[][..], Vec::as_slice);
        for value in values.iter().filter_map(Value::as_str) {
            self.print(TextStyle::Plain, &format!("=> {value}\n"))?;
        }
        if values.is_empty() && content.get("loaded").is_none() && content.get("inBackground").is_none() {
            self.print(TextStyle::Plain, "; No values\n")?;
        }
        Ok(())
    }

    /// Shows the notices and the output in the content of an answer.
    fn show_output(&mut self, content: &Value) -> Result<(), ReplError> {
        self.show_notices(content)?;
        let [background, stdout, stderr] =
            ["background", "stdout", "stderr"].map(|part| content[part].as_str().unwrap_or_default());
        self.print(TextStyle::Plain, background)?;
        self.print(TextStyle::Plain, stdout)?;
        if !stdout.is_empty() && !stdout.ends_with('\n') {
            self.print(TextStyle::Plain, "\n")?;
        }
        if !stderr.is_empty() {
            let stderr = if stderr.ends_with('\n') { stderr.to_owned() } else { format!("{stderr}\n") };
            self.print_stderr(&stderr)?;
        }
        Ok(())
    }

    /// Shows the notices of the server.
    fn show_notices(&mut self, content: &Value) -> Result<(), ReplError> {
        for notice in content["notices"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            self.print(TextStyle::Note, &format!("; {}\n", notice.replace('\n', "\n; ")))?;
        }
        Ok(())
    }

    /// Prints the code's stderr output: to stderr, or, in interactive use, among the other output.
    fn print_stderr(&mut self, text: &str) -> Result<(), ReplError> {
        if self.interactive {
            return self.print(TextStyle::Warning, text);
        }
        io::stdout().flush()?;
        let _ = io::stderr().write_all(text.as_bytes());
        Ok(())
    }

    fn print(&mut self, style: TextStyle, text: &str) -> Result<(), ReplError> {
        let mut stdout = io::stdout().lock();
        let code = match style {
            TextStyle::Plain => "",
            TextStyle::Note => "2",
            TextStyle::Warning => "33",
            TextStyle::Failure => "31",
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

/// Waits for the answer to call `id`. Returns `None` if the server refuses the call, or if Ctrl-C ends the wait: other
/// evaluations may delay the answer.
fn await_answer(client: &mut Client, id: u64) -> Result<Option<ToolAnswer>, ReplError> {
    loop {
        match client.next_event(None).unwrap_or(ClientEvent::Closed) {
            ClientEvent::Message(message) => match response_to(message, id) {
                Some(Ok(result)) => return Ok(Some(ToolAnswer::from_result(&result))),
                Some(Err(CallError::Refused(_))) => return Ok(None),
                Some(Err(_)) => return Err(ReplError::ServerGone),
                None => {}
            },
            ClientEvent::Interrupted(_) => return Ok(None),
            ClientEvent::Closed => return Err(ReplError::ServerGone),
        }
    }
}

/// Returns true if a debugger tool was refused because no evaluation is held.
fn reports_no_held_evaluation(answer: &ToolAnswer) -> bool {
    answer.content.get("refused").is_some() && answer.text.starts_with("No evaluation is held")
}

/// Returns the most similar command, if one is similar enough.
fn similar_command(name: &str) -> Option<&'static str> {
    let similar = COMMANDS.iter().map(|command| (strsim::jaro_winkler(name, command.name), command.name));
    let best = similar.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(similarity, _)| *similarity > MIN_SIMILARITY).map(|(_, name)| name)
}

/// Returns the byte index of the first line that begins with `marker` and is preceded by a blank line. The first line of
/// `text` needs no blank line before it.
fn find_marker(text: &str, marker: &str) -> Option<usize> {
    if text.starts_with(marker) { Some(0) } else { text.find(&format!("\n\n{marker}")).map(|at| at + 2) }
}

/// Returns the lines of a section: from the line after the section's marker up to the next blank line.
fn section<'a>(text: &'a str, marker: &str) -> Option<&'a str> {
    let lines = &text[find_marker(text, &format!("{marker}\n"))? + marker.len() + 1..];
    Some(lines.split("\n\n").next().unwrap_or(lines))
}

/// Returns the child processes of `parent`. The children of a supervisor are its workers, which hold Lisp.
fn workers_of(parent: u32) -> Vec<rustix::process::Pid> {
    let parent = i32::try_from(parent).ok().and_then(rustix::process::Pid::from_raw);
    parent.map(crate::os::processes::children).unwrap_or_default()
}

/// Runs a REPL on its own image or on the image of a running server. Returns the exit status.
pub(super) fn start(
    attach: Option<Option<String>>,
    given: Vec<OsString>,
    shared: bool,
    timeout: Option<f64>,
    stdio: Stdio,
) -> i32 {
    let run_repl = || {
        restore_stdio(stdio).map_err(|error| format!("cannot set up stdin and stdout: {error}"))?;
        let attached_to = attach.clone().map(Option::unwrap_or_default);
        let is_supervised = !given.iter().any(|option| option == "--no-supervisor");
        let options = ReplOptions { attached_to, shared, is_supervised, timeout };
        run(connect_or_start(attach, given)?, &options)
    };
    run_repl().unwrap_or_else(|reason| {
        super::print_to_stderr(&format!("sbcl-mcp repl: {reason}"));
        CANNOT_RUN
    })
}

/// Restores stdin and stdout, which [`Stdio::take`] has moved so that Lisp cannot disturb them. Here, Lisp runs in another
/// process.
fn restore_stdio(stdio: Stdio) -> io::Result<()> {
    rustix::stdio::dup2_stdin(&stdio.input)?;
    rustix::stdio::dup2_stdout(&stdio.output)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_twice_within_a_second_is_a_double_press() {
        let started = Instant::now();
        let mut ctrl_c = CtrlC(started);
        let presses =
            [(1_001, false), (11_000, false), (12_000, true), (12_000, true), (13_001, false), (13_500, true)];
        for (milliseconds, expected) in presses {
            assert_eq!(
                ctrl_c.record_press(started + Duration::from_millis(milliseconds)),
                expected,
                "after {milliseconds} ms"
            );
        }
    }
}
