"""Tests of packaging/attestation.py."""

import json
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "packaging"))

import attestation

CHECKSUMS = f"{'a' * 64}  sbcl-mcp-1.2.3.tgz\n{'b' * 64}  server.json\n"


class Attestation(unittest.TestCase):
    def test_statement_names_each_file_the_commit_and_the_workflow(self):
        statement = attestation.statement(CHECKSUMS, "c" * 40, "refs/tags/v1.2.3", "https://example.invalid/sbcl-mcp")
        self.assertEqual([subject["name"] for subject in statement["subject"]], ["sbcl-mcp-1.2.3.tgz", "server.json"])
        self.assertEqual(statement["subject"][0]["digest"], {"sha256": "a" * 64})
        definition = statement["predicate"]["buildDefinition"]
        self.assertEqual(definition["resolvedDependencies"][0]["digest"], {"gitCommit": "c" * 40})
        self.assertTrue((ROOT / definition["externalParameters"]["workflow"]["path"]).is_file())

    def test_malformed_or_repeated_checksums_are_refused(self):
        for text in ["", "abc  file\n", f"{'a' * 64} file\n", f"{'a' * 64}  two words\n", CHECKSUMS * 2]:
            with self.assertRaises(SystemExit, msg=text):
                attestation.subjects(text)

    def test_bill_of_materials_needs_a_serial_number(self):
        bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": "urn:uuid:0"}
        self.assertIsNone(attestation.bill_problem(json.dumps(bill)))
        del bill["serialNumber"]
        self.assertEqual(attestation.bill_problem(json.dumps(bill)), "no serialNumber")


if __name__ == "__main__":
    unittest.main()
