"""One OpenAI-compatible server, seen from a client: who it is, one streamed request and its times, its counters."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2

from .goodput import Record
from .prometheus import Snapshot

WARM_UP = 8  # new tokens of untimed requests
SETTLE = 0.2  # seconds between readings of /metrics until the counters rest
SETTLE_TRIES = 10
CONNECT = 10.0  # seconds
IDLE = 1.0  # seconds an unused connection is kept: servers close theirs after about 5, and a race would look a failure
DETAIL = 200  # characters of a server's error that are kept


class ServerError(ValueError):
    """The server cannot be measured: not there, wrong address, key or model, or no usage counts."""


@dataclass(frozen=True)
class ChatPrompt:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    route: str = ""
    id: str = ""


class _Failure(Exception):
    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class Server:
    """root: the address without /v1. key: sent as a bearer token, and cut out of every error text. timeout: seconds for
    a whole request."""

    def __init__(self, root: str, key: str | None, temperature: float, timeout: float):
        self.root, self.key, self.model = root, key, ""
        self.temperature, self.timeout = temperature, timeout
        # identity: a compressed stream would be held back to fill blocks
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self.http = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE),
            trust_env=False,  # a proxy, or a netrc's password, would be measured and sent unasked
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> httpx2.Response:
        """Raises _Failure for anything but a 200."""
        try:
            response = await self.http.get(self.root + path, timeout=CONNECT)
        except httpx2.HTTPError as error:
            raise _Failure("connection", self.safe(str(error) or type(error).__name__)) from None
        if response.status_code != 200:
            raise _Failure(f"http {response.status_code}", self.safe(response.text))
        return response

    async def introduce(self, model: str | None) -> dict[str, Any]:
        """Find the model, try one request, and return what the server tells of itself."""
        try:
            found = (await self.get("/v1/models")).json()
            served = [entry["id"] for entry in found["data"]]
        except _Failure as failure:
            if failure.kind == "connection":
                raise ServerError(f"no server answers at {self.root}: {failure.detail}") from None
            if failure.kind in ("http 401", "http 403"):
                raise ServerError(f"{self.root} refuses the API key ({failure.kind}): {failure.detail}") from None
            if model is None:
                raise ServerError(
                    f"{self.root}/v1/models: {failure.kind}: no OpenAI-compatible server, or another path; expected "
                    "the address that ends before /v1, for example http://localhost:8000"
                ) from None
            served = [model]
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self.root}/v1/models is no list of models: not an OpenAI-compatible server") from None
        if model is None and len(served) != 1:
            raise ServerError(f"{self.root} serves {len(served)} models ({', '.join(served)}): say which with --model")
        if model is not None and model not in served:
            raise ServerError(f"{self.root} serves {', '.join(served) or 'no model'}, not {model}")
        self.model = model or served[0]
        probe = await self.ask(0, ChatPrompt([{"role": "user", "content": "Hello"}]), WARM_UP)
        if probe.failure == "no usage":
            raise ServerError(
                f"{self.root} sends no usage block at the end of a stream, so tokens cannot be counted (chunks hold "
                "several tokens under speculation); expected stream_options.include_usage to be honoured"
            )
        if probe.failure is not None:
            raise ServerError(f"a first request to {self.root} failed: {probe.failure}: {probe.detail}")
        return {"model": self.model, **await self.about()}

    async def about(self) -> dict[str, Any]:
        """Version and, from SGLang, how it speculates. Named keys only: SGLang's page holds its API key."""
        out = {}
        for path, names in {
            "/version": ("version",),
            "/server_info": (
                "version",
                "speculative_algorithm",
                "speculative_num_steps",
                "speculative_num_draft_tokens",
            ),
        }.items():
            try:
                told = (await self.get(path)).json()
            except (_Failure, ValueError):
                continue
            if isinstance(told, dict):
                out |= {name: told[name] for name in names if told.get(name) is not None}
        return out

    async def settled(self) -> Snapshot | str:
        """/metrics once its counters rest (an engine counts a moment after it answers), or why there is none."""
        reading = None
        for _ in range(SETTLE_TRIES):
            try:
                last, reading = reading, Snapshot.of((await self.get("/metrics")).text)
            except _Failure as failure:
                return f"{self.root}/metrics: {failure.kind} {failure.detail}".strip()
            if last is not None and last.counters() == reading.counters():
                break
            await asyncio.sleep(SETTLE)
        return reading

    async def ask(self, index: int, prompt: ChatPrompt, max_tokens: int) -> Record:
        """One streamed request. Every failure becomes a record; only cancellation passes through."""
        body = {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tools": prompt.tools} if prompt.tools else {}),
        }
        answer = Answer(time.perf_counter())
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.http.stream("POST", f"{self.root}/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise _Failure(f"http {response.status_code}", response.text)
                async for data in events(response.aiter_bytes()):
                    answer.take(data, time.perf_counter())
            return answer.record(index, prompt)
        except TimeoutError:
            kind, detail = "timeout", f"not over after {self.timeout:g} s"
        except _Failure as failure:
            kind, detail = failure.kind, failure.detail
        except httpx2.ConnectError as error:
            kind, detail = "connection", str(error)
        except httpx2.HTTPError as error:
            kind = "cut off" if answer.first is not None else "connection"
            detail = str(error) or type(error).__name__
        return Record(index, prompt.id, prompt.route, failure=kind, detail=self.safe(detail))

    def safe(self, text: str) -> str:
        """One short line of a foreign text, without the API key."""
        text = text.replace(self.key, "[API key]") if self.key else text
        return " ".join(text.split())[:DETAIL]


async def events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Split at the newline byte alone: a text may hold other line ends (U+2028),
    at which httpx2's own line reader would cut the JSON."""
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Answer:
    """A stream as it arrives. Tokens are the usage block's; chunks are only timed."""

    def __init__(self, started: float):
        self.started = started
        self.first = self.last = self.over = None
        self.text, self.finish, self.usage = [], None, None

    def take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.over = now
            return
        try:
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise _Failure("server error", json.dumps(error))
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                words = [delta.get(name) for name in ("reasoning", "reasoning_content", "content")]
                words = [word for word in words if word]
                calls = delta.get("tool_calls")
                self.text += [*words, *([json.dumps([c.get("function") for c in calls])] if calls else [])]
                self.finish = choice.get("finish_reason") or self.finish
                # the opening chunk has a role and no text; the closing one may stand for the end-of-turn token alone
                if words or calls or choice.get("finish_reason"):
                    self.first = self.first or now
                    self.last = now
        except (ValueError, AttributeError, TypeError) as error:
            raise _Failure("malformed stream", f"{type(error).__name__}: {error}: {data[:80]!r}") from None

    def record(self, index: int, prompt: ChatPrompt) -> Record:
        if self.finish is None:
            raise _Failure("cut off", "the stream ended without a finish_reason")
        tokens = (self.usage or {}).get("completion_tokens")
        if not isinstance(tokens, int) or tokens < 1:
            raise _Failure("no usage", f"expected completion_tokens in a usage block, found {self.usage!r}")
        return Record(
            index,
            prompt.id,
            prompt.route,
            ttft=self.first - self.started,
            tpot=(self.last - self.first) / (tokens - 1) if tokens > 1 else None,
            latency=(self.over or self.last) - self.started,
            tokens=tokens,
            prompt_tokens=self.usage.get("prompt_tokens"),
            finish=self.finish,
            text="".join(self.text),
        )


def address(url: str) -> str:
    """Without /v1 and a final slash."""
    try:
        parts = httpx2.URL(url.strip())
    except httpx2.InvalidURL as error:
        raise ServerError(f"{url!r} is no address: {error}; expected http://HOST:PORT") from None
    if parts.userinfo:
        raise ServerError(f"the address of {parts.host} holds a password: leave it out and give --api-key-env NAME")
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise ServerError(f"{url!r} is no server's address; expected http://HOST:PORT, with or without /v1")
    return str(parts).rstrip("/").removesuffix("/v1").rstrip("/")
