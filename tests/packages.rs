//! The packages that users get: their contents, versions and instructions.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The root directory of the workspace.
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the names of the files in a package, as cargo lists them.
fn packaged_files(package: &str) -> Vec<String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["package", "--list", "--allow-dirty", "--offline", "--package", package]).current_dir(ROOT);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Asserts that the top-level names in a package are `expected`, and that its size in bytes is below `bound`.
fn check_package(package: &str, directory: &str, expected: &[&str], bound: u64) {
    let names = packaged_files(package);
    let first = |name: &String| name.split('/').next().unwrap_or_default().to_owned();
    let found: BTreeSet<String> = names.iter().map(first).collect();
    // Files that cargo adds; .cargo_vcs_info.json only in a repository.
    let made = [".cargo_vcs_info.json", "Cargo.lock", "Cargo.toml", "Cargo.toml.orig"];
    let found: BTreeSet<&str> = found.iter().map(String::as_str).filter(|name| !made.contains(name)).collect();
    assert_eq!(found, expected.iter().copied().collect(), "in {package}");
    let size = |name: &String| Path::new(ROOT).join(directory).join(name).metadata().map_or(0, |data| data.len());
    let total: u64 = names.iter().map(size).sum();
    assert!(total < bound, "{package} has {total} bytes");
}

#[test]
fn cargo_packages_contain_only_the_files_needed_to_build() {
    let ours = ["benches", "build.rs", "CHANGELOG.md", "examples", "ffi", "LICENSE-APACHE", "LICENSE-MIT", "lisp"];
    check_package("sbcl-mcp", "", &[&ours[..], &["README.md", "src"]].concat(), 4_000_000);
    for ours in ["lisp-syntax", "sbcl-core", "sbcl-build"] {
        check_package(ours, ours, &["LICENSE-APACHE", "LICENSE-MIT", "src"], 1 << 20);
    }
}

/// Reads a file of the repository.
fn text(name: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(name)).unwrap()
}

#[test]
fn all_manifests_and_packaging_files_have_the_same_version() {
    let version = env!("CARGO_PKG_VERSION");
    let plugin: serde_json::Value =
        serde_json::from_str(&text("packaging/claude-code/.claude-plugin/plugin.json")).unwrap();
    assert_eq!(plugin["version"], version);
    assert!(text("packaging/deb/changelog").starts_with(&format!("sbcl-mcp ({version}-1) ")));
    // The MCP registry looks for the server's name in the README of the wheel.
    let name =
        text("Cargo.toml").split_once("[package.metadata.mcp]\n").unwrap().1.split('"').nth(1).unwrap().to_owned();
    assert!(text("packaging/python/README.md").contains(&format!("<!-- mcp-name: {name} -->")), "{name}");
    for manifest in
        ["lisp-syntax/Cargo.toml", "sbcl-build/Cargo.toml", "sbcl-core/Cargo.toml", "examples/bundled/Cargo.toml"]
    {
        assert!(text(manifest).contains(&format!("\nversion = \"{version}\"\n")), "{manifest}");
    }
    // The versions that the crates require of each other match, too.
    for manifest in ["Cargo.toml", "sbcl-build/Cargo.toml", "examples/bundled/Cargo.toml"] {
        for line in text(manifest)
            .lines()
            .filter(|line| (line.starts_with("sbcl-") || line.starts_with("lisp-syntax")) && line.contains("version"))
        {
            assert!(line.contains(&format!("version = \"{version}\"")), "{manifest}: {line}");
        }
    }
}

