//! The programs that a build needs. The programs are found and tested before any stage is built.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::{Error, IoContext};
use crate::platform::Platform;
use crate::settings::Settings;
use crate::{files, process};

/// Time limit for each run of the compiler that identifies or tests it, and for the program that tests the emulator.
const COMPILER_TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Names of operating systems and their installation commands, in the order of [`Tool::packages`].
const SYSTEMS: [(&str, &str); 4] = [
    ("Debian, Ubuntu", "apt-get install"),
    ("Fedora", "dnf install"),
    ("Arch", "pacman -S --needed"),
    ("macOS", "brew install"),
];

/// The command that installs the compiler and its tools on macOS. In [`Tool::packages`], this command takes the place of
/// a package.
const XCODE_INSTALL: &str = "xcode-select --install";

/// A required program and its alternatives.
struct Tool {
    /// The program's name in messages.
    name: &'static str,
    /// The alternative commands, one of which must exist.
    commands: Vec<String>,
    /// The package that contains the program, for each of [`SYSTEMS`]; empty if the system always has the program.
    packages: [&'static str; 4],
}

impl Tool {
    /// Returns the tool's name and, unless the name contains it, the command, which an environment variable may name.
    fn description(&self) -> String {
        match self.commands.first() {
            Some(command) if !self.name.contains(command.as_str()) => format!("{command} as {}", self.name),
            _ => self.name.to_owned(),
        }
    }
}

/// The tools on this machine that build for a platform.
#[derive(Debug, Clone)]
pub(crate) struct Toolchain {
    /// The platform to build for.
    pub(crate) platform: Platform,
    /// The command of the C compiler for the platform, split at spaces.
    pub(crate) compiler: Vec<String>,
    /// The command that starts the bootstrapping Lisp.
    pub(crate) bootstrap: String,
    /// Maximum number of commands that run in parallel.
    pub(crate) jobs: usize,
}

impl Toolchain {
    /// Chooses the C compiler for the platform and the bootstrapping Lisp. Fails without a C compiler, because the keys of
    /// all stages depend on it.
    pub(crate) fn choose(settings: &Settings, platform: &Platform) -> Result<Self, Error> {
        let (named, default) = if platform.is_host() {
            (&settings.compiler, "cc".to_owned())
        } else {
            (&settings.cross_compiler, platform.tool("gcc"))
        };
        let compiler = named.as_ref().unwrap_or(&default);
        let toolchain = Self {
            platform: platform.clone(),
            compiler: compiler.split_whitespace().map(str::to_owned).collect(),
            bootstrap: bootstrap_command(&settings.bootstrap),
            jobs: settings.jobs,
        };
        if !files::is_program(toolchain.compiler_program()) {
            // Report all missing tools at once, rather than the compiler now and the other tools in the next build.
            check_tools(&toolchain.tools(), files::is_program)?;
        }
        Ok(toolchain)
    }

    /// Returns a string that identifies the C compiler: its command, version and target machine.
    pub(crate) fn identity(&self) -> Result<String, Error> {
        let ask = |option: &str| {
            process::run_with_timeout(COMPILER_TEST_TIMEOUT, self.compiler_command().arg(option))
                .map_err(|output| self.broken_compiler_error(&format!("fails with the option {option}"), output))
        };
        Ok(format!("{:?} {} {}", self.compiler, ask("--version")?, ask("-dumpmachine")?))
    }

    /// Checks that all tools of a build exist, that the compiler works, and, for another machine, that the emulator works.
    /// `scratch` is a directory for the compiler's output. If tools are missing, the error names all of them and the
    /// commands that install them.
    pub(crate) fn check(&self, scratch: &Path) -> Result<(), Error> {
        check_tools(&self.tools(), files::is_program)?;
        let probe = self.try_compiler(scratch)?;
        if self.platform.is_host() { Ok(()) } else { self.try_emulator(&probe) }
    }

    /// Returns a command that runs the C compiler.
    pub(crate) fn compiler_command(&self) -> Command {
        let mut command = process::clean_command(self.compiler_program());
        command.args(self.compiler.iter().skip(1));
        command
    }

    /// Returns the command that strips symbols from a library.
    pub(crate) fn strip(&self) -> String {
        if self.platform.is_host() { "strip".to_owned() } else { self.platform.tool("strip") }
    }

    fn compiler_program(&self) -> &str {
        self.compiler.first().map_or("cc", String::as_str)
    }

    /// Compiles a small program and returns its path.
    // Often a compiler is installed without the C library's headers, so the probe includes a header.
    fn try_compiler(&self, scratch: &Path) -> Result<PathBuf, Error> {
        let (source, probe) = (scratch.join("probe.c"), scratch.join("probe"));
        let program = "#include <stdio.h>\nint main(void) { return puts(\"\") < 0; }\n";
        std::fs::write(&source, program).context("writing", &source)?;
        let mut command = self.compiler_command();
        command.arg(&source).arg("-o").arg(&probe);
        process::run_with_timeout(COMPILER_TEST_TIMEOUT, &mut command)
            .map_err(|output| self.broken_compiler_error("cannot build a program that includes <stdio.h>", output))?;
        Ok(probe)
    }

