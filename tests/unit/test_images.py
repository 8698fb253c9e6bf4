"""Images of prompts: decoding, numbers of tokens, and rows that are read as transformers reads them, or refused."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from tokenizers.processors import TemplateProcessing
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from gkd.config.schema_sections import DataConfig
from gkd.config.schema_teacher import TeacherConfig
from gkd.data.images import ImageReader
from gkd.data.prompts import RowReader, load_prompts
from gkd.data.row_files import decode_row
from gkd.rollout.messages import encode_prompts
from gkd.types import Prompt
from teacher_server.vision.images import EncodedImage, ImageError, check_image, decode, image_size
from teacher_server.vision.processor import ImageProcessor
from tests.refusals import refuses
from tests.vision_models import picture, save_vision_model

FORMATS = ("PNG", "JPEG", "WEBP")
PLAIN = Image.open(io.BytesIO(picture(20, 30)))
FILES = {"a.png": picture(40, 50, 1), "b.png": picture(70, 90, 2)}
URL = "data:image/png;base64," + base64.b64encode(FILES["a.png"]).decode()
KINDS = ("llava", "begins", "qwen3_vl", "internvl", "gemma3")


def encoded(image: Image.Image, form: str, orientation: int = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(file, form, **({"exif": exif.tobytes()} if orientation else {}) | options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int, color: int, raw: bytes, more: bytes = b"", behind: bytes = b"") -> bytes:
    """Return a PNG with any header: `raw` are the lines, `more` and `behind` chunks before and behind them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(raw, 9)) + behind + chunk(b"IEND", b"")


COLORS = [("CMYK", "JPEG"), ("L", "JPEG"), ("YCbCr", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("P", "PNG")]


@pytest.mark.parametrize("mode, form", [*(("RGB", form) for form in FORMATS), *COLORS])
def test_colors_and_orientations_are_those_of_pil(mode: str, form: str) -> None:
    """Fails if a print, a scan or a turned photograph is refused, or has other pixels or sides than PIL's."""
    for orientation in range(10):
        data = encoded(PLAIN.convert(mode), form, orientation)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        np.testing.assert_array_equal(np.asarray(decode(data)), expected)
        assert image_size(data) == expected.shape[:2]


def test_transparency_is_put_on_white() -> None:
    """Fails if a clear pixel shows the color below it, which some readers take for black, in any form of a file."""
    forms = [("RGBA", "PNG", {}), ("RGBA", "WEBP", {"lossless": True, "exact": True}), ("LA", "PNG", {})]
    for mode, form, options in [*forms, ("L", "PNG", {"transparency": 0})]:
        image = Image.new(mode, (2, 1))  # The second pixel is 0, and clear.
        image.putpixel((0, 0), {"LA": (7, 255), "RGBA": (7, 7, 7, 255)}.get(mode, 7))
        found = decode(encoded(image, form, **options))
        assert (found.getpixel((0, 0)), found.getpixel((1, 0))) == ((7,) * 3, (255,) * 3)
    assert decode(encoded(Image.new("P", (1, 1)), "PNG", transparency=0)).getpixel((0, 0)) == (255,) * 3
    assert decode(encoded(Image.new("LA", (1, 1), (0, 128)), "PNG")).getpixel((0, 0)) == (127,) * 3


GARBAGE = random.Random(0).randbytes(2000)
ZIPPED = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000)))
REFUSED = [
    (b"", "0 bytes"), (picture(9, 9) + bytes(17 << 20), "are allowed"), (GARBAGE, "is not a"),
    *((encoded(PLAIN, form), "is not a") for form in ("GIF", "TIFF", "BMP")),
    *((encoded(PLAIN, form, save_all=True, append_images=[PLAIN.rotate(90)]), "2 frames") for form in ("PNG", "WEBP")),
    (png(4, 4, 16, 0, bytes(36)), "8 bits"), (png(4, 4, 16, 2, bytes(100)), "8 bits"),
    (png(60_000, 60_000, 8, 2, b""), "is not a"), (png(10_000, 10_000, 1, 0, b""), "10000 x 10000"),
    (png(1, 10_000, 8, 0, bytes(20_000)), "200 times"), (png(10_000, 1, 8, 0, bytes(10_001)), "200 times"),
    *((png(4, 4, 8, 0, bytes(20), each), "is not a") for each in (ZIPPED, chunk(b"iCCP", ZIPPED[8:-4]))),  # of 100 MB
]  # fmt: skip


