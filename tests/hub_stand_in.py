"""A stand-in for the Hub: as much of its web interface as reading and committing a model card needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

HANG = "hang"


@dataclass
class Answer:
    """What to answer instead: a status, the Hub's own error code and message, and a body."""

    status: int
    code: str = ""
    message: str = ""
    body: bytes = b"{}"


@dataclass
class Repo:
    """Branches by name, each a commit; commits hold files."""

    heads: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        before = self.commits.get(self.heads.get(branch, ""), {})
        self.commits[sha] = {**before, **files}
        self.heads[branch] = sha
        return sha

    def card(self, branch: str = "main") -> bytes | None:
        return self.commits[self.heads[branch]].get("README.md")


class StandIn:
    """The server and its state. ``faults`` maps the name of an endpoint to an answer, or to HANG."""

    def __init__(self) -> None:
        self.user: dict[str, Any] = {"type": "user", "name": "me", "orgs": []}
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, Answer | str] = {}
        self.log: list[str] = []
        self.senders: set[tuple[str, str | None]] = set()
        self.messages: list[str] = []
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, card: bytes | None, **files: bytes) -> Repo:
        made = self.repos[repo] = Repo()
        made.commit("main", {**({} if card is None else {"README.md": card}), **files})
        return made

    def count(self, endpoint: str) -> int:
        return self.log.count(endpoint)


_ROUTES = (
    ("whoami", r"/api/whoami-v2"),
    ("validate", r"/api/validate-yaml"),
    ("info", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<rev>[^/]+))?"),
    ("discussions", r"/api/models/(?P<repo>[^/]+/[^/]+)/discussions"),
    ("preupload", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)"),
    ("commit", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)"),
    ("resolve", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)"),
)


def _handler(hub: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve()

        do_HEAD = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            url = urlsplit(self.path)
            name, found = next(
                ((name, found) for name, pattern in _ROUTES if (found := re.fullmatch(pattern, url.path))), ("", None)
            )
            if found is None:
                return self._send(Answer(404))
            hub.log.append(name)
            hub.senders.add((name, self.headers.get("Authorization")))
            fault = hub.faults.get(name)
            if fault == HANG:
                hub.closing.wait(30)
                self.close_connection = True
                return None
            if isinstance(fault, Answer):
                return self._send(fault)
            parts = {key: unquote(value) for key, value in found.groupdict().items() if value}
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            return getattr(self, f"_{name}")(parts, query, body)

        def _whoami(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            self._json(hub.user)

        def _validate(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            self._json({"warnings": [], "errors": []})

        def _info(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            repo = hub.repos.get(parts["repo"])
            if repo is None:
                return self._send(Answer(404, "RepoNotFound", "Repository not found"))
            sha = repo.heads.get(parts.get("rev", "main"))
            if sha is None:
                return self._send(Answer(404, "RevisionNotFound", "Invalid rev id"))
            return self._json({"id": parts["repo"], "modelId": parts["repo"], "sha": sha, "siblings": [], "tags": []})

        def _resolve(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            content = hub.repos[parts["repo"]].commits[parts["rev"]].get(parts["file"])
            if content is None:
                return self._send(Answer(404, "EntryNotFound", "Entry not found"), parts["rev"])
            return self._send(Answer(200, body=content), parts["rev"])

        def _preupload(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            files = [file["path"] for file in json.loads(body)["files"]]
            self._json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})

        def _discussions(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            found = [
                request
                for request in hub.repos[parts["repo"]].requests
                if query.get("author") in (None, request["author"]["name"])
                and query.get("status") in (None, request["status"])
            ]
            self._json({"count": len(found), "start": 0, "discussions": found})

        def _commit(self, parts: dict[str, str], query: dict[str, str], body: bytes) -> None:
            repo, branch = hub.repos[parts["repo"]], parts["rev"]
            lines = [json.loads(line) for line in body.splitlines()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            assert len(lines) == 1 + len(files)
            asked = bool(query.get("create_pr"))
            if header.get("parentCommit") != repo.heads[branch] and not asked:
                return self._send(Answer(412, message="A commit has happened since. Please refresh and try again."))
            hub.messages.append(header["summary"])
            url = None
            if asked:
                number = len(repo.requests) + 1
                url = f"{hub.url}/{parts['repo']}/discussions/{number}"
                repo.requests.append(self._request(number, header["summary"], parts["repo"]))
                repo.heads[f"refs/pr/{number}"] = header["parentCommit"]
                branch = f"refs/pr/{number}"
            sha = repo.commit(branch, files)
            commit_url = f"{hub.url}/{parts['repo']}/commit/{sha}"
            return self._json({"commitUrl": commit_url, "commitOid": sha, "pullRequestUrl": url})

        def _request(self, number: int, title: str, repo: str) -> dict[str, Any]:
            return {
                "title": title, "num": number, "author": {"name": hub.user["name"]}, "status": "open",
                "createdAt": "2024-01-01T00:00:00.000Z", "isPullRequest": True, "repo": {"name": repo, "type": "model"},
            }  # fmt: skip

        def _json(self, data: Any) -> None:
            self._send(Answer(200, body=json.dumps(data).encode()))

        def _send(self, answer: Answer, commit: str = "") -> None:
            self.send_response(answer.status)
            headers = {
                "Content-Length": str(len(answer.body)),
                "Content-Type": "application/json",
                "ETag": f'"{hashlib.sha1(answer.body).hexdigest()}"',
                "X-Error-Code": answer.code,
                "X-Error-Message": answer.message,
                "X-Repo-Commit": commit,
            }
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

    return Handler
