"""`python -m teacher_server`: see `teacher_server.main`."""

from __future__ import annotations

import sys

from teacher_server.main import main

if __name__ == "__main__":
    sys.exit(main())
