"""Adapters by the name of a model: /v1/models, and /v1/load_lora_adapter and
/v1/unload_lora_adapter as vLLM has them."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.errors import CheckpointError, ConfigError, DataError, RolloutError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""Paths that change what is loaded."""
CHANGERS = 4
"""Threads that change adapters; an unload holds one while its requests end, and the threads that
tokenise stay free."""
AGAIN_S = 5.0
"""When a change that was not made in time may be asked for again, seconds."""


class HasAdapters(Protocol):
    """Whatever loads adapters by name: sampler.adapters.SamplerAdapters."""

    def loaded(self) -> Mapping[str, int]:
        """Return the versions of the loaded adapters, by name."""
        ...

    def load(self, name: str, adapter: Path) -> int:
        """Load an adapter's directory, or swap it for a newer version; return that."""
        ...

    def unload(self, name: str) -> None:
        """Free an adapter's place once its last request is done."""
        ...


class AdapterDoor:
    """Finds adapters by the `model` of a call, and changes which are loaded."""

    def __init__(self, base: str, adapters: HasAdapters, *, loads_from: Path | None = None) -> None:
        """Make it.

        Args:
            base: name of the model without an adapter.
            adapters: of its sampler.
            loads_from: folder under which adapters may be loaded from by a call; None: nowhere.
        """
        self._base, self._adapters = base, adapters
        self._loads_from = None if loads_from is None else loads_from.resolve()
        self._threads = ThreadPoolExecutor(CHANGERS, thread_name_prefix="adapters")
        self._changing: set[str] = set()  # names, until a thread is done with each

    def adapter_of(self, model: Any) -> str:
        """Return the adapter that a call's `model` names; empty: the base. Raises CallRefused for
        an unknown one, which lists what there is."""
        if model is None or model == self._base:
            return ""
        loaded = self._adapters.loaded()
        if not isinstance(model, str) or model not in loaded:
            raise CallRefused(
                f"the model {str(model)[:80]!r} does not exist; there are: "
                f"{', '.join([self._base, *sorted(loaded)])}",
                status=404,
                field="model",
                code="model_not_found",
            )
        return model

    def names(self) -> list[str]:
        """Return the loaded adapters' names."""
        return sorted(self._adapters.loaded())

    async def load(self, body: Any) -> str:
        """Load an adapter; return what the client is told. Raises CallRefused."""
        root = self._checked_root()
        fields = BodyFields(body)
        name, path = fields.needed_text("lora_name"), fields.needed_text("lora_path")
        in_place = fields.flag("load_inplace")
        fields.close()
        folder = _below(root, path)
        if folder is None:
            fields.refuse("lora_path", "a folder under the one that --adapters-from names")
        if name == self._base:
            fields.refuse("lora_name", "another name than the base's")
        if name in self._adapters.loaded() and not in_place:
            fields.refuse("lora_name", "one that is not loaded, unless load_inplace is true")
        version = await self._changed(name, lambda: self._adapters.load(name, folder))
        return f"Success: LoRA adapter '{name}' added successfully (version {version})."

    async def unload(self, body: Any) -> str:
        """Unload an adapter; return what the client is told. Raises CallRefused."""
        self._checked_root()
        fields = BodyFields(body)
        name = fields.needed_text("lora_name")
        fields.close(frozenset({"lora_int_id"}))
        if name not in self._adapters.loaded():
            raise CallRefused(f"adapter {name!r} is not loaded", status=404, field="lora_name")
        await self._changed(name, lambda: self._adapters.unload(name))
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _checked_root(self) -> Path:
        if self._loads_from is None:
            raise CallRefused(
                "adapters are not loaded by calls here; start with --adapters-from DIR", status=404
            )
        return self._loads_from

    async def _changed(self, name: str, work: Callable[[], Any]) -> Any:
        """Change what is loaded, beside the event loop; it goes on if the client goes away. Raises
        CallRefused for what does not fit, and while another call changes the same adapter."""
        if name in self._changing:
            raise CallRefused(
                f"adapter {name!r} is being changed by another call; wait until that is answered",
                field="lora_name",
            )
        self._changing.add(name)
        done = self._threads.submit(work)
        done.add_done_callback(lambda _: self._changing.discard(name))
        try:
            return await asyncio.wrap_future(done)
        except (ConfigError, CheckpointError, DataError, RolloutError) as error:
            raise CallRefused(str(error)) from None
        except TimeoutError as error:
            raise CallRefused(str(error), status=503, retry_after_s=AGAIN_S) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CallRefused(f"adapter {name!r} cannot be read: {reason}") from None


def _below(root: Path, path: str) -> Path | None:
    """Return a folder that a call names, links followed; None unless it lies below root."""
    try:
        folder = (root / path).resolve()
    except (OSError, RuntimeError, ValueError):  # a link to itself, a name with a zero byte
        return None
    return folder if folder.is_relative_to(root) else None
