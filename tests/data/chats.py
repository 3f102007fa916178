"""Chat templates and conversations for the tests of ``headtrain.data``."""

from __future__ import annotations

import tiny
from tokenizers import AddedToken, processors

from headtrain.data.conversations import Conversation

# Qwen3's own rules, shortened: thoughts before the last question are stripped; the last answer always gets a think
# pair; enable_thinking=False puts the empty pair into the generation prompt; tools, calls, and results as user turns.
QWEN3 = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{%- set thoughts = '' %}
{%- if m.reasoning_content is string %}{%- set thoughts = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

_TAGGED = (
    "{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{{{{ '<|im_start|>assistant\n' }}}}"
    "{open}{{{{ m['content']{inside} }}}}{close}{{{{ {outside}'\n' }}}}"
    "{{% else %}}{{{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}}}{{% endif %}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)
# the end of turn inside the tags, outside them, with its line break inside, and with white-space control
TAGGED = {
    "inside": _TAGGED.format(
        open="{% generation %}", close="{% endgeneration %}", inside=" + '<|im_end|>'", outside=""
    ),
    "outside": _TAGGED.format(
        open="{% generation %}", close="{% endgeneration %}", inside="", outside="'<|im_end|>' + "
    ),
    "line break inside": _TAGGED.format(
        open="{% generation %}", close="{% endgeneration %}", inside=" + '<|im_end|>\n'", outside="'' * 1 + "
    ).replace("{{ '' * 1 + '\n' }}", ""),
    "dashes": _TAGGED.format(
        open="{%- generation -%}", close="{%- endgeneration -%}", inside=" + '<|im_end|>'", outside=""
    ),
}
# as SmolLM2's: a default system message
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + tiny.CHATML
)
# the generation prompt holds an empty think pair that rendered answers never have
THINK_IN_PROMPT_ONLY = tiny.CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)
# as Llama 3's: BOS first, content trimmed
WITH_BOS = "{{ bos_token }}" + tiny.CHATML.replace("m['content']", "m['content'] | trim")
# as Llama 2's: no special token before the answer; the closing one with a space
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)


def bos_tokenizer(template: str | None):
    """A tokenizer that puts <s> before everything that it tokenises, as Llama 3's does, offsets trimmed."""
    tok = tiny.tokenizer(template=template)
    tok.add_special_tokens({"bos_token": AddedToken("<s>", special=True, normalized=False)})
    number = tok.convert_tokens_to_ids("<s>")
    tok.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", number)]),
        ]
    )
    return tok


def chat(*texts: str, system: str | None = None, **changes) -> Conversation:
    """user, assistant, user ... in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, **{"source": "t.jsonl:1", "id": "t", **changes})


def runs(tok, row) -> list[str]:
    """The text of each supervised turn, in order."""
    numbers = sorted({t for t in row.turn if t})
    return [tok.decode([i for i, t in zip(row.ids, row.turn, strict=True) if t == n]) for n in numbers]
