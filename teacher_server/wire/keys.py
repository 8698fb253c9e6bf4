"""CURVE keys of the server, its clients and its workers: reading them, and putting them on sockets.

A key folder of the server, as `python -m teacher_server keygen` writes it:

    server.key  server.key_secret     who the server is
    clients/NAME.key                  who may ask        one allow-list each: a client's key
    workers/NAME.key                  who may work       opens no worker's port, nor the reverse
    bundles/NAME/                     server.key and one secret: all that the host of NAME needs

With keys every byte is encrypted, both ends are authenticated, and nothing of a stranger is read.
The allow-lists are read again while the server runs; a key taken off them opens no new connection.
The trainer's client uses this file too. Needs nothing but zmq.
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
Domain = Literal["clients", "workers"]  # of ZAP, and the folder with its allow-list
DOMAINS: tuple[Domain, ...] = ("clients", "workers")
KEY_CHARS = 40  # 32 bytes in Z85


class KeysError(ServerError):
    """A key folder or key file that cannot be used; says which file and what to do."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's key pair and the folder with its allow-lists."""

    secret: bytes = field(repr=False)  # Z85, 40 bytes
    public: bytes
    folder: Path


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """A client's or worker's key pair, and the key of the one server it talks to."""

    server_public: bytes  # Z85, 40 bytes
    public: bytes
    secret: bytes = field(repr=False)


def load_server_keys(folder: str | Path) -> ServerKeys:
    """Raises KeysError if the folder is incomplete, its secret readable by others, or an allow-list damaged."""
    folder = Path(folder)
    public, secret = _read_secret(folder / "server.key_secret")
    for domain in DOMAINS:
        allowed, problems = read_allow_list(folder, domain)
        if problems:
            raise KeysError(problems[0])
        if public in allowed:
            raise KeysError(f"{folder / domain}: holds the server's own key. Fix: remove {allowed[public]}.key there.")
    return ServerKeys(secret=secret, public=public, folder=folder)


def load_peer_keys(folder: str | Path, role: Role) -> PeerKeys:
    """The bundle that `keygen` made for one host.

    Raises:
        KeysError: it is incomplete, damaged, or its secret readable by others.
    """
    folder = Path(folder)
    if os.path.exists(folder / "server.key_secret"):  # False, and no error, in a folder that we may not enter
        raise KeysError(
            f"{folder}: this is the server's own key folder. Fix: give the bundle of a {role}, {folder}/bundles/NAME "
            f"(made by: python -m teacher_server keygen {folder} --{role} NAME)."
        )
    public, secret = _read_secret(folder / f"{role}.key_secret")
    return PeerKeys(server_public=_read_public(folder / "server.key"), public=public, secret=secret)


def read_allow_list(folder: Path, domain: Domain) -> tuple[dict[bytes, str], list[str]]:
    """({public key: name}, what is wrong with the files that are not in it). A missing folder is such a problem."""
    allowed: dict[bytes, str] = {}
    problems: list[str] = []
    try:
        if not (folder / domain).is_dir():
            problems.append(f"{folder / domain}: no such folder. Fix: run `python -m teacher_server keygen {folder}`.")
        files = sorted((folder / domain).glob("*.key"))
    except OSError as error:
        return {}, [f"{folder / domain}: {error}. Fix: let the server's user read this folder."]
    for file in files:
        try:
            allowed[_read_public(file)] = file.stem
        except KeysError as error:
            problems.append(str(error))
    return allowed, problems


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys, domain: Domain) -> None:
    """Before `bind`: only peers that hold a key of this domain's allow-list get through the handshake.

    Without a running `Authenticator` in the socket's context nobody does.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else libzmq lets everyone in when nobody authenticates


def secure_peer(socket: zmq.Socket[bytes], keys: PeerKeys) -> None:
    """Before `connect`: encrypt, prove who we are, and talk to no other server."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class Authenticator:
    """Answers libzmq's question whether a key may connect, in a thread of its own, for one context.

    Start it before the first `bind` and stop it before the context is destroyed. All methods are for
    one thread, but it need not be the one that made it.
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
        """May be called twice."""
        self._zap.stop()

    def maybe_reload(self) -> bool:
        """Read the allow-lists again if a file has changed; says whether. Costs two directory listings."""
        signature = self._look()
        if signature == self._signature:
            return False
        self._signature = signature
        self.reload()
        return True

    def reload(self) -> None:
        """Read the allow-lists. A file or folder that cannot be read lets nobody in, and is an error in the log."""
        for domain, allow_list in self._lists.items():
            allowed, problems = read_allow_list(self._folder, domain)
            for problem in problems:
                log.error("allow-list: %s", problem)
            for key in allow_list.keys.keys() - allowed.keys():
                log.warning("%s %s is no longer allowed to connect", domain[:-1], allow_list.keys[key])
            for key in allowed.keys() - allow_list.keys.keys():
                log.info("%s %s may connect", domain[:-1], allowed[key])
            allow_list.keys = allowed

    def _look(self) -> object:
        seen = []
        for domain in DOMAINS:
            try:
                with os.scandir(self._folder / domain) as entries:
                    for entry in entries:
                        stat = entry.stat()  # ctime: a chmod counts, too
                        seen.append((domain, entry.name, stat.st_ctime_ns, stat.st_size, stat.st_ino))
            except OSError as error:  # part of what was seen: the change to it is what reload() then reports
                seen.append((domain, str(error), 0, 0, 0))
        return sorted(seen)


class _AllowList:
    """Asked by the authenticator's thread; `keys` is replaced whole, never changed."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self.keys: dict[bytes, str] = {}

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = key in self.keys
        if not allowed:
            log.warning("refused a connection: key %s is not in the allow-list %s/", key.decode(), self._domain)
        return allowed


def _read_public(file: Path) -> bytes:
    return read_key_file(file)[0]


def _read_secret(file: Path) -> tuple[bytes, bytes]:
    """(public, secret)"""
    public, secret = read_key_file(file)
    if file.stat().st_mode & 0o077:
        raise KeysError(f"{file}: others may read this secret key. Fix: chmod 600 {file}")
    if secret is None:
        raise KeysError(f"{file}: holds no secret-key. Fix: copy the file again from where keygen made it.")
    return public, secret


def read_key_file(file: Path) -> tuple[bytes, bytes | None]:
    """(public, secret or None), both valid Z85 of 40 characters. Raises KeysError."""
    try:
        public, secret = zmq.auth.load_certificate(file)
        for key in filter(None, (public, secret)):
            if len(key) != KEY_CHARS or len(z85.decode(key)) != 32:
                raise ValueError("a key is not 40 characters of Z85")
    except FileNotFoundError as error:
        raise _missing(file) from error
    except (OSError, ValueError, KeyError, UnicodeDecodeError) as error:
        try:
            is_missing = not file.exists()  # pyzmq has one OSError for all
        except OSError as why:
            raise KeysError(f"{file}: {why}. Fix: let this user read it.") from why
        if is_missing:
            raise _missing(file) from error
        raise KeysError(f"{file}: not a key file ({error}). Fix: copy it again from where keygen made it.") from error
    return public, secret


def _missing(file: Path) -> KeysError:
    return KeysError(
        f"{file}: no such file. Fix: make it with `python -m teacher_server keygen` on the server's host; "
        "a client or worker needs the folder bundles/NAME that it prints."
    )
