"""The report in a real browser: headless Chromium, spoken to over its DevTools pipe (no driver package).

Skipped, with the reason, where Chromium is not installed; on Debian: apt-get install chromium.
"""

from __future__ import annotations

import base64
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.report import write_report
from isthmus.storage.rundir import RunDirectory

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)
BEGAN = 1_767_225_600.0  # 2026-01-01 00:00 UTC
RECIPE = {
    "name": "sdxl-progressive",
    "stages": [
        {"name": "256px", "steps": 1400, "global_batch_size": 2048, "max_grad_norm": 1.0},
        {"name": "512px", "steps": 1100, "global_batch_size": 2048, "max_grad_norm": 1.0},
        {"name": "1024px", "steps": 500, "global_batch_size": 1024, "max_grad_norm": 1.0},
    ],
    "monitor": {
        "gpu_utilization": {"min": 95, "for": "10 min"},
        "gpu_memory": {"min": 70, "for": "10 min"},
        "fabric_gigabytes_per_s": {"min": 4, "for": "10 min"},
        "data_wait": {"max": 2, "for": "10 min"},
    },
}


class Chromium:
    """One browser with one page; every event it sends is kept."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()

        def pipes() -> None:
            # Chromium reads commands on 3 and answers on 4. Copies first: these may be 3 or 4 themselves.
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._next = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One DevTools command and its result."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium ended")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Loads a file at a window size and colour scheme; waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; the page itself may run none."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def hover(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        """Ends this browser."""
        os.close(self._write)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._read)


def make_run(uri: Path, *, nodes: int = 2, scale: float = 1.0) -> RunDirectory:
    """A run with all that a report shows: three stages, a preemption, NaN losses, alarms, grids, four nodes' metrics."""
    draw = random.Random(7)
    run = RunDirectory(uri)
    run.create(
        "version: 1\nname: sdxl-progressive\n# </pre><script>alert(1)</script>\n" + "stages: []\n" * 30,
        {
            "id": "sdxl-progressive-20260101-7f3a",
            "backend": "local",
            "created": BEGAN - 60,
            "recipe": RECIPE,
            "recipe_hash": "9f2c" * 16,
            "git": {"sha": "3e1c0b5a7d9f4e21", "dirty": True},
            "python": "3.11.7",
            "packages": {
                "torch": "2.13.0",
                "accelerate": "1.15.0",
                "diffusers": "0.42.1",
                "isthmus": "0.1.0",
            },
            "dataset_fingerprints": ["b1946ac92492d234"],
            "world_size": 8 * nodes,
        },
    )
    now = BEGAN
    train = run.metrics("train")
    validation = run.metrics("validation")
    systems = [run.metrics(f"system-node{node}") for node in range(nodes)]
    events: list[tuple[float, str, dict[str, Any]]] = [(now - 50, "submitted", {"job": "local-1"})]
    events.append((now, "started", {"attempt": 1, "host": "node-0"}))
    step, samples, attempt, last_row = 0, 0, 1, 0.0
    preempt_at = int(1900 * scale)
    for stage, section in enumerate(RECIPE["stages"]):  # type: ignore[arg-type, var-annotated]
        pace = (2.1, 3.4, 6.0)[stage]
        for local in range(int(section["steps"] * scale)):
            step += 1
            if step == preempt_at and attempt == 1:
                events.append((now, "preempted", {"step": step - 1, "cause": "SIGTERM from the cloud"}))
                attempt, now, step = 2, now + 900, step - int(40 * scale)
                events.append((now, "started", {"attempt": 2}))
                events.append((now + 5, "resumed", {"step": step, "attempt": 2}))
            wait = pace * (0.004 + 0.03 * draw.random() ** 6)
            now += pace + wait
            samples += section["global_batch_size"]
            base = 0.13 + 0.9 * math.exp(-step / (130 * scale)) + 0.06 * math.exp(-local / (90 * scale))
            loss = base + 0.012 * draw.gauss(0, 1)
            bad = step in (int(700 * scale), int(701 * scale))
            train.write(
                {
                    "step": step,
                    "stage": stage,
                    "loss": math.nan if bad else loss,
                    "grad_norm": 0.35 + 2 * math.exp(-step / (80 * scale)) + 0.08 * abs(draw.gauss(0, 1)),
                    "learning_rate": 1e-4
                    * min(1.0, local / (120 * scale))
                    * (1 if stage < 2 else 1 - local / (500 * scale)),
                    "samples": samples,
                    "samples_per_s": section["global_batch_size"] / (pace + wait),
                    "step_s": pace + wait,
                    "data_wait_s": wait,
                    "skipped": bad,
                    "attempt": attempt,
                    "time": now,
                }
            )
            if step % max(1, int(150 * scale)) == 0:
                bins = [base * (0.5 + 0.16 * b) * (1 + 0.02 * draw.gauss(0, 1)) for b in range(8)]
                validation.write(
                    {"step": step, "loss": sum(bins) / 8, "bins": bins, "held_out": True, "time": now}
                )
                events.append((now, "checkpoint-committed", {"step": step}))
            if now - last_row >= 60:
                elapsed, last_row = now - last_row, now
                for node, writer in enumerate(systems):
                    # A probe that has just started knows no energy yet.
                    energy = 8 * 0.36 * elapsed if elapsed < 120 else None
                    slow = node == 1 and 1000 * scale < step < 1300 * scale
                    writer.write(
                        {
                            "time": now,
                            "cpu_percent": 22 + 3 * draw.gauss(0, 1),
                            "memory_used_percent": 31 + step / 1000,
                            "disk_free_bytes": 5.1e12 - 2e8 * step,
                            "gpu_utilization": (81 if slow else 97.5) + draw.gauss(0, 0.7),
                            "gpu_memory": (62, 74, 88)[stage] + draw.gauss(0, 0.4),
                            **({"gpu_energy_kilojoules": energy * (0.8 if slow else 1)} if energy else {}),
                            "fabric_gigabytes_per_s": (8.1, 5.9, 4.4)[stage] + 0.2 * draw.gauss(0, 1),
                        }
                    )
            if step == int(1050 * scale):
                alarm = {"metric": "gpu_utilization", "node": 1, "value": 81.2, "bound": 95}
                told = "node 1: gpu_utilization 81.2 % is below 95 % (over 600 s)"
                events.append((now, "alarm", {**alarm, "message": told}))
    events.append((now, "finished", {"step": step}))
    for writer in (train, validation, *systems):
        writer.close()
    for at, kind, fields in events:
        run.event(kind, **{**fields, "time": at})
    for at in (500, 1000, 1500, 2000, 2500, 3000):
        run.write_file(f"samples/step-{int(at * scale):08d}.png", _grid(at))
    for at in (2000, 2500, 3000):
        files = {"weights": {"size": 5_132_000_000, "sha256": "0"}, "optimizer": {"size": 10_264_000_000}}
        run.commit_checkpoint(int(at * scale), {"files": files})
    return run


