"""Show training prompts as the models read them, for `main_gkd --show-prompts`. Needs no GPU, no Ray and no teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from gkd.config.schema import Config
from gkd.data.prompts import RowReader, load_tokenizer
from gkd.data.render import Rendered
from gkd.data.row_files import read_rows
from gkd.hf.hub import with_local_copies
from gkd.hf.model_folder import eos_token_ids
from gkd.preflight.images import image_reader
from gkd.preflight.tokenizer_pair import teacher_tokenizer
from gkd.preflight.user_code import environment_tools


def preview(config: Config, n: int) -> Iterator[str]:
    """Yield what the models read of each of the first `n` rows of data.train_files.

    Raises:
        ConfigError: a setting or a row is unusable.
        ModelError: the student has no end-of-sequence token.
    """
    if not config.data.train_files:
        raise config.error("data.train_files", "is empty.", "name one or more prompt files.")
    config = with_local_copies(config, ("model.path", "data.train_files"), weights=False)
    tokenizer = load_tokenizer(config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code)
    ends = None
    if config.distill.on_policy_share < 1:
        ends = sorted({*eos_token_ids(config.model.path, tokenizer), *config.rollout.stop_token_ids})
    tools = environment_tools(config, tokenizer)
    other = teacher_tokenizer(config)
    reader = RowReader(config.data, tokenizer, config.teacher, tools, ends, other, image_reader(config))
    key = "data.train_files"
    rows = (row for file in config.data.train_files for row in read_rows(file, key, reader.reads))
    for where, row in islice(rows, n):
        read = reader.read(row, where)
        yield f"---- {where}: {_described(read.prompt, config.data.max_prompt_length)}"
        yield from _shown(read.prompt.text, read.prompt.ids, images=bool(read.images))
        if read.teacher is not None:
            limit = config.data.max_teacher_prompt_length or config.data.max_prompt_length
            yield f"---- the teacher's prompt: {_described(read.teacher, limit)}"
            yield from _shown(read.teacher.text, read.teacher.ids, images=bool(read.images))
        if ends is not None:
            response, is_own = reader.response(read, row, where)
            assert response is not None  # there are `ends`
            learned = "" if is_own is None else f", {is_own.sum()} of them learned"
            yield f"---- the dataset's response: {len(response)} tokens{learned}"
            yield from _shown(tokenizer.decode(response), response.tolist())


def _described(prompt: Rendered, limit: int) -> str:
    n = len(prompt.ids)
    phrases = [f"{n} tokens", f"more than the limit of {limit}" if n > limit else ""]
    phrases += [f"read as {prompt.converted}" if prompt.converted else ""]
    return ", ".join(filter(None, phrases))


def _shown(text: str, ids: list[int], *, images: bool = False) -> Iterator[Any]:
    yield text
    shown = f"ids: {' '.join(map(str, ids))}"
    run = r"\b(\d+)( \1\b){8,}"  # an image has hundreds of one id
    yield re.sub(run, lambda m: f"{m[1]} ({m[0].count(' ') + 1} times)", shown) if images else shown
