"""Elicitation: the user chooses the restart of a failed evaluation."""

import anyio
import pytest

from mcp import types
from server import serve

pytestmark = pytest.mark.anyio

CODE = '(format t "before~%") (list (restart-case (error "boo") (take (x) :report "Take it" x)) :end)'


def user(questions, *answers):
    """Returns a callback that gives these answers in turn: a restart's name and values, or None to decline."""
    answers = list(answers)

    async def choose(context, params):
        questions.append(params.message)
        answer = answers.pop(0)
        if answer is None:
            return types.ElicitResult(action="decline")
        schema = getattr(params, "requested_schema", None) or params.requestedSchema
        (restart,) = [choice for choice in schema["properties"]["restart"]["enum"] if f" {answer[0]} " in choice]
        return types.ElicitResult(action="accept", content={"restart": restart, "values": answer[1]})

    return choose


async def test_elicitation_lets_the_user_choose_the_restart(mode):
    questions = []
    with anyio.fail_after(60):
        async with serve(mode, choose=user(questions, ("TAKE", "(/ 1 0)"), ("TAKE", "(+ 40 2)"))) as server:
            text, is_error = await server.call("evaluate-lisp", {"code": CODE, "on-error": "ask"})
            assert not is_error, text
            assert text.endswith("\n\n[stdout]\nbefore\n\n=> (42 :END)"), text
            assert "The user chose restart 1 (TAKE), and the evaluation continued." in text
            assert await server.evaluate("(+ 1 2)") == "=> 3"
    question = "The Lisp evaluation failed with SIMPLE-ERROR:\nboo\nHow should the evaluation continue?"
    assert questions == [question, question]


async def test_declined_elicitation_aborts_the_evaluation(mode):
    questions = []
    with anyio.fail_after(60):
        async with serve(mode, choose=user(questions, None)) as server:
            text, is_error = await server.call("evaluate-lisp", {"code": CODE, "on-error": "ask"})
            assert is_error and "The user chose no restart: the evaluation was aborted." in text, text
            assert "[Debugger]" not in text
            text, is_error = await server.call("abort-evaluation", {})
            assert is_error and text.startswith("No evaluation is held")
    assert len(questions) == 1


async def test_client_without_elicitation_gets_a_held_evaluation(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            text, is_error = await server.call("evaluate-lisp", {"code": CODE, "on-error": "ask"})
            assert is_error and "\n\n[Debugger]\nHeld. " in text, text
            assert await server.call("invoke-restart", {"restart": "TAKE", "values": "7"}) == ("=> (7 :END)", False)
