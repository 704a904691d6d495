//! The documents of the repository: links, the book's table of contents, configurations.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The repository.
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the paths of the files below docs/, relative to the repository.
fn documents() -> BTreeSet<PathBuf> {
    let mut directories = vec![Path::new(ROOT).join("docs")];
    let mut files = BTreeSet::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                files.insert(path.strip_prefix(ROOT).unwrap().to_owned());
            }
        }
    }
    files
}

/// Returns the Markdown pages that readers see, and llms.txt, with their texts.
fn pages() -> BTreeMap<PathBuf, String> {
    let is_page = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "md" || extension == "txt");
    let others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(PathBuf::from);
    let pages = documents().into_iter().filter(is_page).chain(others);
    pages.map(|path| (path.clone(), text(&path))).collect()
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap()
}

/// Returns the lines of a page outside of its blocks of code.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    page.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence && !line.starts_with("    ")
    })
}

/// Returns the targets of the links in a page, including images.
fn links(page: &str) -> Vec<String> {
    let mut links = Vec::new();
    for line in prose(page) {
        // Code within a line has no links.
        let line: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        links.extend(targets.map(str::to_owned));
    }
    links
}

/// Returns the anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut counts = BTreeMap::<String, usize>::new();
    let headings =
        prose(page).filter_map(|line| line.strip_prefix('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let kept =
            heading.to_lowercase().chars().filter(|&c| c.is_alphanumeric() || "-_ ".contains(c)).collect::<String>();
        let anchor = kept.replace(' ', "-");
        let count = counts.entry(anchor.clone()).or_default();
        *count += 1;
        if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
    };
    headings.map(anchor).collect()
}

/// Returns the path without `..`.
fn resolved(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => assert!(result.pop(), "{} leaves the repository", path.display()),
            other => result.push(other),
        }
    }
    result
}

#[test]
fn links_between_documents_lead_to_files_and_headings() {
    let pages = pages();
    let mut broken = Vec::new();
    let mut count = 0;
    for (path, page) in &pages {
        for link in links(page).into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            count += 1;
            let (file, anchor) = link.split_once('#').map_or((&*link, None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { path.clone() } else { resolved(&path.parent().unwrap().join(file)) };
            // mdBook makes index.html of a README.md, and leaves links to it as they are.
            let is_lost = target.ends_with("README.md") && path.starts_with("docs") && !path.ends_with("SUMMARY.md");
            if is_lost && path.extension().is_some_and(|extension| extension == "md") {
                broken.push(format!("{}: {link}: not a page of the book", path.display()));
            }
            if !Path::new(ROOT).join(&target).exists() {
                broken.push(format!("{}: {link}: there is no such file", path.display()));
            } else if let Some(anchor) = anchor {
                let page = pages.get(&target).cloned().unwrap_or_else(|| text(&target));
                if !anchors(&page).contains(anchor) {
                    broken.push(format!("{}: {link}: there is no such heading", path.display()));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(count > 100, "{count} links");
}

#[test]
fn every_page_is_in_the_table_of_contents_and_in_llms_txt() {
    let pages: BTreeSet<_> = documents()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "md") && !path.ends_with("SUMMARY.md"))
        .collect();
    for index in ["docs/SUMMARY.md", "docs/llms.txt"] {
        let listed: Vec<_> = links(&text(Path::new(index))).iter().map(|link| Path::new("docs").join(link)).collect();
        assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), pages, "{index}");
        assert_eq!(listed.len(), pages.len(), "{index} lists a page twice");
    }
}

#[test]
fn pictures_have_a_title_and_dark_colours() {
    let pictures: Vec<_> = documents().into_iter().filter(|path| path.starts_with("docs/images")).collect();
    assert!(pictures.len() >= 4);
    for path in pictures {
        let picture = text(&path);
        for part in ["<title ", "<desc ", "prefers-color-scheme: dark", "</svg>"] {
            assert!(picture.contains(part), "{}: {part}", path.display());
        }
    }
}

#[test]
fn configurations_in_the_documents_are_json() {
    let mut count = 0;
    for (path, page) in pages() {
        for block in page.split("\n```json\n").skip(1) {
            let block = block.split("\n```").next().unwrap();
            // A place to fill in.
            let block = block.replace('…', "{}");
            let parsed: Result<serde_json::Value, _> = serde_json::from_str(&block);
            assert!(parsed.is_ok(), "{}: {:?}\n{block}", path.display(), parsed.err());
            count += 1;
        }
    }
    assert!(count > 10, "{count} blocks");
}

#[test]
fn the_program_of_the_readme_is_an_example_that_runs() {
    let readme = text(Path::new("README.md"));
    let block = readme.split("```rust\n").nth(1).unwrap().split("```").next().unwrap();
    let example = text(Path::new("examples/readme.rs"));
    let lines = |text: &str| text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    assert!(lines(&example).contains(&lines(block)), "examples/readme.rs has not all of this:\n{block}");
}
