"""A served model that reads images, called in each protocol."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from endpoint_rig import closed, serve
from gemma_vision import IMAGE, saved
from PIL import Image

import jaxrl_async as jr
from jaxrl_async.config import schema
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.vision.image_form import images_of
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.serve import served_policy

pytestmark = pytest.mark.full


@pytest.mark.exhaustive
def test_every_protocol_reads_the_same_image(tmp_path: Path) -> None:
    saved(tmp_path)
    rows = np.random.default_rng(0).integers(0, 255, (IMAGE, IMAGE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(rows).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    url, text = f"data:image/png;base64,{data}", {"type": "text", "text": "what"}
    picture = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [picture, text]}]
    section = schema.SamplerSection(slots=4, max_length=64, max_new_tokens=8, block=4)
    with jr.Asker(tmp_path, section=section) as asker:
        request = asker._request(messages, 8, jr.SamplingParams(temperature=0))
        (expected,) = asker._sampler.generate([request])
    policy = Policy.from_pretrained(tmp_path)
    store = images_of(policy.tower, policy.spec, policy.tokenizer)
    with Sampler(policy, section=section, settings=SamplerSettings(images=store)) as sampler:
        served = served_policy(tmp_path, sampler, sampler.section, images=store)
        fields = ("chat", "terms")
        rig = serve(sampler, served.tokenizer, **{f: getattr(served, f) for f in fields})
        bodies = {
            "/v1/chat/completions": {"messages": messages, "return_token_ids": True},
            "/v1/messages": {"messages": [{"role": "user", "content": [
                {"type": "image",
                 "source": {"type": "base64", "media_type": "image/png", "data": data}}, text]}]},
            "/v1/responses": {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": url},
                {"type": "input_text", "text": "what"}]}]},
        }  # fmt: skip
        replies = {}
        for path, body in bodies.items():
            most = {"max_output_tokens" if "responses" in path else "max_tokens": 8}
            reply = rig.http.post(path, json={**body, **most, "temperature": 0}, timeout=120)
            assert reply.status_code == 200, reply.text
            replies[path] = reply.json()
        choice = replies["/v1/chat/completions"]
        assert choice["prompt_token_ids"] == request.token_ids.tolist()
        assert choice["choices"][0]["token_ids"] == expected.token_ids.tolist()
        text = choice["choices"][0]["message"]["content"]
        assert replies["/v1/messages"]["content"][-1]["text"] == text
        assert replies["/v1/responses"]["output"][-1]["content"][0]["text"] == text
        assert len(store) == 1, "the same image is kept once"
        wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"messages": [{"role": "user", "content": [wrong]}]}
        reply = rig.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and "cannot be read" in reply.text
        closed(rig)