@pytest.mark.parametrize("data, why", REFUSED, ids=range(len(REFUSED)))
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_refused_from_its_header(data: bytes, why: str) -> None:
    """Fails if a file that no process could use starts a run, or one of some bytes takes gigabytes."""
    for read in (image_size, check_image, decode):
        with pytest.raises(ImageError, match=why):
            read(data)


def test_damage_behind_the_header() -> None:
    """Fails if a cut image passes the check of the rows, or trailing bytes, as of cameras, and damaged EXIF do not."""
    for form in FORMATS:
        data = picture(40, 50, form=form)
        tail = 24 if form == "PNG" else 1  # The pixels of a PNG are whole before its last bytes.
        for end in range(1, len(data) - tail, 7):
            with pytest.raises(ImageError):
                check_image(data[:end])
    for data in (png(8192, 8192, 8, 2, bytes(100)), png(4, 4, 8, 0, bytes(20), behind=ZIPPED)):
        with pytest.raises(ImageError, match="cannot be decoded"):
            decode(data)
    exif = (b"MM\0*\0\0\0\x08\0\x01\x01\x12", b"Exif\0\0II*\0\xff\xff\xff\xff", GARBAGE[:50])
    files = [encoded(PLAIN, form, exif=cut) for form in FORMATS for cut in exif]
    behind = (b"x" * 1000, picture(9, 9, form="JPEG")[:-2])
    files += [picture(20, 30, form=form) + more for form in FORMATS for more in behind]
    files += [encoded(PLAIN, "MPO", save_all=True, append_images=[PLAIN])]  # a phone's photograph with a preview
    for data in [*files, png(30, 20, 8, 2, bytes(50_000_000))]:  # The last one has more pixels than it declares.
        check_image(data)
        assert decode(data).size == (30, 20) and image_size(data) == (20, 30)


def test_mutated_files_end_in_an_image_or_its_error() -> None:
    """Fails if bytes of a client crash a process, take its memory or time, or decode to another size than counted."""
    run = [sys.executable, "-W", "ignore", "-c", "from tests.unit.test_images import fuzz; fuzz(3000)"]
    assert 300 < int(subprocess.run(run, stdout=subprocess.PIPE, timeout=120, check=True).stdout) < 2000


