"""Small chat templates of the families that people use, and a tokenizer for them with one token for each byte."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|end|>", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|eot|>", "<|header|>", "<turn>", "</turn>"),
)
_GENERATE = "{% if add_generation_prompt %}{{ 'TAIL' }}{% endif %}"


def _each(turn: str, tail: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + _GENERATE.replace("TAIL", tail)


_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CHATML_TAIL = "<|im_start|>assistant\n"
_LLAMA2_USER = (
    "{% if m.role == 'system' %}{% elif m.role == 'user' %}{{ '<s>[INST] ' }}"
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}"
    "{{ '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' }}{% endif %}{{ m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' </s>' }}{% else %}"
    "{{ raise_exception('no ' + m.role) }}{% endif %}"
)
_LATE_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.s = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST]' + (ns.s if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
_THOUGHTS = (
    "{% set c = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}"
)
_TOOL_JSON = (
    "{{ '<|header|>' + m.role + '<|end|>\n' }}{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
    "{{ m.content | trim }}{% endif %}{{ '<|eot|>' }}"
)
_NO_SYSTEM = (
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) + '</turn>\n' }}"
)
_PARTS = (
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
)
_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
)
# The families. Each one holds every text that it is given, or raises an error.
FAMILIES: dict[str, str] = {
    "chatml": _each(_CHATML, _CHATML_TAIL),
    "chatml_default_system": _each(_CHATML, _CHATML_TAIL, _DEFAULT_SYSTEM),
    "chatml_no_thinking": _each(
        _CHATML, "' ~ ('' if enable_thinking | default(true) else '<think></think>') ~ '"
    ).replace("{{ '' ~", "{{ '" + _CHATML_TAIL + "' ~"),
    "chatml_thoughts": _each(_THOUGHTS, "<|im_start|>assistant\n<think>\n"),
    "chatml_parts": _each(_PARTS, _CHATML_TAIL),
    "chatml_trim": _each(_CHATML.replace("m.content", "m.content.strip()"), _CHATML_TAIL),
    "headers": _each(
        "{{ '<|header|>' + m.role + '<|end|>\n\n' + (m.content | trim) + '<|eot|>' }}",
        "<|header|>assistant<|end|>\n\n",
        "{{ '<s>' }}",
    ),
    "headers_tool_json": _each(_TOOL_JSON, "<|header|>assistant<|end|>\n", "{{ '<s>' }}"),
    "inst": _each(_LLAMA2_USER, ""),
    "inst_late_system": _LATE_SYSTEM,
    "turns": _each(_NO_SYSTEM, "<turn>model\n", "{{ '<s>' }}"),
    "angle": _each("{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", "<|assistant|>\n"),
    "angle_eos": _each("{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}", "<|assistant|>\n"),
    "channels": _each("{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}", "<|start|>assistant"),
    "instruction": _each("{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}", "### assistant:\n"),
    "names": _each("{{ m.role | upper + ': ' + m.content + '\n' }}", "ASSISTANT:"),
    "names_one_line": _each("{{ m.role + ': ' + m.content + ' ' }}", "assistant:"),
    "plain": _each("{{ m.content + '\n' }}", ""),
}
# Templates that write tools; the second one has another template for rows with tools.
_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}"
)
TOOLS: dict[str, str | dict[str, str]] = {
    "chatml_tools": _each(_CHATML, _CHATML_TAIL, _TOOLS),
    "named": {"default": FAMILIES["chatml"], "tool_use": _each(_CHATML, _CHATML_TAIL, _TOOLS)},
}
# Changes that make a template leave out or change a text: text to replace -> new text.
FAULTS: dict[str, tuple[str, str]] = {
    "drops_system": ("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
    "drops_tool": ("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
    "first_only": ("{% for m in messages %}", "{% for m in messages[:1] %}"),
    "last_only": ("{% for m in messages %}", "{% for m in messages[-1:] %}"),
    "reversed": ("{% for m in messages %}", "{% for m in messages | reverse %}"),
    "lower": ("m.content", "(m.content | lower)"),
    "cut": ("m.content", "m.content[:5]"),
}


def tokenizer(template: str | dict[str, str] | None = None, post: str = "", special: tuple[str, ...] = SPECIAL) -> Any:
    """Return a tokenizer; `post` is what it puts around a text, as "<s> $A </s>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    if post:
        tokens = [(name, special.index(name)) for name in ("<s>", "</s>")]
        inner.post_processor = processors.TemplateProcessing(single=post, special_tokens=tokens)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made
