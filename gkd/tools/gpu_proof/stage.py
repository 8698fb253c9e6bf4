"""One stage of `python -m gkd.tools.gpu_proof`: what it runs, and what it needs of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

JSON, XML, DEVICE = "{json}", "{xml}", "{device}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table.

    Args:
        command: words after `python -m`. {json} and {xml} become the file of the results, {device} cuda or cpu.
        cpu: the words to use on a machine without a GPU; None means the stage needs a GPU.
        limit_s: the stage is stopped after this time.
        expected_s: its time on an H100 with 16 cores; most of it loads libraries, compiles and starts engines.
        expected: of the figure in the table, on a GPU.
        figure: the beginning of its name; "": the first figure.
        min_gib: memory of each GPU; on a smaller one the stage is skipped.
        prepare: words after `python -m` that make on the CPU what the stage finds then. They run in the background from
            the start.
        shares_gib: GPU memory that it takes at most while other stages use the rest. 0: its figures are times or memory
            of the whole card, so it runs alone.
        ahead_s: the part of `expected_s` before it first uses the GPU, where it calls `wait_for_turn`. It is started
            while the stage before it runs. 0: it is not.
    """

    name: str
    what: str
    command: tuple[str, ...]
    cpu: tuple[str, ...] | None
    limit_s: int
    expected_s: int
    expected: str
    figure: str = ""
    n_gpus: int = 1
    min_gib: int = 0
    prepare: tuple[str, ...] = ()
    shares_gib: int = 0
    ahead_s: int = 0

    def words(self, device: str) -> list[str]:
        command = self.cpu if device == "cpu" else self.command
        assert command is not None, f"{self.name} has no form without a GPU"
        return [device if word == DEVICE else word for word in command]
