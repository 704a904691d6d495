"""Tests of scripts/release.py and scripts/compare_builds.py."""

import datetime
import shutil
import struct
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import compare_builds
import release

CHANGELOG = "# Changes\n\nWhat is new.\n\n## 1.3.0 (unreleased)\n\n### The server\n\n- One.\n- Two.\n\n## 1.2.0 (1 May 2026)\n\n- Old.\n"


class Versions(unittest.TestCase):
    def test_only_three_numbers_are_a_version(self):
        self.assertEqual(release.parse_version("0.12.3"), (0, 12, 3))
        for text in ["1.2", "v1.2.3", "1.2.3-rc1", "1.02.3", ""]:
            with self.assertRaises(release.Refusal, msg=text):
                release.parse_version(text)

    def test_version_must_be_newer_than_every_tag(self):
        release.check_newer("1.10.0", "1.9.0", ["v1.9.0", "v1.2.0", "very-old"])
        release.check_newer("0.1.0", "0.1.0", [])
        for version in ["1.9.0", "1.8.7"]:
            with self.assertRaisesRegex(release.Refusal, "newer than 1.9.0"):
                release.check_newer(version, "1.0.0", ["v1.9.0"])
        with self.assertRaisesRegex(release.Refusal, "Cargo.toml"):
            release.check_newer("0.9.0", "1.0.0", [])


class Changelogs(unittest.TestCase):
    def test_unreleased_section_becomes_that_of_the_version(self):
        text = release.release_changelog(CHANGELOG, "1.4.0", "2 June 2026")
        self.assertIn("## 1.4.0 (2 June 2026)\n\n### The server\n\n- One.", text)
        self.assertNotIn("unreleased", text)
        self.assertEqual(release.release_notes(text, "1.4.0"), "### The server\n\n- One.\n- Two.\n")

    def test_changelog_without_an_unreleased_section_or_entries_is_refused(self):
        for text, reason in [
            ("# Changes\n", "begins with"),
            (CHANGELOG.replace(" (unreleased)", " (1 June 2026)"), "begins with"),
            (CHANGELOG.replace("- One.\n- Two.\n", ""), "no entries"),
        ]:
            with self.assertRaisesRegex(release.Refusal, reason):
                release.release_changelog(text, "1.3.0", "2 June 2026")

    def test_notes_of_a_missing_version_are_refused(self):
        with self.assertRaises(release.Refusal):
            release.release_notes(CHANGELOG, "1.3")

    def test_debian_changelog_gets_an_entry_or_a_new_date(self):
        old = (ROOT / "packaging/deb/changelog").read_text()
        date = "Tue, 02 Jun 2026 00:00:00 +0000"
        new = release.debian_changelog(old, "99.0.0", date)
        self.assertTrue(new.startswith("sbcl-mcp (99.0.0-1) unstable; urgency=low\n\n  * "), new)
        self.assertTrue(new.endswith(f"\n{old}"))
        again = release.debian_changelog(new, "99.0.0", "Wed, 03 Jun 2026 00:00:00 +0000")
        self.assertEqual(again, new.replace(date, "Wed, 03 Jun 2026 00:00:00 +0000"))


class Files(unittest.TestCase):
    def test_every_file_with_the_version_gets_the_new_one(self):
        names = ["CHANGELOG.md", "packaging/deb/changelog", release.PLUGIN, *release.MANIFESTS, *release.LOCK_FILES]
        old = release.manifest_version((ROOT / "Cargo.toml").read_text())
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory)
            for name in names:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)
            if "(unreleased)" not in (tree / "CHANGELOG.md").read_text():
                self.skipTest("the changelog has no unreleased section")
            release.change_files(tree, "99.1.2", datetime.datetime(2026, 6, 2, tzinfo=datetime.timezone.utc))
            for name in names:
                self.assertIn("99.1.2", (tree / name).read_text(), name)
            for name in [release.PLUGIN, *release.MANIFESTS]:
                self.assertNotIn(f'"{old}"', (tree / name).read_text(), name)
            self.assertIn("## 99.1.2 (2 June 2026)\n", (tree / "CHANGELOG.md").read_text())

    def test_lock_files_list_all_our_crates(self):
        for name in release.LOCK_FILES:
            for crate in release.CRATES:
                self.assertIn(f'name = "{crate}"\n', (ROOT / name).read_text(), name)

    def test_versions_of_other_crates_stay(self):
        manifest = '[package]\nversion = "0.1.0"\nrust-version = "0.1.0"\n\n[dependencies]\nother = "0.1.0"\nsbcl-core = "0.1.0"\n'
        self.assertEqual(
            release.bump_manifest(manifest, "0.1.0", "0.2.0"),
            '[package]\nversion = "0.2.0"\nrust-version = "0.1.0"\n\n[dependencies]\nother = "0.1.0"\nsbcl-core = "0.2.0"\n',
        )
        lock = '[[package]]\nname = "sbcl-mcp"\nversion = "0.1.0"\n\n[[package]]\nname = "other"\nversion = "0.1.0"\n'
        self.assertEqual(
            release.bump_lock(lock, "0.1.0", "0.2.0"), lock.replace('sbcl-mcp"\nversion = "0.1.0"', 'sbcl-mcp"\nversion = "0.2.0"')
        )

    def test_placeholders_that_are_left_are_listed(self):
        files = {"Cargo.toml": 'name = "io.github.sbcl-mcp/sbcl-mcp"\n', "packaging/deb/changelog": "fine"}
        self.assertEqual(
            release.placeholders(files.get), ["Cargo.toml: io.github.sbcl-mcp/", "Cargo.toml: no repository"]
        )
        files["Cargo.toml"] = 'repository = "https://example.invalid"\n'
        self.assertEqual(release.placeholders(files.get), [])


def core(words):
    """Returns the bytes of a core with one space, of pages of 32 KiB, that contains `words`."""
    header = [compare_builds.CORE_MAGIC, compare_builds.DIRECTORY, 7, 1, len(words), 0, 0x1000000000, 1, compare_builds.END]
    page = 32768
    return struct.pack("<9Q", *header).ljust(page, b"\0") + struct.pack(f"<{len(words)}Q", *words).ljust(page, b"\0")


class Comparison(unittest.TestCase):
    def test_core_differences_are_located_by_space_and_address(self):
        words = list(range(4096))
        other = [*words[:7], 99, *words[8:]]
        self.assertEqual(compare_builds.compare_cores(core(words), core(words)), [])
        self.assertEqual(
            compare_builds.compare_cores(core(words), core(other)),
            ["dynamic: 1 of 4096 words differ", "  0x1000000038: 0x7 and 0x63"],
        )

    def test_differing_members_of_archives_are_listed(self):
        with tempfile.TemporaryDirectory() as directory:
            one, two = Path(directory) / "one", Path(directory) / "two"
            for build, contents in [(one, "same"), (two, "else")]:
                build.mkdir()
                (build / "server.json").write_text("{}")
                with zipfile.ZipFile(build / "bundle.mcpb", "w") as archive:
                    archive.writestr("manifest.json", "{}")
                    archive.writestr("program", contents)
            (two / "more").write_text("")
            lines = compare_builds.compare_directories(one, two)
            self.assertEqual([line.split(":")[0] for line in lines], ["bundle.mcpb", "  program", "more"])
            self.assertEqual(compare_builds.compare_directories(one, one), [])


if __name__ == "__main__":
    unittest.main()
