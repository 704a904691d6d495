//! The command line as a person uses it.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::client::{Scratch, binary, short_limit};

fn run(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(binary())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Writing fails if the command exits without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

#[test]
fn version_and_help_go_to_stdout() {
    let version = run(&["--version"], "");
    assert_eq!(stdout(&version), format!("sbcl-mcp {} (SBCL {})\n", sbcl::VERSION, sbcl::SBCL_VERSION));
    assert!(version.status.success());
    for arguments in [&["--help"][..], &["serve", "--help"], &["eval", "--help"]] {
        let help = run(arguments, "");
        assert!(stdout(&help).contains("--timeout <SECONDS>"), "{}", stdout(&help));
        assert!(help.status.success());
    }
}

#[test]
fn eval_prints_the_report_and_exits_with_1_on_an_error() {
    let fine = run(&["eval", "(+ 1 2)"], "");
    assert_eq!((stdout(&fine), fine.status.code()), ("=> 3\n", Some(0)));
    let failed = run(&["eval", "(/ 1 0)"], "");
    assert!(stdout(&failed).starts_with("[ERROR] DIVISION-BY-ZERO\n"), "{}", stdout(&failed));
    assert_eq!(failed.status.code(), Some(1));
    let from_stdin = run(&["eval", "-"], "(+ 1\n 2)\n");
    assert_eq!((stdout(&from_stdin), from_stdin.status.code()), ("=> 3\n", Some(0)));
    let in_pieces = run(&["eval", "--timeout", "5", "(+ 1", "; a comment ends with its piece", "2)"], "");
    assert_eq!(stdout(&in_pieces), "=> 3\n");
    let limited = run(&["eval", "--timeout", "0.2", "(loop)"], "");
    assert!(stdout(&limited).starts_with("[ERROR] TIMEOUT\n"), "{}", stdout(&limited));
    assert_eq!(limited.status.code(), Some(1));
    let limit = short_limit().to_string();
    let stuck = run(&["eval", "--timeout", &limit, "(sb-sys:without-interrupts (loop))"], "");
    assert!(stdout(&stuck).starts_with("[ERROR] TIMEOUT\n"), "{}", stdout(&stuck));
    assert!(stdout(&stuck).contains("The Lisp image did not respond to an interrupt ("), "{}", stdout(&stuck));
    assert_eq!(stuck.status.code(), Some(1));
}

#[test]
fn eval_words_refused_exits_and_running_threads_for_a_person() {
    for (code, expected) in [
        ("(sb-ext:exit)", "\nEXIT was called, but cannot end the process.\n"),
        (
            "(sb-ext:save-lisp-and-die \"core\")",
            "\nSAVE-LISP-AND-DIE was called, but cannot end the process. To build a core, start another SBCL.\n",
        ),
        (
            "(progn (sb-thread:make-thread #'sleep :arguments '(600) :name \"sleeper\") 1)",
            "[notice]\nStill running at the end: thread sleeper.\n",
        ),
    ] {
        let output = run(&["eval", code], "");
        let text = stdout(&output);
        assert!(text.contains(expected) && !text.contains("reset-session"), "{text}");
        assert!(!text.contains("Later answers"), "{text}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn eval_exits_with_3_when_the_report_cannot_be_written() {
    for code in ["(+ 1 2)", "(/ 1 0)"] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(binary()).args(["eval", code]).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(3));
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(complaint.contains("cannot write the report to stdout: No space left on device"), "{complaint}");
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in [
        &["eval"][..],
        &["no-such-command"],
        &["--no-such-option"],
        &["--timeout", "-1"],
        &["--timeout", "soon"],
        &["--max-output", "0"],
        &["--heap", "much"],
        &["--log", "sbcl=loud"],
    ] {
        let output = run(arguments, "");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(stdout(&output), "");
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn sbcl_options_are_refused_with_a_one_line_hint() {
    for (arguments, option) in [
        (&["--noinform", "--eval", "1"][..], "--noinform"),
        (&["--core", "sbcl.core", "--eval", "1"], "--eval"),
        (&["--script", "x.lisp"], "--script"),
        (&["--load", "x.lisp"], "--load"),
        (&["--non-interactive"], "--non-interactive"),
        (&["--no-userinit"], "--no-userinit"),
        (&["--dynamic-space-size=1GB"], "--dynamic-space-size"),
        (&["eval", "--eval", "1"], "--eval"),
    ] {
        let output = run(arguments, "");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), stdout(&output)), (Some(2), ""), "{arguments:?}");
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
        assert!(complaint.contains(&format!("it has no option {option}. ")), "{complaint}");
        for advice in ["`sbcl-mcp eval CODE`", "`sbcl-mcp load FILE`", "`--heap` and `--control-stack`"] {
            assert!(complaint.contains(advice), "{complaint}");
        }
    }
    // After `--`, code for `eval` may look like an option.
    assert_eq!(stdout(&run(&["eval", "--", "1"], "")), "=> 1\n");
}

#[test]
#[cfg(unix)]
fn failure_to_start_lisp_threads_is_reported() {
    let home = Scratch::new();
    for (init, reason) in [
        (
            "(sb-ext:without-package-locks \
             (sb-int:encapsulate (find-symbol \"START-LANE\" \"SBCL-HOST/EMBEDDING\") 'test \
             (lambda (f lane) f (error \"no lane ~D\" lane))))",
            "SIMPLE-ERROR: no lane 0",
        ),
        (
            "(sb-thread:abort-thread)",
            "a non-local exit ended the start, for instance (sb-thread:abort-thread) in ~/.sbclrc",
        ),
    ] {
        std::fs::write(home.join(".sbclrc"), init).unwrap();
        for (arguments, status) in
            [(&["eval", "--user-init", "1"][..], 3), (&["serve", "--no-supervisor", "--user-init"], 1)]
        {
            let output =
                Command::new(binary()).args(arguments).env("HOME", &home).stdin(Stdio::null()).output().unwrap();
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert_eq!((output.status.code(), stdout(&output)), (Some(status), ""), "{complaint}");
            let expected =
                format!("sbcl-mcp cannot start: SBCL has booted, but the image could not be prepared: {reason}");
            assert!(complaint.contains(&expected), "{complaint}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn too_low_address_space_limit_is_reported_with_its_size() {
    let program = binary();
    let script = format!("ulimit -v 4000000; '{program}' eval 1; '{program}' eval --heap 1G --control-stack 64M 1");
    let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(stdout(&output), "=> 1\n");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("address space") && complaint.contains("3906 MiB"), "{complaint}");
}

#[test]
#[cfg(target_os = "linux")]
fn every_command_runs_with_a_64_kilobyte_stack_limit() {
    for (arguments, expected) in [
        ("--version", sbcl::VERSION),
        ("eval '(reduce (function *) (list 6 7))'", "=> 42\n"),
        ("doctor --heap 1G", "\nEverything works.\n"),
        ("serve --no-supervisor </dev/null", ""),
    ] {
        assert_runs_with_small_stack(arguments, expected);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn confined_eval_runs_with_a_64_kilobyte_stack_limit() {
    assert_runs_with_small_stack("eval --read-only --no-network '(+ 1 2)'", "=> 3\n");
}

/// Runs a command with a stack limit of 64 kilobytes. The command must succeed and print `expected`.
#[cfg(target_os = "linux")]
fn assert_runs_with_small_stack(arguments: &str, expected: &str) {
    let script = format!("ulimit -s 64; exec '{}' {arguments}", binary());
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success() && stdout(&output).contains(expected), "{arguments}: {output:?}");
}

/// With too little address space the command names the limit in one line; with enough it works.
#[test]
#[cfg(target_os = "linux")]
fn eval_under_any_address_space_limit_works_or_names_the_limit() {
    let program = binary();
    let mut worked = Vec::new();
    // In MiB. With less, the system cannot even load the program.
    for limit in [300, 600, 800, 900, 1000, 1100, 1200, 1300, 1370, 1390, 1500, 1800, 2500] {
        let script =
            format!("ulimit -v {}; exec '{program}' eval --heap 256M --control-stack 16M '(+ 1 2)'", limit << 10);
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            assert_eq!((stdout(&output), &*complaint), ("=> 3\n", ""), "{limit}");
            worked.push(limit);
        } else {
            let told = format!("this process is limited to {limit} MiB: reduce the options");
            assert_eq!(output.status.code(), Some(3), "{limit}: {complaint}");
            assert!(complaint.lines().count() == 1 && complaint.contains(&told), "{limit}: {complaint}");
            assert!(worked.is_empty(), "{worked:?} was enough, {limit} is not");
        }
    }
    assert!(worked.contains(&1500), "{worked:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn eval_read_only_denies_writing_files() {
    let code = "(with-open-file (s \"/proc/self/comm\" :direction :output :if-exists :append) (write-line \"x\" s))";
    assert_eq!(run(&["eval", code], "").status.code(), Some(0));
    let output = run(&["eval", "--read-only", "--no-network", code], "");
    assert!(stdout(&output).contains("Permission denied"), "{}", stdout(&output));
}

#[test]
fn invalid_heap_stack_or_core_exits_with_3() {
    for (arguments, expected) in [
        (&["--heap", "5"][..], "heap 5 is out of range; allowed: 128M to 64G"),
        (&["--heap", "65G"], "heap 65G is out of range; allowed: 128M to 64G"),
        (&["--control-stack", "1025K"], "control-stack 1025K is out of range; allowed: 2M to 4G"),
        (&["--core", "/nowhere"], "cannot use the SBCL core /nowhere/sbcl.core: No such file or directory"),
        (&["--core", "/dev/null"], "cannot use the SBCL core /dev/null/sbcl.core: Not a directory"),
    ] {
        let output = run(&[&["eval"], arguments, &["1"]].concat(), "");
        assert_eq!(output.status.code(), Some(3), "{arguments:?}");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(complaint.contains(expected), "{complaint}");
    }
}

/// Returns the lines of a `doctor` report that begin with `word`, as pairs of check and finding.
fn found(report: &Output, word: &str) -> Vec<(String, String)> {
    let lines = stdout(report).lines().filter_map(|line| line.strip_prefix(word));
    lines.map(|line| (line[..18].trim().to_owned(), line[18..].trim().to_owned())).collect()
}

#[test]
fn doctor_reports_versions_limits_and_that_everything_works() {
    let report = run(&["doctor", "--heap", "1G"], "");
    assert_eq!(report.status.code(), Some(0), "{}", stdout(&report));
    assert!(found(&report, "FAILS").is_empty() && stdout(&report).ends_with("\n\nEverything works.\n"));
    let fine = found(&report, "ok   ");
    let is = |what: &str, finding: &str| fine.iter().any(|(thing, text)| thing == what && text.contains(finding));
    assert!(is("versions", &format!("sbcl-mcp {}, SBCL {}, MCP ", sbcl::VERSION, sbcl::SBCL_VERSION)));
    assert!(is("versions", "2025-11-25") && is("binary", &format!("{} (", binary())));
    assert!(is("address space", "for a heap of 1.0 GiB") && is("evaluation", "(+ 1 2) => 3 in "));
    assert!(is("ASDF", "compiled files below /"), "{}", stdout(&report));
    for what in ["start", "open files", "core"] {
        assert!(is(what, ""), "{what}: {}", stdout(&report));
    }
    #[cfg(target_os = "linux")]
    assert!(is("/proc", "mounted") && is("overcommit", "vm.overcommit_memory is "));
}

#[test]
#[cfg(target_os = "linux")]
fn doctor_reports_failures_with_a_working_remedy() {
    let program = binary();
    let script = format!("ulimit -v 4000000; exec '{program}' doctor");
    let report = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(report.status.code(), Some(1));
    let fails = found(&report, "FAILS");
    let things: Vec<_> = fails.iter().map(|(thing, _)| thing.as_str()).collect();
    assert_eq!(things, ["address space", "start"], "{}", stdout(&report));
    assert!(fails[1].1.contains("SBCL needs 10880 MiB of address space"), "{}", fails[1].1);
    assert!(stdout(&report).ends_with("\n\n2 checks failed.\n"));
    // The remedy works.
    let (_, remedy) = stdout(&report).split_once("-> start the server with ").unwrap();
    let (remedy, _) = remedy.split_once(',').unwrap();
    let script = format!("ulimit -v 4000000; exec '{program}' doctor {remedy}");
    let report = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(report.status.code(), Some(0), "{remedy}: {}", stdout(&report));
    let report = Command::new("sh").args(["-c", &format!("ulimit -f 8; exec '{program}' doctor")]).output().unwrap();
    assert_eq!(found(&report, "FAILS")[0].0, "file size", "{}", stdout(&report));
}

#[test]
#[cfg(unix)]
fn doctor_reports_unwritable_directories_missing_home_and_init_file() {
    let nowhere = std::path::Path::new("/dev/null/home");
    let doctor = || {
        let mut command = Command::new(binary());
        command.args(["doctor", "--heap", "1G"]).stdin(Stdio::null());
        command
    };
    for (variable, value, what) in [
        ("TMPDIR", "/dev/null/tmp", "TMPDIR"),
        ("TMPDIR", "/proc", "TMPDIR"),
        ("XDG_STATE_HOME", "/proc", "checkpoints"),
    ] {
        let report = doctor().env(variable, value).output().unwrap();
        let fails = found(&report, "FAILS");
        assert_eq!((report.status.code(), fails.len()), (Some(1), 1), "{}", stdout(&report));
        assert!(fails[0].0 == what && fails[0].1.contains("is not writable: "), "{fails:?}");
        assert!(stdout(&report).contains(&format!("-> set {variable} to a writable directory\n")));
    }
    // Without a home directory, all files go to another directory.
    for home in [Some(nowhere), None] {
        let mut command = doctor();
        command
            .env_remove("XDG_STATE_HOME")
            .env_remove("XDG_CACHE_HOME")
            .env_remove("HOME")
            .envs(home.map(|home| ("HOME", home)));
        let report = command.output().unwrap();
        assert_eq!(report.status.code(), Some(0), "{}", stdout(&report));
        if home.is_some() {
            let notes = found(&report, "note ");
            let is = |what: &str, text: &str| notes.iter().any(|(thing, found)| thing == what && found.contains(text));
            assert!(is("home", "/dev/null/home is not a directory") && is("ASDF", "sbcl-mcp-"), "{}", stdout(&report));
            assert!(stdout(&report).contains("set XDG_CACHE_HOME, without which"), "{}", stdout(&report));
        }
    }
    let beside = "(:output-translations :ignore-inherited-configuration :disable-cache)";
    let report = doctor().env("ASDF_OUTPUT_TRANSLATIONS", beside).output().unwrap();
    let fine = found(&report, "ok   ");
    let is_beside =
        |(what, text): &(String, String)| what == "ASDF" && text.ends_with("compiled files beside their sources");
    assert!(fine.iter().any(is_beside), "{}", stdout(&report));
    for (value, expected) in [("", "is not set: "), ("run", "is not an absolute path: ")] {
        let report = doctor().env("XDG_RUNTIME_DIR", value).output().unwrap();
        let notes = found(&report, "note ");
        let begin = format!("XDG_RUNTIME_DIR {expected}");
        assert!(notes.iter().any(|(what, text)| what == "runtime" && text.starts_with(&begin)), "{notes:?}");
    }
    let init = Scratch::new();
    std::fs::write(init.join(".sbclrc"), "#-quicklisp (when nil (load \"quicklisp/setup.lisp\"))").unwrap();
    let report = doctor().env("HOME", &init).output().unwrap();
    let notes = found(&report, "note ");
    assert!(notes.iter().any(|(what, text)| what == "init file" && text.contains("mentions quicklisp")), "{notes:?}");
    let report = doctor().arg("--user-init").env("HOME", &init).output().unwrap();
    assert!(stdout(&report).contains("is loaded (--user-init)"), "{}", stdout(&report));
}

#[test]
#[cfg(target_os = "linux")]
fn start_on_a_terminal_prints_the_client_configuration() {
    // `script` provides a terminal and forwards the output.
    let output = Command::new("script").args(["-qec", binary(), "/dev/null"]).stdin(Stdio::null()).output().unwrap();
    let text = stdout(&output).replace('\r', "");
    assert!(text.contains(&format!("sbcl-mcp {} (SBCL {}): ", sbcl::VERSION, sbcl::SBCL_VERSION)), "{text}");
    let configuration = text.lines().find(|line| line.contains("mcpServers")).unwrap();
    let configuration: serde_json::Value = serde_json::from_str(configuration).unwrap();
    assert_eq!(configuration["mcpServers"]["sbcl"], serde_json::json!({"command": binary(), "args": []}));
    assert!(text.contains(&format!("claude mcp add --scope user sbcl -- {}\n", binary())), "{text}");
}

/// Returns the option and command names in a command's help.
fn words_of_help(arguments: &[&str]) -> Vec<String> {
    let help = run(&[arguments, &["--help"]].concat(), "");
    let name = |word: &str| word.split(['[', '=']).next().unwrap_or_default().to_owned();
    let word = |line: &str| line.split_whitespace().find(|word| word.starts_with("--")).map(name);
    stdout(&help).lines().filter(|line| line.trim_start().starts_with('-')).filter_map(word).collect()
}

#[test]
fn manual_pages_name_every_option_in_the_help() {
    let directory = Scratch::new();
    let path = directory.to_str().unwrap();
    assert!(run(&["man", path], "").status.success());
    for (page, command) in [("sbcl-mcp.1", &[][..]), ("sbcl-mcp-eval.1", &["eval"]), ("sbcl-mcp-check.1", &["check"])] {
        let text = std::fs::read_to_string(directory.join(page)).unwrap();
        let plain = text.replace("\\-", "-");
        assert!(text.contains(&format!(".TH {}", page.trim_end_matches(".1"))), "{text}");
        for option in words_of_help(command) {
            assert!(plain.contains(&option), "{option} is not in {page}");
        }
    }
    // Hidden commands have no manual page, and no page mentions a hidden option.
    let mut pages: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path()).collect();
    pages.sort();
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for hidden in ["worker", "watch\\-interval", "completions"] {
            assert!(!text.contains(hidden), "{hidden} in {}", page.display());
        }
    }
    let file = run(&["man", "/dev/null/pages"], "");
    assert_eq!(file.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&file.stderr).starts_with("sbcl-mcp cannot write the manual pages to "));
}

#[test]
fn shell_completions_contain_every_option_in_the_help() {
    for shell in ["bash", "zsh", "fish"] {
        let completions = run(&["completions", shell], "");
        assert!(completions.status.success());
        let text = stdout(&completions);
        for option in [words_of_help(&[]), words_of_help(&["check"])].concat() {
            assert!(text.contains(option.trim_start_matches('-')), "{option} is not in those of {shell}");
        }
        for hidden in ["watch-interval", "worker", "probe"] {
            assert!(!text.contains(hidden), "{hidden} in those of {shell}");
        }
    }
    // Runs the completions as bash does.
    let program = binary();
    let script = format!(
        "source <({program} completions bash); COMP_WORDS=(sbcl-mcp --struct); COMP_CWORD=1; \
         \"$(complete -p sbcl-mcp | sed 's/.*-F \\([^ ]*\\).*/\\1/')\" sbcl-mcp --struct sbcl-mcp; \
         echo \"${{COMPREPLY[@]}}\""
    );
    let completed = Command::new("bash").args(["--norc", "-c", &script]).output().unwrap();
    assert_eq!(stdout(&completed), "--structured-content\n", "{completed:?}");
}
