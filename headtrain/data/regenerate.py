"""The target's own answers to the prompts of conversations: the text that a draft head has to predict."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from . import DataError
from .chat import Renderer
from .conversations import Conversation

MIN_CUT = 8  # tokens of a cut answer that are worth keeping
CUT_TRIES = 8  # tokens before the first difference that may have to go, too
SAY_EVERY = 30.0  # seconds between lines where there is no terminal
PROMPT_TOKENS = 16384  # of one batch, padded


@dataclass
class RegenerateReport:
    """wanted, written: answers. skipped: of those, already there. finish: how the written ones ended. dropped: why
    answers are not in the file."""

    path: Path
    wanted: int = 0
    written: int = 0
    skipped: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        out = [f"{self.written} of {self.wanted} answers in {self.path} ({self.skipped} were there before)"]
        out += [f"{count:>7} x finish: {why}" for why, count in sorted(self.finish.items())]
        out += [f"{count:>7} x dropped: {why}" for why, count in sorted(self.dropped.items())]
        return out


@dataclass(frozen=True)
class _Task:
    """One answer to generate: ``order`` is its place in the output."""

    order: int
    key: tuple[str, int]
    conversation: Conversation
    prompt: list[int]


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    out_path: str | Path,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    samples: int = 1,
    batch_size: int = 8,
    seed: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    model_name: str | None = None,
    dtype: str | None = None,
) -> RegenerateReport:
    """Write the answers of ``model`` (a causal LM of transformers) to ``out_path`` as JSONL, in input order.

    The prompt is the conversation without the assistant turns that end it: up to its last user turn, or tool
    result. Sampling is from the target's own distribution at ``temperature`` (0: greedy) and ``top_p``; what the
    model's generation_config would add (top-k, penalties) is left out. Batches are fixed by the whole input, and
    each has its own seed from (seed, its first row, sample), so stopping and resuming changes nothing.

    dtype: what ``model`` was asked to compute in, where that is not its own; recorded like the other settings, and
    answers of another are refused.

    Each line has id, route, messages, tools where there are some, and generated_by {model, temperature, top_p,
    seed, sample, max_new_tokens, finish}. finish: "stop"; "length" where max_new_tokens ended the answer; "cut" where
    the text from there on would not give the generated tokens again (targets sample spellings that their tokenizer
    never writes; what comes before is kept, or nothing where that is under MIN_CUT tokens). ``truncated: true`` says
    that the template's end of turn was not the target's own, so that it is not supervised.

    While it runs, answers are in OUT.partial; a second call goes on from there and from OUT. What was dropped is
    listed in OUT.dropped, with the reason, and not tried again. Raises DataError for
    settings that differ from those of the answers found there, and for conversations that cannot be prompts.
    """
    if temperature == 0 and samples > 1:
        raise DataError(f"samples={samples} at temperature 0 would be {samples} equal answers; raise the temperature")
    path = Path(out_path)
    partial = path.with_name(path.name + ".partial")
    renderer = Renderer(tokenizer, template_kwargs)
    settings = {
        "model": model_name or model.name_or_path or type(model).__name__,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "template_kwargs": template_kwargs or None,
        "dtype": dtype,
    }
    report = RegenerateReport(path)
    tasks = _tasks(renderer, conversations, samples)
    report.wanted = len(tasks)
    dropped = path.with_name(path.name + ".dropped")
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for earlier in (path, dropped, partial):
        found |= _found(earlier, tasks, settings)
    report.skipped = len(found)
    generator = _Generator(model, _stop_ids(model, tokenizer, renderer), max_new_tokens, temperature, top_p, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _progress(len(tasks), len(found)) as advance, open(partial, "a", encoding="utf-8") as file:
        for batch in _batches(tasks, batch_size):
            new = [task for task in batch if task.key not in found]
            if not new:
                continue
            answers = generator(batch)  # the whole batch, also what is there already: its random numbers are shared
            for task in new:
                found[task.key] = line = _line(renderer, task, answers[task.key], settings)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            advance(len(new))
    _finish(path, dropped, tasks, found, report)
    partial.unlink()
    return report


def _tasks(renderer: Renderer, conversations: Sequence[Conversation], samples: int) -> list[_Task]:
    """One task for each prompt and sample. Ids that come twice get a number, so that every answer has its key."""
    tasks: list[_Task] = []
    seen: Counter[str] = Counter()
    for conversation in conversations:
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not any(m["role"] == "user" for m in messages):
            raise DataError(f"{conversation.source}: no user turn before the last answer, so there is no prompt")
        seen[conversation.id] += 1
        again = seen[conversation.id]
        name = conversation.id if again == 1 else f"{conversation.id}~{again}"
        prompt = replace(conversation, messages=messages, id=name, verbatim=False, truncated=False)
        ids = renderer.prompt_ids(prompt)
        for sample in range(samples):
            tasks.append(_Task(len(tasks), (name, sample), prompt, ids))
    return tasks


def _batches(tasks: list[_Task], size: int) -> list[list[_Task]]:
    """Even batches, the longest prompts first (so that memory is shown to suffice at once), one sample number each; at
    most ``size`` prompts and, padded, PROMPT_TOKENS tokens: reading a wide batch of long prompts at once costs memory
    and gains no speed."""
    out: list[list[_Task]] = []
    for sample in sorted({task.key[1] for task in tasks}):
        same = sorted((t for t in tasks if t.key[1] == sample), key=lambda t: (-len(t.prompt), t.order))
        while same:
            fits = max(1, min(size, PROMPT_TOKENS // max(1, len(same[0].prompt))))
            out.append(same[:fits])
            same = same[fits:]
    return sorted(out, key=lambda batch: -len(batch[0].prompt))


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> list[int]:
    """Tokens that end an answer: the template's end of turn, the tokenizer's EOS and the model's own list."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    return sorted({i for i in (*own, tokenizer.eos_token_id, renderer.template.end_id) if i is not None})