#[test]
fn python_tests_of_packaging_and_releases_pass() {
    let mut command = Command::new("python3");
    command.args(["-B", "-m", "unittest", "discover", "--start-directory", "tests/packaging"]).current_dir(ROOT);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Validates `value` against `schema`, a part of `root`, for the JSON Schema keywords that server.json needs.
fn check_schema(root: &serde_json::Value, schema: &serde_json::Value, value: &serde_json::Value) -> Result<(), String> {
    if let Some(name) = schema["$ref"].as_str() {
        let definition = root.pointer(name.trim_start_matches('#')).ok_or(format!("{name} is not defined"))?;
        return check_schema(root, definition, value);
    }
    if let Some(any) = schema["anyOf"].as_array()
        && any.iter().all(|schema| check_schema(root, schema, value).is_err())
    {
        return Err(format!("{value} is none of {any:?}"));
    }
    for required in schema["required"].as_array().into_iter().flatten() {
        value.get(required.as_str().unwrap()).ok_or(format!("{value} has no {required}"))?;
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        return Err(format!("{value} is not in {allowed:?}"));
    }
    let length = value.as_str().map_or(0, |text| text.chars().count() as u64);
    if schema["maxLength"].as_u64().is_some_and(|most| length > most) {
        return Err(format!("{value} has {length} characters"));
    }
    for (name, part) in value.as_object().into_iter().flatten() {
        let known = schema["properties"].get(name);
        if schema["properties"].is_object() {
            check_schema(root, known.ok_or(format!("{name} is unknown"))?, part)?;
        }
    }
    for item in value.as_array().into_iter().flatten() {
        check_schema(root, &schema["items"], item)?;
    }
    Ok(())
}

#[test]
fn mcp_registry_schema_accepts_server_json() {
    let read = |name: &str| serde_json::from_str::<serde_json::Value>(&text(name)).unwrap();
    let schema = read("packaging/registry/server.schema.json");
    // packaging/build.py adds the name and the version.
    let mut server = read("packaging/registry/server.json");
    assert!(check_schema(&schema, &schema, &server).is_err(), "without a name and a version");
    server["name"] = "io.github.sbcl-mcp/sbcl-mcp".into();
    server["version"] = env!("CARGO_PKG_VERSION").into();
    check_schema(&schema, &schema, &server).unwrap();
    server["packages"][0]["transport"]["type"] = "carrier pigeon".into();
    assert!(check_schema(&schema, &schema, &server).is_err());
}

#[test]
fn packaged_skill_names_only_existing_tools() {
    let definitions = text("tests/clients/tools.json");
    let skill = text("packaging/claude-code/skills/lisp/SKILL.md");
    let known = |word: &str| definitions.contains(&format!("\"{word}\""));
    let names =
        skill.split('`').skip(1).step_by(2).filter(|word| {
            word.contains('-') && word.chars().all(|letter| letter == '-' || letter.is_ascii_lowercase())
        });
    for name in names {
        assert!(known(name), "the skill speaks of {name}");
    }
}

#[test]
#[cfg(unix)]
fn claude_code_hook_reports_errors_in_lisp_files_only() {
    use std::io::Write;
    use std::process::Stdio;

    let directory = std::env::temp_dir().join(format!("sbcl-mcp-hook-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = Path::new(env!("CARGO_BIN_EXE_sbcl-mcp")).parent().unwrap().display().to_string();
    let hook = |name: &str, text: &str| {
        let file = directory.join(name);
        std::fs::write(&file, text).unwrap();
        let call = serde_json::json!({
            "tool_name": "Write",
            "tool_input": { "file_path": file, "content": "\"file_path\": \"/elsewhere.lisp\"" },
            "tool_response": { "filePath": file },
        });
        let mut child = Command::new(Path::new(ROOT).join("packaging/claude-code/scripts/check.sh"))
            .env("PATH", format!("{path}:/usr/bin:/bin"))
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(serde_json::to_string_pretty(&call).unwrap().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(hook("fine.lisp", "(defun f (x)\n  (car x))\n"), (Some(0), String::new()));
    let (status, said) = hook("broken.lisp", "(defun f (x)\n  (car x)\n\n(defun g () 1)\n");
    assert!(status == Some(2) && said.contains("broken.lisp:2:10: error: "), "{status:?} {said}");
    assert_eq!(hook("notes.txt", "(((").0, Some(0));
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Until this project owns the names, a command that installs by name may run code that somebody else published.
#[test]
fn docs_install_from_files_not_by_unregistered_package_names() {
    let mut documents = Vec::new();
    let mut directories = vec!["docs".to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(Path::new(ROOT).join(&directory)).unwrap() {
            let name = format!("{directory}/{}", entry.unwrap().file_name().to_string_lossy());
            let list = if Path::new(ROOT).join(&name).is_dir() { &mut directories } else { &mut documents };
            list.push(name);
        }
    }
    let others = ["README.md", "packaging/npm/README.md", "packaging/python/README.md"].map(str::to_owned);
    for name in documents.into_iter().filter(|name| name.ends_with(".md")).chain(others) {
        let text = text(&name);
        for command in [
            "npx -y sbcl-mcp",
            "npx sbcl-mcp",
            "uvx sbcl-mcp",
            "`npx`",
            "`uvx`",
            "install --global sbcl-mcp",
            "pip install sbcl-mcp",
            "tool install sbcl-mcp",
            "cargo install sbcl-mcp",
            "\"uvx\"",
            "\"npx\"",
        ] {
            assert!(!text.contains(command), "{name}: {command}");
        }
    }
}
