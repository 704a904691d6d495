"""Tests of the parts of packaging/ that need no packages."""

import copy
import hashlib
import json
import os
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "packaging"))

import combine
import glibc
import licences
import reproducible
import sbom

PIN = (ROOT / "sbcl-core/src/pin.rs").read_text()
SYSTEMS = (ROOT / "lisp/sbcl-host.asd").read_text()

# What cargo-cyclonedx writes for a program with one crate of the workspace and one of a registry.
CRATES = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.5",
    "metadata": {
        "component": {
            "type": "application",
            "bom-ref": "path+file:///build/one#sbcl-mcp@1.2.3",
            "name": "sbcl-mcp",
            "version": "1.2.3",
            "purl": "pkg:cargo/sbcl-mcp@1.2.3?download_url=file://.",
            "components": [
                {
                    "type": "library",
                    "bom-ref": "path+file:///build/one#sbcl-mcp@1.2.3 bin-target-0",
                    "name": "sbcl",
                    "purl": "pkg:cargo/sbcl-mcp@1.2.3?download_url=file://.#src/lib.rs",
                }
            ],
        }
    },
    "components": [
        {
            "type": "library",
            "bom-ref": "registry+https://registry.invalid#libc@0.2.1",
            "name": "libc",
            "version": "0.2.1",
            "purl": "pkg:cargo/libc@0.2.1",
        },
        {
            "type": "library",
            "bom-ref": "path+file:///build/one/lisp-syntax#1.2.3",
            "name": "lisp-syntax",
            "version": "1.2.3",
            "purl": "pkg:cargo/lisp-syntax@1.2.3?download_url=file://lisp-syntax",
        },
    ],
    "dependencies": [
        {
            "ref": "path+file:///build/one#sbcl-mcp@1.2.3",
            "dependsOn": ["registry+https://registry.invalid#libc@0.2.1", "path+file:///build/one/lisp-syntax#1.2.3"],
        },
        {"ref": "registry+https://registry.invalid#libc@0.2.1"},
        {"ref": "path+file:///build/one/lisp-syntax#1.2.3"},
    ],
}


def complete_bill(crates):
    components, dependencies = sbom.lisp_components(PIN, SYSTEMS)
    return sbom.complete(crates, components, dependencies, {"libm.so.6", "libc.so.6"})


class BillOfMaterials(unittest.TestCase):
    def test_sbcl_and_each_contrib_of_the_core_are_listed_with_licences(self):
        components = {item["name"]: item for item in complete_bill(CRATES)["components"]}
        self.assertEqual(components["sbcl"]["version"], sbom.pin(PIN)["VERSION"])
        for name in ["asdf", "sb-bsd-sockets", "sb-sprof", "tlsf-bsd"]:
            self.assertTrue(components[name]["licenses"], name)

    def test_every_reference_names_a_component(self):
        bill = complete_bill(CRATES)
        names = {item["bom-ref"] for item in [bill["metadata"]["component"], *bill["components"]]}
        for entry in bill["dependencies"]:
            self.assertIn(entry["ref"], names)
            self.assertLessEqual(set(entry.get("dependsOn", [])), names)
        self.assertEqual(names, {entry["ref"] for entry in bill["dependencies"]})

    def test_the_program_depends_on_its_crates_and_sbcl(self):
        bill = complete_bill(CRATES)
        (entry,) = (entry for entry in bill["dependencies"] if entry["ref"] == "pkg:cargo/sbcl-mcp@1.2.3")
        expected = ["pkg:cargo/libc@0.2.1", "pkg:cargo/lisp-syntax@1.2.3", f"pkg:generic/sbcl@{sbom.pin(PIN)['VERSION']}"]
        self.assertEqual(entry["dependsOn"], expected)

    def test_the_directory_of_the_build_does_not_matter(self):
        elsewhere = copy.deepcopy(CRATES)
        elsewhere["serialNumber"] = "urn:uuid:00000000-0000-0000-0000-000000000000"
        renamed = json.loads(json.dumps(elsewhere).replace("/build/one", "/elsewhere"))
        bill = complete_bill(CRATES)
        self.assertEqual(bill, complete_bill(renamed))
        self.assertNotIn("file:", repr(bill))
        self.assertTrue(bill["serialNumber"].startswith("urn:uuid:"))

    def test_contrib_without_a_known_licence_is_refused(self):
        systems = SYSTEMS.replace('"sb-md5"', '"sb-md5" "sb-new"')
        with self.assertRaisesRegex(SystemExit, "sb-new"):
            sbom.lisp_components(PIN, systems)

    def test_only_libraries_of_the_system_are_expected(self):
        for name in ["libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"]:
            self.assertTrue(sbom.SYSTEM_LIBRARIES.match(name), name)
        for name in ["libzstd.so.1", "libz.so.1", "libcrypt.so.1"]:
            self.assertFalse(sbom.SYSTEM_LIBRARIES.match(name), name)


