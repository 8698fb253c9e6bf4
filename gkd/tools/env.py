"""Print what a report of a problem needs of this environment: `gkd env`."""

from __future__ import annotations

import json
import os
import sys

from teacher_server.config.command import command_parser


def main() -> int:
    """Return the exit code 0."""
    about = "Print versions, hardware and variables of this environment, for the report of a problem."
    command_parser("gkd env", about, "example:\n  gkd env > env.txt").parse_args()
    from gkd.preflight.environment import VARIABLES, describe_machine

    facts = describe_machine() | {"variables": {name: os.environ[name] for name in VARIABLES if name in os.environ}}
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
