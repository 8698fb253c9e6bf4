"""Write a student that has other tokens than its teacher: layers of SmolLM2 with the SentencePiece tokens of Mistral.

python -m examples.other_tokenizer.student --base models/smollm2/whole --out models/other_tokenizer/student --layers 12
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.real_model.model import shrink, write

FILE = "mistral_instruct_tokenizer_240323.model.v3"  # of the package mistral_common, which vLLM installs
# Special token of the student -> the one of SmolLM2 that it replaces in the chat template, and whose embedding it gets.
SPECIAL = {"[INST]": "<|im_start|>", "</s>": "<|im_end|>", "<s>": "<|endoftext|>", "<unk>": "<|endoftext|>"}
_NORMAL, _OWN, _BYTE = 1, 4, 6  # kinds of pieces in SentencePiece's file
TEXTS = (
    "The quick brown fox doesn't jump over 12,345.67 lazy dogs!",
    " Two  spaces,\n\n\ta tab and the end. \n",
    "def f(x: int) -> str:\n    return f'{x:>8}'  # comment\n",
    "今天天气很好，我们去公园吧。",
    "naïve café 🙂👩‍🚀 Ωμέγα ∑x²",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2 with all of its layers")
    parser.add_argument("--out", type=Path, required=True, help="folder of the student")
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    if not args.out.exists():
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as made:
            shrink(args.base, args.layers, small := Path(made) / "small")
            change_tokens(small, args.out)
    return 0


def change_tokens(base: Path, out: Path) -> None:
    """Write a copy of a model whose tokens are those of `FILE`; check them against SentencePiece itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString((importlib.resources.files("mistral_common") / "data" / FILE).read_bytes())
    model, old = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    new = _tokenizer(proto, old.chat_template)
    _check(new, proto)
    rows = _embeddings(model.get_input_embeddings().weight.data, old, proto.pieces)
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    model.get_input_embeddings().weight.data.copy_(rows)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = (
            new.convert_tokens_to_ids(token) for token in ("<s>", "</s>", "</s>")
        )
    write(model, new, out)


def _tokenizer(proto: Any, chat_template: str) -> Any:
    """Return the tokens of SentencePiece as a fast tokenizer with SmolLM2's chat template, written in its own tokens.

    Mistral also puts a space before each text. This tokenizer does not, so the texts of its tokens add up to the text.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import SpmConverter, generate_merges

    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    # The order of the merges is that of the scores, not of the ids: runs of spaces have low ids and merge last.
    merges = generate_merges(vocab, [(piece.piece, piece.score) for piece in proto.pieces if piece.type == _NORMAL])
    tokens = SpmConverter.build_tokenizer_from_spm_proto(proto, vocab, merges)
    added = [piece for piece in proto.pieces if piece.type not in (_NORMAL, _BYTE)]
    tokens.add_tokens([AddedToken(each.piece, normalized=False, special=each.type != _OWN) for each in added])
    for ours, base in SPECIAL.items():
        chat_template = chat_template.replace(base, ours)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>",
        chat_template=chat_template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _embeddings(rows: Any, old: Any, pieces: Sequence[Any]) -> Any:
    """Return an embedding for each piece: the mean over the tokens that `old` has for its text.

    Args:
        rows: embeddings of the tokens of `old`, [V, H].

    Returns:
        [len(pieces), H]; that of a special token without a text is the mean of all `rows`.
    """
    import torch
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids_of, of_byte, everything = old.get_vocab(), bytes_to_unicode(), rows.mean(0)
    made = []
    for piece in pieces:
        if piece.type == _BYTE:
            token = of_byte[int(piece.piece[3:5], 16)]
            ids = [ids_of[token]] if token in ids_of else []
        elif piece.type == _NORMAL:
            ids = old.encode(piece.piece.replace("▁", " "), add_special_tokens=False)
        else:
            ids = [ids_of[SPECIAL[piece.piece]]] if piece.piece in SPECIAL else []
        made.append(rows[ids].mean(0) if ids else everything)
    return torch.stack(made)


def _check(tokenizer: Any, proto: Any) -> None:
    """End the program if the tokens of a text are not those of SentencePiece, or if they do not give the text back."""
    from sentencepiece import SentencePieceProcessor

    proto.normalizer_spec.add_dummy_prefix = False  # see `_tokenizer`
    exact = SentencePieceProcessor(model_proto=proto.SerializeToString())
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != exact.encode(text) or tokenizer.decode(ids) != text:
            sys.exit(f"{text!r} has the tokens {ids}, and {exact.encode(text)} in SentencePiece")


if __name__ == "__main__":
    sys.exit(main())