    fn try_emulator(&self, probe: &Path) -> Result<(), Error> {
        let mut command = process::cleaned(self.platform.command(probe));
        process::run_with_timeout(COMPILER_TEST_TIMEOUT, &mut command)
            .map(|_| ())
            .map_err(|output| Error::BrokenEmulator { target: self.platform.to_string(), output })
    }

    /// Returns the error of a compiler that does not work. `problem` is worded to follow the compiler's command.
    fn broken_compiler_error(&self, problem: &str, output: String) -> Error {
        Error::BrokenCompiler {
            compiler: self.compiler.join(" "),
            problem: problem.to_owned(),
            output,
            help: install_help(&[&self.compiler_tool()]),
        }
    }

    fn compiler_tool(&self) -> Tool {
        if self.platform.is_host() {
            let packages = ["build-essential", "gcc glibc-devel", "base-devel", XCODE_INSTALL];
            return tool("a C compiler (cc, or the command in CC)", &[self.compiler_program()], packages);
        }
        let packages =
            ["gcc-aarch64-linux-gnu libc6-dev-arm64-cross", "gcc-aarch64-linux-gnu", "aarch64-linux-gnu-gcc", ""];
        let name = "a C compiler for aarch64 (aarch64-linux-gnu-gcc, or the command in CC_aarch64_unknown_linux_gnu)";
        tool(name, &[self.compiler_program()], packages)
    }

    fn tools(&self) -> Vec<Tool> {
        let lisp = self.bootstrap.split_whitespace().next().unwrap_or_default();
        let mut tools = vec![
            tool("a Common Lisp (sbcl, or the command in SBCL_MCP_BOOTSTRAP)", &[lisp], ["sbcl"; 4]),
            self.compiler_tool(),
            tool("make", &["make", "gmake"], ["make", "make", "make", XCODE_INSTALL]),
            tool("strip", &["strip"], ["binutils", "binutils", "binutils", XCODE_INSTALL]),
            tool("tar", &["tar"], ["tar", "tar", "tar", ""]),
            tool("xz", &["xz"], ["xz-utils", "xz", "xz", "xz"]),
        ];
        if !self.platform.is_host() {
            let binutils =
                ["binutils-aarch64-linux-gnu", "binutils-aarch64-linux-gnu", "aarch64-linux-gnu-binutils", ""];
            let qemu = ["qemu-user-static", "qemu-user-static-aarch64", "qemu-user-static", ""];
            tools.push(tool("strip for aarch64", &[&self.strip()], binutils));
            tools.push(tool("QEMU for aarch64 programs", &["qemu-aarch64-static", "qemu-aarch64"], qemu));
            tools.push(tool("unshare", &["unshare"], ["util-linux", "util-linux", "util-linux", ""]));
        }
        tools
    }
}

fn tool(name: &'static str, commands: &[&str], packages: [&'static str; 4]) -> Tool {
    Tool { name, commands: commands.iter().map(|&command| command.to_owned()).collect(), packages }
}

/// If the command is only the name or path of SBCL, adds options with which SBCL reads no init file and never waits for
/// input. Returns any other command unchanged.
fn bootstrap_command(command: &str) -> String {
    let program = Path::new(command).file_name().unwrap_or_default().to_string_lossy();
    if program.starts_with("sbcl") && !command.contains(char::is_whitespace) {
        format!("{command} --no-sysinit --no-userinit --disable-debugger")
    } else {
        command.to_owned()
    }
}

fn check_tools(tools: &[Tool], is_there: impl Fn(&str) -> bool) -> Result<(), Error> {
    let is_missing = |tool: &&Tool| !tool.commands.iter().any(|command| is_there(command));
    let missing: Vec<&Tool> = tools.iter().filter(is_missing).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::MissingTools {
        missing: missing.iter().map(|tool| tool.description()).collect(),
        help: install_help(&missing),
    })
}

