#!/usr/bin/env bash
# scripts/workflows.sh [WORKFLOW[/JOB]...]
# Checks GitHub's workflows with actionlint, then runs the steps of the named workflows or jobs (default: all jobs) on this
# machine.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/packagers.sh
. scripts/packagers.sh
packaging/check_workflows.mjs "$tools/node/node_modules"
"$tools/python/bin/python" scripts/run_workflows.py "$@"
