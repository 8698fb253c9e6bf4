"""A stand-in of the Hugging Face hub on this machine: the routes that huggingface_hub calls to download.

The library itself is not changed: `Hub.environment` selects the stand-in, with a cache of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlparse

_ROUTE = re.compile(
    r"/(?P<api>api/)?(?P<kind>models/|datasets/)?(?P<repo>[^/]+/[^/]+)"
    r"(/(?P<what>revision|tree|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?)?"
)
_OFF = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH", "http_proxy", "https_proxy", "ALL_PROXY")


class Hub:
    """Serve repositories from memory as a context manager.

    Attributes:
        gated: repositories whose files need the header of `token`.
        stalled: a download of a file that ends with this name stops after half of the file, until `released` is set.
        requests: method and path of each request.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.gated: set[str] = set()
        self.token = "hf_stand_in"
        self.stalled = ""
        self.has_stalled, self.released = threading.Event(), threading.Event()
        self.requests: list[str] = []
        self._commits: dict[str, dict[str, bytes]] = {}  # "repo@commit" -> content by file
        self._branches: dict[str, str] = {}  # "repo@branch" -> commit
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_POST(self) -> None:
                hub.take(self, self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def push(self, repo: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        """Commit these files alone, and return the commit. A dataset's repo begins with datasets/."""
        if isinstance(files, Path):
            files = {file.name: file.read_bytes() for file in files.iterdir()}
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self._commits[f"{repo}@{commit}"] = dict(files)
        self._branches[f"{repo}@{branch}"] = commit
        return commit

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub."""
        kept = {key: value for key, value in os.environ.items() if key not in _OFF}
        own = {"HF_ENDPOINT": self.address, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_XET": "1"}
        return kept | own | {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"} | more

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        self.requests.append(f"{request.command} {request.path}")
        match = _ROUTE.fullmatch(urlparse(request.path).path)
        assert match is not None, request.path
        repo = f"datasets/{match['repo']}" if match["kind"] == "datasets/" else match["repo"]
        revision, file = unquote(match["revision"] or "main"), unquote(match["file"] or "")
        commit = self._branches.get(f"{repo}@{revision}", revision)
        files = self._commits.get(f"{repo}@{commit}")
        allowed = request.headers.get("Authorization") == f"Bearer {self.token}"
        if "Authorization" in request.headers and not allowed:
            self._send(request, 401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif not any(name.startswith(f"{repo}@") for name in self._commits):
            # Without a token the real one does not tell which repositories exist, either.
            self._send(request, 404 if allowed else 401, {"X-Error-Code": "RepoNotFound"})
        elif files is None:
            self._send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        elif match["api"] and match["what"] == "tree":
            entries = [self._entry(name, content) for name, content in files.items()]
            self._send(request, 200, {}, json.dumps(entries).encode())
        elif match["api"]:
            self._send(request, 200, {}, json.dumps({"id": match["repo"], "sha": commit, "siblings": []}).encode())
        elif repo in self.gated and not allowed:
            self._send(request, 403, {"X-Error-Code": "GatedRepo"})
        elif file not in files:
            self._send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            content = files[file]
            headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
            start = int(part[1]) if part else 0
            if part:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            stalls = with_body and bool(self.stalled) and file.endswith(self.stalled)
            self._send(request, 206 if part else 200, headers, content[start:], with_body=with_body, stalls=stalls)

    def take(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Make a repository, or commit the files that are sent."""
        self.requests.append(f"POST {request.path}")
        words = request.path.split("/")
        reply: dict[str, Any] = {}
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(request, 401, {"X-Error-Message": "Invalid username or password."})
            return
        lines = [json.loads(line) for line in body.splitlines()]
        if words[-1] == "create":
            repo = f"{lines[0]['organization']}/{lines[0]['name']}"
            self.push(repo, {})
            is_private = lines[0].get("private") or lines[0].get("visibility") == "private"  # by the library's version
            self.requests.append(f"create {repo}, private: {is_private}")
            reply = {"url": f"{self.address}/{repo}", "name": repo}
        elif "preupload" in words:
            reply = {"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in lines[0]["files"]]}
        elif "commit" in words:
            repo, files = "/".join(words[3:5]), [line["value"] for line in lines if line["key"] == "file"]
            commit = self.push(repo, {file["path"]: base64.b64decode(file["content"]) for file in files})
            reply = {"success": True, "commitOid": commit, "commitUrl": f"{self.address}/{repo}/commit/{commit}"}
        self._send(request, 200, {}, json.dumps(reply).encode())

    def files(self, repo: str) -> dict[str, bytes]:
        """Return the files of a repository's branch main."""
        return self._commits[f"{repo}@{self._branches[f'{repo}@main']}"]

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        with_body: bool = True,
        stalls: bool = False,
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        half = len(body) // 2 if stalls else len(body)
        if with_body:
            request.wfile.write(body[:half])
            request.wfile.flush()
        if stalls:
            self.has_stalled.set()
            self.released.wait()
            request.close_connection = True

    @staticmethod
    def _entry(name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
