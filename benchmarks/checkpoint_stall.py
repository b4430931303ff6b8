"""What a checkpoint in the background costs training, beside a synchronous one of the same state.

    python benchmarks/checkpoint_stall.py [--json] [--store s3|disk] [--threads 1] [--megabytes 1000] [--rate 200]

Each repetition is two fresh processes that train a PixArt of the size (weights, average and AdamW's moments together)
on the CPU. One saves synchronously: its cost is the wall time of the save. The other steps for a while, begins a
checkpoint, and steps on until it is committed: its cost is the wall time from the beginning to the end of that last
step, less what as many steps took before and after it: the stall and the slowing of the steps beside it together.

    s3    an S3 server of ours (a process of its own, on this machine) that takes parts at the rate, and drops them:
          the real upload by obstore. The server's own work is on this machine's cores too, which a real store's is not.
    disk  files on this machine's disk, written at the rate.

`--threads` is torch's. With as many as there are cores nothing is idle, and every CPU second of the background is one
that the steps lose; a GPU's host has idle cores. Also printed: where the background's CPU time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.server
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

MB = 1_000_000
SETTLE_STEPS = 3


def main() -> None:
    """Measures and prints."""
    options = _parser().parse_args()
    if options.serve:
        _serve(options.serve, options.rate * MB)
    elif options.child:
        print(json.dumps(_child(options)))
    else:
        report = _measure(options)
        print(json.dumps(report, indent=1) if options.json else _text(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", choices=["s3", "disk"], default="s3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=1000, help="of the state")
    parser.add_argument("--rate", type=float, default=200, help="MB/s that the store takes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6, help="of steps before and after the checkpoint")
    parser.add_argument("--child", choices=["asynchronous", "synchronous"], help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    runs = []
    with _place(options) as (place, environment):
        for number in range(options.repetitions):
            pair = {}
            # Interleaved, so that a machine that slows down slows both.
            for mode in ("synchronous", "asynchronous"):
                command = [sys.executable, __file__, "--child", mode, "--place", f"{place}/{mode}-{number}"]
                for name in ("threads", "megabytes", "rate", "seconds", "store"):
                    command += [f"--{name}", str(getattr(options, name))]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                pair[mode] = json.loads(done.stdout.splitlines()[-1])
            pair["share"] = pair["asynchronous"]["cost_s"] / pair["synchronous"]["cost_s"]
            runs.append(pair)
    shares = sorted(run["share"] for run in runs)
    return {
        "store": options.store,
        "megabytes": runs[0]["asynchronous"]["megabytes"],
        "rate": options.rate,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "share_median": statistics.median(shares),
        "share_min": shares[0],
        "share_max": shares[-1],
        "synchronous_s": statistics.median(run["synchronous"]["cost_s"] for run in runs),
        "asynchronous_s": statistics.median(run["asynchronous"]["cost_s"] for run in runs),
        "stall_s": statistics.median(run["asynchronous"]["stall_s"] for run in runs),
        "background_s": statistics.median(run["asynchronous"]["background_s"] for run in runs),
        "step_s": statistics.median(run["asynchronous"]["step_s"] for run in runs),
        "background_cpu_s": statistics.median(run["asynchronous"]["background_cpu_s"] for run in runs),
        "hash_s": runs[0]["asynchronous"]["hash_s"],
        "runs": runs,
    }


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"state of {report['megabytes']:.0f} MB to {report['store']} at {report['rate']:.0f} MB/s, "
        f"{report['threads']} of {report['cores']} cores train, {len(report['runs'])} pairs of fresh processes",
        f"  synchronous save            {report['synchronous_s']:.2f} s",
        f"  asynchronous, all it costs  {report['asynchronous_s']:.3f} s = {report['share_median']:.1%} of it "
        f"(median; {report['share_min']:.1%} to {report['share_max']:.1%})",
        f"    of that the stall         {report['stall_s']:.3f} s (the copy)",
        f"    CPU of the background     {report['background_cpu_s']:.2f} s over {report['background_s']:.2f} s "
        f"(SHA-256 of the state alone: {report['hash_s']:.2f} s)",
        f"  a step                      {report['step_s']:.3f} s",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _place(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    """Where checkpoints go, and the environment that children need for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    with tempfile.TemporaryDirectory() as folder:
        if options.store == "disk":
            yield folder, environment
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(port), "--rate", str(options.rate)]
        )
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield (
                "s3://bucket/runs",
                {
                    **environment,
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                    "AWS_ACCESS_KEY_ID": "none",
                    "AWS_SECRET_ACCESS_KEY": "none",
                    "AWS_REGION": "us-east-1",
                },
            )
        finally:
            server.terminate()
            server.wait()


# -- one process that trains


