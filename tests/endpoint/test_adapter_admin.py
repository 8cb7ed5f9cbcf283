"""What a call may change of the adapters that are served, and its errors otherwise."""

import asyncio
import threading
from pathlib import Path

import pytest

from jaxrl_async.endpoint.adapter_admin import AdapterAdmin
from jaxrl_async.endpoint.http_errors import CallRefused


class SlowAdapters:
    """Adapters whose unloading waits, and fails as scripted."""

    def __init__(self) -> None:
        self.names = {"a": 0}
        self.error: Exception | None = None
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def loaded(self) -> dict[str, int]:
        return dict(self.names)

    def load(self, name: str, adapter: Path) -> int:
        if self.error is not None:
            raise self.error
        self.names[name] = 0
        return 0

    def unload(self, name: str) -> None:
        self.begun.release()
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        del self.names[name]


def refused(admin: AdapterAdmin, **body: object) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        asyncio.run(admin.load({"lora_name": "b", **body}))
    return caught.value


def test_only_folders_below_the_one_that_is_named_are_loaded(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (tmp_path / "rooted").mkdir()
    (root / "out").symlink_to(tmp_path / "rooted")
    (root / "loop").symlink_to(root / "loop")
    admin = AdapterAdmin("base", SlowAdapters(), loads_from=root)
    for path in ("..", "../rooted", f"{tmp_path}", "out", "inside/../../rooted", "loop", "a\0b"):
        found = refused(admin, lora_path=path)
        assert (found.status, found.field) == (400, "lora_path"), path
    assert "added" in asyncio.run(admin.load({"lora_name": "b", "lora_path": "inside"}))


def test_a_failure_is_reported_and_can_be_retried(tmp_path: Path) -> None:
    adapters = SlowAdapters()
    admin = AdapterAdmin("base", adapters, loads_from=tmp_path)
    for error, status, words in (
        (TimeoutError("its requests were not done"), 503, "its requests were not done"),
        (PermissionError(13, "Permission denied", "/secret"), 400, "'b'.*Permission denied"),
        (RuntimeError("a defect"), None, "a defect"),
    ):
        adapters.error = error
        if status is None:
            with pytest.raises(RuntimeError, match=words):
                asyncio.run(admin.load({"lora_name": "b", "lora_path": "."}))
            continue
        found = refused(admin, lora_path=".")
        assert found.status == status
        with pytest.raises(CallRefused, match=words):
            raise found


@pytest.mark.full
def test_one_call_at_a_time_changes_an_adapter_also_if_its_client_goes(tmp_path: Path) -> None:
    adapters = SlowAdapters()
    admin = AdapterAdmin("base", adapters, loads_from=tmp_path)

    async def play() -> None:
        unload = asyncio.create_task(admin.unload({"lora_name": "a"}))
        await asyncio.to_thread(adapters.begun.acquire)
        unload.cancel()  # the client goes away
        await asyncio.gather(unload, return_exceptions=True)
        for _ in range(8):
            with pytest.raises(CallRefused, match="being changed by another call"):
                await admin.unload({"lora_name": "a"})
        await admin.load({"lora_name": "b", "lora_path": "."})
        adapters.go.set()
        while "a" in adapters.names:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert adapters.names == {"b": 0} and not adapters.begun.acquire(blocking=False)
