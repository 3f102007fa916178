"""One row of a data file as a conversation, and the stated rules for rows that break the usual form.

Forms: OpenAI ``messages`` (role, content, tool_calls ...), ShareGPT ``conversations`` (from, value), and
``prompt`` + ``response`` (or ``completion``), each a string or a list of messages.

Rules, each counted by name when it applies (CASES 15):

* ``assistant before any user``: those turns are dropped (with tool turns among them): the row does not show what
  they answer. System messages stay.
* ``two user turns in a row``: joined by a blank line; many templates refuse roles that do not alternate.
* ``two assistant turns in a row``: the conversation is cut before the second; nobody asked for it.
* ``empty turn``: a user turn without text, or an assistant turn without text and without tool calls: the
  conversation is cut before it. An empty system message or tool result is meant, and kept.
* ``unknown role``: the row is dropped: whether to supervise such a turn cannot be known.
* ``no user turn left``: after these rules nothing can be answered; the row is dropped.
* ``unpaired surrogate``: half of a UTF-16 pair becomes U+FFFD; no tokenizer can encode it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "claude", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "function_response"), "tool"),
}
MESSAGE_KEYS = ("messages", "conversations", "conversation")
ROW_DROPPED = ": row dropped"  # how the name of a rule ends by which a row gives no conversation


class RowError(ValueError):
    """A row that is valid JSON but no conversation."""


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form, ``tools`` as JSON schemas or None.

    verbatim: the last assistant message is the target's own raw text, to be rendered right after the generation
    prompt, untouched by the template. truncated: that text stopped at a length limit (or at a token that is not the
    template's end of turn), so its end-of-turn token is not the target's and is not supervised.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    route: str = ""
    id: str = ""
    source: str = ""
    verbatim: bool = False
    truncated: bool = False


def from_row(
    row: Any, source: str, *, rules: Counter[str], system: str | None = None, arrow: bool = False
) -> Conversation | None:
    """The conversation of one row, or None where a rule drops it (counted in ``rules``). ``system`` is put before
    conversations without a system message. ``arrow``: the row came through Arrow, which fills absent keys of
    structures with None; they are removed again. Raises RowError for a row in none of the forms."""
    if not isinstance(row, dict):
        raise RowError(f"expected an object, found {_kind(row)}")
    if arrow:
        row = _without_none(row)
    messages = [_message(m, n) for n, m in enumerate(_raw_messages(row), 1)]
    unknown = [m["role"] for m in messages if m["role"] not in ROLES]
    if unknown:
        rules[f"unknown role {unknown[0]!r}{ROW_DROPPED}"] += 1
        return None
    messages = _apply_rules([{**m, "role": ROLES[m["role"]]} for m in messages], rules)
    if not any(m["role"] == "user" for m in messages):
        rules[f"no user turn left{ROW_DROPPED}"] += 1
        return None
    if messages[0]["role"] not in ("system", "developer"):
        own = row.get("system")
        text = own if isinstance(own, str) and own.strip() else system
        if text is not None:
            messages.insert(0, {"role": "system", "content": text})
    made = row.get("generated_by")
    made = made if isinstance(made, dict) else {}
    return Conversation(
        messages=messages,
        tools=_tools(row),
        route=str(row.get("route") or ""),
        id=str(row["id"]) if row.get("id") is not None else source,
        source=source,
        verbatim=bool(made) and messages[-1]["role"] == "assistant",
        truncated=bool(row.get("truncated")) or made.get("finish") == "length" or row.get("finish") == "length",
    )


def _raw_messages(row: dict) -> list:
    for key in MESSAGE_KEYS:
        if row.get(key) is not None:
            found = row[key]
            break
    else:
        if row.get("prompt") is None:
            raise RowError(
                f"found the keys {sorted(map(str, row))}, expected `messages` (OpenAI), `conversations` (ShareGPT) "
                "or `prompt` with `response`"
            )
        answer = next((row[k] for k in ("response", "completion") if row.get(k) is not None), [])
        found = _as_list(row["prompt"], "user") + _as_list(answer, "assistant")
        key = "prompt"
    if isinstance(found, str):  # some exports store the list as JSON text
        try:
            found = json.loads(found)
        except ValueError:
            raise RowError(f"`{key}` is a string and no JSON list") from None
    if isinstance(found, dict) and found and all(isinstance(v, list) for v in found.values()):  # columns, from Arrow
        found = [dict(zip(found, values, strict=False)) for values in zip(*found.values(), strict=False)]
    if not isinstance(found, list):
        raise RowError(f"`{key}`: expected a list of messages, found {_kind(found)}")
    return found


def _as_list(value: Any, role: str) -> list:
    return [{"role": role, "content": value}] if isinstance(value, str) else value if isinstance(value, list) else []


def _message(message: Any, number: int) -> dict[str, Any]:
    """One message in OpenAI's form with its role as written. ShareGPT keeps only what templates know."""
    if not isinstance(message, dict):
        raise RowError(f"message {number}: expected an object, found {_kind(message)}")
    if "role" in message or "content" in message:
        out = {key: value for key, value in message.items() if value is not None}
    elif "from" in message:
        keep = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
        out = {"role": message["from"], "content": message.get("value")}
        out.update({key: message[key] for key in keep if message.get(key) is not None})
        if message["from"] == "function_call":
            out["tool_calls"], out["content"] = [{"type": "function", "function": _json(out["content"], number)}], ""
    else:
        raise RowError(f"message {number}: found the keys {sorted(map(str, message))}, expected role and content")
    if not isinstance(out.get("role"), str):
        raise RowError(f"message {number}: the role is {_kind(out.get('role'))}, expected a string")
    out["content"] = _text(out.get("content"), number)
    if out["role"] == "assistant" and isinstance(out.get("function_call"), dict):  # OpenAI's older form
        out["tool_calls"] = [{"type": "function", "function": out.pop("function_call")}]
    if "tool_calls" in out:
        calls = out["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RowError(f"message {number}: tool_calls is no list of objects")
        out["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            del out["tool_calls"]
    return out


def _text(content: Any, number: int) -> str:
    """Content as one string; lists of text parts are joined as servers do for templates that expect strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = part.get("type") if isinstance(part, dict) else _kind(part)
                raise RowError(f"message {number}: a content part of type {found!r}; only text can be trained on")
        return "\n".join(part["text"] for part in content)
    raise RowError(f"message {number}: the content is {_kind(content)}, expected a string")


def _call(call: dict) -> dict:
    """Arguments as an object, not JSON text: the form that servers give to templates."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _json(text: Any, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        raise RowError(f"message {number}: function_call holds no JSON") from None


def _tools(row: dict) -> list[dict] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError("`tools` is a string and no JSON list") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("`tools`: expected a list of JSON schemas")
    return tools


def _apply_rules(messages: list[dict], rules: Counter[str]) -> list[dict]:
    out: list[dict] = []
    asked = False
    for message in messages:
        role = message["role"]
        message = _encodable(message, rules)
        if role in ("assistant", "tool") and not asked:
            rules["assistant before any user: turn dropped"] += 1
            continue
        if role in ("user", "assistant") and not message["content"].strip() and not message.get("tool_calls"):
            rules["empty turn: cut before it"] += 1
            break
        if role == "user" and out and out[-1]["role"] == "user":
            rules["two user turns in a row: joined"] += 1
            out[-1] = {**out[-1], "content": out[-1]["content"] + "\n\n" + message["content"]}
            continue
        if role == "assistant" and out[-1]["role"] == "assistant":
            rules["two assistant turns in a row: cut before the second"] += 1
            break
        asked = asked or role == "user"
        out.append(message)
    return out


def _encodable(message: dict, rules: Counter[str]) -> dict:
    try:
        message["content"].encode()
    except UnicodeEncodeError:
        rules["unpaired surrogate: replaced by U+FFFD"] += 1
        text = message["content"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return {**message, "content": text}
    return message


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
