"""Key folders, and who gets through a CURVE handshake; real sockets on loopback."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from teacher_server.cli.keygen import make_keys
from teacher_server.wire.keys import (
    Authenticator,
    Domain,
    KeysError,
    PeerKeys,
    load_peer_keys,
    load_server_keys,
    secure_peer,
    secure_server,
)

NOBODY_S = 0.3  # long enough for a handshake on loopback many times over


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server with a client `c` and a worker `w`."""
    make_keys(tmp_path / "keys", ["c"], ["w"])
    return tmp_path / "keys"


class Port:
    """A ROUTER that echoes, with or without somebody who checks keys."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, domain: Domain) -> None:
        self.context = context
        self.router = context.socket(zmq.ROUTER)
        secure_server(self.router, load_server_keys(folder), domain)
        self.endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def answers(self, keys: PeerKeys | None, timeout_s: float = 5.0) -> bool:
        """Whether a peer with these keys gets a message through."""
        peer = self.context.socket(zmq.DEALER)
        if keys is not None:
            secure_peer(peer, keys)
        peer.connect(self.endpoint)
        peer.send(b"hello")
        heard = self.router.poll(int(timeout_s * 1000)) > 0
        if heard:
            assert self.router.recv_multipart()[1:] == [b"hello"]
        peer.close(linger=0)
        return heard


@contextlib.contextmanager
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(linger=0)


@contextlib.contextmanager
def guarded(folder: Path, domain: Domain) -> Iterator[tuple[Port, Authenticator]]:
    with context() as made:
        guard = Authenticator(made, load_server_keys(folder))
        guard.start()
        try:
            yield Port(made, folder, domain), guard
        finally:
            guard.stop()


def test_only_the_own_list_gets_in(folder: Path, tmp_path: Path) -> None:
    """Would break if a client's key made a worker, which could answer with any numbers, or a stranger got through."""
    make_keys(tmp_path / "other", ["c"], [])
    client = load_peer_keys(folder / "bundles/c", "client")
    worker = load_peer_keys(folder / "bundles/w", "worker")
    stranger = load_peer_keys(tmp_path / "other/bundles/c", "client")
    unlisted = PeerKeys(client.server_public, stranger.public, stranger.secret)
    with guarded(folder, "clients") as (port, _):
        assert port.answers(client)
        for keys in (worker, stranger, unlisted, None):
            assert not port.answers(keys, NOBODY_S), keys
    with guarded(folder, "workers") as (port, _):
        assert port.answers(worker)
        assert not port.answers(client, NOBODY_S)


def test_without_an_authenticator_nobody_gets_in(folder: Path) -> None:
    """Would break if forgetting to start it, or its death, opened the server to every key: libzmq's default."""
    with context() as made:
        assert not Port(made, folder, "clients").answers(load_peer_keys(folder / "bundles/c", "client"), NOBODY_S)


