"""A small real HTTP server on loopback that streams like vLLM: several tokens a chunk, a usage block, /metrics."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (seconds before the chunk, its text, its tokens)
PIECES = [(0.0, "one", 1), (0.0, " two three four", 3), (0.0, " five six", 2)]


@dataclass
class ChatServer:
    """pieces: by prompt text, or for every prompt. A prompt text that is a key of ``faults`` fails in that way: an HTTP
    status, "drop", "garbage", "end" (without a finish reason), "error" (in the stream), "hang", "no usage", or bytes:
    an event in place of the usage block. drips: paths whose answer comes a byte now and then."""

    pieces: dict[str, list[tuple[float, str, int]]] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    models: list[Any] | None = field(default_factory=lambda: ["tiny"])
    pages: dict[str, str] = field(default_factory=dict)
    drips: tuple[str, ...] = ()
    metrics: Any = None  # () -> text
    usage: bool = True
    key: str | None = None
    seen: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)  # by prompt: when each piece was written
    finished: int = 0
    tokens: int = 0
    now: int = 0
    most: int = 0
    on_request: Any = None

    def __enter__(self) -> ChatServer:
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        self.http.shutdown()
        self.http.server_close()


def _handler(of: ChatServer) -> type:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as real servers do; else a small chunk waits 40 ms for the one before it

        def log_message(self, *_: Any) -> None:
            pass

        def send(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def drip(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            try:
                while not of.stop.wait(0.05):
                    self.wfile.write(b" ")
            except OSError:
                pass

        def do_GET(self) -> None:
            if self.path in of.drips:
                return self.drip()
            if of.key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {of.key}":
                return self.send(401, f"invalid key {self.headers['Authorization']}")
            if self.path == "/v1/models" and of.models is not None:
                return self.send(200, json.dumps({"data": [{"id": name} for name in of.models]}))
            if self.path == "/metrics" and of.metrics is not None:
                return self.send(200, of.metrics())
            if self.path in of.pages:
                return self.send(200, of.pages[self.path])
            return self.send(404, "nothing here")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with of.lock:
                of.seen.append(body)
                of.headers.append(dict(self.headers))
                of.now += 1
                of.most = max(of.most, of.now)
            try:
                if of.on_request:
                    of.on_request(body)
                self.answer(body)
            except OSError:
                self.close_connection = True
            finally:
                with of.lock:
                    of.now -= 1

        def block(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def event(self, value: Any) -> None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            self.block(f"data: {text}\n\n".encode())

        def delta(self, finish: str | None = None, **delta: Any) -> None:
            self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        def answer(self, body: dict) -> None:
            prompt = body["messages"][-1]["content"]
            fault = of.faults.get(prompt)
            if isinstance(fault, int):
                return self.send(fault, json.dumps({"error": f"broken: {self.headers['Authorization']}"}))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.delta(role="assistant", content="")
            written, tokens = [], 0
            for wait, text, count in of.pieces.get(prompt, PIECES):
                time.sleep(wait)
                if isinstance(fault, str) and written:
                    break
                written.append(time.perf_counter())
                self.delta(content=text)
                tokens += count
            of.times[prompt] = written
            if fault == "drop":
                self.close_connection = True
                return self.connection.shutdown(2)
            if fault == "garbage":
                return self.block(b'data: {"choices": [{"delta"\n\n0') or self.block(b"")
            if fault == "error":
                return self.event({"error": {"message": "engine died", "code": 500}}) or self.block(b"")
            if fault == "hang":
                return of.stop.wait(30) and None
            if fault != "end":
                self.delta(finish="stop", content="")
                if isinstance(fault, bytes):
                    self.block(b"data: " + fault + b"\n\n")
                elif of.usage and fault != "no usage" and body["stream_options"]["include_usage"]:
                    self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
                with of.lock:
                    of.finished += 1
                    of.tokens += tokens
                self.event("[DONE]")
            return self.block(b"")

    return Handler
