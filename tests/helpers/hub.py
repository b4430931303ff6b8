"""A stand-in for the Hugging Face hub: repositories of files at one commit, served as its API does, and what was asked of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A running stand-in."""

    url: str
    repositories: Mapping[str, Path]
    gated: set[str] = field(default_factory=set)
    broken: bool = False
    asked: list[str] = field(default_factory=list)
    """Method and path of every request."""

    def files(self) -> list[str]:
        """Of the files that were read."""
        return sorted(
            {
                line.split("/resolve/")[1].partition("/")[2]
                for line in self.asked
                if line.startswith("GET") and "/resolve/" in line
            }
        )


@contextmanager
def served(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """Serve `owner/name` -> folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, data, headers = self._found(path)
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def _found(self, path: str) -> tuple[int, bytes, dict[str, str]]:
            if hub.broken:
                return 503, b"{}", {}
            parts = path.removeprefix("/api/models/").strip("/").split("/")
            name, rest = "/".join(parts[:2]), parts[2:]
            if name not in repositories:
                return 404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}
            if name in hub.gated:
                return 403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"}
            if len(rest) < 2 or rest[1] != COMMIT:
                return 404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"}
            folder = repositories[name]
            if path.startswith("/api/models/"):
                return 200, json.dumps(self._tree(folder)).encode(), {}
            file = folder.joinpath(*rest[2:])
            if not file.is_file():
                return 404, b"", {"X-Error-Code": "EntryNotFound"}
            data = file.read_bytes()
            return 200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}

        def _tree(self, folder: Path) -> list[dict[str, Any]]:
            return [
                {
                    "type": "file",
                    "path": file.relative_to(folder).as_posix(),
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            ]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