def test_keys_come_and_go_while_it_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Would break if taking a key back, or adding one, needed a restart of the server."""
    client = load_peer_keys(folder / "bundles/c", "client")
    with guarded(folder, "clients") as (port, guard):
        assert not guard.maybe_reload()
        (folder / "clients/c.key").unlink()
        make_keys(folder, ["d"], [])
        assert guard.maybe_reload()
        assert not port.answers(client, NOBODY_S)
        assert port.answers(load_peer_keys(folder / "bundles/d", "client"))
        (folder / "clients/d.key").write_text("public-key = 'short'")  # damaged: lets nobody in, stops nobody
        make_keys(folder, ["e"], [])
        assert guard.maybe_reload() and "d.key: not a key file" in caplog.text
        assert port.answers(load_peer_keys(folder / "bundles/e", "client"))
        assert not port.answers(load_peer_keys(folder / "bundles/d", "client"), NOBODY_S)


def test_looking_for_changes_is_cheap(folder: Path) -> None:
    """Would break if the broker, which asks once a second between messages, lost milliseconds to it."""
    make_keys(folder, [f"c{i}" for i in range(50)], [])
    with context() as made:
        guard = Authenticator(made, load_server_keys(folder))
        guard.maybe_reload()
        start_s = time.perf_counter()
        assert not any(guard.maybe_reload() for _ in range(20))
        assert (time.perf_counter() - start_s) / 20 < 5e-3  # about 0.2 ms


def test_keygen_again_adds_and_never_overwrites(folder: Path) -> None:
    """Would break if adding a client locked out everyone who already has a key."""
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    lines = make_keys(folder, ["c", "d"], ["w"])
    assert {file: file.read_bytes() for file in before} == before
    assert (folder / "bundles/d/client.key_secret").exists()
    assert "already" in lines[1] and f"copy the folder {folder}/bundles/d" in lines[2]
    assert not list(folder.rglob("*.partial"))
    # One host may be both; its two keys are different.
    make_keys(folder, [], ["c"])
    both = [load_peer_keys(folder / "bundles/c", role).public for role in ("client", "worker")]
    assert both[0] != both[1]


def test_secrets_are_for_the_owner_alone(folder: Path) -> None:
    """Would break if keygen, or a careless copy, left a secret key for every user of the machine to read."""
    secrets = [file for file in folder.rglob("*.key_secret")]
    assert len(secrets) == 3 and all(file.stat().st_mode & 0o777 == 0o600 for file in secrets)
    assert (folder / "bundles").stat().st_mode & 0o077 == 0
    for file, load in (
        (folder / "server.key_secret", lambda: load_server_keys(folder)),
        (folder / "bundles/c/client.key_secret", lambda: load_peer_keys(folder / "bundles/c", "client")),
    ):
        os.chmod(file, 0o640)
        with pytest.raises(KeysError, match=f"chmod 600 {file}"):
            load()


def test_wrong_folders_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    """Would break if the wrong folder became a silent connection that never comes about."""
    for broken, words in (
        (lambda: load_server_keys(tmp_path / "none"), "no such file.*keygen"),
        (lambda: load_peer_keys(folder, "client"), "server's own key folder.*bundles/NAME"),
        (lambda: load_peer_keys(folder / "bundles/w", "client"), "client.key_secret: no such file"),
        (lambda: make_keys(folder, ["../x"], []), "'../x' is no name"),
    ):
        with pytest.raises(Exception, match=words) as caught:
            broken()
        assert type(caught.value).__name__ in ("KeysError", "SettingsError")
    (folder / "clients/c.key").unlink()
    with pytest.raises(KeysError, match="is there, but not .*c.key"):
        make_keys(folder, ["c"], [])
    (folder / "bundles/c/client.key_secret").write_text("no key")
    with pytest.raises(KeysError, match="not a key file"):
        load_peer_keys(folder / "bundles/c", "client")
    (folder / "clients/bad.key").write_text("")
    with pytest.raises(KeysError, match="bad.key: not a key file"):
        load_server_keys(folder)


def test_secrets_do_not_show(folder: Path) -> None:
    """Would break if a log line or a traceback that prints the keys gave the secret away."""
    for keys in (load_server_keys(folder), load_peer_keys(folder / "bundles/c", "client")):
        assert keys.secret.decode() not in repr(keys)


def test_a_list_that_cannot_be_read_lets_nobody_in(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would break if a wrong chmod on a folder ended the running server, or left the list of yesterday in force."""
    client = load_peer_keys(folder / "bundles/c", "client")
    with guarded(folder, "clients") as (port, guard):
        make_keys(folder, ["d"], [])
        with monkeypatch.context() as patch:  # root, who may run the tests, is refused nothing
            patch.setattr(Path, "glob", _refuse)
            assert guard.maybe_reload() and "Permission denied" in caplog.text
            with pytest.raises(KeysError, match="let the server's user read"):
                load_server_keys(folder)
        assert not port.answers(client, NOBODY_S)
        (folder / "clients/d.key").chmod(0o600)  # what repairs it is noticed
        assert guard.maybe_reload() and port.answers(client)


def _refuse(self: Path, pattern: str) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
