"""Our endpoint as the teacher server of TRL's AsyncDistillationTrainer, asked by TRL's own code."""

import json
import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import KEY, SECTION, closed, serve, tiny_policy
from whole_rows import logprobs_of

from jaxrl_async.sampler.sampler import Sampler

pytestmark = pytest.mark.exhaustive

TOP = 4
PROMPT, COMPLETION = [5, 9, 40], [7, 41, 12, 8]


@pytest.fixture(scope="module")
def trl_python() -> Path:
    peers = os.environ.get("JAXRL_PEERS")
    if not peers:
        pytest.skip("JAXRL_PEERS is not set: no environments of peers (docs/agreement.md)")
    return Path(peers) / "trl" / "bin" / "python"


def test_trls_rollout_worker_reads_the_log_probs_of_a_completion(trl_python: Path) -> None:
    spec, params = tiny_policy()
    with Sampler((spec, params), section=SECTION, seed=5) as sampler:
        rig = serve(sampler, byte_tokenizer(CHATML))
        try:
            address = rig.endpoint.address.replace("http://", f"http://any:{quote(KEY)}@")
            words = [address, str(TOP), json.dumps(PROMPT), json.dumps(COMPLETION)]
            worker = Path(__file__).with_name("worker_trl_teacher.py")
            done = subprocess.run(
                [trl_python, worker, *words],
                capture_output=True,
                text=True,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            )
        finally:
            closed(rig)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == "tiny" and len(found["ids"]) == len(COMPLETION)
    expected = logprobs_of(spec, params, np.array(PROMPT + COMPLETION, np.int32))[len(PROMPT) :]
    for token, logprob, ids, logprobs in zip(
        COMPLETION, expected, found["ids"], found["logprobs"], strict=True
    ):
        assert token in ids and len(ids) in (TOP, TOP + 1)
        assert logprobs[ids.index(token)] == pytest.approx(logprob, abs=1e-5)
        assert logprobs[:TOP] == sorted(logprobs[:TOP], reverse=True)
    assert any(len(ids) == TOP + 1 for ids in found["ids"]), "one token is not among the likeliest"