def fuzz(n: int) -> None:
    """Decode mutated files within 2 GiB, and print how many are images."""
    rng, n_images = random.Random(0), 0
    seeds = [encoded(PLAIN, form, 6) for form in FORMATS] + [encoded(PLAIN.convert("RGBA"), "WEBP", lossless=True)]
    seeds += [encoded(PLAIN.convert(mode), form) for mode, form in COLORS]
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    for _ in range(n):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 2, 8))):
            at, size = rng.randrange(rng.choice((len(data), 100))), rng.choice((0, 1, 4, 12))
            data[at : at + size] = rng.choice((b"", b"\0" * size, b"\xff" * size, rng.randbytes(size or 1)))
        with suppress(ImageError):
            check_image(bytes(data))
        with suppress(ImageError):
            size = image_size(bytes(data))
            image = decode(bytes(data))
            n_images += 1
            assert (image.height, image.width) == size and image.mode == "RGB"
    print(n_images)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images and models, of LLaVA also one that begins a text and ends turns, as Llama's does."""
    folder = tmp_path_factory.mktemp("rows")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    for kind in (*KINDS, "qwen2_5_vl", "qwen3_5"):
        save_vision_model(folder / kind, kind.replace("begins", "llava"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "begins")
    begin = tokenizer.bos_token = "<|endoftext|>"
    special = [(begin, tokenizer.convert_tokens_to_ids(begin))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=special)
    ends = "{{ p.text + ('<|im_end|>' if m.role == 'assistant' else ' ') }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ p.text + ' ' }}", ends)
    tokenizer.save_pretrained(folder / "begins")
    return folder


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "gemma3"])
def test_the_expansion_is_that_of_transformers(here: Path, kind: str) -> None:
    """Fails if the student, the engine or the teacher would get another number of tokens than the model's processor."""
    ours, tokenizer = ImageProcessor(str(here / kind)), AutoTokenizer.from_pretrained(here / kind)
    pixels = AutoImageProcessor.from_pretrained(here / kind)
    mark, rng = ours.written[0] or tokenizer.convert_ids_to_tokens(ours.token_id), random.Random(1)
    images = [EncodedImage(picture(rng.randrange(4, 400), rng.randrange(4, 400), i)) for i in range(50)]
    for own in [*([image] for image in images), *(images[at : at + 3] for at in range(0, 48, 3))]:
        text, decoded = f"\n{mark} b\n\n" * len(own) + " c", [decode(image.data) for image in own]
        if kind in ("llava", "gemma3"):
            expected = AutoProcessor.from_pretrained(here / kind)(text=text, images=decoded)["input_ids"][0]
        elif kind == "internvl":  # AutoProcessor of InternVL and Qwen needs torchvision; these are their rules.
            tiles = pixels(images=decoded, crop_to_patches=True, return_tensors="pt")["num_patches"]
            shown = (f"\n<|vision_start|>{mark * 4 * n}<|vision_end|> b\n\n" for n in tiles.tolist())
            expected = tokenizer("".join(shown) + " c")["input_ids"]
        else:
            grids = pixels(images=decoded, return_tensors="pt")["image_grid_thw"]
            numbers = (grids.prod(-1) // pixels.merge_size**2).tolist()
            expected = tokenizer("".join(f"\n{mark * n} b\n\n" for n in numbers) + " c")["input_ids"]
        ids = ours.expand(tokenizer(text.replace(*ours.written))["input_ids"], own)
        assert ids == list(expected)
        ours.check(np.array(ids), own)


def test_ids_of_other_images_are_refused(here: Path) -> None:
    """Fails if a token too much or too little, or images in another order, would give scores of other images."""
    ours = ImageProcessor(str(here / "qwen3_vl"))
    small, large, wide = (EncodedImage(picture(*size)) for size in ((56, 56), (112, 112), (56, 112)))  # 4, 16, 8 tokens
    token = ours.token_id
    ids = np.array([1, *[token] * 4, 1, *[token] * 16, 2])
    ours.check(ids, [small, large])
    wrong = [(other, [small, large]) for other in (np.delete(ids, 2), np.insert(ids, 2, token), ids[ids != token])]
    wrong += [(ids, images) for images in ([small], [small, large, wide], [wide, large], [], [large, small])]
    for other, images in wrong:
        with pytest.raises(ImageError, match="tokens"):
            ours.check(other, images)
    with pytest.raises(ImageError, match="tokens"):  # such a run has no positions on grids
        ours.check(np.delete(ids, 5), [small, wide, wide])


def load(here: Path, kind: str, *rows: Any, ends: Any = None, template: str = "", **data: Any) -> list[Prompt]:
    """Load rows.parquet, or rows that are given, of a file of JSONL."""
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(**{"images_key": "images", "truncation": "drop", "max_prompt_length": 4096} | data)
    images = ImageReader(ImageProcessor(str(here / kind)), config.images_key, here)
    tokenizer, teacher = AutoTokenizer.from_pretrained(here / kind), TeacherConfig(prompt_template=template)
    reader = RowReader(config, tokenizer, teacher, response_ends=ends, images=images)
    file = here / ("rows.jsonl" if rows else "rows.parquet")
    return load_prompts([str(file)], "data.train_files", reader, keep_rows=True)[0]


def said(form: str, role: str = "user", **more: Any) -> dict[str, Any]:
    """Return a message of parts, from a text such as "A|x|*": the image a.png, the text x, an image without a name."""
    images = {"A": {"image": "a.png"}, "B": {"image": "b.png"}, "*": {}}
    parts = [{"type": "image", **images[p]} if p in images else {"type": "text", "text": p} for p in form.split("|")]
    parts[0] |= more
    return {"role": role, "content": parts}


def expected(here: Path, kind: str, *messages: Any, **more: Any) -> tuple[list[str], list[int]]:
    """Return the names of images, and the ids of transformers; AutoProcessor of others than LLaVA needs torchvision."""
    more = {"add_generation_prompt": True, "tokenize": True} | more
    names = [part["image"] for each in messages for part in each["content"] if "image" in part]
    if kind in ("qwen3_vl", "internvl"):
        made = AutoTokenizer.from_pretrained(here / kind).apply_chat_template(messages, **more)["input_ids"]
        return names, ImageProcessor(str(here / kind)).expand(made, [EncodedImage(FILES[name]) for name in names])
    pixels = {name: {"image": decode(data)} for name, data in FILES.items()}
    parts = [[part | pixels.get(part.get("image"), {}) for part in each["content"]] for each in messages]
    read = [{**each, "content": own} for each, own in zip(messages, parts, strict=True)]
    return names, [*AutoProcessor.from_pretrained(here / kind).apply_chat_template(read, **more)[0]]


ONE, BOTH = {"images": ["a.png"]}, {"images": [*FILES]}
TALK = [said("Be brief.", "system"), said("Hi"), said("Yes?", "assistant")]
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "marks": ({"prompt": "See <image> or <image>!", **BOTH}, [said("See |A| or |B|!")]),
    "message": ({"prompt": [{"role": "user", "content": "<image>\nHm?"}], **ONE}, [said("A|\nHm?")]),
    "parts": ({"prompt": [said("*|x|*")], **BOTH}, [said("A|x|B")]),
    "numbered": ({"prompt": [said("*|x", index=0), said("*|y", index=1)], **BOTH}, [said("A|x"), said("B|y")]),
    "two texts": ({"prompt": [said("*|x|y")], **ONE}, [said("A|x|y")]),
    "texts and a column": ({"prompt": [said("x|y")], **ONE}, [said("A|x|y")]),
    "texts before": ({"prompt": [said("x|y"), TALK[2], said("*|z")], **ONE}, [said("x|y"), TALK[2], said("A|z")]),
    "openai": ({"prompt": [{"role": "user", "content": [OPENAI, {"type": "text", "text": "x"}]}]}, [said("A|x")]),
    "column": ({"prompt": "What?", **BOTH}, [said("A|B|What?")]),
    "behind a system": ({"prompt": [TALK[0], said("x")], **ONE}, [TALK[0], said("A|x")]),
    "later turn": ({"prompt": [*TALK, said("*|x")], **ONE}, [*TALK, said("A|x")]),
    "names": ({"prompt": [said("B|x|A")]}, [said("B|x|A")]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_tokens_of_transformers(here: Path, kind: str, form: str) -> None:
    """Fails if an image, a space or the beginning of a text is read in another place than by the model's own code."""
    row, messages = FORMS[form]
    names, ids = expected(here, kind, *messages)
    stored = [{"bytes": FILES[name], "path": None} for name in names[:1]]
    stored += [{"bytes": None, "path": name} for name in names[1:]]
    pq.write_table(pa.Table.from_pylist([row | {"images": stored} if "images" in row else row]), here / "rows.parquet")
    tokenizer = AutoTokenizer.from_pretrained(here / kind)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    again = {"prompt": rendered, "images": names}
    found = [*load(here, kind), *load(here, kind, again, chat_template="never")]
    found += [] if rendered.startswith("SYSTEM") else load(here, kind, again)
    own, *plain = load(here, kind, row, *({"prompt": "x", "images": none} for none in ([], None, "")))
    assert [[*prompt.token_ids] for prompt in plain] == [expected(here, kind, said("x"))[1]] * 3
    for prompt in (own, *found):
        assert [*prompt.token_ids] == ids and [image.data for image in prompt.images] == [FILES[name] for name in names]


def test_images_that_a_template_numbers(here: Path) -> None:
    """Fails if Qwen's `add_vision_id` calls two images of a conversation "Picture 1", as it does in a message alone."""
    numbers: dict[str, Any] = {"chat_template_kwargs": {"add_vision_id": True}}
    (prompt,) = load(here, "qwen3_vl", {"prompt": [*TALK, said("A|x|B")]}, **numbers)
    assert [*prompt.token_ids] == expected(here, "qwen3_vl", *TALK, said("A|x|B"), add_vision_id=True)[1]
    two = [said("A|x"), TALK[2], said("B|y")]
    (prompt,) = load(here, "qwen3_vl", {"prompt": two}, **numbers)
    assert [*prompt.token_ids] == expected(here, "qwen3_vl", *two, add_vision_id=True)[1]
    with refuses("data.messages_key") as caught:  # a later turn is written alone
        load(here, "qwen3_vl", {"talk": [*two, TALK[2]]}, messages_key="talk", ends=[1], **numbers)
    assert "rows.jsonl:1 in another way than" in caught.value.problem


@pytest.mark.parametrize("kind", KINDS[1:])
def test_conversations_of_llava_instruct(here: Path, kind: str) -> None:
    """Fails if a later turn is read with other tokens than transformers', or the user's text is learned."""
    words = ["<image>\nWhat?", "A cat.", "Its color?", "Red."]
    talk = [{"from": ("human", "gpt")[i % 2], "value": each} for i, each in enumerate(words)]
    turns = [said(each.replace("<image>", "A|"), ("user", "assistant")[i % 2]) for i, each in enumerate(words)]
    tokenizer = AutoTokenizer.from_pretrained(here / kind)
    settings = {"messages_key": "talk", "images_key": "image", "response_key": "", "ends": [tokenizer.eos_token_id]}
    (prompt,) = load(here, kind, {"talk": talk, "image": "a.png"}, **settings)
    whole = [*prompt.token_ids, *prompt.response_ids]
    assert whole == expected(here, kind, *turns, add_generation_prompt=False)[1][: len(whole)]
    learned = tokenizer.decode(prompt.response_ids[prompt.own]).replace(" ", "")
    assert learned == "Acat.<|im_end|>Red.<|im_end|>"
    turns[2] = said("Its |color?")
    (prompt,) = load(here, kind, {"talk": turns}, **settings)
    whole = [*prompt.token_ids, *prompt.response_ids]
    assert whole == expected(here, kind, *turns, add_generation_prompt=False)[1][: len(whole)]


def test_the_teachers_own_prompt(here: Path) -> None:
    """Fails if the teacher reads its prompt without the image, or with an image that the student does not see."""
    row = {"prompt": "<image>What?", "own": "<image>What? Hint.", "answer": "x", **ONE}
    for settings in ({"teacher_prompt_key": "own"}, {"template": "{prompt} Hint."}):
        (prompt,) = load(here, "llava", row, **settings)
        assert [*prompt.teacher_ids] == expected(here, "llava", said("A|What? Hint."))[1]
    for own in ("B|x", "x", "A|A|x"):
        with refuses("data.teacher_prompt_key", text="rows.jsonl:1 has other images"):
            load(here, "llava", {"prompt": [said("A|x")], "own": [said(own)]}, teacher_prompt_key="own")
    with refuses("data.images_key"):  # The template leaves the image out.
        load(here, "llava", row, template="{answer}")


PROMPT, IMAGES, RESPONSE = "data.prompt_key", "data.images_key", "data.response_key"
LEARNS = {"response_key": "", "ends": [1]}
WRONG: list[tuple[str, Any, Any, str, dict[str, Any]]] = [  # key, prompt, images, words, settings
    (PROMPT, "<image>x", None, "no image for it", {}), (PROMPT, "<image><image>x", "a.png", "2 places for 1", {}),
    (PROMPT, "<image>x", [*FILES], "1 places for 2", {}), (PROMPT, [said("*|<image>x")], [*FILES], "<image>", {}),
    (PROMPT, [said("A|x")], "b.png", "0 places", {}), (PROMPT, [said("*|x", index=1)], "a.png", "next image is 0", {}),
    (PROMPT, "\ue002x", "a.png", "U+E002", {}), (PROMPT, [said("*|x", type=["image"])], "a.png", "only text", {}),
    (PROMPT, [said("x"), said("A|y", "assistant")], None, "an image in the response", LEARNS),
    (RESPONSE, [said("x"), said("<image>y", "assistant")], None, "token of an image", LEARNS),
    (PROMPT, "SYSTEM: Hi. USER: <image>\nx ASSISTANT:", "a.png", "rendered already", {}),
    (IMAGES, "x", "a.png", "2 placeholders", {"system_prompt": "<image>"}),
    (IMAGES, "x", "a.png", "0 placeholders", {"chat_template": "never"}),
    (IMAGES, "x", [""], "directory", {}), (IMAGES, "x", [None], "neither bytes", {}),
    (IMAGES, "x", [["a.png"]], "neither bytes", {}), (IMAGES, "x", {"bytes": None, "path": None}, "neither bytes", {}),
    (IMAGES, "x", "c.png", "No such file", {}), (IMAGES, "x", "https://a/b.png", "reads local files", {}),
    (IMAGES, "x", "data:image/png;base64,#", "base64", {}), (IMAGES, "x", "rows.jsonl", "is not a JPEG", {}),
    (IMAGES, [said("A|x", path="b.png")], None, "one of", {}), (IMAGES, [said("A|x", text="lost")], None, "'text'", {}),
    (IMAGES, [said("A|x", size=9)], None, "size", {}), (IMAGES, "x", [{"image": "a.png", "size": 9}], "size", {}),
    (IMAGES, "x", None, "no row of data.train_files has an image", {"images_key": "picture"}),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
def test_rows_that_would_be_read_wrongly(here: Path, case: tuple[str, Any, Any, str, dict[str, Any]]) -> None:
    """Fails if a row trains on other images than it names, on none, or on an image's token without an image."""
    key, prompt, images, words, more = case
    with refuses(key) as caught:
        load(here, "llava", {"prompt": prompt, "images": images}, **more)
    assert words in caught.value.problem and ("rows.jsonl:1" in caught.value.problem or "images_key" in more)


def test_a_file_that_changes_is_not_sent(here: Path) -> None:
    """Fails if engine, teacher and student read other bytes than those whose tokens were counted."""
    file = shutil.copy(here / "a.png", here / "c.png")
    (prompt,) = load(here, "llava", {"prompt": "x", "images": ["c.png", URL]})
    assert decode_row(prompt.row)[1]["images"] == ["c.png", None]  # Functions get no bytes.
    assert pickle.loads(pickle.dumps(prompt.images)) == prompt.images
    for change, words in ((lambda: file.write_bytes(FILES["b.png"]), "changed"), (file.unlink, "cannot be read")):
        change()
        for send in (lambda: encode_prompts([prompt], [0]), lambda: pickle.dumps(prompt)):
            with pytest.raises(ImageError, match=words):
                send()
    assert prompt.images[1].data == FILES["a.png"]
