//! Plugins written in Lisp, with host functions, reloading and time limits: `cargo run --example plugin_host`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sbcl::{Error, Function, Lisp};

/// A plugin that turns text into text. It may call `host:log`.
const SHOUT: &str = "(in-package :plugins) (define-plugin shout (text) (host:log \"shouting\") (string-upcase text))";
const BROKEN: &str = "(in-package :plugins) (define-plugin shout (text) (elt text 1000))";
const ENDLESS: &str = "(in-package :plugins) (define-plugin shout (text) (loop while text))";

struct Host {
    lisp: Lisp,
    run: Function,
    log: Arc<Mutex<Vec<String>>>,
}

impl Host {
    fn new() -> Result<Self, Error> {
        let lisp = Lisp::builder().boot()?;
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = log.clone();
        lisp.define("host:log", "Keep LINE.", move |line: String| {
            lines.lock().map(|mut lines| lines.push(line)).map_err(|_| "the log is gone")
        })?;
        lisp.load_str(
            "(defpackage :plugins (:use :cl) (:export #:run))
             (in-package :plugins)
             (defvar *plugins* (make-hash-table :test 'equal))
             (defmacro define-plugin (name (text) &body body)
               `(setf (gethash ,(string-downcase name) *plugins*) (lambda (,text) ,@body)))
             (defun run (name text) (funcall (gethash name *plugins*) text))",
        )?;
        let run = lisp.with_timeout(Duration::from_millis(200)).function("plugins:run")?;
        Ok(Self { lisp, run, log })
    }

    /// Runs a plugin on `text`. A plugin that fails or does not end does not harm the host.
    fn run(&self, plugin: &str, text: &str) -> Result<String, Error> {
        let limited = self.lisp.with_timeout(Duration::from_millis(200));
        limited.enter(|_| self.run.call((plugin, text)))
    }
}

fn main() -> Result<(), Error> {
    let host = Host::new()?;
    host.lisp.load_str(SHOUT)?;
    println!("{}", host.run("shout", "hello")?);
    for plugin in [BROKEN, ENDLESS] {
        host.lisp.load_str(plugin)?;
        println!("{}", host.run("shout", "hello").unwrap_err());
    }
    // The repaired plugin is loaded while the host runs.
    host.lisp.load_str(SHOUT)?;
    println!("{}", host.run("shout", "again")?);
    println!("{:?}", host.log.lock().map(|lines| lines.clone()).unwrap_or_default());
    Ok(())
}
