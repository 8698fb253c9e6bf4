"""Key folders and CURVE handshakes, with real sockets on loopback."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from teacher_server.cli.keygen import make_keys
from teacher_server.errors import SettingsError
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

REFUSED_S = 0.3  # many times as long as a handshake on loopback


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Key folder of a server with a client `c` and a worker `w`."""
    make_keys(tmp_path / "keys", ["c"], ["w"])
    return tmp_path / "keys"


class Port:
    """A ROUTER with the server's keys."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, domain: Domain) -> None:
        self.context = context
        self.router = context.socket(zmq.ROUTER)
        secure_server(self.router, load_server_keys(folder), domain)
        self.endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def accepts(self, keys: PeerKeys | None, timeout_s: float = 5.0) -> bool:
        """Return whether a message of a peer with these keys arrives."""
        peer = self.context.socket(zmq.DEALER)
        if keys is not None:
            secure_peer(peer, keys)
        peer.sndtimeo = int(timeout_s * 1000)  # it would block for good if it were refused before it sends
        peer.connect(self.endpoint)
        with contextlib.suppress(zmq.Again):
            peer.send(b"hello")
        arrived = self.router.poll(int(timeout_s * 1000)) > 0
        if arrived:
            assert self.router.recv_multipart()[1:] == [b"hello"]
        peer.close(linger=0)
        return arrived


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


def test_only_keys_of_the_domains_allow_list_connect(folder: Path, tmp_path: Path) -> None:
    """Fails if a client's key opens the worker port, or an unlisted key opens either."""
    make_keys(tmp_path / "other", ["c"], [])
    client = load_peer_keys(folder / "bundles/c", "client")
    worker = load_peer_keys(folder / "bundles/w", "worker")
    stranger = load_peer_keys(tmp_path / "other/bundles/c", "client")
    unlisted = PeerKeys(client.server_public, stranger.public, stranger.secret)
    with guarded(folder, "clients") as (port, _):
        assert port.accepts(client)
        for keys in (worker, stranger, unlisted, None):
            assert not port.accepts(keys, REFUSED_S), keys
    with guarded(folder, "workers") as (port, _):
        assert port.accepts(worker)
        assert not port.accepts(client, REFUSED_S)


def test_without_an_authenticator_every_key_is_refused(folder: Path) -> None:
    """Fails if the server accepts every key while no authenticator runs, which is libzmq's default."""
    with context() as made:
        assert not Port(made, folder, "clients").accepts(load_peer_keys(folder / "bundles/c", "client"), REFUSED_S)


def test_keys_are_added_and_revoked_without_a_restart(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if revoking or adding a key requires a restart of the server."""
    client = load_peer_keys(folder / "bundles/c", "client")
    with guarded(folder, "clients") as (port, guard):
        assert not guard.maybe_reload()
        (folder / "clients/c.key").unlink()
        make_keys(folder, ["d"], [])
        assert guard.maybe_reload()
        assert not port.accepts(client, REFUSED_S)
        assert port.accepts(load_peer_keys(folder / "bundles/d", "client"))
        (folder / "clients/d.key").write_text(
            "public-key = 'short'"
        )  # damaged: allows no key, and does not affect others
        make_keys(folder, ["e"], [])
        assert guard.maybe_reload() and f"{folder}/clients/d.key" in caplog.text
        assert port.accepts(load_peer_keys(folder / "bundles/e", "client"))
        assert not port.accepts(load_peer_keys(folder / "bundles/d", "client"), REFUSED_S)


def test_keygen_again_adds_and_never_overwrites(folder: Path) -> None:
    """Fails if adding a client changes an existing key."""
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    lines = make_keys(folder, ["c", "d"], ["w"])
    assert {file: file.read_bytes() for file in before} == before
    assert (folder / "bundles/d/client.key_secret").exists()
    assert str(folder / "clients/c.key") in lines[1] and str(folder / "bundles/d") in lines[2]
    assert not list(folder.rglob("*.partial"))
    # One host may be both; its two keys are different.
    make_keys(folder, [], ["c"])
    both = [load_peer_keys(folder / "bundles/c", role).public for role in ("client", "worker")]
    assert both[0] != both[1]


def test_secret_keys_are_readable_by_their_owner_only(folder: Path) -> None:
    """Fails if keygen creates a secret key that other users can read, or if such a key is accepted."""
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


def test_wrong_folders_are_errors_that_contain_the_file(folder: Path, tmp_path: Path) -> None:
    """Fails if a wrong key folder is accepted, so that the connection is refused later without a message."""
    for load, error, token in (
        (lambda: load_server_keys(tmp_path / "none"), KeysError, "none/server.key_secret.*keygen"),
        (lambda: load_peer_keys(folder, "client"), KeysError, "bundles/NAME"),
        (lambda: load_peer_keys(folder / "bundles/w", "client"), KeysError, "bundles/w/client.key_secret"),
        (lambda: make_keys(folder, ["../x"], []), SettingsError, "'../x'"),
    ):
        with pytest.raises(error, match=token):
            load()
    (folder / "clients/c.key").unlink()
    with pytest.raises(KeysError, match="client.key_secret.*clients/c.key"):
        make_keys(folder, ["c"], [])
    (folder / "bundles/c/client.key_secret").write_text("no key")
    with pytest.raises(KeysError, match="client.key_secret"):
        load_peer_keys(folder / "bundles/c", "client")
    (folder / "clients/bad.key").write_text("")
    with pytest.raises(KeysError, match="clients/bad.key"):
        load_server_keys(folder)


def test_secret_keys_are_not_in_the_repr(folder: Path) -> None:
    """Fails if a log line or a traceback that prints the keys contains the secret."""
    for keys in (load_server_keys(folder), load_peer_keys(folder / "bundles/c", "client")):
        assert keys.secret.decode() not in repr(keys)


def test_an_unreadable_allow_list_refuses_every_key(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a wrong chmod on a folder ends the running server, or leaves the old allow-list in force."""
    client = load_peer_keys(folder / "bundles/c", "client")
    with guarded(folder, "clients") as (port, guard):
        make_keys(folder, ["d"], [])
        with monkeypatch.context() as patch:  # a chmod has no effect if root runs the tests
            patch.setattr(Path, "glob", _refuse)
            assert guard.maybe_reload() and "Permission denied" in caplog.text
            with pytest.raises(KeysError):
                load_server_keys(folder)
        assert not port.accepts(client, REFUSED_S)
        (folder / "clients/d.key").chmod(0o600)  # the repair triggers a reload
        assert guard.maybe_reload() and port.accepts(client)


def _refuse(self: Path, pattern: str) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
