"""A small Hub on this machine: the endpoints that huggingface_hub's client uses to push and to download a model.

``Hub.faults`` makes it fail: each entry (method, part of the path, what) is used once; what: a status, or "drop" to
close the connection in the middle of an answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, dict] = {}  # id -> {"private": bool, "branches": {name: {path: bytes}}, "commits": n}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.authorizations: set[str | None] = set()
        self.faults: list[tuple[str, str, int | str]] = []
        self.lose_commit_answer = False
        self.error_headers: dict[str, str] = {}
        self.lock = threading.Lock()

    def fault(self, method: str, path: str):
        with self.lock:
            for fault in self.faults:
                if fault[0] == method and fault[1] in path:
                    self.faults.remove(fault)
                    return fault[2]
        return None

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in p for m, p in self.requests)

    def add(self, repo: str, files: dict[str, bytes], private: bool = True) -> None:
        self.repos[repo] = {"private": private, "branches": {"main": dict(files)}, "commits": 1}


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha(repo: dict, branch: str) -> str:
    state = json.dumps([branch, sorted((n, git_oid(d)) for n, d in repo["branches"][branch].items())])
    return hashlib.sha1(state.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, status: int, value=None, headers: dict[str, str] | None = None) -> None:
        data = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def serve(self) -> None:
        path, size = unquote(urlsplit(self.path).path), self.headers.get("Content-Length")
        body = b""
        if size is not None:
            body = self.rfile.read(int(size))
        elif "chunked" in self.headers.get("Transfer-Encoding", ""):
            while n := int(self.rfile.readline(), 16):
                body += self.rfile.read(n)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.requests.append((self.command, path))
        self.hub.authorizations.add(self.headers.get("Authorization"))
        what = self.hub.fault(self.command, path)
        if what == "drop":
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            return
        if isinstance(what, int):
            sent = self.headers.get("Authorization") or ""  # a server that quotes what it was sent
            said = f"refused: {sent} {sent.removeprefix('Bearer ')}"
            return self.answer(what, {"error": said}, self.hub.error_headers)
        with self.hub.lock:
            self.route(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = serve

    def route(self, path: str, body: bytes) -> None:
        hub, where = self.hub, f"http://{self.headers['Host']}"
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            new = name not in hub.repos
            if new:
                hub.add(name, {".gitattributes": b""}, wanted.get("visibility", "public") == "private")
            return self.answer(200 if new else 409, {"url": f"{where}/{name}"})
        if path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            bad = not isinstance(yaml.safe_load(text.split("---")[1]), dict)
            return self.answer(400 if bad else 200, {"errors": [{"message": "no metadata"}] if bad else []})
        if path.startswith("/lfs/"):
            hub.lfs[path.removeprefix("/lfs/")] = body
            return self.answer(200 if hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/") else 422)
        if path.endswith("/info/lfs/objects/batch"):
            objects = []
            for wanted in json.loads(body)["objects"]:
                one = {"oid": wanted["oid"], "size": wanted["size"]}
                if wanted["oid"] not in hub.lfs:
                    href = f"{where}/lfs/{wanted['oid']}?X-Amz-Signature=signed"
                    one["actions"] = {"upload": {"href": href}}
                objects.append(one)
            return self.answer(200, {"transfer": "basic", "objects": objects})
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in hub.repos:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        repo, branches = hub.repos[name], hub.repos[name]["branches"]
        if parts[0] != "api":
            return self.file(repo, parts[3], "/".join(parts[4:]))
        action, rest = (parts[4] if len(parts) > 4 else "revision"), "/".join(parts[5:]) or "main"
        if action == "branch":
            if rest in branches:
                return self.answer(409, {"error": "exists"})
            branches[rest] = dict(branches["main"])
            return self.answer(200)
        branch = next((b for b in branches if rest in (b, sha(repo, b))), None)
        if branch is None:
            return self.answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = branches[branch]
        if action == "revision":
            return self.answer(200, {"id": name, "private": repo["private"], "sha": sha(repo, branch), "siblings": []})
        if action == "tree":
            tree = [{"type": "file", "path": n, "size": len(d), "oid": git_oid(d)} for n, d in files.items()]
            return self.answer(200, tree)
        if action == "preupload":
            out = []
            for file in json.loads(body)["files"]:
                mode = "lfs" if file["path"].endswith((".safetensors", ".pt")) else "regular"
                there = files.get(file["path"])
                oid = None if there is None else hashlib.sha256(there).hexdigest() if mode == "lfs" else git_oid(there)
                out.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            return self.answer(200, {"files": out})
        if action == "commit":
            for line in body.splitlines():
                item = json.loads(line)
                key, value = item["key"], item["value"]
                if key == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    files[value["path"]] = hub.lfs[value["oid"]]
                elif key == "deletedFile":
                    del files[value["path"]]
            repo["commits"] += 1
            if hub.lose_commit_answer:
                hub.lose_commit_answer, self.close_connection = False, True
                return None
            oid = sha(repo, branch)
            return self.answer(200, {"commitUrl": f"{where}/{name}/commit/{oid}", "commitOid": oid})
        return self.answer(404, {"error": f"no endpoint {path}"})

    def file(self, repo: dict, revision: str, name: str) -> None:
        branch = next((b for b in repo["branches"] if revision in (b, sha(repo, b))), "main")
        data = repo["branches"][branch].get(name)
        if data is None:
            return self.answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{git_oid(data)}"', "X-Repo-Commit": sha(repo, branch), "Content-Length": str(len(data))}
        start = 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers |= {"Content-Length": str(len(data) - start), "Content-Range": f"bytes {start}-/{len(data)}"}
        self.answer(206 if start else 200, data[start:], headers)


@contextmanager
def running():
    """(the Hub, its address)"""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
