"""Check and fingerprint a model folder in milliseconds, without torch.

A wrong path or a truncated download then stops the server before the first worker starts, and not
after minutes of loading.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from teacher_server.engines.folder_check import check_folder
from teacher_server.engines.hub import local_path, name_of
from teacher_server.engines.weight_files import fingerprint_of, read_json
from teacher_server.errors import ServerError
from teacher_server.wire.fingerprint import add_template, template_example, template_fingerprint, tokenizer_fingerprint
from teacher_server.wire.protocol import MAX_TEXT, MAX_TOKENS

log = logging.getLogger(__name__)

_SAMPLE_BYTES = 4 << 10
_N_SAMPLES = 1024  # at most, of a file whose form is unknown
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Keys of config.json for the longest sequence: the usual one, and those of GPT-2 and of other early families.
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: str  # absolute
    name: str
    max_tokens: int  # the model's position limit
    fingerprint: str  # 32 hex digits, see `fingerprint_of` and `_fingerprint_of_own`


def inspect_model_folder(path: str, *, needs_weights: bool = True) -> ModelFolder:
    """Check the config and the weight files of a folder, and compute its fingerprint.

    Args:
        path: the folder, or a model's name on the hub, which is downloaded.
        needs_weights: False for an engine with an import path: of its folder, config.json alone is checked.

    Raises:
        ServerError: if the folder is missing, or as `check_folder`.
    """
    folder = Path(local_path(path, weights=needs_weights))
    if not folder.is_dir():
        raise ServerError(
            f"model folder {path}: no such folder. Fix: give a folder with config.json and *.safetensors, or ORG/NAME."
        )
    weights = check_folder(folder) if needs_weights else None
    config = read_json(folder / "config.json")
    text_config = config.get("text_config", config)
    lengths = [text_config.get(key) for key in _LENGTHS] if isinstance(text_config, dict) else []
    max_tokens = next((length for length in lengths if isinstance(length, int) and length > 1), None)
    if max_tokens is None:
        raise ServerError(
            f"model folder {path}: config.json does not say how long a sequence may be ({', '.join(_LENGTHS)}). "
            f"Fix: add {_LENGTHS[0]} to it."
        )
    resolved = folder.resolve()
    name = name_of(resolved) or resolved.name
    fingerprint = _fingerprint_of_own(resolved) if weights is None else fingerprint_of(folder, weights)
    return ModelFolder(str(resolved), name, min(max_tokens, MAX_TOKENS), fingerprint)


def describe_tokenizer(folder: ModelFolder) -> tuple[str, str, str]:
    """Return the fingerprints of the folder's tokenizer and of its chat template, and `template_example`.

    They are empty without a tokenizer; the last also if the template fails or writes more than `MAX_TEXT` characters.

    Raises ServerError on failure.
    """
    if not any((Path(folder.path) / file).is_file() for file in _TOKENIZER_FILES):
        return "", "", ""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path)
        add_template(tokenizer, Path(folder.path))
        fingerprints = tokenizer_fingerprint(tokenizer.get_vocab()), template_fingerprint(tokenizer.chat_template)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ServerError(f"model folder {folder.path}: cannot load the tokenizer: {error}") from error
    try:
        example = template_example(tokenizer)
        n_bytes = len(example.encode())
    except Exception as error:  # a template is a program and may raise any error
        log.warning("%s: the chat template fails, so clients cannot show what it writes: %s", folder.path, error)
        return *fingerprints, ""
    return *fingerprints, example if n_bytes <= MAX_TEXT else ""


def _fingerprint_of_own(folder: Path) -> str:
    """Hash config.json and what an engine with an import path may load: names, sizes and samples of weight files.

    The hub's cache may have no weights yet; there the commit stands for them.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if name_of(folder) is not None:
        digest.update(folder.name.encode())
        return digest.hexdigest()[:32]
    for file in sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS and file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(_SAMPLE_BYTES, -(-size // _N_SAMPLES))):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
