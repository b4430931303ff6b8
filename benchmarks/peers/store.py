"""A loopback object store: nginx over a folder, as it is or with the delay and the speed of a real store."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DELAY_S = 0.020
"""To the first byte."""
BYTES_PER_S = 80_000_000
"""Of a connection."""
_MODULES = Path("/usr/lib/nginx/modules")
INSTALL = "apt-get install nginx-core libnginx-mod-http-lua"


def missing() -> str | None:
    """What is not installed; None when all is."""
    if shutil.which("nginx") is None:
        return f"nginx is not installed: {INSTALL}"
    if not (_MODULES / "ngx_http_lua_module.so").exists():
        return f"nginx's lua module is not installed: {INSTALL}"
    return None


@contextlib.contextmanager
def serving(folder: Path, *, delayed: bool) -> Iterator[str]:
    """Serves `folder`; yields its address. Delayed: 20 ms to the first byte, 80 MB/s a connection."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slow = f"access_by_lua_block {{ ngx.sleep({DELAY_S}) }} limit_rate {BYTES_PER_S};" if delayed else ""
    work = Path(tempfile.mkdtemp(prefix="isthmus-nginx-"))
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    (work / "nginx.conf").write_text(f"""
        load_module {_MODULES}/ndk_http_module.so;
        load_module {_MODULES}/ngx_http_lua_module.so;
        {user} daemon off; worker_processes 1; pid {work}/pid; error_log {work}/errors warn;
        events {{ worker_connections 1024; }}
        http {{
          access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; keepalive_timeout 300;
          default_type application/octet-stream; lua_package_path "/usr/share/lua/5.1/?.lua;;";
          client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
          uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
          server {{ listen 127.0.0.1:{port}; root {folder}; location / {{ {slow} }} }}
        }}
    """)
    command = ["nginx", "-p", str(work), "-c", str(work / "nginx.conf"), "-e", str(work / "errors")]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if server.poll() is not None or time.monotonic() > end:
                errors = work / "errors"
                raise RuntimeError(
                    f"nginx did not start: {errors.read_text()[-300:] if errors.exists() else ''}"
                )
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)
        shutil.rmtree(work, ignore_errors=True)
