"""JetStream's orchestrator and gRPC server over our engine, in a process of its own."""

import importlib.util
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from jaxrl_async.config import schema
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.interop.jetstream import engine_api
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams

INSTALLED = importlib.util.find_spec("jetstream") is not None
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not INSTALLED, reason="needs google-jetstream, slim (docs/engines.md)"),
]
PROMPTS = [f"{a}+{b}=" for a, b in ((12, 7), (998, 4), (5, 5), (640, 640), (3, 999), (71, 28))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = addition_tokenizer()
    size = -(-tokenizer.vocab_size // 8) * 8
    shape = schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64)
    spec = ModelSpec.from_architecture(shape, size)
    Policy(spec, init_params(spec, jax.random.key(3)), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def port(folder: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--policy", str(folder), "--port", str(port), "--slots", "3", "--temperature", "0"]
    limits = ["--max-length", "64", "--max-new-tokens", "16", "--tokens-per-step", "4"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.interop.jetstream_serve", *words, *limits],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        assert any("serving" in line for line in server.stdout), "it ended before it served"
        yield port
        server.send_signal(signal.SIGINT)
        assert server.wait(60) is not None
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def ask(port: int, prompt: str) -> list[int]:
    """Token ids that the server streams for a prompt."""
    import grpc

    engine_api()
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        text = jetstream_pb2.DecodeRequest.TextContent(text=prompt)
        request = jetstream_pb2.DecodeRequest(text_content=text, max_tokens=16)
        ids: list[int] = []
        for answer in stub.Decode(request, timeout=120):
            for sample in answer.stream_content.samples:
                ids += sample.token_ids
        return ids


def listening(port: int) -> set[str]:
    """Local addresses that are listened on at a port, as the kernel lists them (hexadecimal)."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    ends = [words[1].split(":") for words in lines if words[3] == "0A"]
    return {address for address, number in ends if int(number, 16) == port}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux who listens")
def test_the_server_listens_to_this_machine_alone(port: int) -> None:
    found = listening(port)
    assert found and all(end.endswith("0100007F") for end in found), "127.0.0.1, and no other"


def test_concurrent_clients_get_what_our_sampler_samples(folder: Path, port: int) -> None:
    tokenizer = load_tokenizer(folder)
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        served = list(clients.map(lambda prompt: ask(port, prompt), PROMPTS))
    section = schema.SamplerSection(slots=4, max_length=64, max_new_tokens=16, block=4)
    sampler = Sampler(Policy.from_pretrained(folder), section=section)
    requests = [
        Request(
            request_id=prompt,
            token_ids=tokenizer.encode_prompt(prompt),
            max_new_tokens=16,
            sampling=SamplingParams(temperature=0.0),
            stop_token_ids=tuple(tokenizer.eos_ids),
        )
        for prompt in PROMPTS
    ]
    for ids, done in zip(served, sampler.generate(requests), strict=True):
        ours = [t for t in done.token_ids.tolist() if t not in tokenizer.eos_ids]
        assert [t for t in ids if t not in tokenizer.eos_ids] == ours
    sampler.close()
