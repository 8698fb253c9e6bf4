"""Read the CURVE keys of the server, its clients and its workers, and apply them to sockets.

`gkd teacher keygen` writes the server's key folder:

    server.key  server.key_secret     key pair of the server
    clients/NAME.key                  allow-list of the client port     A client's key does not open
    workers/NAME.key                  allow-list of the worker port     the worker port, nor the reverse.
    bundles/NAME/                     server.key and one secret key: copy it to the host of NAME

With keys all traffic is encrypted and both ends are authenticated; messages of unknown keys are not read.
The allow-lists are reloaded while the server runs; a removed key cannot open new connections.
The trainer's client uses this file too. It depends on zmq only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from teacher_server.errors import ServerError

log = logging.getLogger(__name__)

Role = Literal["client", "worker"]
Domain = Literal["clients", "workers"]  # ZAP domain, and name of the folder with its allow-list
DOMAINS: tuple[Domain, ...] = ("clients", "workers")
KEY_CHARS = 40  # 32 bytes in Z85


class KeysError(ServerError):
    """A key folder or key file cannot be used. The text contains the file and the fix."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's key pair and the folder with its allow-lists."""

    secret: bytes = field(repr=False)  # Z85, 40 bytes
    public: bytes
    folder: Path


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """The key pair of a client or worker, and the public key of its server."""

    server_public: bytes  # Z85, 40 bytes
    public: bytes
    secret: bytes = field(repr=False)


def load_server_keys(folder: str | Path) -> ServerKeys:
    """Load the server's keys from its key folder.

    Raises:
        KeysError: if the folder is incomplete, other users can read its secret key, or an allow-list is damaged.
    """
    folder = Path(folder)
    public, secret = _read_secret(folder / "server.key_secret")
    for domain in DOMAINS:
        allowed, problems = read_allow_list(folder, domain)
        if problems:
            raise KeysError(problems[0])
        if public in allowed:
            raise KeysError(f"{folder / domain}: contains the server's own key. Fix: delete {allowed[public]}.key.")
    return ServerKeys(secret=secret, public=public, folder=folder)


def load_peer_keys(folder: str | Path, role: Role) -> PeerKeys:
    """Load a bundle of `keygen`. Raises KeysError: incomplete or damaged, or other users can read its secret key."""
    folder = Path(folder)
    if os.path.exists(folder / "server.key_secret"):  # False, and no error, in a folder without access
        raise KeysError(
            f"{folder}: this is the server's own key folder. Fix: give the bundle of a {role}, {folder}/bundles/NAME "
            f"(created by: gkd teacher keygen {folder} --{role} NAME)."
        )
    public, secret = _read_secret(folder / f"{role}.key_secret")
    server_public, _ = read_key_file(folder / "server.key")
    return PeerKeys(server_public=server_public, public=public, secret=secret)


def read_allow_list(folder: Path, domain: Domain) -> tuple[dict[bytes, str], list[str]]:
    """Return ({public key: name}, problems). Files that cannot be read, or a missing folder, are problems."""
    allowed: dict[bytes, str] = {}
    problems: list[str] = []
    try:
        if not (folder / domain).is_dir():
            problems.append(f"{folder / domain}: no such folder. Fix: run `gkd teacher keygen {folder}`.")
        files = sorted((folder / domain).glob("*.key"))
    except OSError as error:
        return {}, [f"{folder / domain}: {error}. Fix: give the server's user read access to this folder."]
    for file in files:
        try:
            allowed[read_key_file(file)[0]] = file.stem
        except KeysError as error:
            problems.append(str(error))
    return allowed, problems


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys, domain: Domain) -> None:
    """Accept only peers whose key is in this domain's allow-list. Call it before `bind`.

    Without a running `Authenticator` in the socket's context, every handshake is refused.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else libzmq accepts every key when no authenticator runs


def secure_peer(socket: zmq.Socket[Any], keys: PeerKeys) -> None:
    """Encrypt the connection and authenticate both ends. Call it before `connect`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class Authenticator:
    """Decide for libzmq (ZAP) which keys may connect, in its own thread, for one context.

    Start it before the first `bind` and stop it before the context is destroyed. Call all methods from
    one thread; it may differ from the thread that created the object.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys) -> None:
        self._folder = keys.folder
        self._zap = ThreadAuthenticator(context)
        self._lists = {domain: _AllowList(domain) for domain in DOMAINS}
        for domain, allow_list in self._lists.items():
            self._zap.configure_curve_callback(domain, allow_list)
        self._signature: object = None

    def start(self) -> None:
        self.maybe_reload()
        self._zap.start()

    def stop(self) -> None:
        """Stop the thread. Can be called twice."""
        self._zap.stop()

    def maybe_reload(self) -> bool:
        """Reload the allow-lists if a file has changed, and return whether. Costs two directory listings.

        A file or folder that cannot be read allows no key and is logged as an error.
        """
        signature = self._scan()
        if signature == self._signature:
            return False
        self._signature = signature
        for domain, allow_list in self._lists.items():
            allowed, problems = read_allow_list(self._folder, domain)
            for problem in problems:
                log.error("allow-list: %s", problem)
            for key in allow_list.keys.keys() - allowed.keys():
                log.warning("%s %s is no longer allowed to connect", domain[:-1], allow_list.keys[key])
            for key in allowed.keys() - allow_list.keys.keys():
                log.info("%s %s may connect", domain[:-1], allowed[key])
            allow_list.keys = allowed
        return True

    def _scan(self) -> object:
        seen = []
        for domain in DOMAINS:
            try:
                with os.scandir(self._folder / domain) as entries:
                    for entry in entries:
                        stat = entry.stat()  # ctime also changes on a chmod
                        seen.append((domain, entry.name, stat.st_ctime_ns, stat.st_size, stat.st_ino))
            except OSError as error:  # part of the signature, so that a new error is logged
                seen.append((domain, str(error), 0, 0, 0))
        return sorted(seen)


class _AllowList:
    """Keys of one domain. The authenticator's thread reads `keys`, which is replaced as a whole, never modified."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self.keys: dict[bytes, str] = {}

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = key in self.keys
        if not allowed:
            log.warning("refused a connection: key %s is not in the allow-list %s/", key.decode(), self._domain)
        return allowed


def _read_secret(file: Path) -> tuple[bytes, bytes]:
    """Return (public, secret). Raises KeysError."""
    public, secret = read_key_file(file)
    if file.stat().st_mode & 0o077:
        raise KeysError(f"{file}: other users can read this secret key. Fix: chmod 600 {file}")
    if secret is None:
        raise KeysError(f"{file}: contains no secret-key. Fix: copy the file again from the key folder.")
    return public, secret


def read_key_file(file: Path) -> tuple[bytes, bytes | None]:
    """Return (public, secret or None), both valid Z85 of 40 characters. Raises KeysError."""
    try:
        is_missing = not file.exists()  # pyzmq raises the same OSError for every cause
    except OSError as denied:
        raise KeysError(f"{file}: {denied}. Fix: give this user read access.") from denied
    if is_missing:
        raise KeysError(
            f"{file}: no such file. Fix: create it with `gkd teacher keygen` on the server's host; "
            "a client or worker needs the folder bundles/NAME that keygen prints."
        )
    try:
        public, secret = zmq.auth.load_certificate(file)
        for key in filter(None, (public, secret)):
            if len(key) != KEY_CHARS or len(z85.decode(key)) != 32:
                raise ValueError("a key is not 40 characters of Z85")
    except (OSError, ValueError, KeyError) as error:
        raise KeysError(f"{file}: not a key file ({error}). Fix: copy it again from the key folder.") from error
    return public, secret