/// Returns advice with the commands that install these tools, one line for each operating system.
fn install_help(tools: &[&Tool]) -> String {
    let mut help = String::from("Install with:");
    for (system, (name, install)) in SYSTEMS.iter().enumerate() {
        let mut packages: Vec<&str> = tools.iter().map(|tool| tool.packages[system]).collect();
        let mut commands = Vec::new();
        if packages.contains(&XCODE_INSTALL) {
            commands.push(XCODE_INSTALL.to_owned());
        }
        packages.retain(|&package| !package.is_empty() && package != XCODE_INSTALL);
        if !packages.is_empty() {
            commands.push(format!("{install} {}", packages.join(" ")));
        }
        if !commands.is_empty() {
            help.push_str(&format!("\n  {name}: {}", commands.join(" && ")));
        }
    }
    help
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn toolchain() -> Toolchain {
        let platform = Platform::host();
        Toolchain { platform, compiler: vec!["cc".to_owned()], bootstrap: "sbcl".to_owned(), jobs: 1 }
    }

    /// A platform that no machine has, so that a build for it is a cross build everywhere.
    fn foreign() -> Platform {
        Platform { arch: "pdp10".to_owned(), os: "linux".to_owned() }
    }

    #[test]
    fn missing_tools_are_listed_with_install_commands() {
        let message = check_tools(&toolchain().tools(), |_| false).unwrap_err().to_string();
        for part in [
            "a Common Lisp (sbcl, or",
            "a C compiler",
            "make",
            "xz",
            "Debian, Ubuntu: apt-get install sbcl build-essential make binutils tar xz-utils",
            "Fedora: dnf install sbcl gcc glibc-devel make",
            "Arch: pacman -S --needed sbcl base-devel make",
            "macOS: xcode-select --install && brew install sbcl xz",
        ] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }

    #[test]
    fn install_commands_name_only_the_missing_tools() {
        let message = check_tools(&toolchain().tools(), |name| name != "sbcl").unwrap_err().to_string();
        assert!(message.contains("Debian, Ubuntu: apt-get install sbcl\n"), "{message}");
        assert!(!message.contains("gcc"), "{message}");
        assert!(check_tools(&toolchain().tools(), |name| name != "gmake").is_ok());
    }

    #[test]
    fn missing_compiler_is_reported_when_the_toolchain_is_chosen() {
        let mut settings = Settings::from_environment(Path::new("/nowhere"));
        settings.compiler = Some("no-such-compiler -m64".to_owned());
        let error = Toolchain::choose(&settings, &Platform::host()).unwrap_err();
        assert!(matches!(error, Error::MissingTools { .. }), "{error}");
        assert!(error.to_string().contains("no-such-compiler as a C compiler (cc, or the command in CC)"), "{error}");
        assert!(error.to_string().contains("build-essential"), "{error}");
    }

    #[test]
    fn a_cross_build_uses_the_cross_compiler_and_no_other() {
        let mut settings = Settings::from_environment(Path::new("/nowhere"));
        settings.compiler = Some("no-such-compiler".to_owned());
        settings.cross_compiler = Some("sh -c true".to_owned());
        let toolchain = Toolchain::choose(&settings, &foreign()).unwrap();
        assert_eq!(toolchain.compiler, ["sh", "-c", "true"]);
        assert_eq!(toolchain.strip(), "pdp10-linux-gnu-strip");
        settings.cross_compiler = None;
        let error = Toolchain::choose(&settings, &foreign()).unwrap_err();
        assert!(error.to_string().contains("gcc-aarch64-linux-gnu libc6-dev-arm64-cross"), "{error}");
    }

    #[test]
    fn missing_tools_of_a_cross_build_are_listed_with_install_commands() {
        let toolchain = Toolchain { platform: foreign(), ..toolchain() };
        let message = check_tools(&toolchain.tools(), |_| false).unwrap_err().to_string();
        for part in
            ["a C compiler for aarch64", "QEMU for aarch64 programs", "binutils-aarch64-linux-gnu qemu-user-static"]
        {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
        // Newer systems have QEMU under a name without `static`.
        assert!(check_tools(&toolchain.tools(), |name| name != "qemu-aarch64-static" && name != "gmake").is_ok());
    }

    #[test]
    fn failing_emulator_is_reported_with_its_output() {
        let scratch = Scratch::new("emulator");
        let probe = scratch.join("no-such-program");
        let toolchain = Toolchain { platform: foreign(), ..toolchain() };
        let error = toolchain.try_emulator(&probe).unwrap_err();
        assert!(matches!(error, Error::BrokenEmulator { .. }), "{error}");
        assert!(error.to_string().starts_with("programs for pdp10-linux do not run on this machine:\n"), "{error}");
    }

    #[test]
    fn a_missing_bootstrap_lisp_is_reported_before_anything_starts() {
        let scratch = Scratch::new("toolchain");
        let toolchain = Toolchain { bootstrap: "no-such-lisp -x".to_owned(), ..toolchain() };
        let error = toolchain.check(&scratch).unwrap_err();
        assert!(matches!(error, Error::MissingTools { .. }), "{error}");
        assert!(error.to_string().contains("apt-get install sbcl"), "{error}");
        assert_eq!(scratch.read_dir().unwrap().count(), 0);
    }

    #[test]
    fn failing_compiler_is_reported_with_its_output() {
        let scratch = Scratch::new("compiler");
        let toolchain =
            Toolchain { compiler: ["sh", "-c", "echo no headers; exit 1"].map(str::to_owned).to_vec(), ..toolchain() };
        let message = toolchain.try_compiler(&scratch).unwrap_err().to_string();
        assert!(message.contains("no headers"), "{message}");
        assert!(message.contains("apt-get install"), "{message}");
    }

    #[test]
    fn bootstrap_command_adds_options_to_a_bare_sbcl_only() {
        assert_eq!(bootstrap_command("/x/sbcl"), "/x/sbcl --no-sysinit --no-userinit --disable-debugger");
        assert_eq!(bootstrap_command("sbcl --core c"), "sbcl --core c");
        assert_eq!(bootstrap_command("ccl"), "ccl");
    }
}
