"""Adapters as model names: /v1/models, and vLLM's /v1/load_lora_adapter and
/v1/unload_lora_adapter."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.errors import CheckpointError, ConfigError, DataError, RolloutError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""Paths that load or unload adapters."""
CHANGERS = 4
"""Threads that load and unload adapters. An unload holds one while its requests end, but the
tokenisation threads stay free."""
AGAIN_S = 5.0
"""Retry-After for a change that timed out, seconds."""


class HasAdapters(Protocol):
    """Loads adapters by name, such as sampler.adapters.SamplerAdapters."""

    def loaded(self) -> Mapping[str, int]:
        """Return the versions of the loaded adapters, by name."""
        ...

    def load(self, name: str, adapter: Path) -> int:
        """Load an adapter's directory, or swap it for a newer version; return the version."""
        ...

    def unload(self, name: str) -> None:
        """Free an adapter's slot once its last request is done."""
        ...


class AdapterAdmin:
    """Resolves the `model` of a call to an adapter, and loads and unloads adapters."""

    def __init__(self, base: str, adapters: HasAdapters, *, loads_from: Path | None = None) -> None:
        """Make it.

        Args:
            base: name of the model without an adapter.
            adapters: adapters of its sampler.
            loads_from: folder from which calls may load adapters; None: they may not.
        """
        self._base, self._adapters = base, adapters
        self._loads_from = None if loads_from is None else loads_from.resolve()
        self._threads = ThreadPoolExecutor(CHANGERS, thread_name_prefix="adapters")
        self._changing: set[str] = set()  # adapters that are being changed

    def adapter_of(self, model: object) -> str:
        """Return the adapter that a call's `model` names; empty: the base. Raises CallRefused that
        lists the available models if it is unknown."""
        if model is None or model == self._base:
            return ""
        loaded = self._adapters.loaded()
        if not isinstance(model, str) or model not in loaded:
            raise CallRefused(
                f"the model {str(model)[:80]!r} does not exist; available models: "
                f"{', '.join([self._base, *sorted(loaded)])}",
                status=404,
                field="model",
                code="model_not_found",
            )
        return model

    def names(self) -> list[str]:
        """Return the loaded adapters' names."""
        return sorted(self._adapters.loaded())

    async def load(self, body: object) -> str:
        """Load an adapter; return the message for the client. Raises CallRefused."""
        root = self._checked_root()
        fields = BodyFields(body)
        name, path = fields.needed_text("lora_name"), fields.needed_text("lora_path")
        in_place = fields.flag("load_inplace")
        fields.close()
        folder = _folder_below(root, path)
        if folder is None:
            fields.refuse("lora_path", "a folder below the --adapters-from folder")
        if name == self._base:
            fields.refuse("lora_name", "a name other than the base's")
        if name in self._adapters.loaded() and not in_place:
            fields.refuse("lora_name", "a name that is not loaded, unless load_inplace is true")
        version = await self._change(name, lambda: self._adapters.load(name, folder))
        return f"Success: LoRA adapter '{name}' added successfully (version {version})."

    async def unload(self, body: object) -> str:
        """Unload an adapter; return the message for the client. Raises CallRefused."""
        self._checked_root()
        fields = BodyFields(body)
        name = fields.needed_text("lora_name")
        fields.close(frozenset({"lora_int_id"}))
        if name not in self._adapters.loaded():
            raise CallRefused(f"adapter {name!r} is not loaded", status=404, field="lora_name")
        await self._change(name, lambda: self._adapters.unload(name))
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _checked_root(self) -> Path:
        if self._loads_from is None:
            raise CallRefused(
                "adapters cannot be loaded; start the server with --adapters-from DIR",
                status=404,
            )
        return self._loads_from

    async def _change(self, name: str, work: Callable[[], object]) -> Any:
        """Run a change off the event loop; it continues if the client disconnects. Raises
        CallRefused if it fails, or while another call changes the same adapter."""
        if name in self._changing:
            raise CallRefused(
                f"adapter {name!r} is being changed by another call; wait until it has finished",
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


def _folder_below(root: Path, path: str) -> Path | None:
    """Resolve a folder that a call names, following links; None unless it lies below root."""
    try:
        folder = (root / path).resolve()
    except (OSError, RuntimeError, ValueError):  # a link to itself, a name with a null byte
        return None
    return folder if folder.is_relative_to(root) else None
