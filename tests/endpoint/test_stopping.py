"""The errors that agents get from a run that stops while their sessions are open."""

import threading
import time

import openai
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import Speaker, closed, serve

from jaxrl_async.endpoint import service
from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember
from jaxrl_async.errors import Closed
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import EpisodeLimits, SamplingParams

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("retries", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_calls_under_way_and_later_ones_get_an_error_to_come_back(
    retries: int, monkeypatch: pytest.MonkeyPatch
):
    """An official client comes back as often as it is set to, and ends by itself."""
    monkeypatch.setattr(service, "STOPPED_S", 1.0)
    tokenizer = byte_tokenizer(CHATML)
    rig = serve(Speaker(tokenizer, ["a long answer " * 40], step=1), tokenizer)
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=96,
        max_length=128,
    )
    member = SessionMember(prompt=make_prompt(3), label="g3")
    session = rig.sessions.open(rig.sampler, member, limits, SessionLimits())
    errors: list[openai.APIStatusError] = []
    client = openai.OpenAI(base_url=rig.openai.base_url, api_key=session.key, max_retries=retries)

    def agent() -> None:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as error:
                client.chat.completions.create(model="m", messages=HI)
            errors.append(error.value)

    try:
        thread = threading.Thread(target=agent)
        thread.start()
        end = time.monotonic() + 10
        while not rig.sampler.requests and time.monotonic() < end:
            time.sleep(0.005)
        rig.sessions.close()
        thread.join(20)
        assert not thread.is_alive() and len(errors) == 2
        for error in errors:
            assert (error.status_code, error.response.headers["retry-after"]) == (503, "1")
            assert "the run is stopping" in str(error)
        assert session.counts().cancelled_calls == 1
        with pytest.raises(Closed):
            rig.sessions.find(session.key)
    finally:
        client.close()
        closed(rig)
