"""Settings of distill.support, checks before the start, and the rollout's own ids on their way to the teacher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gkd.config.derived import derive
from gkd.config.load import load_config
from gkd.errors import ConfigError
from gkd.preflight.teacher import check_teacher
from gkd.quickstart.addition import build_tokenizer
from gkd.teacher.base import TeacherInfo
from teacher_server.wire.fingerprint import tokenizer_fingerprint

BASE = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "eval.metric=none", "teacher.topk=2"]
MIXTURE = "distill.losses=[{name: jsd}, {name: k3}]"


@pytest.mark.parametrize("setting", [MIXTURE])
def test_a_server_of_version_1_is_refused_if_it_lacks_a_feature(setting: str) -> None:
    """Fails if an old server refuses the first request of a run, or serves no run any more."""
    tokenizer = build_tokenizer()
    own = tokenizer_fingerprint(tokenizer.get_vocab())
    info = TeacherInfo("t", "m", "p", "f", 10, 4, own, 9999, 1, 1, "hf", "cpu", "float32", 1)
    config = load_config(None, BASE)
    (route,) = derive(config).routes
    assert check_teacher(config, route, info, tokenizer, 9) == 9
    config = load_config(None, [*BASE, setting])
    assert check_teacher(config, route, replace(info, protocol_version=2), tokenizer, 9) == 9
    with pytest.raises(ConfigError) as caught:
        check_teacher(config, route, info, tokenizer, 9)
    assert caught.value.key == "teacher.server_port"
