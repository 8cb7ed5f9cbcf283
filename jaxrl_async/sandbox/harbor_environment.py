"""An environment of Harbor without containers: a sandbox of this package. Harbor's Python runs it.

A task's Dockerfile may have FROM, WORKDIR, COPY and ENV; the programs are this machine's. Files
that a task or agent writes are in the sandbox's memory and gone with it.
"""

import asyncio
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)

from jaxrl_async.sandbox.harbor_files import copies_of
from jaxrl_async.sandbox.sandbox import CommandOutcome, Sandbox, limits_of

LONGEST_S = 24 * 3600.0
"""Limit of a command for which the caller sets none, seconds."""
TRANSFER_BYTES = 1 << 30
"""Maximum size of files that leave the sandbox together."""
OUTPUT_KB = 16 * 1024
"""Maximum output of one command, KiB."""
TIMED_OUT = 124
"""Exit code of a command that was ended at its limit, as of the command timeout."""


class SandboxHarborEnvironment(BaseEnvironment):
    """Harbor's environment as a sandbox. The keyword arguments are SandboxLimits' fields."""

    def __init__(
        self, *args: object, limits: Mapping[str, object] | None = None, **kwargs: object
    ) -> None:
        self._limits = dict(limits or {})
        self._box: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """See BaseEnvironment."""
        return "jaxrl-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """See BaseEnvironment."""
        return EnvironmentCapabilities(disable_internet=not self._limits.get("network"))

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """See BaseEnvironment."""
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        self._copies = copies_of(self.environment_dir)

    async def start(self, force_build: bool) -> None:
        """Start the sandbox and copy the task's files into it."""
        resources: dict[str, Any] = {
            "memory_mb": self._effective_memory_mb or 2048,
            "disk_mb": min(self._effective_storage_mb or 1024, 1024),
            "processes": 256,
            "output_kb": OUTPUT_KB,
        }
        limits = limits_of({**resources, **self._limits})
        self._box = await asyncio.to_thread(lambda: Sandbox(limits))
        folders = [mount["target"] for mount in self._mounts]
        await self._run_checked(["mkdir", "-p", self._copies.workdir, *folders])
        for source, target in self._copies.files:
            if source.is_dir():
                await self.upload_dir(source, target)
            elif target.endswith(("/", "/.")):
                await self.upload_file(source, str(PurePosixPath(target) / source.name))
            elif (await self._run(["test", "-d", target], 10.0)).code == 0:
                await self.upload_file(source, f"{target}/{source.name}")
            else:
                await self.upload_file(source, target)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """End the sandbox."""
        if self._box is not None:
            await asyncio.to_thread(self._box.close)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """See BaseEnvironment; every user is the sandbox's own."""
        environ = {**self._copies.environ, **(self._merge_env(env) or {})}
        folder = cwd or self.task_env_config.workdir or self._copies.workdir
        done = await self._run(
            ["bash", "-c", command], float(timeout_sec or LONGEST_S), cwd=folder, environ=environ
        )
        stderr = done.stderr.decode(errors="replace")
        if done.reason:
            stderr += f"\n[ended by the limit of {done.reason}]"
        code = (
            TIMED_OUT if done.reason == "time" else done.code if done.code >= 0 else 128 - done.code
        )
        return ExecResult(
            stdout=done.stdout.decode(errors="replace"), stderr=stderr, return_code=code
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """See BaseEnvironment."""
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        target = PurePosixPath(target_path)
        await self._unpack(_pack([(target.name, data, _mode(source_path))]), str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """See BaseEnvironment."""
        await self._unpack(await asyncio.to_thread(_pack_folder, Path(source_dir)), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """See BaseEnvironment."""
        done = await self._run_checked(["cat", source_path], output_bytes=TRANSFER_BYTES)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(Path(target_path).write_bytes, done.stdout)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """See BaseEnvironment. Links that lead out of the folder, and special files, are left
        behind."""
        words = ["tar", "-cf", "-", "-C", source_dir, "."]
        done = await self._run_checked(words, output_bytes=TRANSFER_BYTES)
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(_extract, done.stdout, Path(target_dir))

    async def _unpack(self, packed: bytes, folder: str) -> None:
        script = 'mkdir -p "$1" && tar -xf - --no-same-owner -C "$1"'
        await self._run_checked(["sh", "-c", script, "sh", folder], stdin=packed)

    async def _run(self, words: list[str], timeout_s: float, **more: Any) -> CommandOutcome:
        if self._box is None:
            raise RuntimeError("the sandbox is not started")
        return await asyncio.to_thread(self._box.run, words, timeout_s=timeout_s, **more)

    async def _run_checked(self, words: list[str], **more: object) -> CommandOutcome:
        """Run a command that must succeed."""
        done = await self._run(words, 600.0, cwd="/", **more)
        if not done.ok:
            text = done.stderr.decode(errors="replace")[-300:]
            raise RuntimeError(f"{json.dumps(words)[:200]}: {done.reason or done.code}: {text}")
        return done


def _mode(path: Path | str) -> int:
    return Path(path).stat().st_mode & 0o777


def _pack(files: list[tuple[str, bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data, mode in files:
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(data), mode
            tar.addfile(about, io.BytesIO(data))
    return buffer.getvalue()


def _pack_folder(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=False) as tar:
        tar.add(folder, arcname=".")
    return buffer.getvalue()


def _extract(packed: bytes, folder: Path) -> None:
    """Extract what the sandbox sent, which is not trusted."""
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r") as tar:
        for member in tar:
            try:
                tar.extract(member, folder, filter="data")
            except (tarfile.FilterError, OSError):
                continue
