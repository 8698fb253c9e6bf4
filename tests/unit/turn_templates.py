"""Small chat templates that treat turns and tools as the families do that people use, and tokenizers for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
REAL = ROOT / "models/smollm2/whole/tokenizer.json"  # absent unless the example with a real model was prepared
BOTH = frozenset({"tool", "user"})
USER = frozenset({"user"})
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and what is expected of it.

    Attributes:
        ends: tokens that end a turn, as generation_config.json names them.
        special: its other special tokens.
        added: tokens that are not special.
        changes: kind of a turn -> roles of later messages that make the template write the turn otherwise.
        opened: the part of an answer's thinking that the prompt has already.
        around: texts that the model generates around an answer, as the history has them.
        metaspace: the tokenizer marks the beginnings of words, as Llama 2's does.
        rstrip: special tokens absorb white space behind them, as Phi-3's do.
    """

    template: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    roles: frozenset[str] = BOTH
    changes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    opened: str = ""
    around: tuple[str, str] = ("", "")
    bos: str = ""
    metaspace: bool = False
    rstrip: bool = False
    has_tools: bool = True


def _loop(turn: str, tail: str, before: str = "", closing: str = "") -> str:
    """Return a template: of each message `m`, and of the beginning of an answer. They are expressions or statements."""
    end = "{% if add_generation_prompt %}" + tail + ("{% else %}" + closing if closing else "") + "{% endif %}"
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + end


def _cases(**turns: str) -> str:
    """Return statements for each role; the last role may be `other`."""
    found = "".join(
        ("{% else %}" if role == "other" else ("{% elif " if i else "{% if ") + f"m.role == '{role}' %}}") + turn
        for i, (role, turn) in enumerate(turns.items())
    )
    return found + "{% endif %}"