def _child(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from isthmus.core.recipe.schema import Checkpoint
    from isthmus.core.train.checkpoint import Checkpoints, TrainerState
    from isthmus.core.train.trainer_state import Identity

    torch.set_num_threads(options.threads)
    if options.store == "disk":
        _pace_disk(options.rate * MB)
    step, engine, ema = _training(options.megabytes * MB)
    checkpoints = Checkpoints(_Run(options.place), engine, ema, Checkpoint(), None)  # type: ignore[arg-type]
    checkpoints.prepare()
    state = TrainerState(Identity("benchmark", (), 1), step=1)
    for _ in range(SETTLE_STEPS):
        step()
    assert checkpoints._planned is not None
    size = checkpoints._planned.image.size
    if options.child == "synchronous":
        return {"cost_s": checkpoints.save(state), "megabytes": size / MB}

    times: list[float] = []

    def steps(until: Any) -> tuple[float, float]:
        """Steps until told; wall and CPU seconds of them all."""
        began, cpu = time.perf_counter(), time.process_time()
        while not until(time.perf_counter() - began):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return time.perf_counter() - began, time.process_time() - cpu

    alone = [steps(lambda passed: passed > options.seconds)]
    count = len(times)
    began, cpu = time.perf_counter(), time.process_time()
    flight = checkpoints.begin(state)
    steps(lambda _: flight.ended.is_set())
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    beside, count_alone = len(times) - count, count
    alone.append(steps(lambda passed: passed > options.seconds))
    count_alone += len(times) - count - beside
    if flight.error is not None:
        raise flight.error
    step_s = sum(wall for wall, _ in alone) / count_alone
    step_cpu_s = sum(cpu for _, cpu in alone) / count_alone
    digest, began = hashlib.sha256(), time.perf_counter()
    for data in checkpoints._planned.image.files().values():
        digest.update(data)
    return {
        "cost_s": wall - beside * step_s,
        "stall_s": flight.stall_s,
        "background_s": flight.background_s,
        "background_cpu_s": cpu - beside * step_cpu_s,
        "hash_s": time.perf_counter() - began,
        "steps_beside": beside,
        "step_s": step_s,
        "megabytes": size / MB,
    }


def _training(state_bytes: float) -> tuple[Any, Any, Any]:
    """A step of a PixArt with AdamW and the average, whose whole state is about so large."""
    import torch

    from isthmus.core.models.families import build_from_config
    from isthmus.core.models.presets import CLASSES
    from isthmus.core.recipe.schema import Parallel
    from isthmus.core.recipe.stages import EMA as EMASettings
    from isthmus.core.recipe.stages import Optimizer
    from isthmus.core.train.ema import EMA
    from isthmus.core.train.parallel import prepare

    width, per_layer = 512, 8 * 512 * 512 + 8 * 512 * 512
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4,
        "num_layers": max(1, round(state_bytes / 16 / per_layer)), "num_attention_heads": 8,
        "attention_head_dim": width // 8, "cross_attention_dim": width, "caption_channels": 64,
        "use_additional_conditions": False,
    }  # fmt: skip
    model = build_from_config(CLASSES["dit"], config, 0)
    engine = prepare(model, Optimizer(), Parallel(strategy="ddp", precision="fp32"), cpu=True)
    ema, settings = EMA(engine.parameters), EMASettings(decay=0.999)
    engine.optimizer.param_groups[0]["lr"] = 1e-4
    latents, text = torch.randn(2, 4, 16, 16), torch.randn(2, 8, 64)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        out = engine.model(
            latents,
            encoder_hidden_states=text,
            timestep=torch.full((2,), 500.0),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        torch.autograd.backward(out.square().mean())
        engine.clip(1.0)
        engine.optimizer.step()
        ema.step(number, settings)
        engine.optimizer.zero_grad(set_to_none=True)

    return step, engine, ema


class _Run:
    """What checkpoints use of a run directory, without its small objects: those are the same for both ways to save."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def checkpoints(self) -> list[int]:
        return []

    def checkpoint_uri(self, step: int) -> str:
        return f"{self.uri}/step-{step:08d}"

    def commit_checkpoint(self, *_: Any, **__: Any) -> None: ...
    def remove_checkpoint(self, step: int) -> None: ...
    def event(self, *_: Any, **__: Any) -> None: ...


# -- stores that take so many bytes a second


class _Tap:
    """Lets bytes through at a rate, over all that ask."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def take(self, count: int) -> None:
        """Returns when the bytes may have gone through."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            wait = self._free_at - now
        time.sleep(max(0.0, wait))


def _pace_disk(bytes_per_s: float) -> None:
    from isthmus.storage import uploads

    tap, write = _Tap(bytes_per_s), uploads._PIECE
    real = os.fsync

    class Paced:
        """A file whose writes take their time."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            tap.take(min(len(data), write))
            return int(self._file.write(data))

        def fileno(self) -> int:
            return int(self._file.fileno())

    def paced(path: Any, data: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        left = memoryview(data)
        with path.open("wb", buffering=0) as file:
            slow = Paced(file)
            while left:
                left = left[slow.write(left[: uploads._PIECE]) :]
            real(file.fileno())

    uploads._write = paced


def _serve(port: int, bytes_per_s: float) -> None:
    tap = _Tap(bytes_per_s)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None: ...

        def _body(self) -> None:
            left, memory = int(self.headers.get("Content-Length") or 0), memoryview(bytearray(1 << 20))
            # What came with the headers; then the kernel drops bytes without a copy, where it can: a store's own work is not
            # on the trainer's cores.
            left -= len(self.rfile.read(min(left, len(self.rfile.peek()))) if left else b"")  # type: ignore[attr-defined]
            drop = socket.MSG_TRUNC if sys.platform == "linux" else 0
            while left > 0:
                count = self.connection.recv_into(memory, min(left, len(memory)), drop)
                if not count:
                    return
                left -= count
                tap.take(count)

        def _say(self, body: str = "") -> None:
            self.send_response_only(200)
            self.send_header("ETag", '"part"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_PUT(self) -> None:
            self._body()
            self._say()

        def do_POST(self) -> None:
            self._body()
            names = "<Bucket>bucket</Bucket><Key>key</Key>"
            if "uploadId" in self.path:
                kind = "CompleteMultipartUploadResult"
                names += '<Location>here</Location><ETag>"whole"</ETag>'
            else:
                kind = "InitiateMultipartUploadResult"
                names += "<UploadId>upload</UploadId>"
            self._say(f"<?xml version='1.0'?><{kind}>{names}</{kind}>")

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