@dataclass(frozen=True)
class _Answer:
    """ids: generated tokens without the one that stopped it; stop: that one, None at the length limit."""

    ids: list[int]
    stop: int | None


@dataclass(frozen=True)
class _Generator:
    model: PreTrainedModel
    stops: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int

    @torch.inference_mode()
    def __call__(self, batch: list[_Task]) -> dict[tuple[str, int], _Answer | None]:
        """Answers by key, None where the target's window is too short. Prompts are padded on the left."""
        window = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        out: dict[tuple[str, int], _Answer | None] = {task.key: None for task in batch}
        fits = [t for t in batch if window is None or len(t.prompt) + self.max_new_tokens <= window]
        if not fits:
            return out
        width, device = max(len(t.prompt) for t in fits), self.model.device
        pad = self.stops[0] if self.stops else 0
        ids = torch.tensor([[pad] * (width - len(t.prompt)) + t.prompt for t in fits], device=device)
        mask = torch.tensor([[0] * (width - len(t.prompt)) + [1] * len(t.prompt) for t in fits], device=device)
        name, sample = batch[0].key
        digest = hashlib.sha256(json.dumps([self.seed, name, sample]).encode()).digest()
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.temperature else {}
        config = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=bool(self.temperature),
            pad_token_id=pad,
            eos_token_id=self.stops or None,
            **sampling,
        )
        own = self.model.generation_config
        try:
            self.model.generation_config = GenerationConfig()  # else its top-k and penalties fill what is not given
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(int.from_bytes(digest[:7], "little"))
                whole = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        finally:
            self.model.generation_config = own
        for task, tokens in zip(fits, whole[:, width:].tolist(), strict=True):
            end = next((n for n, token in enumerate(tokens) if token in self.stops), None)
            out[task.key] = _Answer(tokens[:end], None if end is None else tokens[end])
        return out


