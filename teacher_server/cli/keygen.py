"""`gkd teacher keygen DIR`: create the keys of a server, its clients and its workers.

`wire/keys.py` describes the folder. Run the command again to add names; it never overwrites a key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import zmq

from teacher_server.config.command import command_parser
from teacher_server.config.settings import check_name
from teacher_server.wire.keys import DOMAINS, KeysError, Role, read_key_file

_EXAMPLES = """example:
  a server, one trainer, and workers on two more hosts:
    gkd teacher keygen keys --client trainer --worker host7 --worker host8
    gkd teacher --model /models/teacher --host 10.0.0.5 --worker-port 15556 --keys keys
  Then copy each bundle folder that it prints to its host over a trusted channel, and delete it here.

  revoke a key: delete keys/clients/trainer.key; a running server notices within about a second.
"""
_NOTE = "# CURVE {} key of {}, made by `gkd teacher keygen`\n"


def main(argv: Sequence[str]) -> int:
    """Run `keygen`. Raises KeysError."""
    parser = command_parser(
        "gkd teacher keygen",
        "Create the keys of a server, or add clients and workers to existing keys.",
        _EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the server's key folder, for its --keys")
    parser.add_argument(
        "--client", action="append", default=[], metavar="NAME", help="create a client's key; can be repeated"
    )
    parser.add_argument(
        "--worker", action="append", default=[], metavar="NAME", help="create a worker's key; can be repeated"
    )
    args = parser.parse_args(argv)
    for line in make_keys(Path(args.folder), args.client, args.worker):
        print(line)
    return 0


def make_keys(folder: Path, clients: Sequence[str], workers: Sequence[str]) -> list[str]:
    """Create the keys that do not exist yet.

    Returns:
        Lines for the user: what was created, and which folder to copy to which host.

    Raises:
        KeysError: if a name is invalid, a file cannot be written, or one half of a key pair already exists.
    """
    try:
        for name in (*clients, *workers):
            check_name(name, "--client or --worker")
        for sub in ("", *DOMAINS, "bundles"):
            (folder / sub).mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = [_server_pair(folder)]
        lines += [_peer_pair(folder, "client", name) for name in dict.fromkeys(clients)]
        lines += [_peer_pair(folder, "worker", name) for name in dict.fromkeys(workers)]
    except OSError as error:
        raise KeysError(f"{error.filename or folder}: {error.strerror}. Fix: choose a folder you may write.") from error
    return lines


def _server_pair(folder: Path) -> str:
    secret_file = folder / "server.key_secret"
    if secret_file.exists():
        public, _ = read_key_file(secret_file)
        done = f"{folder}: the server's key already exists"
    else:
        public, secret = zmq.curve_keypair()
        _write(secret_file, "secret", "the server", public, secret)
        done = f"{folder}: created the server's key; keep it here and start the server with --keys {folder}"
    _write_server_public(folder, public)
    return done


def _write_server_public(folder: Path, public: bytes) -> None:
    file = folder / "server.key"
    if not file.exists():
        _write(file, "public", "the server", public)
    elif read_key_file(file)[0] != public:
        raise KeysError(f"{file}: is the key of another server. Fix: delete it, and copy the new one to its host.")


def _peer_pair(folder: Path, role: Role, name: str) -> str:
    allowed = folder / f"{role}s" / f"{name}.key"
    bundle = folder / "bundles" / name
    if allowed.exists():
        return f"{role} {name}: its key already exists ({allowed}); to replace it, delete that file first"
    secret_file = bundle / f"{role}.key_secret"
    if secret_file.exists():
        raise KeysError(f"{secret_file}: exists without {allowed}. Fix: delete it to create another key for {name}.")
    bundle.mkdir(mode=0o700, exist_ok=True)
    public, secret = zmq.curve_keypair()
    _write_server_public(bundle, read_key_file(folder / "server.key")[0])
    _write(secret_file, "secret", f"{role} {name}", public, secret)
    _write(allowed, "public", f"{role} {name}", public)  # last: a name on the allow-list always has its bundle
    use = f"teacher.keys: {name}" if role == "client" else f"worker --keys {name}"
    return f"{role} {name}: created; copy the folder {bundle} to its host ({use}), then delete it here"


def _write(file: Path, kind: str, whose: str, public: bytes, secret: bytes | None = None) -> None:
    """Write a key file atomically. Never overwrites a file, and never makes a secret readable by other users."""
    text = _NOTE.format(kind, whose) + f'curve\n    public-key = "{public.decode()}"\n'
    if secret is not None:
        text += f'    secret-key = "{secret.decode()}"\n'
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if secret is None else 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        os.link(partial, file)
    finally:
        partial.unlink()
