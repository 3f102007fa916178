"""One OpenAI-compatible server, seen from a client: who it is, one streamed request and its times, its counters."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2

from .goodput import Record, ServerError, whole
from .prometheus import Snapshot

WARM_UP = 8  # new tokens of untimed requests
SETTLE = 0.2  # seconds between readings of /metrics until the counters rest
SETTLE_TRIES = 10
CONNECT = 10.0  # seconds to connect, and for a whole page that is no answer of the model
IDLE = 1.0  # seconds an unused connection is kept: servers close theirs after about 5, and a race would look a failure
DETAIL = 200  # characters of a server's error that are kept
LONGEST_PAGE = 64 << 20  # bytes
LONGEST_LINE = 4 << 20  # bytes of one event
MOST_TOKENS = 10**9  # of one answer; a larger count is none
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f]")  # a terminal would obey them


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
    """root: the address without /v1. key: sent as a bearer token, and cut out of every error text. sampling: what a
    request's body says of it. timeout: seconds for a whole request."""

    def __init__(self, root: str, key: str | None, sampling: dict[str, Any], timeout: float):
        self.root, self.key, self.model = root, key, ""
        self.sampling, self.timeout = sampling, timeout
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

    async def get(self, path: str) -> bytes:
        """Raises _Failure for anything but a 200 that is over in time: a server may send a byte now and then."""
        limit = min(CONNECT, self.timeout)
        try:
            async with asyncio.timeout(limit), self.http.stream("GET", self.root + path) as response:
                page = await read(response)
        except TimeoutError:
            raise _Failure("timeout", f"not over after {limit:g} s") from None
        except httpx2.HTTPError as error:
            raise _Failure("connection", self.safe(str(error) or type(error).__name__)) from None
        if response.status_code != 200:
            raise _Failure(f"http {response.status_code}", self.safe(page.decode(errors="replace")))
        return page

    async def introduce(self, model: str | None) -> dict[str, Any]:
        """Find the model, try one request, and return what the server tells of itself."""
        try:
            found = json.loads(await self.get("/v1/models"))
            served = [entry["id"] for entry in found["data"]]
            if strange := [name for name in served if not isinstance(name, str)]:
                raise TypeError(f"a model's id is {strange[0]!r}, expected a text")
        except _Failure as failure:
            if failure.kind in ("connection", "timeout"):
                raise ServerError(f"no server answers at {self.root}: {failure.detail}") from None
            if failure.kind in ("http 401", "http 403"):
                raise ServerError(f"{self.root} refuses the API key ({failure.kind}): {failure.detail}") from None
            if model is None:
                raise ServerError(
                    f"{self.root}/v1/models: {failure.kind}: no OpenAI-compatible server, or another path; expected "
                    "the address that ends before /v1, for example http://localhost:8000"
                ) from None
            served = [model]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = self.safe(f"{type(error).__name__}: {error}")
            raise ServerError(
                f"{self.root}/v1/models is no list of models: not an OpenAI-compatible server ({why})"
            ) from None
        names = printable(", ".join(served))
        if model is None and len(served) != 1:
            raise ServerError(f"{self.root} serves {len(served)} models ({names}): say which with --model")
        if model is not None and model not in served:
            raise ServerError(f"{self.root} serves {names or 'no model'}, not {model}")
        self.model = model or served[0]
        probe = await self.ask(0, ChatPrompt([{"role": "user", "content": "Hello"}]), WARM_UP)
        if probe.failure == "no usage":
            raise ServerError(
                f"{self.root} sends no usage block at the end of a stream, so tokens cannot be counted (chunks hold "
                "several tokens under speculation); expected stream_options.include_usage to be honoured; "
                + probe.detail
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
                told = json.loads(await self.get(path))
            except (_Failure, ValueError, RecursionError):
                continue
            if isinstance(told, dict):
                given = {name: told.get(name) for name in names}
                out |= {name: self.safe(value) for name, value in given.items() if isinstance(value, str)}
                out |= {name: value for name, value in given.items() if isinstance(value, int | float)}
        return out

    async def settled(self) -> Snapshot | str:
        """/metrics once its counters rest (an engine counts a moment after it answers), or why there is none."""
        reading = None
        for _ in range(SETTLE_TRIES):
            try:
                last, reading = reading, Snapshot.of((await self.get("/metrics")).decode(errors="replace"))
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
            **self.sampling,
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
                    raise _Failure(f"http {response.status_code}", (await read(response)).decode(errors="replace"))
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
        except Exception as error:  # whatever else a stranger sends costs this request, not the measurement
            kind, detail = "unusable", f"{type(error).__name__}: {error}"
        return Record(index, prompt.id, prompt.route, failure=kind, detail=self.safe(detail))

    def safe(self, text: str) -> str:
        """One short line of a foreign text, without the API key."""
        text = text.replace(self.key, "[API key]") if self.key else text
        return printable(" ".join(text.split()))[:DETAIL]


def printable(text: str) -> str:
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", whole(text))


async def read(response: httpx2.Response) -> bytes:
    """The body. Raises _Failure where it does not end."""
    page = bytearray()
    async for block in response.aiter_bytes():
        page += block
        if len(page) > LONGEST_PAGE:
            raise _Failure("endless", f"a page of more than {LONGEST_PAGE} bytes")
    return bytes(page)


async def events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Split at the newline byte alone: a text may hold other line ends (U+2028),
    at which httpx2's own line reader would cut the JSON."""
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > LONGEST_LINE:
            raise _Failure("malformed stream", f"a line of more than {LONGEST_LINE} bytes")


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
                calls, finish = delta.get("tool_calls"), choice.get("finish_reason")
                for value in (*words, finish):
                    if not isinstance(value, str | None):
                        raise TypeError(f"expected a text, found {type(value).__name__}")
                self.text += [*words, *([json.dumps([c.get("function") for c in calls])] if calls else [])]
                self.finish = finish or self.finish
                # the opening chunk has a role and no text; the closing one may stand for the end-of-turn token alone
                if words or calls or finish:
                    self.first = self.first or now
                    self.last = now
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise _Failure("malformed stream", f"{type(error).__name__}: {error}: {data[:80]!r}") from None

    def record(self, index: int, prompt: ChatPrompt) -> Record:
        if self.finish is None:
            raise _Failure("cut off", "the stream ended without a finish_reason")
        tokens, prompt_tokens = _count(self.usage, "completion_tokens"), _count(self.usage, "prompt_tokens")
        if not tokens:
            raise _Failure("no usage", f"expected completion_tokens in a usage block, found {self.usage!r}")
        return Record(
            index,
            prompt.id,
            prompt.route,
            ttft=self.first - self.started,
            tpot=(self.last - self.first) / (tokens - 1) if tokens > 1 else None,
            latency=(self.over or self.last) - self.started,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            finish=self.finish,
            text=whole("".join(self.text)),
        )


def _count(usage: Any, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count <= MOST_TOKENS else None  # True is an int, too


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
