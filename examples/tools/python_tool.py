"""A Python interpreter as a tool: `rollout.environment: examples.tools.python_tool:Python`.

Time, memory and output of the student's code are limited, and what it starts ends with it. That is not a sandbox: it
can read the files and use the network of this user. Run it in a container, or behind a service, if that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile

from gkd.environment.tools import ToolEnvironment

LIMIT_S, MEMORY_MIB, MAX_OUTPUT = 10.0, 1024, 4096
_PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({0} << 20, {0} << 20))
resource.setrlimit(resource.RLIMIT_CPU, ({1}, {1}))  # also when the process that waits for this one is killed
exec(compile(sys.stdin.read(), "code.py", "exec"), {{"__name__": "__main__"}})
"""


async def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: a complete program; nothing is kept for the next call.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _PROGRAM.format(MEMORY_MIB, int(4 * LIMIT_S))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            process_group=0,  # so that the end of the call includes what the code has started
        )
        assert process.stdin is not None and process.stdout is not None
        output, note = b"", ""
        try:
            process.stdin.write(code.encode(errors="replace"))
            process.stdin.close()
            async with asyncio.timeout(LIMIT_S):
                while len(output) <= MAX_OUTPUT and (part := await process.stdout.read(MAX_OUTPUT)):
                    output += part
        except TimeoutError:
            note = f"\nThe code was stopped after {LIMIT_S:g} s."
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if len(output) > MAX_OUTPUT:
        note = f"\nThe output was cut after {MAX_OUTPUT} bytes."
    return output[:MAX_OUTPUT].decode(errors="replace") + note


class Python(ToolEnvironment):
    """One tool, `python`; a turn without a call ends the trajectory."""

    functions = (python,)
