"""Stand-ins for the trainer and the sampler on a Ray cluster: sockets instead of a model.

ray_standin.py train CONFIG             listens at remote.listen, and makes a step of metrics each
                                        0.1 s while a sampler is there; resumes where it ended; two
                                        are enough, one if there is a file `slow`
ray_standin.py sample --join HOST:PORT  joins with the secret, again and again; SIGTERM: says so
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import yaml

SECRET = os.environ["JAXRL_ASYNC_SECRET"].encode()


def train(path: str) -> int:
    config = yaml.safe_load(Path(path).read_text())
    folder = Path(config["run"]["dir"]) / config["run"]["name"]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "metrics.jsonl"
    host, _, port = config["remote"]["listen"].rpartition(":")
    living: set[str] = set()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def serve(one: socket.socket) -> None:
        words = one.makefile("rb")
        if words.readline().strip() != SECRET:
            return
        name = words.readline().decode().strip()
        living.add(name)
        log(folder, f"join {name}")
        last = words.readline()
        living.discard(name)
        log(folder, f"{'leave' if last else 'lost'} {name}")

    def accept() -> None:
        with socket.create_server((host, int(port))) as listener:
            while True:
                one, _ = listener.accept()
                threading.Thread(target=serve, args=(one,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    log(folder, f"train {os.getpid()}")
    step = len(file.read_text().splitlines()) if file.exists() else 0
    while step < config["run"]["steps"] and not stop.is_set():
        time.sleep(0.1)
        count = len(living)
        if not count:
            continue
        step += 1
        load = 0.5 if (folder / "slow").exists() else 2.0  # samplers that the trainer can use
        values = {
            "time/step_s": 2.0,
            "time/wait_data_s": 2.0 * max(1 - count / load, 0.0),
            "sampler/idle_share": max(1 - load / count, 0.0),
            "sampler/living": float(count),
        }
        with file.open("a") as out:
            out.write(json.dumps({"step": step, **values}) + "\n")
    log(folder, f"end {step}")
    return 0 if step >= config["run"]["steps"] else 75


def sample(address: str) -> int:
    host, _, port = address.rpartition(":")
    one: socket.socket | None = None

    def leave(*_: object) -> None:
        if one is not None:
            one.sendall(b"leaving\n")
        os._exit(75)

    signal.signal(signal.SIGTERM, leave)
    while True:
        try:
            one = socket.create_connection((host, int(port)), timeout=5)
            one.settimeout(None)
            one.sendall(SECRET + b"\n" + str(os.getpid()).encode() + b"\n")
            one.recv(1)  # until the trainer is gone
        except OSError:
            pass
        one = None
        time.sleep(0.1)


def log(folder: Path, text: str) -> None:
    with (folder / "events").open("a") as out:
        out.write(text + "\n")


if __name__ == "__main__":
    sys.exit(train(sys.argv[2]) if sys.argv[1] == "train" else sample(sys.argv[3]))