def _line(renderer: Renderer, task: _Task, answer: _Answer | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of one answer; with `dropped`, why there is none."""
    c = task.conversation
    line: dict[str, Any] = {"id": task.key[0], "route": c.route, "messages": c.messages}
    if c.tools:
        line["tools"] = c.tools
    made = line["generated_by"] = {k: v for k, v in settings.items() if v is not None} | {"sample": task.key[1]}
    if answer is None:
        return {**line, "dropped": "prompt and max_new_tokens exceed the target's window"}
    ids, end_id = answer.ids, renderer.template.end_id
    made["finish"] = "length" if answer.stop is None else "stop"
    whole = answer.stop is not None and answer.stop == end_id
    while answer.stop is None and ids and renderer.decode(ids).endswith("\ufffd"):  # the limit fell inside a character
        ids = ids[:-1]
    if not renderer.decode(ids).strip():
        return {**line, "dropped": "empty answer"}
    messages, same = _retokenised(renderer, task, ids, whole)
    if same < len(ids):
        made["finish"], whole = "cut", False
        for length in range(same, max(same - CUT_TRIES, MIN_CUT - 1), -1):
            messages, same = _retokenised(renderer, task, ids[:length], whole)
            if same == length:
                break
        else:
            return {**line, "dropped": "its text does not give the generated tokens again"}
    line["messages"] = messages
    if not whole:
        line["truncated"] = True
    return line


def _retokenised(renderer: Renderer, task: _Task, ids: list[int], whole: bool) -> tuple[list[dict[str, Any]], int]:
    """The conversation with the answer ``ids`` as text, and how many of them its rendering gives again."""
    answer = {"role": "assistant", "content": renderer.decode(ids)}
    messages = [*task.conversation.messages, answer]
    row = renderer.render(replace(task.conversation, messages=messages, verbatim=True, truncated=not whole))
    end = [] if renderer.template.end_id is None else [renderer.template.end_id]
    wanted = task.prompt + ids + end
    if row.ids == wanted:
        return messages, len(ids)
    same = next((i for i, (a, b) in enumerate(zip(row.ids, wanted, strict=False)) if a != b), len(wanted) - 1)
    return messages, min(max(same - len(task.prompt), 0), len(ids) - 1)


def _found(path: Path, tasks: list[_Task], settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Lines of earlier calls, by key. A half-written last line is cut off. An answer to a prompt that reads
    otherwise now is forgotten. Raises DataError for other settings, and for answers to prompts not in the input."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    by_key = {task.key: task.conversation for task in tasks}
    out: dict[tuple[str, int], dict[str, Any]] = {}
    for number, raw in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(raw)
            made = line["generated_by"]
            key = (line["id"], made["sample"])
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}:{number} is no answer written by regenerate; choose another output file") from None
        for name, value in settings.items():
            if made.get(name) != value:
                raise DataError(
                    f"{path}:{number} was generated with {name}={made.get(name)!r}, now it is {value!r}. Delete the "
                    "file to start again, or choose another output file"
                )
        if key not in by_key:
            raise DataError(
                f"{path}:{number} answers {key[0]!r} (sample {key[1]}), which is not in the input. Choose another "
                "output file, so that these answers are not lost"
            )
        prompt = line["messages"] if "dropped" in line else line["messages"][:-1]
        if (prompt, line.get("tools")) == (by_key[key].messages, by_key[key].tools):
            out[key] = line
    return out


def _finish(path: Path, dropped: Path, tasks: list[_Task], found: dict, report: RegenerateReport) -> None:
    """Write all answers in input order in one step and count them. Raises DataError when there is none."""
    lines = [found[task.key] for task in tasks]
    kept = [line for line in lines if "dropped" not in line]
    lost = [line for line in lines if "dropped" in line]
    report.written = len(kept)
    report.finish.update(line["generated_by"]["finish"] for line in kept)
    report.dropped.update(line["dropped"] for line in lost)
    if not kept:
        raise DataError("no answer could be used:\n  " + "\n  ".join(report.lines()))
    _write(path, kept)
    if lost:
        _write(dropped, lost)
    else:
        dropped.unlink(missing_ok=True)


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar with the remaining time on a terminal, a line now and then elsewhere; on stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    began = said = time.monotonic()
    finished = 0
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("answers", total=total, completed=done)

        def advance(count: int) -> None:
            nonlocal finished, said
            finished += count
            bar.advance(task, count)
            now = time.monotonic()
            if bar.disable and now - said >= SAY_EVERY:
                left = (now - began) / finished * (total - done - finished)
                console.print(f"{done + finished} of {total} answers, about {left / 60:.1f} minutes left")
                said = now

        yield advance