class Licences(unittest.TestCase):
    def test_debian_paragraph_indents_text_and_marks_empty_lines(self):
        paragraph = licences.debian_paragraph("SBCL", "\nOne line \n\n  two\n")
        self.assertEqual(paragraph, "License: SBCL\n One line\n .\n   two\n")


    def test_debian_copyright_defines_each_licence_that_it_names(self):
        text = licences.debian_copyright()
        for name in ["Apache-2.0", "Expat", "SBCL", "crates"]:
            self.assertEqual(text.count(f"\nLicense: {name}\n"), 1, name)


class Archives(unittest.TestCase):
    def test_zip_files_of_the_same_contents_become_equal(self):
        with tempfile.TemporaryDirectory() as directory:
            files = [Path(directory) / "one.zip", Path(directory) / "two.zip"]
            for year, names, file in [(2020, "ab", files[0]), (2024, "ba", files[1])]:
                with zipfile.ZipFile(file, "w") as archive:
                    for name in names:
                        member = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
                        member.external_attr = 0o755 << 16
                        archive.writestr(member, f"contents of {name}")
                reproducible.normalize_zip(file)
            self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
            with zipfile.ZipFile(files[0]) as archive:
                self.assertEqual(archive.read("a"), b"contents of a")
                self.assertEqual([member.external_attr >> 16 for member in archive.infolist()], [0o755, 0o755])
            self.assertEqual(len(os.listdir(directory)), 2)

    def test_packages_of_machines_are_combined_unless_common_files_differ(self):
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)

            def build(machine, common):
                (root / machine).mkdir(exist_ok=True)
                files = {f"sbcl-mcp-{machine}.deb": machine, "server.json": common}
                for name, text in files.items():
                    (root / machine / name).write_text(text)
                sums = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in files.items()]
                (root / machine / "SHA256SUMS").write_text("".join(sums))
                return root / machine

            machines = [build("x86_64", "{}"), build("aarch64", "{}")]
            combine.combine(root / "all", machines)
            names = ["SHA256SUMS", "sbcl-mcp-aarch64.deb", "sbcl-mcp-x86_64.deb", "server.json"]
            self.assertEqual(sorted(path.name for path in (root / "all").iterdir()), names)
            self.assertEqual(len((root / "all/SHA256SUMS").read_text().splitlines()), 3)
            build("aarch64", "[]")
            with self.assertRaisesRegex(SystemExit, "server.json differently"):
                combine.combine(root / "again", machines)
            (root / "aarch64/server.json").write_text("damaged")
            with self.assertRaisesRegex(SystemExit, "checksum"):
                combine.combine(root / "once-more", machines)
            (root / "aarch64/server.json").unlink()
            with self.assertRaisesRegex(SystemExit, "aarch64 lacks server.json"):
                combine.combine(root / "incomplete", machines)


class SharedLibraries(unittest.TestCase):
    def test_a_file_that_objdump_cannot_read_is_refused(self):
        self.assertTrue(glibc.shared_libraries("/bin/sh"))
        with self.assertRaisesRegex(SystemExit, "cannot read"):
            glibc.shared_libraries(__file__)


if __name__ == "__main__":
    unittest.main()
