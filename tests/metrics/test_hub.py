"""The metric from the Hub, played by a server on this machine: as a Space, and where the Hub does not have it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import evaluate
import pytest

from hf_geosharp import GeodesicSharpness, registration

FOLDER = Path(__file__).resolve().parents[2] / "metrics" / "geodesic_sharpness"


class Hub(ThreadingHTTPServer):
    """Has the Space somebody/geodesic_sharpness, and answers ``otherwise`` to the rest."""

    otherwise = 404

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def _answer(self, body: bool) -> None:
        self.server.asked.append(self.path)
        space, _, name = self.path.partition("/resolve/main/")
        file = FOLDER / name
        found = space == "/spaces/somebody/geodesic_sharpness" and bool(name) and file.is_file()
        content = file.read_bytes() if found else b""
        self.send_response(200 if found else self.server.otherwise)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(evaluate.config, "HUB_EVALUATE_URL", endpoint + "/spaces/{path}/resolve/{revision}/{name}")
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", False)
    monkeypatch.setattr(evaluate.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_space(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(evaluate.load("somebody/geodesic_sharpness")) is GeodesicSharpness
    # Nothing is fetched besides the script: it imports nothing of its own folder.
    assert {path.rpartition("/")[2] for path in hub.asked} == {"geodesic_sharpness.py"}
    # From then on without a network.
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    assert type(evaluate.load("somebody/geodesic_sharpness")) is GeodesicSharpness


@pytest.mark.parametrize("otherwise", [401, 403, 404, 500, 503])
def test_the_bare_name_where_the_hub_does_not_have_it(hub: Hub, otherwise: int) -> None:
    hub.otherwise = otherwise
    registration.register()
    assert type(evaluate.load("geodesic_sharpness")) is GeodesicSharpness
    assert any("evaluate-metric/geodesic_sharpness" in path for path in hub.asked)
