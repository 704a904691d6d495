"""Concurrent calls, cancellation, progress."""

from contextlib import asynccontextmanager

import anyio
import pytest

from server import MAJOR, MODES, serve

NO_ERROR = "No error information available.\n(No error has occurred since the last successful evaluation)"
LIMITS = """Current limits:
  timeout: 30 seconds
  max-output: 1000000 characters
  max-answer: 9500 characters
  on-error: abort"""

pytestmark = pytest.mark.anyio


def waiting(directory):
    """Returns Lisp code that creates the file `runs` and waits for the file `go`, so that the order is certain."""
    return f'(progn (open "{directory}/runs" :direction :probe :if-does-not-exist :create) \
        (loop until (probe-file "{directory}/go") do (sleep 0.01)) :went-on)'


async def appears(path):
    while not path.exists():
        await anyio.sleep(0.01)


@asynccontextmanager
async def busy(server, directory, on_progress=None):
    """Runs an evaluation until the block ends; yields the list that then gets its answer."""
    answers = []

    async def evaluate():
        arguments = {"code": waiting(directory), "timeout": 600}
        answers.append(await server.call("evaluate-lisp", arguments, on_progress))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(evaluate)
        await appears(directory / "runs")
        yield answers
        assert answers == []
        (directory / "go").touch()


async def test_other_tools_answer_while_an_evaluation_runs(mode, tmp_path):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            async with busy(server, tmp_path) as answers:
                assert await server.call("describe-last-error", {}) == (NO_ERROR, False)
                assert await server.call("get-backtrace", {}) == (NO_ERROR, False)
                assert await server.call("configure-limits", {}) == (LIMITS, False)
                assert len(await server.tools()) >= 7
                # The revision without a handshake has no ping.
                if not server.modern:
                    await server.client.send_ping()
            assert answers == [("=> :WENT-ON", False)]


async def test_evaluations_run_in_request_order(mode, tmp_path):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            await server.evaluate("(defvar *order* '())")
            async with anyio.create_task_group() as tasks, busy(server, tmp_path):
                for number in range(10):
                    tasks.start_soon(server.evaluate, f"(push {number} *order*)")
                    # The answer shows that the call was sent before the next one.
                    await server.tools()
            assert await server.evaluate("(reverse *order*)") == "=> (0 1 2 3 4 5 6 7 8 9)"


async def test_cancellation_ends_a_running_evaluation(mode, tmp_path):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            await server.evaluate("(defvar *kept* 42)")
            async with anyio.create_task_group() as tasks:
                request = server.next_request() if MAJOR == 1 else None
                code = f"(loop (ignore-errors {waiting(tmp_path)}))"
                tasks.start_soon(server.call, "evaluate-lisp", {"code": code, "timeout": 600})
                await appears(tmp_path / "runs")
                if request is not None:
                    await server.cancel(request)
                # 2.x notifies the server itself.
                tasks.cancel_scope.cancel()
            text = NO_ERROR
            while text == NO_ERROR:
                text, _ = await server.call("describe-last-error", {})
            assert text.startswith("Error: CANCELLED\n")
            assert await server.call("describe-last-error", {}) == (text, False)
            assert await server.evaluate("*kept*") == "=> 42"
            assert await server.call("describe-last-error", {}) == (NO_ERROR, False)


async def test_cancelled_queued_evaluation_does_not_run(mode, tmp_path):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            await server.evaluate("(defvar *ran* nil)")
            async with busy(server, tmp_path):
                async with anyio.create_task_group() as tasks:
                    request = server.next_request() if MAJOR == 1 else None
                    tasks.start_soon(server.call, "evaluate-lisp", {"code": "(setf *ran* t)"})
                    await anyio.sleep(0)
                    await server.tools()
                    if request is not None:
                        await server.cancel(request)
                    tasks.cancel_scope.cancel()
                await server.tools()
            assert await server.evaluate("*ran*") == "=> NIL"


@pytest.mark.parametrize("mode", MODES[-1:])
async def test_a_long_evaluation_reports_progress(mode, tmp_path):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            alive = anyio.Event()

            async def progressed(*_):
                alive.set()

            async with busy(server, tmp_path, progressed) as answers:
                await alive.wait()
            assert answers == [("=> :WENT-ON", False)]