def _grid(seed: int) -> bytes:
    from io import BytesIO

    from PIL import Image, ImageDraw

    image = Image.new("RGB", (4 * 132, 2 * 152), "white")
    brush, draw = ImageDraw.Draw(image), random.Random(seed)
    for column in range(4):
        for row in range(2):
            x, y, blur = column * 132 + 2, row * 152 + 2, max(0, 2600 - seed) // 90
            colour = ("#c0392b", "#2471a3", "#1e8449", "#b7950b")[column]
            brush.rectangle((x, y, x + 127, y + 127), fill="#e9ecef")
            inset = 24 + draw.randint(-blur, blur) // 2
            shape = brush.ellipse if row else brush.rectangle
            shape((x + inset, y + inset, x + 127 - inset, y + 127 - inset), fill=colour)
            brush.text((x + 4, y + 131), ("red", "blue", "green", "yellow")[column], fill="black")
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """A fresh browser with its own profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        chromium = Chromium(Path(profile))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up run."""
    run = make_run(tmp_path_factory.mktemp("run"), scale=0.2)
    return Path(write_report(run.uri))


def requests(browser: Chromium) -> list[str]:
    """Addresses that the page asked for, but for itself and what it carries."""
    sent = [event["params"] for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    urls = [event["request"]["url"] for event in sent]
    return [url for url in urls if not url.startswith("data:") and not url.endswith("/report.html")]


def complaints(browser: Chromium) -> list[Any]:
    """What the console says."""
    kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    return [event for event in browser.events if event.get("method") in kinds]


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_page_is_whole_quiet_and_fits(browser: Chromium, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    text = browser.evaluate("document.body.innerText")
    for word in ("sdxl-progressive-20260101-7f3a", "finished", "Loss", "Gradient norm", "512px", "preempted"):
        assert word in text
    assert complaints(browser) == []
    assert requests(browser) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 20, 22)" if dark else "rgb(255, 255, 255)")


@needs_chromium
def test_the_checks_can_fail(browser: Chromium, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<body style='width:900px'><script>console.error('no')</script><img src='http://127.0.0.1:9/x.png'>"
    )
    browser.open(bad, width=400)
    assert browser.evaluate("document.documentElement.scrollWidth") > 400
    assert "http://127.0.0.1:9/x.png" in requests(browser)
    assert complaints(browser)


OVERLAPS = """
(() => {
  const found = [];
  for (const frame of document.querySelectorAll('.frame'))
    for (const group of ['.xs span', '.ys span', '.spans span', '.bound-label']) {
      const boxes = [...frame.querySelectorAll(group)].map(e => [e.getBoundingClientRect(), e.innerText]);
      for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
        const [a, s] = boxes[i], [b, t] = boxes[j];
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
          found.push(group + ' ' + s + ' ' + t);
      }
    }
  return found;
})()
"""


@needs_chromium
@pytest.mark.parametrize("width", [400, 800, 1280])
def test_axis_labels_do_not_overlap(browser: Chromium, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.querySelectorAll('.xs span').length") > 20
    assert browser.evaluate(OVERLAPS) == []


@needs_chromium
def test_the_value_under_the_pointer_is_shown(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280)
    place = browser.evaluate(
        "(() => { const b = document.querySelector('.plot').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )
    browser.hover(place[0] + place[2] / 2, place[1] + place[3] / 2)
    shown = browser.evaluate(
        "[...document.querySelectorAll('.hover b')].filter(b => b.checkVisibility()).map(b => b.innerText)"
    )
    assert len(shown) == 1
    assert shown[0].startswith("step ")


def main() -> None:
    """Writes pictures of a report for people to look at: `python tests/e2e/test_report_browser.py FOLDER`."""
    import sys

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    run_folder = folder / "run"
    shutil.rmtree(run_folder, ignore_errors=True)
    page = Path(write_report(make_run(run_folder).uri))
    print(f"{page.stat().st_size / 1e6:.2f} MB in {time.perf_counter() - started:.1f} s")
    chromium = Chromium(folder / "profile")
    for width in (1280, 400):
        for dark in (False, True):
            chromium.open(page, width=width, dark=dark)
            chromium.screenshot(folder / f"{width}-{'dark' if dark else 'light'}.png")
    chromium.close()
    shutil.rmtree(folder / "profile", ignore_errors=True)


if __name__ == "__main__":
    main()