_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}DEFAULT{% endif %}"
_CHATML = "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
_ANSWER = "<|im_start|>assistant\n"
_HEAD = "<|im_start|>system\n" + _SYSTEM + "{% if tools %}\n\n" + _TOOLS + "{% endif %}<|im_end|>\n"
_RESULT = (  # neighbors share one turn
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ CONTENT ~ '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_QWEN = _cases(system="", tool=_RESULT.replace("CONTENT", "m.content"), other=_CHATML)
# The turn behind the last question of the user keeps its thinking, and gets an empty one if it has none.
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THINKING = (
    "{% set parts = m.content.split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (WHEN) %}{{ '<think>\n' ~ thought ~ '\n</think>\n\n' }}{% endif %}"
    "{{ said ~ '<|im_end|>\n' }}"
)
_QWEN3 = _loop(
    _cases(
        system="",
        tool=_RESULT.replace("CONTENT", "m.content"),
        assistant=_THINKING.replace("WHEN", "loop.last or thought"),
        other=_CHATML,
    ),
    _ANSWER + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "{% if tools or messages[0].role == 'system' %}" + _HEAD.replace("DEFAULT", "") + "{% endif %}" + _LAST_USER,
)
_QWEN35 = _loop(
    _cases(
        system="",
        tool=_RESULT.replace("CONTENT", "m.content | trim"),
        assistant=_THINKING.replace("WHEN", "true")
        .replace("lstrip('\n')", "strip()")
        .replace("strip('\n')", "strip()"),
        other=_CHATML.replace("m.content", "(m.content | trim)"),
    ),
    _ANSWER + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
    "{% if tools or messages[0].role == 'system' %}" + _HEAD.replace("DEFAULT", "") + "{% endif %}" + _LAST_USER,
)
_NEMOTRON = _loop(
    _cases(
        system="",
        tool=_RESULT.replace("CONTENT", "m.content"),
        assistant=(
            "{% set c = m.content if '</think>' in m.content else '<think></think>' ~ m.content %}"
            "{% if loop.index0 < ns.last %}{% set c = '<think></think>' ~ c.split('</think>')[-1].strip() %}{% endif %}"
            "{{ '<|im_start|>assistant\n' ~ c ~ '<|im_end|>\n' }}"
        ),
        other=_CHATML,
    ),
    _ANSWER + "<think>\n",
    _HEAD.replace("DEFAULT", "") + _LAST_USER,
)
_LLAMA_HEADER = "'<|start_header_id|>' ~ {} ~ '<|end_header_id|>\n\n'"
_LLAMA = _loop(
    _cases(
        system="",
        tool="{{ " + _LLAMA_HEADER.format("'ipython'") + " ~ (m.content | tojson) ~ '<|eot_id|>' }}",
        other="{{ " + _LLAMA_HEADER.format("m.role") + " ~ (m.content | trim) ~ '<|eot_id|>' }}",
    ),
    "{{ " + _LLAMA_HEADER.format("'assistant'") + " }}",
    "{{ bos_token ~ " + _LLAMA_HEADER.format("'system'") + " }}Today is a day.\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}" + _TOOLS + "<|eot_id|>",
)
_ALTERNATE = (  # as Gemma's and Mistral's: roles take turns behind the system message
    "{% if (m.role == 'user') != ((loop.index0 - (messages[0].role == 'system') | int) % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
_GEMMA_TURN = "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
_GEMMA = _loop(
    _ALTERNATE
    + _cases(system="{{ raise_exception('no system role') }}")
    + _GEMMA_TURN
    + "{{ (m.content | trim) ~ '<end_of_turn>\n' }}",
    "<start_of_turn>model\n",
    "{{ bos_token }}",
)
_PHI_TURN = "{{ '<|%s|>\n' ~ m.content ~ '<|end|>\n' }}"
_PHI = {role: _PHI_TURN % role for role in ("user", "assistant")}
_GLM = _loop(
    _cases(
        user="{{ '<|user|>\n' ~ m.content }}",
        assistant="{{ '<|assistant|>\n' ~ m.content }}",
        tool="{% if loop.first or loop.previtem.role != 'tool' %}<|observation|>{% endif %}{{ '\n' ~ m.content }}",
        other="{{ '<|system|>\n' ~ m.content }}",
    ),
    "<|assistant|>\n",
    "{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}",
)
_DEEPSEEK = _loop(
    _cases(
        user="{% set ns.tool = false %}{{ '<|User|>' ~ m.content }}",
        assistant=(
            "{% set c = m.content.split('</think>')[-1] %}"
            "{{ ('<|tool_outputs_end|>' if ns.tool else '<|Assistant|>') ~ c ~ eos_token }}{% set ns.tool = false %}"
        ),
        tool=(
            "{% set ns.tool = true %}{{ '\n' if ns.had else '<|tool_outputs_begin|>' }}{% set ns.had = true %}"
            "{{ '<|tool_output_begin|>' ~ m.content ~ '<|tool_output_end|>' }}"
        ),
    ),
    "{% if ns.tool %}<|tool_outputs_end|>{% else %}<|Assistant|><think>\n{% endif %}",
    "{% set ns = namespace(tool=false, had=false) %}{{ bos_token }}" + _SYSTEM.replace("DEFAULT", "") + _TOOLS,
)
_GPT_OSS = _loop(
    _cases(
        assistant=(
            "{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}"
            "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        ),
        tool="{{ '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' ~ m.content ~ '<|end|>' }}",
        other="{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}",
    ),
    "<|start|>assistant",
    "<|start|>developer<|message|>" + _TOOLS + "<|end|>",
)
_MISTRAL = _loop(
    _cases(
        system="",
        user=(
            "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
            "{{ '[INST]' ~ (messages[0].content ~ '\n\n' if loop.last and messages[0].role == 'system' else '') }}"
            "{{ m.content ~ '[/INST]' }}"
        ),
        assistant="{{ m.content ~ eos_token }}",
        tool="{{ '[TOOL_RESULTS]{\"content\": ' ~ (m.content | tojson) ~ '}[/TOOL_RESULTS]' }}",
    ),
    "",
    "{{ bos_token }}",
)
_LLAMA2 = _loop(
    _ALTERNATE
    + _cases(
        system="",
        user=(
            "{{ bos_token ~ '[INST] ' }}"
            "{% if loop.index0 == 1 and messages[0].role == 'system' %}"
            "<<SYS>>{{ messages[0].content }}<</SYS>>\n{% endif %}"
            "{{ (m.content | trim) ~ ' [/INST]' }}"
        ),
        assistant="{{ ' ' ~ (m.content | trim) ~ ' ' ~ eos_token }}",
    ),
    "",
).replace("(m.role == 'user') !=", "m.role != 'system' and (m.role == 'user') !=")
_NAMES = _loop(
    _cases(
        assistant="{{ 'ASSISTANT: ' ~ m.content ~ eos_token }}",
        tool="{{ 'Tool result:\n' ~ m.content ~ '\n' }}",
        other="{{ m.role | upper ~ ': ' ~ m.content ~ '\n' }}",
    ),
    "ASSISTANT: ",
    _TOOLS,
)
_IM = ("<|im_start|>",)
_WHITE = {"white": BOTH}
_RESPONSE = ("<tool_response>", "</tool_response>", "<think>", "</think>")
FAMILIES: dict[str, Family] = {
    "smollm2": Family(_loop(_CHATML, _ANSWER, _HEAD.replace("DEFAULT", "Help.")), ("<|im_end|>",), _IM),
    "qwen2.5": Family(
        _loop(_QWEN, _ANSWER, _HEAD.replace("DEFAULT", "Help.")), ("<|im_end|>", "<|endoftext|>"), _IM, _RESPONSE
    ),
    "qwen3": Family(_QWEN3, ("<|im_end|>", "<|endoftext|>"), _IM, _RESPONSE, changes={"thinking": USER, "white": BOTH}),
    "qwen3_no_think": Family(
        _QWEN3,
        ("<|im_end|>",),
        _IM,
        _RESPONSE,
        changes={"plain": BOTH, "white": BOTH, "thinking": BOTH},
        variables={"enable_thinking": False},
    ),
    "qwen3.5": Family(
        _QWEN35,
        ("<|im_end|>",),
        _IM,
        _RESPONSE,
        changes={"plain": BOTH, "white": BOTH, "thinking": USER},
        opened="<think>\n",
    ),
    "lfm2": Family(
        _loop(
            _cases(
                system="",
                tool=_CHATML.replace("m.content", "'<|tool_response_start|>' ~ m.content ~ '<|tool_response_end|>'"),
                other=_CHATML,
            ),
            _ANSWER,
            "{{ bos_token }}" + _HEAD.replace("DEFAULT", ""),
        ),
        ("<|im_end|>",),
        (*_IM, "<|tool_response_start|>", "<|tool_response_end|>"),
        bos="<|startoftext|>",
    ),
    "llama3.1": Family(
        _LLAMA,
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        changes=_WHITE,
        bos="<|begin_of_text|>",
    ),
    "gemma": Family(
        _GEMMA,
        ("<eos>", "<end_of_turn>"),
        ("<start_of_turn>",),
        ("\n\n", "\n\n\n"),
        roles=USER,
        changes=_WHITE,
        bos="<bos>",
        metaspace=True,
        has_tools=False,
    ),
    "phi3": Family(
        _loop(_cases(**_PHI), "<|assistant|>\n", "", "{{ eos_token }}"),
        ("<|endoftext|>", "<|end|>"),
        ("<|user|>", "<|assistant|>", "<|system|>"),
        roles=USER,
        metaspace=True,
        rstrip=True,
        has_tools=False,
    ),
    "nemotron": Family(
        _NEMOTRON,
        ("<|im_end|>",),
        _IM,
        _RESPONSE,
        changes={"plain": BOTH, "white": USER, "thinking": USER},
        opened="<think>\n",
    ),
    "glm4": Family(_GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), ("<|assistant|>", "<|system|>"), roles=NONE),
    "deepseek": Family(
        _DEEPSEEK,
        ("<|end_of_sentence|>",),
        (
            *("<|User|>", "<|Assistant|>", "<|tool_outputs_begin|>", "<|tool_outputs_end|>", "<|tool_output_begin|>"),
            "<|tool_output_end|>",
        ),
        ("<think>", "</think>"),
        roles=USER,
        changes={"plain": USER, "white": USER, "thinking": USER},
        opened="<think>\n",
        bos="<|begin_of_sentence|>",
    ),
    "gpt_oss": Family(
        _GPT_OSS,
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        roles=NONE,
    ),
    "mistral": Family(
        _MISTRAL,
        ("</s>",),
        ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        roles=frozenset({"tool"}),
        bos="<s>",
    ),
    "llama2": Family(
        _LLAMA2, ("</s>",), roles=USER, changes=_WHITE, around=(" ", " "), bos="<s>", metaspace=True, has_tools=False
    ),
    "names": Family(_NAMES, ("</s>",)),
}
# Changes of "smollm2" with which no observation can be written exactly: text to replace -> new text.
FAULTS: dict[str, tuple[str, str]] = {
    "drops_the_answer": ("for m in messages", "for m in messages if m.role != 'assistant'"),
    "repeats_the_answer": ("m.content ~", "m.content ~ (m.content if m.role == 'assistant' else '') ~"),
    "drops_the_last": ("for m in messages", "for m in messages[:2]"),
    "reverses": ("for m in messages", "for m in messages | reverse"),
    "lower": ("m.content", "(m.content | lower)"),
    "cut": ("m.content", "m.content[:12]"),
    "counts": ("m.role ~", "m.role ~ loop.index ~"),
    "counts_questions": ("m.role ~", "m.role ~ (messages | selectattr('role', 'eq', 'user') | list | length) ~"),
    "reads_the_thinking": (
        "m.role ~",
        "m.role ~ ('!' if loop.index0 and '</think>' in messages[loop.index0 - 1].content else '') ~",
    ),
    "no_end_of_the_last": ("~ '<|im_end|>\n'", "~ ('\n' if loop.last else '<|im_end|>\n')"),
    "no_end": ("~ '<|im_end|>\n'", "~ '\n'"),
    "end_of_the_last_only": ("~ '<|im_end|>\n'", "~ ('<|im_end|>\n' if loop.last else '\n')"),
    "text_before_the_end": ("~ '<|im_end|>\n'", "~ ' Over.<|im_end|>\n'"),
    "first_answer_differs": ("{% if add_generation_prompt %}", "{% if messages | length < 2 %}First: {% endif %}"),
    "fails": ("{% for m", "{{ raise_exception('no') if messages | length > 1 }}{% for m"),
}


@cache
def _inner(metaspace: bool, real: bool) -> str:
    """Return a tokenizer as JSON: SmolLM2's, or one with the merges of the project's pages."""
    if real and not metaspace:
        return REAL.read_text()
    split: Any = pre_tokenizers.Metaspace(prepend_scheme="first") if metaspace else pre_tokenizers.ByteLevel(False)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = split
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    made.train([str(ROOT / "README.md"), str(ROOT / "CONTRIBUTING.md")], trainer)
    if metaspace:  # characters that the pages lack become their bytes
        vocab = {f"<0x{i:02X}>": i for i in range(256)}
        vocab.update({token: i + 256 for token, i in made.get_vocab().items()})
        merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
        made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
        made.pre_tokenizer = split
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        made.decoder = decoders.ByteLevel()
    return made.to_str()


def tokenizer(family: Family, template: str = "", *, real: bool = False) -> Any:
    """Return the tokenizer of a family.

    Args:
        template: another template than the family's.
        real: with SmolLM2's merges, where they are on this machine and fit.
    """
    inner = Tokenizer.from_str(_inner(family.metaspace, real and REAL.exists()))
    special = [*family.ends, *family.special, *([family.bos] if family.bos else [])]
    inner.add_special_tokens([AddedToken(token, rstrip=family.rstrip, normalized=False) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=family.bos or None,
        eos_token=family.ends[0],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template or family.template
    return made


def end_ids(family: Family, made: Any) -> list[int]:
    return [made.convert_tokens_to_ids(token) for token in family.ends]
