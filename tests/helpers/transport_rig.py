"""Weights on one mesh, wanted on another; proxies between both sides; fetchers in processes."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from compile_flags import QUICK_COMPILE
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROOT = Path(__file__).parent.parent.parent
LAYERS = (3, 16, 32)
SPECS = {  # as a trainer and a sampler shard them: (fsdp x tensor, tensor)
    "w": (PartitionSpec(None, "fsdp", "tensor"), PartitionSpec(None, None, "tensor")),
    "down": (PartitionSpec(None, "tensor", "fsdp"), PartitionSpec(None, "tensor", None)),
    "norm": (PartitionSpec(), PartitionSpec()),
    "values": (PartitionSpec(None, "fsdp", "tensor"), PartitionSpec(None, None, "tensor")),
    "scale": (PartitionSpec(None, "tensor"), PartitionSpec(None, "tensor")),
    "step": (PartitionSpec(), PartitionSpec()),
    "head": (PartitionSpec("tensor", "fsdp"), PartitionSpec("tensor", None)),
}


def host_tree(seed=0, rows=64):
    """Random weights of several types, nested, with 8-bit matrices; in host memory."""
    rng = np.random.default_rng(seed)

    def bits(shape, dtype):
        dtype = np.dtype(dtype)
        raw = rng.integers(0, 120, (*shape, dtype.itemsize), dtype=np.uint8)
        return raw.reshape(-1).view(dtype).reshape(shape)

    return {
        "layers": {
            "w": bits(LAYERS, jnp.bfloat16),
            "down": bits((3, 32, 16), np.float32),
            "norm": bits((16,), np.float32),
            "values": bits(LAYERS, jnp.float8_e4m3fn),
            "scale": bits((3, 32), np.float32),
            "step": bits((), np.float32),
        },
        "head": bits((rows, 16), np.int8),
    }


def mesh_of(fsdp, tensor, first=0):
    """A mesh of forced host devices, from the given one on."""
    devices = jax.devices()[first : first + fsdp * tensor]
    return Mesh(np.array(devices).reshape(fsdp, tensor), ("fsdp", "tensor"))


def sharded(tree, mesh, side):
    """Shardings of the tree: side 0 as a trainer's, 1 as a sampler's."""

    def one(path, _):
        return NamedSharding(mesh, SPECS[path[-1].key][side])

    return jax.tree_util.tree_map_with_path(one, tree)


def on_trainer(tree, fsdp=2, tensor=2):
    """The weights on the trainer's mesh."""
    return jax.device_put(tree, sharded(tree, mesh_of(fsdp, tensor), 0))


def target_of(tree, fsdp=1, tensor=1, first=4):
    """What a sampler of this mesh wants."""
    shardings = sharded(tree, mesh_of(fsdp, tensor, first), 1)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def same_bits(params, tree):
    """Whether arrays have the very bits of the source."""

    def equal(a, b):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()

    return jax.tree.all(jax.tree.map(equal, params, tree))


class Proxy:
    """Stands between a client and a server, and does harm to what the server sends.

    harm(bytes so far, data) -> data to pass on; None: cut the connection.
    """

    def __init__(self, target: str, harm: Callable[[int, bytes], bytes | None]) -> None:
        host, port = target.rsplit(":", 1)
        self._target, self._harm = (host, int(port)), harm
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.connections, self.passed = 0, 0
        self._lock, self._sockets = threading.Lock(), [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self.connections += 1
            self._sockets += [client, server]
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                server.sendall(data)
        except OSError:
            pass
        self._end(client, server)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 12):
                with self._lock:
                    passed = self._harm(self.passed, data)
                    self.passed += len(data)
                if passed is None:
                    break
                client.sendall(passed)
        except OSError:
            pass
        self._end(client, server)

    def _end(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end(*self._sockets)
        for one in self._sockets:
            one.close()


class FetchProcess:
    """A sampler's fetching in a process of its own; see `main`."""

    def __init__(self, **section) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}"}
        env["XLA_FLAGS"] = QUICK_COMPILE
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(section)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.pid = self._process.pid

    def tell(self, message) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self):
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()


def main() -> None:
    """Read a tree's arguments, then offers; print address, then what came."""
    from jaxrl_async.config.remote_section import RemoteSection
    from jaxrl_async.errors import WeightsError
    from jaxrl_async.remote.weights.transport_choice import make_fetching

    section = RemoteSection(**json.loads(sys.argv[1]))
    tree = host_tree(rows=json.loads(sys.stdin.readline()))
    fetching = make_fetching(section, target_of(tree, first=0))
    print(json.dumps(fetching.address), flush=True)
    for line in sys.stdin:
        version, where, sources = json.loads(line)
        try:
            got = fetching.fetch(version, where, sources, threading.Event())
            result = [
                got.num_bytes,
                got.source,
                same_bits(got.params, host_tree(version, _rows(where))),
            ]
        except WeightsError as error:
            result = ["error", str(error), False]
        print(json.dumps(result), flush=True)
    fetching.close()


def _rows(where):
    return next(shape[0] for name, shape, _ in where["arrays"] if name == "head")


if __name__ == "__main__":
    main()
